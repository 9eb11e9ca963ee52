#!/usr/bin/env python3
"""Counts that no machine changes, against those that were committed: what made a pass dearer?

    python tests/tools/guard.py            # print counts and times; 1 when a count has moved
    python tests/tools/guard.py --update   # accept them: rewrite tests/tools/baseline.json

Of a random LLaMA of fixed bytes, its reads done before each block runs, and of a disk made of
numbers. Times are shown and never compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import threading
import time
import tracemalloc
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import pipeload
import pipeload_hooks
from pipeload.prefetch.dispatcher import Dispatcher
from pipeload.prefetch.unit import Ticket
from tests.support import fake_disk
from tests.support.fake_disk import FakeFiles, Rig
from tests.support.streaming import (
    WAIT_SECONDS,
    finish_messages,
    in_thread,
    load_streamed,
    prefetcher_of,
)
from tests.tools.make_llama import LlamaShape, make_llama

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import CodeType, FrameType

    from typing_extensions import Self

BASELINE = Path(__file__).with_name("baseline.json")
_SHAPE = LlamaShape(64, 160, 6, 4, 2, vocab=512, dtype="fp32", shard_bytes=300_000)
_FOLDERS = tuple(str(Path(package.__file__ or "").parent) for package in (pipeload, pipeload_hooks))
_IDS = torch.arange(3, 20)[None]
# Bytes over the smallest limit: nothing, some and all of the blocks stay.
_SPARES = {"streamed": 0, "part resident": 500_000, "all resident": 10_000_000}
_WARM_UP = 6
_PASSES = 4
_SAMPLES = 9
_MANY = 30
# What other threads and Python's free lists hold at the moment counts as well.
_LOOSE = {"blocks of memory made": 24, "blocks of memory left": 2}

Counts = dict[str, int]


@dataclass(slots=True)
class Measured:
    """Counts for every interpreter, those of this one's version, and times."""

    counts: Counts
    python: Counts
    seconds: dict[str, float]


def measure() -> Measured:
    """Count everything, in a thread of its own: how deep the stack is counts as well."""
    found = in_thread(_measure).result()
    assert isinstance(found, Measured)
    return found


def _measure() -> Measured:
    found = Measured({}, {}, {})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_llama(_SHAPE, Path(scratch) / "llama")
        for name, spare in _SPARES.items():
            _measure_model(name, load_streamed(folder, spare=spare, io_mode="buffered"), found)
    _measure_disk(found.counts)
    return found


# -- a model ---------------------------------------------------------------------------------------


def _measure_model(name: str, model: Any, found: Measured) -> None:
    prefetcher = prefetcher_of(model)

    def rest(*_args: object) -> None:
        """Until all that can be read ahead is there: whether a block waits is no matter of time."""
        while prefetcher._closer.alive:
            finish_messages(prefetcher)
            if not prefetcher._dispatcher._loading:
                return

    def one_pass() -> None:
        with torch.no_grad():
            model(_IDS)

    for module in (*model.model.layers, model.lm_head):
        module.register_forward_pre_hook(rest, prepend=True)
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    found.counts[f"{name}: hooks while loading"] = hooks - len(model.model.layers) - 1
    for _ in range(_WARM_UP):
        one_pass()
    rest()
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    found.counts[f"{name}: hooks"] = hooks - len(model.model.layers) - 1
    before, started = model.pipeload.stats(), time.perf_counter()
    with _messages() as messages:
        for _ in range(_PASSES):
            one_pass()
        rest()
    found.seconds[name] = (time.perf_counter() - started) / _PASSES
    after = model.pipeload.stats()
    for what in ("bytes_read", "reads", "hits", "misses"):
        each = (getattr(after, what) - getattr(before, what)) / _PASSES
        found.counts[f"{name}: {what.replace('_', ' ')} per token"] = round(each)
    for what, count in messages.items():
        found.counts[f"{name}: messages {what!r} per pass"] = round(count / _PASSES)
    _count_python(name, one_pass, model.model.layers[3], found.python)


@contextmanager
def _messages() -> Iterator[Counts]:
    """Messages that the dispatcher gets inside, by name."""
    names = ("entered", "ran", "wanted", "released", "reset", "resplit", "_finished")
    counts = dict.fromkeys(names, 0)

    def counting(name: str, original: Callable[..., None]) -> Callable[..., None]:
        def counted(self: Dispatcher, *args: Any) -> None:
            counts[name] += 1
            original(self, *args)

        return counted

    methods: Any = {name: counting(name, getattr(Dispatcher, name)) for name in counts}
    with mock.patch.multiple(Dispatcher, **methods):
        yield counts


def _count_python(
    name: str, one_pass: Callable[[], None], block: torch.nn.Module, counts: Counts
) -> None:
    """Calls and instructions of pipeload in the model's thread, and its blocks of memory."""
    tracers = [_Tracer() for _ in range(3)]
    for tracer in tracers:
        gc.collect()  # else finalizers of what came before run inside
        with tracer:
            one_pass()
    counts[f"{name}: calls per pass"] = min(tracer.calls for tracer in tracers)
    counts[f"{name}: instructions per pass"] = min(tracer.instructions for tracer in tracers)
    inside: list[int] = []
    tracemalloc.start()
    try:
        for _ in range(2):
            one_pass()
        before = _blocks()
        for _ in range(_MANY):
            one_pass()
        after = _blocks()
        hook = block.register_forward_hook(lambda *_: inside.append(_blocks()))
        for _ in range(_SAMPLES):  # readers make and drop theirs at any time
            one_pass()
        hook.remove()
    finally:
        tracemalloc.stop()
    counts[f"{name}: blocks of memory made by the middle of a pass"] = round(median(inside)) - after
    counts[f"{name}: blocks of memory left by a pass"] = round((after - before) / _MANY)


