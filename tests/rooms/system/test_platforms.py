"""Systems that lack what Linux has: the same numbers by other means, or one line that says so."""

from __future__ import annotations

import json
import mmap
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

import pipeload
from pipeload.bench import reader
from pipeload.budget import cut, host_memory
from pipeload.checkpoint.file_reads import FileSet
from pipeload.checkpoint.io_mode import resolve_io_mode
from pipeload.entry.spill import Spill
from pipeload.errors import (
    CheckpointChangedError,
    OptionError,
    UnsupportedOperationError,
)
from pipeload.system import memory
from pipeload.system.memory import peak_rss_bytes, rss_bytes
from tests.rooms.test_imports import MODULES, PURE
from tests.support.children import printed_by, printed_warmly
from tests.support.models import load_plain
from tests.support.platforms import hide_proc, take_away
from tests.support.streaming import (
    FLOOR_BYTES,
    generated,
    load_streamed,
    logits,
    session_of,
    smallest_limit,
    steady_floor,
)
from tests.support.sweeps import few

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import TinyCheckpoint

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="plays other systems")

_CHILD = """
import json, sys
from pathlib import Path
import psutil, pytest, safetensors, torch, transformers
from tests.support.models import load_plain
from tests.support.platforms import SYSTEMS

system, io_mode, *folders = sys.argv[1:]
folders = [Path(name) for name in folders]
ids = torch.arange(3, 20)[None]
options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}

def outcome(model):
    with torch.no_grad():
        return model(ids).logits, model.generate(ids, **options)

wanted = [outcome(load_plain(folder)) for folder in folders]
for name in [name for name in sys.modules if name.split(".")[0].startswith("pipeload")]:
    del sys.modules[name]  # the tests' models come from it
made = SYSTEMS[system](pytest.MonkeyPatch())

from pipeload.budget import host_memory
from pipeload.system import pages
from pipeload.budget import cut
from pipeload.budget.shared_limit import Accountant
from tests.support.streaming import FLOOR_BYTES, load_streamed, session_of
Accountant.other_bytes = lambda self: FLOOR_BYTES  # a tiny model is less than the libraries' noise
cut._TABLE_BYTES = 0  # a tiny model's table is read by rows, too
host_memory.TABLE_KEEP_BYTES = 0  # and given back after every pass
results = []
for folder, expected, spare in zip(folders, wanted, (200_000, 30_000_000)):
    def same():
        return all(map(torch.equal, outcome(model), expected))
    model = load_streamed(folder, spare=spare, io_mode=io_mode)
    plan = model.pipeload.plan
    result = {"streamed": plan.bytes_per_pass, "io_mode": plan.io_mode}
    result |= {"same": [same()], "tables": len(session_of(model).streamer.tables)}
    for change in (-spare // 2, spare):
        model.pipeload.set_memory_limit(model.pipeload.plan.memory_limit + change)
        result["same"].append(same())
    model.pipeload.remove()
    result["same"].append(same())
    model = load_streamed(folder, spare=10**9)
    result["same"].append(same())
    result["fits"] = model.pipeload.plan.io_mode
    model.pipeload.remove()
    results.append(result)
stats = {"page": pages.PAGE, "unlocked": len(getattr(made, "unlocked", ()))}
print(json.dumps({"results": results, **stats}))
"""

# How a model is to be streamed, and how it is read where everything fits.
MODES = {
    "mac": ("uncached", "buffered"),
    "windows": ("auto", "buffered"),
    "arm linux": ("direct", "mapped"),
}
PAGES = {"mac": 16384, "windows": 4096, "arm linux": 65536}


