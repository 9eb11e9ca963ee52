"""What comes with a checkpoint is data: it runs nothing, leads nowhere and cannot dress up."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import pipeload
from pipeload.budget.shared_limit import ACCOUNTANT
from pipeload.cli.commands import app
from pipeload.demo.model import make_smollm2
from pipeload.entry.spill import Spill
from pipeload.errors import CheckpointError, PipeloadError
from pipeload.formats import compiler
from pipeload.formats.bitsandbytes import kernel
from tests.rooms.test_imports import FILES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import TinyCheckpoint

# Red, a line end, right to left, a bell: none of it may reach a terminal.
NASTY = "\x1b[31m\n\u202e\x07\u2066\x9b2J"


def printable(text: str) -> bool:
    return text.replace("\n", "").isprintable()


# -- nothing runs ----------------------------------------------------------------------------------

UNPICKLERS = {
    *("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"),
    *("jsonpickle", "yaml", "code", "codeop", "runpy"),
}
BUILTINS = {"eval", "exec", "compile", "__import__", "execfile"}
CALLS = {
    *("torch.load", "numpy.load", "np.load", "os.system", "os.popen", "tempfile.mktemp"),
    *("torch.hub.load", "torch.jit.load", "torch.ops.load_library", "importlib.import_module"),
}
ALLOWED = {
    # The user's own script, which `python -m pipeload` is asked to run.
    *(("script", "runpy"), ("script", "exec"), ("script", "compile")),
    ("_lookup", "compile"),  # the source of a running function, to be compared and never run
    # Of names that stand in these files.
    *(("__init__", "importlib.import_module"), ("everywhere", "importlib.import_module")),
}


def suspects(file: Path) -> Iterator[str]:
    """Names in a module by which data could become code."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in UNPICKLERS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNPICKLERS:
            yield node.module or ""
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in BUILTINS | CALLS:
                yield called
            yield from (
                f"{called}({ast.unparse(k)})"
                for k in node.keywords
                if (k.arg in {"trust_remote_code", "shell"} and ast.unparse(k.value) != "False")
                or (k.arg in {"weights_only", "use_safetensors"})
            )


def test_no_module_can_turn_data_into_code() -> None:
    """Nothing unpickles, evaluates, or trusts remote code by itself."""
    found = {(file.stem, suspect) for file in FILES for suspect in suspects(file)}
    assert found == ALLOWED


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self._mark,)


