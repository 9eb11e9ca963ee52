"""Planning looks at the process and leaves it as it is; loading then makes what was counted on."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from pipeload.budget import measured_host
from pipeload.budget.measured_host import measure
from tests.support.children import printed_by

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")

_CHILD = """
import ctypes, json, os, sys
import pipeload
from transformers import LlamaForCausalLM
from pipeload.system import library_pages

class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks mapped".split()] + [
        (f"_{number}", ctypes.c_size_t) for number in range(6)
    ]

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
libc.free.argtypes = (ctypes.c_void_p,)
libc.mallinfo2.restype = Heap

def mapped(nbytes):
    before = libc.mallinfo2().mapped
    block = libc.malloc(nbytes)
    more = libc.mallinfo2().mapped - before
    libc.free(block)
    return bool(more)

def own_malloc():
    # As long as nobody has set a threshold, it follows what is freed.
    mapped(20 << 20)
    return not mapped(10 << 20)

def pages():
    return {(s.path, s.start): s.resident for s in library_pages._own_segments()}

folder, how = sys.argv[1:]
call = getattr(pipeload, how)
for segment in library_pages._own_segments():  # as if all of them had been needed
    ctypes.string_at(segment.start, min(segment.stop - segment.start, 64 << 20))
environment, before = dict(os.environ), pages()
result = call(folder, dtype="bfloat16", memory_limit="2GB")
after = pages()
print(json.dumps({
    "floor": getattr(getattr(result, "pipeload", None), "plan", result).floor_bytes,
    "gone": sum(max(0, there - after.get(key, 0)) for key, there in before.items()),
    "there": sum(before.values()),
    "set": sorted(os.environ.items() - environment.items()),
    "own_malloc": own_malloc(),
}))
"""


def child(folder: Path, how: str) -> dict[str, Any]:
    """What a process of its own is like after one call."""
    result: dict[str, Any] = json.loads(printed_by(_CHILD, folder, how).splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def planned(tiny: TinyCheckpoint) -> dict[str, Any]:
    """After a plan. (The smallest limit is what the plan for a limit of one byte says.)"""
    return child(tiny("llama"), "plan")


@pytest.mark.slow
@linux
def test_planning_changes_nothing(planned: dict[str, Any]) -> None:
    """Pages of libraries stay, malloc and the environment are as they were."""
    assert planned["gone"] == 0
    assert planned["there"] > 50_000_000
    assert planned["own_malloc"]
    assert planned["set"] == []


@pytest.mark.slow
@linux
def test_loading_makes_what_was_counted_on(planned: dict[str, Any], tiny: TinyCheckpoint) -> None:
    """What is held then is what a plan said before, though that plan left it all there."""
    loaded = child(tiny("llama"), "from_pretrained")
    assert loaded["gone"] > 50_000_000
    assert not loaded["own_malloc"]
    assert abs(loaded["floor"] - planned["floor"]) < 20_000_000


def test_code_that_comes_back_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the pages that loading drops, those that computing needs are no gain."""
    monkeypatch.setattr(measured_host, "rss_bytes", lambda: 1000)
    monkeypatch.setattr(measured_host, "droppable_bytes", lambda: 300)
    held = [measure([], "buffered", code_bytes=code).held_bytes for code in (0, 100, 300, 400)]
    assert held == [700, 800, 1000, 1000]