@pytest.mark.slow
@linux
@pytest.mark.parametrize("system", few(MODES, ["mac"]))
def test_a_whole_process_elsewhere(system: str, tiny: TinyCheckpoint, smollm2_bf16: Path) -> None:
    """Streamed, given back, and loaded whole: equal to the bit, by that system's own means."""
    folders = [tiny("llama"), smollm2_bf16]
    io_mode, whole_mode = MODES[system]
    seen = json.loads(printed_warmly(_CHILD, system, io_mode, *map(str, folders)))
    assert seen["page"] == PAGES[system]
    assert (seen["unlocked"] > 0) == (system == "windows")
    for result in seen["results"]:
        assert result["same"] == [True] * 5
        assert result["tables"] == 1
        assert result["streamed"] > 0
        assert result["io_mode"] == ("direct" if system == "arm linux" else "buffered")
        assert result["fits"] == whole_mode


# Each missing by itself; a child above misses many at once.
FALLBACKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "no preadv": lambda patch: take_away(patch, os, "preadv"),
    "neither preadv nor pread": lambda patch: take_away(patch, os, "preadv", "pread"),
    "no direct reads": lambda patch: take_away(patch, os, "O_DIRECT"),
    "no advice on files": lambda patch: take_away(patch, os, "O_DIRECT", "posix_fadvise"),
    "no advice on memory": lambda patch: take_away(
        patch, mmap, *(name for name in dir(mmap) if name.startswith("MADV_"))
    ),
    "no files in memory": lambda patch: take_away(patch, os, "memfd_create"),
    "not Linux": lambda patch: patch.setattr(sys, "platform", "darwin"),
    "no /proc": hide_proc,
}


@pytest.fixture
def by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model's embedding is read by rows, which are given back after every pass."""
    monkeypatch.setattr(cut, "_TABLE_BYTES", 0)
    monkeypatch.setattr(host_memory, "TABLE_KEEP_BYTES", 0)


