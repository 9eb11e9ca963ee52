"""`%load_ext pipeload` and `%pipeload 4GB` in an IPython shell."""

from __future__ import annotations

import atexit
import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import pipeload
from tests.promises.ways_in.test_scripts import ROOT, WAIT_SECONDS, environment
from tests.support.models import load_plain
from tests.support.streaming import logits, smallest_limit, steady_floor
from tests.support.talking import add_letters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

interactive = pytest.importorskip("IPython.core.interactiveshell")
OFF = "Models are loaded plainly."


@pytest.fixture
def folder(tiny: TinyCheckpoint) -> Path:
    return tiny("llama")


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[[str], str]]:
    """Runs a cell in a shell that has the extension, and returns what it prints."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    # A shell replaces these for good.
    for name in ("displayhook", "excepthook"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    shell: Any = interactive.InteractiveShell()
    shell.history_manager.enabled = False

    def cell(code: str) -> str:
        capsys.readouterr()
        shell.run_cell(code).raise_error()
        return capsys.readouterr().out.strip()

    with steady_floor():
        cell("%load_ext pipeload")
        try:
            yield cell
        finally:
            shell.run_cell("%unload_ext pipeload")
            atexit.unregister(shell.atexit_operations)
            shell.atexit_operations()


def load_in(run: Callable[[str], str], folder: Path) -> str:
    """What a cell that loads a model says of it."""
    return run(
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, dtype='auto')\n"
        "print('pipeload' in vars(model) and model.pipeload.plan.memory_limit)"
    )


def test_sizes_as_people_type_them(run: Callable[[str], str]) -> None:
    """A letter is enough; what lacks its unit is asked back, and changes nothing."""
    assert "(40000000000 bytes)" in run("%pipeload 40G")
    assert 'did you mean "4GB"?' in run("%pipeload 4")
    assert "(40000000000 bytes)" in run("%pipeload")


def test_on_and_off(run: Callable[[str], str], folder: Path) -> None:
    """Models of later cells are streamed within the limit, until it is off."""
    limit = smallest_limit(folder, dtype="auto")
    wanted = logits(load_plain(folder)).tolist()
    assert run("%pipeload").startswith(OFF)
    assert "%pipeload 4GB" in run("%pipeload")
    assert load_in(run, folder) == "False"
    said = run(f"%pipeload {limit}")
    assert f"({limit} bytes)" in said
    assert run("%pipeload") == said
    assert load_in(run, folder) == str(limit)
    ids = "ids = torch.arange(3, 20)[None]"
    run(f"import torch\n{ids}\nwith torch.no_grad(): made = model(ids).logits")
    assert run(f"print(made.tolist() == {wanted!r})") == "True"
    assert run("%pipeload off").startswith(OFF)
    # What streams already goes on.
    assert run("with torch.no_grad(): print(torch.equal(model(ids).logits, made))") == "True"
    assert load_in(run, folder) == "False"


def test_a_limit_is_for_models_that_stream_already(run: Callable[[str], str], folder: Path) -> None:
    """All of a process share one; one that is too small for them changes nothing."""
    limit = smallest_limit(folder, dtype="auto")
    run(f"%pipeload {limit}")
    load_in(run, folder)
    run(f"%pipeload {limit + 8192}")
    assert run("print(model.pipeload.plan.memory_limit)") == str(limit + 8192)
    before = run("%pipeload")
    assert run("%pipeload 1MB").startswith("error: ")
    assert run("%pipeload") == before
    assert run("print(model.pipeload.plan.memory_limit)") == str(limit + 8192)


def test_how_a_limit_is_written(run: Callable[[str], str]) -> None:
    """With units, as a share, by the system; what means nothing is said in a line."""
    assert "(4000000000 bytes)" in run("%pipeload 4GB")
    assert "(4294967296 bytes)" in run("%pipeload  4 GiB ")
    share = run("%pipeload 50%")
    assert "Models are streamed within" in share
    automatic = run("%pipeload auto")
    assert "Models are streamed within" in automatic
    refused = run("%pipeload 4XB")
    assert refused.startswith("error: memory_limit='4XB'")
    assert "\n" not in refused
    assert run("%pipeload") == automatic


def test_unloading(run: Callable[[str], str], folder: Path) -> None:
    """Models are loaded plainly again, and the magic is gone; loading it again brings it back."""
    run("%pipeload 40GB")
    run("%unload_ext pipeload")
    assert load_in(run, folder) == "False"
    assert not hasattr(AutoModelForCausalLM.from_pretrained(folder), "pipeload")
    with pytest.raises(interactive.UsageError, match="`%pipeload` not found"):
        run("%pipeload")
    run("%load_ext pipeload")
    assert run("%pipeload").startswith(OFF)


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "pipeload.OptionError"])
def test_an_interrupted_cell_keeps_nothing(
    error: str, run: Callable[[str], str], folder: Path
) -> None:
    """IPython keeps the last traceback, but what its functions held goes."""
    run(f"%pipeload {smallest_limit(folder, dtype='auto')}")
    load_in(run, folder)
    run("import gc, sys, weakref, pipeload, torch\nkept = 5")
    run(
        "def end(_module, args, _output):\n"
        "    global states\n"
        "    states = weakref.ref(args[0])\n"
        f"    raise {error}('enough')\n"
        "model.lm_head.register_forward_hook(end)"
    )
    with pytest.raises((KeyboardInterrupt, pipeload.OptionError), match="enough"):
        run("model.generate(torch.arange(3, 20)[None], max_new_tokens=5)")
    assert run("gc.collect()\nprint(kept, sys.last_value, states())") == "5 enough None"


def test_other_errors_are_left_to_the_debugger(run: Callable[[str], str]) -> None:
    """`%debug` shows what the functions of the last one held."""
    with pytest.raises(ZeroDivisionError):
        run("def divide(x):\n    return x / 0\ndivide(8)")
    shown = "import sys, traceback\nfor frame, _ in traceback.walk_tb(sys.last_traceback):\n"
    assert run(f"{shown}    last = frame\nprint(last.f_locals['x'])") == "8"


@pytest.fixture
def cells() -> dict[str, str]:
    """The cells of the example, by their ids."""
    notebook = json.loads((ROOT / "examples" / "colab.ipynb").read_text(encoding="utf-8"))
    return {cell["id"]: "".join(cell["source"]) for cell in notebook["cells"]}


@pytest.mark.parametrize("source", ["", "git+https://example.org/pipeload"])
def test_the_example_installs(
    source: str, run: Callable[[str], str], cells: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the checkout that it lies in, or from where the user says; only where it is needed."""
    if source:
        monkeypatch.setenv("PIPELOAD_EXAMPLE_SOURCE", source)
    run(
        "asked = []\n"
        "get_ipython().register_magic_function(asked.append, 'line', 'pip')\n"
        "import importlib.util; find_spec = importlib.util.find_spec"
    )
    run(cells["install"])
    assert run("print(asked)") == "[]"
    run("importlib.util.find_spec = lambda name: None")
    try:
        run(cells["install"])
    finally:
        run("importlib.util.find_spec = find_spec")
    assert run("print(asked)") == f"['install -q {source or '..'}']"
    assert (ROOT / "examples" / ".." / "pyproject.toml").exists()