def test_pickles_beside_the_weights_are_not_opened(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """Whatever they are called."""
    folder, mark = shutil.copytree(tiny("llama"), tmp_path / "model"), tmp_path / "mark"
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "adapter_model.bin"):
        (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
    model = pipeload.from_pretrained(folder, memory_limit="50GB")
    model.generate(torch.tensor([[3, 4]]), max_new_tokens=2, do_sample=False)
    pipeload.handle(model).remove()
    assert not mark.exists()
    pickle.loads((folder / "optimizer.pt").read_bytes())
    assert mark.exists()  # it would have


@pytest.fixture
def with_code(tiny: TinyCheckpoint, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint that brings code, and the file that the code makes."""
    folder, mark = shutil.copytree(tiny("llama"), tmp_path / "model"), tmp_path / "mark"
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "mine"
    config["auto_map"] = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(
        f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig):\n    model_type = 'mine'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    )
    return folder, mark


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "{}", "--disk-rate", "1GB"],
        ["run", "{}", "hello"],
        ["quantize", "{}", "{}-made"],
    ],
    ids=lambda words: words[0],
)
def test_the_command_line_runs_no_code_of_a_checkpoint(
    with_code: tuple[Path, Path], words: list[str]
) -> None:
    """There is no option for it."""
    folder, mark = with_code
    result = invoke(*(word.format(folder) for word in words))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert not mark.exists()


def test_code_runs_for_a_user_who_says_so(
    with_code: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The library's own argument, handed on; without it the library refuses or asks."""
    folder, mark = with_code
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    with pytest.raises(ValueError, match="trust_remote_code"):
        pipeload.from_pretrained(folder, memory_limit="50GB", trust_remote_code=False)
    assert not mark.exists()
    model = pipeload.from_pretrained(folder, memory_limit="50GB", trust_remote_code=True)
    assert mark.exists()
    assert pipeload.handle(model).plan.units


def test_a_model_with_code_is_quantised(
    with_code: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For a user who says so: the result is looked at with the same permission."""
    folder, mark = with_code
    modules = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    made = pipeload.quantize(folder, tmp_path / "made", method="int8", trust_remote_code=True)
    assert mark.exists()
    assert (made / "mine.py").exists()


# -- nothing leads elsewhere -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["\x1b[31m.safetensors", "a\u202e.safetensors", "a\u2028b.safetensors", "a\x7f"]
)
def test_a_shard_with_an_unprintable_name(tiny: TinyCheckpoint, tmp_path: Path, name: str) -> None:
    """It is refused even where there is such a file."""
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    shards = sorted(set(table["weight_map"].values()))
    (folder / shards[0]).rename(folder / name)
    table["weight_map"] = {
        key: name if shard == shards[0] else shard for key, shard in table["weight_map"].items()
    }
    index.write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match="may lie outside the folder") as caught:
        pipeload.from_pretrained(folder)
    assert printable(str(caught.value))


def link_to_text(folder: Path) -> Path:
    (folder / "secret").write_text("root:x:0:0:a secret that nobody should read aloud")
    return folder / "secret"


def link_to_a_pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def link_to_a_device(_folder: Path) -> Path:
    return Path("/dev/zero")


@pytest.mark.parametrize("make", [link_to_text, link_to_a_pipe, link_to_a_device])
def test_a_link_to_what_is_no_checkpoint(
    tiny: TinyCheckpoint, tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    """Links are followed, as the hub's cache needs; what they lead to is neither shown nor read."""
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    shard.symlink_to(make(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        pipeload.from_pretrained(folder)
    assert shard.name in str(caught.value)
    assert "secret that" not in str(caught.value)


# -- nothing dresses up ----------------------------------------------------------------------------


def invoke(*words: object) -> Any:
    ACCOUNTANT.forget_all()
    return CliRunner().invoke(app, [str(word) for word in words])


CHANGES: dict[str, dict[str, Any]] = {
    "model_type": {"model_type": NASTY},
    "quantised": {"quantization_config": {"quant_method": NASTY}},
    "dtype": {"dtype": NASTY},
    "activation": {"hidden_act": NASTY},
    "positions": {"rope_parameters": {"rope_type": NASTY}},
    "attention": {"_attn_implementation": NASTY, "attn_implementation": NASTY},
    "weights": {"transformers_weights": NASTY + ".safetensors"},
    "code": {"model_type": NASTY, "auto_map": {"AutoConfig": NASTY + ".C"}},
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("command", ["plan", "quantize"])
def test_the_command_line_prints_no_configuration_as_it_is(
    tiny: TinyCheckpoint, tmp_path: Path, name: str, command: str
) -> None:
    """One line, whoever is the author of the message, and status 1."""
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | CHANGES[name]))
    rest = ["--disk-rate", "1GB"] if command == "plan" else [tmp_path / "made"]
    result = invoke(command, folder, *rest)
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ")
    assert printable(result.output)
    assert "\\x1b[31m" in result.output or name == "code"


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        key.replace("layers.1.mlp.up_proj", f"{NASTY}up"): value for key, value in tensors.items()
    }


def added(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {NASTY: torch.ones(3)}


@pytest.mark.parametrize("spoil", [renamed, added])
def test_the_command_line_prints_no_tensor_name_as_it_is(
    tiny: TinyCheckpoint, tmp_path: Path, spoil: Callable[[Any], Any]
) -> None:
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    (folder / "model.safetensors.index.json").unlink()
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    save_file(spoil(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    for words in (["plan", folder, "--disk-rate", "1GB"], ["quantize", folder, tmp_path / "made"]):
        result = invoke(*words)
        assert printable(result.output), result.output


@pytest.mark.parametrize(
    "kind", [kind for kind in vars(pipeload.errors).values() if isinstance(kind, type)]
)
def test_no_error_carries_what_moves_a_terminal(kind: type[PipeloadError]) -> None:
    """Also where the text of another library's error has become a part of it."""
    limits = {"limit": 1, "smallest_limit": 2} if kind is pipeload.MemoryLimitError else {}
    error = kind(f"a\nmodel of type {NASTY}", **limits)
    for text in (str(error), f"{error}"):
        assert text == "a\nmodel of type \\x1b[31m\n\\u202e\\x07\\u2066\\x9b2J"


# -- nobody else can write -------------------------------------------------------------------------


@pytest.fixture
def no_mask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def rights(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("no_mask")
def test_a_spill_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is written, and afterwards."""
    seen: list[int] = []
    replace = os.replace

    def look(source: str, target: Path) -> None:
        seen.append(rights(Path(source)))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    spill = Spill(tmp_path, {"a": torch.ones(3)})
    assert [*seen, rights(spill.path)] == [0o600, 0o600]
    spill.remove()


@pytest.mark.usefixtures("no_mask")
def test_a_quantised_model_is_not_for_everybody_to_write(
    tiny: TinyCheckpoint, tmp_path: Path
) -> None:
    """Its folder is closed until it is whole; then all may read it, as with a plain save."""
    target, seen = tmp_path / "made", set()

    def look(_done: int, _total: int) -> None:
        seen.add(rights(tmp_path / ".made.partial"))

    ACCOUNTANT.forget_all()
    pipeload.quantize(tiny("llama"), target, progress=look)
    assert seen == {0o700}
    assert rights(target) == 0o775
    assert {rights(file) for file in target.iterdir()} == {0o664}


def test_a_quantised_model_has_the_rights_that_the_mask_gives(
    tiny: TinyCheckpoint, tmp_path: Path
) -> None:
    """A strict mask stays strict."""
    before = os.umask(0o077)
    try:
        pipeload.quantize(tiny("llama"), tmp_path / "made")
    finally:
        os.umask(before)
    assert rights(tmp_path / "made") == 0o700
    assert {rights(file) for file in (tmp_path / "made").iterdir()} == {0o600}


@pytest.mark.usefixtures("no_mask")
def test_the_demos_model_is_made_where_nobody_else_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def convert(_source: Path, folder: Path, *_options: object) -> None:
        seen.extend(map(rights, (folder, folder.parent)))
        (folder / "model.safetensors").touch()

    monkeypatch.setattr("pipeload.demo.model._find_gguf", lambda: tmp_path)
    monkeypatch.setattr("pipeload.demo.model._convert", convert)
    made = make_smollm2(tmp_path / "pipeload" / "model")
    assert seen == [0o700, 0o755]
    assert rights(made) == 0o755
    assert {rights(file) for file in made.iterdir()} == {0o644}


@pytest.mark.usefixtures("no_mask")
def test_a_kernel_is_compiled_where_nobody_else_can_write(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def look(*command: str) -> None:
        seen.append(rights(Path(command[-1]).parent))
        raise OSError("no compiler after all")

    monkeypatch.setattr(compiler, "_run", look)
    monkeypatch.setenv("CC", "sh")
    assert kernel.compiled.__wrapped__() is None
    assert seen == [0o700]