def _blocks() -> int:
    gc.collect()
    filters = [tracemalloc.Filter(True, f"{folder}/*") for folder in _FOLDERS]
    snapshot = tracemalloc.take_snapshot().filter_traces(filters)
    return sum(statistic.count for statistic in snapshot.statistics("filename"))


class _Tracer:
    """Counts what this thread runs of pipeload's files."""

    def __init__(self) -> None:
        self.calls = self.instructions = 0
        self._ours: dict[CodeType, bool] = {}

    def __enter__(self) -> Self:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, _value: object) -> Any:
        code = frame.f_code
        ours = self._ours.get(code)
        if ours is None:
            ours = self._ours[code] = code.co_filename.startswith(_FOLDERS)
        if not ours or event != "call":
            return None
        self.calls += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, _frame: FrameType, event: str, _value: object) -> Any:
        self.instructions += event == "opcode"
        return self._step


# -- a disk made of numbers ------------------------------------------------------------------------


class PacedFiles(FakeFiles):
    """Reads a unit only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = threading.Semaphore(0)

    def read_pages(self, path: Path, first: int, stop: int, into: memoryview) -> int:
        assert self.permits.acquire(timeout=WAIT_SECONDS)
        return super().read_pages(path, first, stop, into)


class Paced:
    """Blocks in some order at a disk that reads so many units while one of them runs."""

    def __init__(self, kinds: str, order: Sequence[int], *, rate: int) -> None:
        self.waits = 0
        with mock.patch.object(fake_disk, "FakeFiles", PacedFiles):
            self.rig = Rig(kinds, readers=1)
        wait = Ticket.wait
        with mock.patch.object(
            Ticket, "wait", lambda ticket, *rest: self._wait(ticket, partial(wait, ticket, *rest))
        ):
            for index in order:
                self.rig.run(index)
                for _ in range(rate):
                    self._read_one()
        cast("PacedFiles", self.rig.files).permits.release(1000)
        self.rig.rest()
        self.rig.prefetcher.close()

    def _wait(self, ticket: Ticket, wait: Callable[[], None]) -> None:
        self.waits += 1
        while ticket._done.locked():
            self._read_one()
        wait()

    def _read_one(self) -> None:
        """If anything is to be read now; returns once the dispatcher knows that it was."""
        prefetcher, counters = self.rig.prefetcher, self.rig.prefetcher.counters
        finish_messages(prefetcher)
        if self.rig.dispatcher._loading:
            reads = counters.reads
            cast("PacedFiles", self.rig.files).permits.release()
            while counters.reads == reads:
                finish_messages(prefetcher)
            finish_messages(prefetcher)  # and has told whoever waits for it


def _measure_disk(counts: Counts) -> None:
    """Blocks that did not find their weights, at disks of three speeds and three orders."""
    orders = {
        "in order": [*range(6)] * 4,
        "early exit": [*range(6), *([*range(4)] * 4)],
        "repeated blocks": [0, 1, 2, 2, 3, 3, 4, 5] * 4,
    }
    for name, order in orders.items():
        for kinds in ("SSSSSS", "RSSRSS"):
            for rate in (0, 1, 3):
                paced = Paced(kinds, order, rate=rate)
                what = f"{kinds}, {name}, {rate} reads a block"
                counts[f"{what}: blocks that waited"] = paced.waits
                counts[f"{what}: read late"] = paced.rig.prefetcher.counters.misses
                counts[f"{what}: reads"] = len(paced.rig.files.reads)


# -- against the baseline --------------------------------------------------------------------------


def _version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def read_baseline() -> dict[str, Any]:
    """What was committed."""
    baseline: dict[str, Any] = json.loads(BASELINE.read_text(encoding="utf-8"))
    return baseline


def moved(was: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """One line for each count that is another one."""
    names = [*now, *(name for name in was if name not in now)]
    return [
        f"{name}: {was.get(name, 'none')} -> {now.get(name, 'none')}"
        for name in names
        if not _same(name, was.get(name), now.get(name))
    ]


def _same(name: str, was: int | None, now: int | None) -> bool:
    if was is None or now is None:
        return was == now
    return abs(was - now) <= next((by for part, by in _LOOSE.items() if part in name), 0)


def changes(found: Measured, baseline: Mapping[str, Any]) -> list[str]:
    """What has moved. Counts of an interpreter that has none in the baseline are not compared."""
    lines = moved(baseline["counts"], found.counts)
    own = baseline["python"].get(_version())
    return lines if own is None else lines + moved(own, found.python)


def update(found: Measured) -> None:
    """Rewrite the baseline; counts of other interpreters stay."""
    python = read_baseline()["python"] if BASELINE.exists() else {}
    python[_version()] = found.python
    text = json.dumps({"counts": found.counts, "python": python}, indent=1)
    BASELINE.write_text(text + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print counts and times; 1 when a count has moved and is not accepted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help="accept what is counted now")
    options = parser.parse_args(arguments)
    found = measure()
    for name, count in (found.counts | found.python).items():
        print(f"{count:>10,}  {name}")
    for name, seconds in found.seconds.items():
        print(f"{seconds * 1e3:>7.2f} ms  {name}: a pass, on this machine now")
    lines = changes(found, read_baseline()) if BASELINE.exists() else ["there is no baseline"]
    if options.update:
        update(found)
    if lines:
        print("\nmoved:", *lines, sep="\n  ")
        print("accepted" if options.update else "To accept: python tests/tools/guard.py --update")
    return 1 if lines and not options.update else 0


if __name__ == "__main__":
    sys.exit(main())
