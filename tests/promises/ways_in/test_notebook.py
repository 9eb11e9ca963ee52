"""The notebook runs as it stands, and what a notebook shows of a streamed model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient

import pipeload
from pipeload.engine.stats import Stats
from tests.support.exact import load_smallest, steady_floor
from tests.support.models import load_plain
from tests.support.warm import warm_python

if TYPE_CHECKING:
    from tests.conftest import TinyCheckpoint

__all__ = ["steady_floor"]

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOK = ROOT / "examples" / "colab.ipynb"
# What the notebook leaves behind, as one line of JSON.
PROBE = """
import json
print(json.dumps({
    "ids": output[0].tolist(),
    "prompt": inputs["input_ids"].shape[1],
    "limit": limit,
    "planned": model.pipeload.plan.memory_limit,
    "streams": not model.pipeload.plan.fits,
    "bytes_per_pass": model.pipeload.plan.bytes_per_pass,
    "passes": model.pipeload.stats().passes,
    "bytes_read": model.pipeload.stats().bytes_read,
    "peak": model.pipeload.stats().peak_rss_bytes,
}))
"""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel "python3" of this very environment, and no others."""
    folder = tmp_path / "kernels" / "python3"
    folder.mkdir(parents=True)
    spec = {
        "argv": [*warm_python(), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Python 3",
        "language": "python",
    }
    (folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    for variable in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")  # Jupyter warns of its older folders
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'hooks'}")


def outputs(cell: Any, kind: str) -> str:
    """What a cell streamed to stdout or stderr, or showed as its last expression."""
    if kind in {"stdout", "stderr"}:
        return "".join(o["text"] for o in cell.outputs if o.get("name") == kind)
    return "".join(o["data"].get(kind, "") for o in cell.outputs if "data" in o)


@pytest.mark.slow
def test_the_notebook(
    kernel: None, smollm2_bf16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers as plain transformers do, within its limit, and draws its tables."""
    monkeypatch.setenv("PIPELOAD_EXAMPLE_MODEL", str(smollm2_bf16))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(PROBE, id="probe"))
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()  # raises where a cell does

    cells = {cell.id: cell for cell in notebook.cells}
    found = json.loads(outputs(cells["probe"], "stdout"))
    prompt = found["prompt"]
    plain = load_plain(smollm2_bf16)
    ids = torch.tensor([found["ids"][:prompt]])
    wanted = plain.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False
    )
    assert found["ids"] == wanted[0].tolist()
    assert "Paris" in outputs(cells["chat"], "stdout")

    assert found["peak"] <= found["limit"] == found["planned"]
    assert found["streams"]
    assert found["passes"] == len(found["ids"]) - prompt
    # What is resident need not be read again; the rest is, but for the last page of each file.
    assert found["bytes_read"] > 0.95 * found["bytes_per_pass"] * found["passes"]

    for name, words in {"plan": "smallest that works", "statistics": "peak memory"}.items():
        assert "<pre" in outputs(cells[name], "text/html")
        assert words in outputs(cells[name], "text/html")
        assert words in outputs(cells[name], "text/plain")
    assert "the CPU" in outputs(cells["load"], "stdout")
    assert "0it" not in outputs(cells["load"], "stderr")


def test_the_notebook_is_clean() -> None:
    """Committed as nobody ran it: no outputs, no counts, no metadata of whoever wrote it."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) == 5
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert all(cell.metadata == {} for cell in notebook.cells)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.cells[0].cell_type == "markdown"


STATS = Stats(
    passes=4,
    tokens=6,
    bytes_read=3_000_000_000,
    reads=70,
    read_seconds=1.5,
    stall_seconds=0.25,
    compute_seconds=2.0,
    hits=30,
    misses=2,
    resident_bytes=50_000_000,
    buffer_bytes=16_000_000,
    peak_rss_bytes=430_000_000,
    peak_since_load_bytes=420_000_000,
    memory_limit=480_000_000,
)


def test_statistics_as_a_table() -> None:
    """The same rows as text, for rich and in a notebook."""
    text = STATS.table()
    wanted = {
        "memory limit": "480 MB",
        "peak memory": "430 MB",
        "peak since load": "420 MB",
        "read from disk": "3.00 GB, 2 GB/s while reading",
        "waited for disk": "0.25 s",
        "computed": "2 s",
        "units read late": "2 of 32",
        "passes": "4",
        "tokens": "6, 1.5 per pass",
    }
    lines = text.splitlines()
    for name, value in wanted.items():
        assert f"{name:<16}{value}" in lines
    bundle = STATS._repr_mimebundle_(include=None, exclude=None)
    assert bundle["text/plain"] == text
    assert all(name in bundle["text/html"] for name in wanted)
    assert all(value in bundle["text/html"] for value in wanted.values())


class Bar:
    """Records what a progress bar is told."""

    def __init__(self, made: list[Bar], total: int) -> None:
        self.total, self.count = total, 0
        self.closed = False
        made.append(self)

    def update(self, step: int) -> None:
        self.count += step

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    """Bars that are made while this process takes itself for a notebook's kernel."""
    made: list[Bar] = []
    ipython: Any = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr("pipeload.hf.library.progress_bar", lambda total, *_names: Bar(made, total))
    return made


IDS = torch.tensor([[5, 6, 7]])


@torch.no_grad()
def run_pass(model: Any) -> None:
    model(IDS)


def hooks_of(model: Any) -> list[int]:
    return [len(layer._forward_hooks) for layer in model.model.layers]


def test_a_first_pass_in_a_notebook(bars: list[Bar], tiny: TinyCheckpoint) -> None:
    """A bar counts the layers of the pass that reads everything; nothing stays of it."""
    model = load_smallest(tiny("llama"))
    layers, before = len(model.model.layers), hooks_of(model)
    assert bars == []  # it comes with the pass, in the cell that runs it
    run_pass(model)
    assert [(bar.total, bar.count, bar.closed) for bar in bars] == [(layers, layers, True)]
    assert hooks_of(model) == [count - 1 for count in before]
    run_pass(model)
    assert len(bars) == 1


def test_a_first_pass_that_dies_in_a_notebook(bars: list[Bar], tiny: TinyCheckpoint) -> None:
    """Its bar goes when the model runs again."""
    model = load_smallest(tiny("llama"))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    layer = model.model.layers[1]
    with layer.register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
        run_pass(model)
    assert [(bar.count, bar.closed) for bar in bars] == [(1, False)]
    run_pass(model)
    assert [(bar.count, bar.closed) for bar in bars] == [(1, True)]


def test_a_model_that_is_plain_again_before_it_ran(bars: list[Bar], tiny: TinyCheckpoint) -> None:
    """No hook counts for a bar that nobody needs."""
    model = load_smallest(tiny("llama"))
    model.pipeload.remove()
    assert set(hooks_of(model)) == {0}
    run_pass(model)
    assert bars == []


@pytest.mark.parametrize("shown", [True, False])
def test_the_librarys_bars(
    shown: bool, tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bar does, and so does its stand-in where bars are switched off."""
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", shown)
    monkeypatch.setattr("pipeload.entry.notebook_bar.in_notebook", lambda: True)
    model = load_smallest(tiny("llama"))
    before = hooks_of(model)
    run_pass(model)
    assert hooks_of(model) == [count - 1 for count in before]


def test_no_bar_over_nothing(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library's loading bar shows when it loads something: of a streamed model, nothing."""
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", True)
    folder = tiny("llama")
    load_plain(folder)
    assert "Loading weights" in capfd.readouterr().err
    model = load_smallest(folder)
    assert capfd.readouterr().err == ""
    assert pipeload.handle(model).plan.bytes_per_pass > 0
    load_plain(folder)
    assert "Loading weights" in capfd.readouterr().err
