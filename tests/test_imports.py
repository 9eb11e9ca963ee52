"""Imports go down only: the picture in the design, held by the syntax trees."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted([*(ROOT / "pipeload").glob("*.py"), *(ROOT / "hooks").glob("*/*.py")])

# A module may import those on lower floors, at run time. A new module needs a floor.
FLOORS = (
    {"_pages"},
    {
        "errors",
        "_advice",
        "_calls",
        "_bitsandbytes_needs",
        "_counters",
        "_device",
        "_first_pass",
        "_folder_lock",
        "_layout",
        "_nf4_kernel",
        "_on_import",
        "_passlog",
        "_patch",
        "_rounding",
        "_hf_marks",
        "_home",
        "_floor",
        "_slots",
        "_demo_tokenizer",
        "_windows",
        "_mounts",
        "_open_file",
        "_tabled",
        "_wide_product",
    },
    {
        "_abandoned",
        "_bench_reader",
        "_read_faults",
        "_sizes",
        "_checkpoint_json",
        "_arena",
        "_int4_order",
        "_stalls",
        "_on_disk",
        "_own_weights",
        "_twins",
        "_formats",
        "_loading_args",
    },
    {"_reader_pool", "_torch_device", "_whole_shape"},
    {"_row_check"},
    {"_row_products"},
    {
        "_caches",
        "_guards",
        "_reader",
        "_packed_linear",
        "_probe",
        "_repack",
        "_seats",
        "_stats",
    },
    {
        "_checkpoint_folder",
        "_device_seats",
        "_mapped",
        "_memory",
        "_pass_trace",
        "_device_views",
        "_nan_arena",
        "_placement",
        "_plan",
        "_unit",
    },
    {
        "_accountant",
        "_device_buffers",
        "_device_place",
        "_mappings",
        "_mps_device",
        "_pressure",
        "_demo_model",
        "_hint_pass",
        "_pass_shape",
        "_phases",
        "_places",
        "_restore",
        "_rows",
        "_stored",
        "_widths",
        "_adapters",
        "_copies",
    },
    {
        "_checkpoint",
        "_compare",
        "_device_account",
        "_device_restore",
        "_dispatcher",
        "_hosting",
        "_nf4",
        "_open_device",
        "_handle",
        "_pass_needs",
        "_residency",
        "_tables",
    },
    {"_forks", "_prefetcher", "_bitsandbytes", "_reserve", "_sites", "_spill"},
    {"_edits", "_host_share", "_recipes"},
    {"_build", "_hooking", "_model_card", "_quantizer", "_refusals", "_shards", "_transformers"},
    {
        "_device_plan",
        "_governor",
        "_notebook_bar",
        "_live",
        "_quantised_tensor",
        "_request",
        "_streamer",
        "_takeover",
    },
    {"_device_governor", "_four_bits"},
    {"_targets"},
    {"_assembly", "_device_target"},
    {"_loading", "_quantise_forms"},
    {"_quantise", "_wrap"},
    {"_api"},
    {"_everywhere", "_notebook"},
    {"__init__", "_script_end"},
    {
        "_bench_report",
        "_bench_worker",
        "_cli_options",
        "_cli_output",
        "_cli_plan_text",
        "_cli_prompt",
        "_cli_report",
        "_eval_report",
        "_eval_text",
        "_perplexity",
        "_run_script",
    },
    {"bench", "_cli_answer", "_cli_model", "_eval_progress"},
    {"_cli_eval", "_cli_plan", "_cli_quantise", "_cli_run"},
    {"cli"},
    {"__main__"},
)
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}

# Pure: sizes, byte ranges and records. They can be used, and tested, without torch.
WITHOUT_TORCH = {
    "errors",
    "_abandoned",
    "_accountant",
    "_advice",
    "_checkpoint",
    "_checkpoint_folder",
    "_checkpoint_json",
    "_counters",
    "_device",
    "_floor",
    "_folder_lock",
    "_formats",
    "_home",
    "_layout",
    "_loading_args",
    "_mappings",
    "_memory",
    "_model_card",
    "_mounts",
    "_on_import",
    "_open_file",
    "_pages",
    "_own_weights",
    "_plan",
    "_reader_pool",
    "_residency",
    "_run_script",
    "_script_end",
    "_sizes",
    "_shards",
    "_slots",
    "_stalls",
    "_stats",
    "_windows",
    "_tabled",
}
THE_LIBRARYS_FILES = {
    "_api",
    "_quantise",
    "_quantise_forms",
    "_quantizer",
    "_recipes",
    "_takeover",
    "_transformers",
    # On top of everything, where a user's script would be:
    "_bench_worker",
    "_cli_answer",
    "_cli_eval",
    "_cli_model",
    "_cli_output",
}
FILES_ON_THE_HOOKS = {
    "_adapters",
    "_assembly",
    "_bench_worker",
    "_bitsandbytes",
    "_device_restore",
    "_edits",
    "_eval_progress",
    "_first_pass",
    "_hooking",
    "_on_disk",
    "_pass_trace",
    "_probe",
    "_refusals",
    "_restore",
    "_seats",
    "_sites",
    "_streamer",
    "_tables",
    "_twins",
}


class Imports(NamedTuple):
    """What one module imports, wherever in it; not what it names for type checkers alone."""

    module: str
    hooks: bool
    ours: set[str]
    others: set[str]


def imports_of(file: Path) -> Imports:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in walk_without_typing(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}: imports are absolute"
            source = node.module or ""
            found |= {f"{source}.{alias.name}" for alias in node.names}
    ours = {own_module(name) for name in found if name.split(".")[0] == "pipeload"}
    others = {name.split(".")[0] for name in found} - {"pipeload"}
    return Imports(file.stem, file.parent.name == "pipeload_hooks", ours, others)


def walk_without_typing(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return [inner for child in node.orelse for inner in walk_without_typing(child)]
    children = [
        inner for child in ast.iter_child_nodes(node) for inner in walk_without_typing(child)
    ]
    return [node, *children]


def own_module(name: str) -> str:
    """The file that `pipeload.a.b` or `pipeload.name` comes from."""
    part = name.split(".")[1] if "." in name else "__init__"
    return part if (ROOT / "pipeload" / f"{part}.py").exists() else "__init__"


ALL = [imports_of(file) for file in FILES]
PRODUCT = [imports for imports in ALL if not imports.hooks]


def test_every_module_has_a_floor() -> None:
    """The list above is complete, and names nothing that is gone."""
    assert {imports.module for imports in PRODUCT} == set(FLOOR)


@pytest.mark.parametrize("imports", PRODUCT, ids=lambda imports: imports.module)
def test_imports_go_down(imports: Imports) -> None:
    """No module imports one of its own floor or a higher one."""
    up = {name for name in imports.ours if FLOOR[name] >= FLOOR[imports.module]}
    assert up == set()


@pytest.mark.parametrize("imports", [i for i in ALL if i.hooks], ids=lambda imports: imports.module)
def test_the_hooks_know_torch_alone(imports: Imports) -> None:
    """The lower package could be taken out and used by itself."""
    assert imports.ours == set()
    allowed = {"torch", "pipeload_hooks", *sys.stdlib_module_names}
    assert imports.others - allowed == set()


def users_of(package: str) -> set[str]:
    return {imports.module for imports in PRODUCT if package in imports.others}


def test_who_imports_what() -> None:
    """The library is touched in few files, the hooks in fewer, torch not in the pure ones."""
    assert users_of("transformers") <= THE_LIBRARYS_FILES
    assert users_of("pipeload_hooks") == FILES_ON_THE_HOOKS
    assert users_of("torch") & WITHOUT_TORCH == set()
    assert users_of("psutil") == {"_memory"}


@pytest.mark.parametrize(
    "mark", ["_is_hf_initialized", "_commit_hash", "_hf_hook", "hf_device_map"]
)
def test_marks_of_the_library_are_in_one_file(mark: str) -> None:
    """What it notes on models is private, and may be called something else one day."""
    found = [file.name for file in FILES if mark in file.read_text(encoding="utf-8")]
    assert found == ["_hf_marks.py"]


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'hooks'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


HEAVY = "print(*sorted({'torch', 'transformers', 'psutil', 'numpy', 'rich'} & set(sys.modules)))"


@pytest.mark.parametrize(
    "code",
    [
        "import pipeload",
        "import pipeload; pipeload.MemoryLimitError, pipeload.__version__, dir(pipeload)",
        "import pipeload; pipeload.Plan, pipeload.Stats",
        *(f"import pipeload.{name}" for name in sorted(WITHOUT_TORCH - {"_memory", "_accountant"})),
    ],
)
def test_light_imports(code: str) -> None:
    """The package, its errors and everything pure load none of the heavy libraries."""
    assert fresh(f"import sys; {code}; {HEAVY}") == ""


def test_the_rest_is_loaded_when_asked_for() -> None:
    """The first use of from_pretrained imports what it needs."""
    code = "import sys, pipeload; pipeload.from_pretrained; print('transformers' in sys.modules)"
    assert fresh(code) == "True"