@linux
@pytest.mark.usefixtures("by_rows")
@pytest.mark.parametrize("missing", FALLBACKS)
@pytest.mark.parametrize("io_mode", ["auto", "uncached"])
def test_one_thing_missing(
    missing: str, io_mode: str, tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal to plain while it streams, after less and more memory, and after it was given back."""
    folder = tiny("llama")
    plain = load_plain(folder)
    FALLBACKS[missing](monkeypatch)
    model = load_streamed(folder, spare=500_000, io_mode=io_mode)
    assert model.pipeload.plan.bytes_per_pass > 0
    assert len(session_of(model).streamer.tables) == 1
    for limit in (0, -500_000, 500_000):
        if limit:
            model.pipeload.set_memory_limit(model.pipeload.plan.memory_limit + limit)
        assert torch.equal(logits(model), logits(plain))
        assert generated(model) == generated(plain)
    model.pipeload.remove()
    assert torch.equal(logits(model), logits(plain))


@linux
def test_wrap_where_mappings_are_not_told(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every weight is compared, none is taken for memory that goes: a mapped one may not be any."""
    folder = tiny("llama")
    plain, model = load_plain(folder), load_plain(folder)
    with steady_floor():
        limit = smallest_limit(folder, dtype="auto")
        hide_proc(monkeypatch)
        pipeload.wrap(model, memory_limit=limit)
    assert model.pipeload.plan.floor_bytes == FLOOR_BYTES
    assert torch.equal(logits(model), logits(plain))


@pytest.mark.parametrize("wanted", ["auto", "uncached", "direct"])
def test_no_way_past_the_page_cache(
    wanted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Buffered reads, which is said in a line; who insists on direct ones is refused."""
    file = tmp_path / "file"
    file.write_bytes(bytes(8192))
    take_away(monkeypatch, os, "O_DIRECT", "posix_fadvise")
    with caplog.at_level("INFO", "pipeload"):
        if wanted == "direct":
            with pytest.raises(OptionError, match="this system has no direct reads"):
                resolve_io_mode(wanted, [file], fits_cache=False)
        else:
            assert resolve_io_mode(wanted, [file], fits_cache=False) == "buffered"
            (record,) = caplog.records
            assert "buffered reads" in record.message


def test_the_benchmark_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own reader is of use past the page cache alone."""
    file = tmp_path / "file"
    file.write_bytes(bytes(8192))
    take_away(monkeypatch, os, "O_DIRECT")
    with pytest.raises(OSError, match="this system has no direct reads"):
        reader.read_rate([file], 0.1)


@pytest.mark.parametrize("change", ["replaced", "removed", "none"])
def test_a_file_that_cannot_be_opened_again(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a name for an open file, another file in its place is not taken for it."""
    file = tmp_path / "file"
    file.write_bytes(b"1")
    files = FileSet([file], "buffered")
    if change != "none":
        file.rename(tmp_path / "elsewhere")
    if change == "replaced":
        file.write_bytes(b"2")
    if sys.platform.startswith("linux"):
        assert Path(files.reopen_name(file)).read_bytes() == b"1"
    hide_proc(monkeypatch)
    if change == "none":
        assert files.reopen_name(file) == str(file)
    else:
        with pytest.raises(CheckpointChangedError, match="replaced or removed"):
            files.reopen_name(file)
    files.close()


def test_memory_figures_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil tells what the process holds; its peak comes from where the system keeps it."""
    held = rss_bytes()
    hide_proc(monkeypatch)
    assert rss_bytes() == pytest.approx(held, rel=0.2)
    assert peak_rss_bytes() >= held * 0.8
    monkeypatch.setattr(memory, "_memory_info", lambda: _Info(rss=5, peak_wset=7))
    assert (rss_bytes(), peak_rss_bytes()) == (5, 7)
    monkeypatch.setattr(memory, "_memory_info", lambda: _Info(rss=1 << 50))
    assert peak_rss_bytes() == 1 << 50
    monkeypatch.setitem(sys.modules, "resource", None)  # Windows has none
    monkeypatch.setattr(memory, "_memory_info", lambda: _Info(rss=5))
    assert peak_rss_bytes() == 5


class _Info:
    def __init__(self, **figures: int) -> None:
        vars(self).update(figures)


def test_no_memory_figures_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that cannot be measured is not promised."""

    def refuse() -> Any:
        raise psutil.AccessDenied(1)

    monkeypatch.setattr(psutil, "Process", refuse)
    hide_proc(monkeypatch)
    with pytest.raises(UnsupportedOperationError, match="memory cannot be measured"):
        rss_bytes()


def test_a_file_that_cannot_be_removed_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Windows keeps files that are open: no error, but a line that names what is left."""
    spill = Spill(tmp_path, {"weight": torch.ones(3)})

    def refuse(_path: Path, **_options: Any) -> None:
        raise PermissionError(13, "used by another process")

    monkeypatch.setattr(Path, "unlink", refuse)
    spill.remove()
    (record,) = caplog.records
    assert str(spill.path) in record.message


def test_letters_that_the_output_cannot_hold() -> None:
    """An answer goes on where the terminal's encoding ends."""
    code = "from pipeload.cli.log_lines import replace_unprintable as f; f(); print('caf\\u00e9')"
    assert printed_by(code, PYTHONIOENCODING="ascii") == "caf?\n"


_IMPORT = """
import importlib, sys
import psutil, pytest
{before}
from tests.support.platforms import SYSTEMS
SYSTEMS["windows"](pytest.MonkeyPatch())
for name in {names}:
    importlib.import_module(name)
print("torch" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize("pure", [True, False])
def test_everything_can_be_imported(*, pure: bool) -> None:
    """With all that is Linux's and POSIX's missing; the pure modules without torch."""
    modules = PURE if pure else sorted(MODULES.keys() - {"__init__", "__main__"})
    names = ["pipeload", *(f"pipeload.{module}" for module in modules)]
    # The library imports parts of itself when they are asked for.
    names_of = "AutoModelForCausalLM, PreTrainedModel, TextStreamer"
    libraries = f"import torch, typer, rich.progress, uvicorn; from transformers import {names_of}"
    before = "" if pure else libraries
    assert printed_by(_IMPORT.format(before=before, names=names)) == f"{not pure}\n"