@pytest.fixture
def named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model that can talk is the one of the example."""
    model = shutil.copytree(folder, tmp_path / "model")
    add_letters(model)
    monkeypatch.setenv("PIPELOAD_EXAMPLE_MODEL", str(model))


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("gpu", [True, False])
def test_the_example_looks_for_a_gpu(
    gpu: bool, run: Callable[[str], str], cells: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what it found, and answers on the CPU in any case."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpu)
    run(cells["install"])
    said = run(cells["load"])
    assert ("There is a GPU" in said) is gpu
    assert ("There is no GPU: the CPU computes" in said) is not gpu
    run(cells["chat"])
    state = run("print(output.device, model.device, model.pipeload.plan.memory_limit == limit)")
    assert state == "cpu cpu True"


@pytest.mark.slow
def test_loading_is_all_that_is_needed() -> None:
    """In a new process, where nobody has imported pipeload: the line helps, and nothing else."""
    code = (
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell()\n"
        "for cell in ('%load_ext pipeload', '%pipeload 40GB', '%pipeload'):\n"
        "    shell.run_cell(cell).raise_error()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=WAIT_SECONDS,
    )
    said = "Models are streamed within 40.0 GB (40000000000 bytes) for this process."
    assert done.stdout.splitlines() == [said, said]
