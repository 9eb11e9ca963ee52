"""Imports go down only: the rooms of the design, held by the syntax trees."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import pipeload

ROOT = Path(__file__).resolve().parents[2]
PRODUCT, HOOKS = ROOT / "pipeload", ROOT / "hooks" / "pipeload_hooks"
TESTS = ROOT / "tests"
FILES = sorted([*PRODUCT.rglob("*.py"), *HOOKS.glob("*.py")])

# From the ground up. A room may import those on lower floors, never its neighbours.
FLOORS = (
    {"errors"},
    {"_sizes", "_text_tables"},
    {"system"},
    {"checkpoint"},
    {"weights"},
    {"budget", "formats"},
    {"prefetch", "hf"},
    {"engine"},
    {"devices", "ring"},
    {"entry"},
    {"__init__"},  # what users import
    {"bench", "demo", "evaluate", "quantiser", "serving"},
    {"cli"},
    {"__main__"},
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
ROOMS = {folder.name for folder in PRODUCT.iterdir() if (folder / "__init__.py").exists()}

# Who else may be known where, for type checkers as well. In front stands what a user could write.
FRONT = {"bench", "cli", "demo", "evaluate", "quantiser", "serving"}
KNOWN_IN = {
    "torch": FLOOR.keys() - {"errors", "_sizes", "_text_tables", "system", "checkpoint"},
    "transformers": {"formats", "hf", "entry", *FRONT},
    "bitsandbytes": {"formats", "quantiser"},
    "pipeload_hooks": {"formats", "budget", "hf", "engine", "devices", "ring", *FRONT},
    "psutil": {"system"},
    "rich": {"_text_tables", "cli"},
    "typer": {"cli"},
    "starlette": {"serving"},
    "uvicorn": {"serving"},
    "prometheus_client": {"serving"},
    "matplotlib": {"cli"},
}
# Pure: sizes, byte ranges and records. They can be used, and tested, without torch.
WITHOUT_TORCH = {
    *("errors", "_sizes", "_text_tables", "system", "checkpoint"),
    *(
        "weights.layout",
        "weights.device_interface",
        "weights.kept_pieces",
        "formats.registry",
        "hf.arguments",
    ),
    *("budget.expert_cache", "budget.experts_in_plan"),
    *(
        "budget.plan",
        "budget.residency",
        "budget.read_counters",
        "budget.shared_limit",
        "prefetch.buffers",
    ),
    "ring.deal",
    *("engine.stats", "engine.own_weights", "entry.script", "evaluate.text_windows"),
    *("quantiser.resumable_shards", "quantiser.model_card"),
}


def module_of(file: Path) -> str:
    """Its name below `pipeload`; that of a room for the room's `__init__`."""
    parts = file.relative_to(PRODUCT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_of(file): file for file in FILES if file.is_relative_to(PRODUCT)}
PURE = sorted(module for module in MODULES if {module, module.partition(".")[0]} & WITHOUT_TORCH)


@functools.cache
def imports_of(file: Path, *, typing: bool = True) -> frozenset[str]:
    """Full names of all that a file imports, wherever in it; `typing`: also for type checkers."""
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        if not typing and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        else:
            todo += ast.iter_child_nodes(node)
    return frozenset(found)


def ours(names: frozenset[str]) -> set[str]:
    """The modules of `pipeload` that hold these names."""
    found = set()
    for name in names:
        package, *parts = name.split(".")
        if package == "pipeload":
            starts = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
            found.add(next((start for start in starts if start in MODULES), "__init__"))
    return found


def room_of(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    """Into rooms on lower floors, and within the room."""
    room = room_of(module)
    # What users import names all that it gives them; it loads what is asked for.
    found = ours(imports_of(MODULES[module], typing=module != "__init__"))
    others = {room_of(one) for one in found} - ({room} & ROOMS)
    assert {one for one in others if FLOOR[one] >= FLOOR[room]} == set()


def test_no_cycles() -> None:
    """Nor do files of one room go round in a circle."""
    graph = {module: ours(imports_of(file)) for module, file in MODULES.items()}
    TopologicalSorter({**graph, "__init__": set()}).prepare()


def test_rooms() -> None:
    """Every module stands in one; none takes the place of a public name, or loads anything."""
    assert {room_of(module) for module in MODULES} == FLOOR.keys()
    assert ROOMS & {*pipeload.__all__} == set()
    for module, file in MODULES.items():
        if file.name == "__init__.py" and module != "__init__":
            assert imports_of(file) == set()


def test_rooms_of_tests() -> None:
    """They lie in folders of the same names; what tests share knows no test and no tool."""
    folders = {file.parent.relative_to(TESTS / "rooms") for file in TESTS.glob("rooms/*/**/*.py")}
    assert {one for one in folders if not (PRODUCT / one).is_dir()} == {Path("hooks")}
    for file in {*TESTS.glob("support/*.py")} - {*TESTS.glob("support/test_*.py")}:
        found = {name for name in imports_of(file) if name.startswith("tests.")}
        assert {name for name in found if not name.startswith("tests.support.")} == set()


@pytest.mark.parametrize("package", KNOWN_IN)
def test_who_knows_what(package: str) -> None:
    """Other libraries, and the hooks, are met in few rooms."""
    users = {
        room_of(module)
        for module, file in MODULES.items()
        if any(name.split(".")[0] == package for name in imports_of(file))
    }
    assert users - KNOWN_IN[package] == set()


@pytest.mark.parametrize("file", [*HOOKS.glob("*.py")], ids=lambda file: file.stem)
def test_the_hooks_know_torch_alone(file: Path) -> None:
    """The lower package could be taken out and used by itself."""
    used = {name.split(".")[0] for name in imports_of(file)}
    assert used - {"torch", "pipeload_hooks", *sys.stdlib_module_names} == set()


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


@pytest.mark.parametrize(
    "code",
    [
        "import pipeload",
        "import pipeload; pipeload.MemoryLimitError, pipeload.__version__, dir(pipeload)",
        "import pipeload; pipeload.Plan, pipeload.Stats",
    ],
)
def test_light_imports(code: str) -> None:
    """The package and its errors load none of the heavy libraries."""
    heavy = "{'torch', 'transformers', 'psutil', 'numpy', 'rich'}"
    assert fresh(f"import sys; {code}; print(*({heavy} & set(sys.modules)))") == ""


def test_pure_modules_do_without_torch() -> None:
    """Whatever they import in turn."""
    code = f"""
import importlib, sys
for name in {PURE}:
    importlib.import_module("pipeload." + name)
    if {{"torch", "transformers", "numpy", "rich"}} & set(sys.modules):
        print(name)
        break
"""
    assert fresh(code) == ""


@pytest.mark.slow
def test_the_rest_is_loaded_when_asked_for() -> None:
    """The first use of from_pretrained imports what it needs."""
    code = "import sys, pipeload; pipeload.from_pretrained; print('transformers' in sys.modules)"
    assert fresh(code) == "True"
