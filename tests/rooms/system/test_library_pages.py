"""Library pages that are not in use are given back, and nothing else changes."""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pipeload.system import library_pages
from pipeload.system.library_pages import droppable, lower_floor
from tests.support.children import printed_by

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")

_CHILD = """
import json, sys
from pathlib import Path
import pipeload, pipeload.system.library_pages
if sys.argv[2] == "plain":
    pipeload.system.library_pages.lower_floor = lambda: 0
    pipeload.system.library_pages.droppable_bytes = lambda: 0
def held():
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) * 1024
def peak():
    return pipeload.system.memory.peak_rss_bytes()
model = pipeload.from_pretrained(sys.argv[1], memory_limit="1GB")
import torch
result = {"floor": model.pipeload.plan.floor_bytes}
text = model.generate(torch.arange(16)[None] + 5, max_new_tokens=6, do_sample=False)
result |= {"text": text.tolist(), "held": held(), "peak": peak()}
import torch._dynamo
torch._dynamo.reset()
graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward
compiled = torch.compile(lambda x: torch.relu(x) * 2 + 1, backend=backend, fullgraph=True)
result["compiled"] = compiled(torch.tensor([-1.0, 3.0])).tolist()
result["graphs"] = len(graphs)
result["dynamo"] = type(sys.modules["torch._dynamo"]).__name__
print(json.dumps(result))
"""


def child(folder: Path, how: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(printed_by(_CHILD, folder, how).splitlines()[-1])
    return result


@pytest.mark.slow
@linux
def test_a_child_holds_less_and_says_the_same(tiny: TinyCheckpoint) -> None:
    """Less at the plan, after generating and at the peak; the same text; torch.compile as ever."""
    folder = tiny("llama")
    plain, lowered = child(folder, "plain"), child(folder, "lowered")
    assert lowered["floor"] < plain["floor"] - 50_000_000
    assert lowered["held"] < plain["held"] - 30_000_000
    assert lowered["peak"] < plain["peak"] - 30_000_000
    assert lowered["text"] == plain["text"]
    for result in (plain, lowered):
        assert result["compiled"] == [1.0, 7.0]
        assert result["graphs"] == 1
        assert result["dynamo"] == "module"


@linux
def test_results_stay_while_other_threads_run() -> None:
    """Code whose pages go away under it is mapped again, and never missed."""
    matrix = torch.randn(96, 96, generator=torch.Generator().manual_seed(3))

    def compute(_: int) -> torch.Tensor:
        return torch.softmax(matrix @ matrix, dim=-1)

    expected = compute(0)
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(compute, range(400))
        dropped = [lower_floor() for _ in range(5)]
        assert all(torch.equal(result, expected) for result in results)
    assert all(dropped)


@linux
def test_what_is_dropped_leaves_memory() -> None:
    """The figure is real: the same libraries hold less right after."""
    torch.linalg.svd(torch.ones(4, 4))
    before = sum(segment.resident for segment in library_pages._own_segments())
    dropped = lower_floor()
    after = sum(segment.resident for segment in library_pages._own_segments())
    assert 0 < dropped <= 2 * before  # some come back while others go: threads run on
    assert after < before / 2


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[tuple[mmap.mmap, Path]]:
    """Four pages of a private mapping of a file that is named like a library."""
    file = tmp_path / "libnone.so"
    file.write_bytes(b"a" * 4 * mmap.PAGESIZE)
    with file.open("rb") as opened:
        memory = mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    yield memory, file
    memory.close()


def make_read_only(memory: mmap.mmap) -> None:
    first = ctypes.c_char.from_buffer(memory)
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(ctypes.addressof(first))
    assert libc.mprotect(address, ctypes.c_size_t(len(memory)), mmap.PROT_READ) == 0


def segments_of(file: Path) -> list[library_pages.Segment]:
    return [s for s in library_pages._own_segments() if s.path == str(file).encode()]


@linux
def test_a_mapping_that_was_written_to_stays(
    mapped: tuple[mmap.mmap, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read-only now, but with a page of its own: even of a held library it would be lost."""
    memory, file = mapped
    memory[0:1] = b"b"
    make_read_only(memory)
    assert memory[-1:] == b"a"
    assert segments_of(file) == []
    hold = library_pages._hold
    known = str(file).encode()
    monkeypatch.setattr(
        library_pages, "_hold", lambda libc, path: (path, 0) if path == known else hold(libc, path)
    )
    lower_floor()
    assert memory[0:1] == b"b"


@linux
def test_a_file_that_the_loader_does_not_hold_stays(mapped: tuple[mmap.mmap, Path]) -> None:
    """Clean, read-only and named like a library, but its owner could unmap it any time."""
    memory, file = mapped
    make_read_only(memory)
    assert memory[0:1] == b"a"
    before = segments_of(file)
    assert [segment.resident for segment in before] != []
    lower_floor()
    assert segments_of(file) == before


def smaps_entry(mode: str, path: str, rss: int, anonymous: int) -> list[bytes]:
    text = f"""7f0000000000-7f0000400000 {mode} 00001000 fe:00 1234                      {path}
Size:               4096 kB
Rss:                {rss} kB
Pss:                   7 kB
Anonymous:          {anonymous} kB
VmFlags: rd ex mr mw me
"""
    return text.encode().splitlines(keepends=True)


MODES = ("r-xp", "r--p", "rw-p", "rwxp", "r-xs", "r--s", "---p")
LIBRARIES = ("/lib/liba.so", "/a b/libc.so.6", "/x/lib.so.3.11")
OTHERS = ("/x/a.so (deleted)", "/x/a.sock", "/x/model.safetensors", "/dev/nvidia0", "[vdso]", "")
KILOBYTES = (0, 4, 2048)


def test_only_clean_library_mappings_are_droppable() -> None:
    """Of every kind of mapping: private, read-only, resident, a library, no page of its own."""
    entries = list(itertools.product(MODES, LIBRARIES + OTHERS, KILOBYTES, KILOBYTES))
    lines = [line for entry in entries for line in smaps_entry(*entry)]
    expected = [
        (path.encode(), rss * 1024)
        for mode, path, rss, anonymous in entries
        if mode in {"r-xp", "r--p"} and path in LIBRARIES and rss and not anonymous
    ]
    found = list(droppable(lines))
    assert [(segment.path, segment.resident) for segment in found] == expected
    assert {segment.stop - segment.start for segment in found} == {4 << 20}


def test_nothing_is_done_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other systems have no such files, and madvise means something else there."""

    def fail() -> Any:
        raise AssertionError

    monkeypatch.setattr(library_pages, "_own_segments", fail)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert lower_floor() == 0


def test_nothing_is_done_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox may hide it."""

    def hidden() -> Any:
        raise FileNotFoundError("/proc/self/smaps")

    monkeypatch.setattr(library_pages, "_own_segments", hidden)
    assert lower_floor() == 0
