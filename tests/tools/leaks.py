#!/usr/bin/env python3
"""Thousands of loads, passes and broken-off passes of a tiny model: what the process holds is flat.

    python tests/tools/leaks.py
    python tests/tools/leaks.py --wraps 1000 --passes 10000 --aborts 500

After each kind of work the counts of threads, descriptors and mappings are what they were after a
first part of it, and resident memory has grown by no more than the allocator's own holes.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import pipeload
from pipeload.system.memory import rss_bytes
from tests.support.models import load_plain
from tests.support.streaming import load_streamed, logits, smallest_limit, steady_floor

if TYPE_CHECKING:
    from collections.abc import Sequence

Work = Callable[[int], object]
# The allocator's heap breathes by that much whatever is done.
_RSS_BYTES = 8_000_000
# Mappings come and go with the heap's arenas; a leak is one for each turn.
_MAPS = 12


class Held(NamedTuple):
    """What this process holds."""

    threads: int
    files: int
    mappings: int
    rss: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        for thread in threading.enumerate():
            if thread.name.startswith("pipeload-reader"):
                thread.join(0.5)  # told to end, but not waited for
        return cls(
            threading.active_count(),
            len(list(Path("/proc/self/fd").iterdir())),
            len(Path("/proc/self/maps").read_text().splitlines()),
            rss_bytes(),
        )

    def faults_since(self, before: Held, turns: int) -> list[str]:
        """What has grown. Few turns cannot tell a leak of memory from the heap's own moods."""
        found = []
        for name in ("threads", "files"):
            was, now = getattr(before, name), getattr(self, name)
            if now > was:
                found.append(f"{name} {was} -> {now}")
        if self.mappings > before.mappings + min(_MAPS, max(4, turns // 2)):
            found.append(f"mappings {before.mappings} -> {self.mappings}")
        if self.rss > before.rss + _RSS_BYTES:
            found.append(f"rss {before.rss} -> {self.rss}")
        return found


class Stop(KeyboardInterrupt):
    """Ctrl-C in the middle of a pass."""


def wrapping(folder: Path, expected: torch.Tensor) -> Work:
    """Load plainly, stream, run, and give the plain model back."""
    plain = load_plain(folder)
    with steady_floor():
        limit = smallest_limit(folder, dtype="auto") + 200_000

    def work(_turn: int) -> None:
        with steady_floor():
            model = pipeload.wrap(plain, memory_limit=limit)
        assert torch.equal(logits(model), expected)
        model.pipeload.remove()

    return work


def passing(folder: Path, expected: torch.Tensor) -> Work:
    """One pass of the same model."""
    model = load_streamed(folder)

    def work(turn: int) -> None:
        got = logits(model)
        assert turn % 100 or torch.equal(got, expected)

    return work


def aborting(folder: Path, expected: torch.Tensor) -> Work:
    """A pass that dies at another block each time, by an error or Ctrl-C; now and then a whole."""
    model = load_streamed(folder)
    blocks = model.model.layers

    def work(turn: int) -> None:
        error = (ValueError, Stop)[turn % 2]

        def die(*_args: object) -> None:
            raise error("on purpose")

        hook = blocks[turn % len(blocks)].mlp.register_forward_pre_hook(die)
        try:
            logits(model)
        except error:
            pass
        finally:
            hook.remove()
        assert turn % 10 or torch.equal(logits(model), expected)

    return work


KINDS: dict[str, Callable[[Path, torch.Tensor], Work]] = {
    "wraps": wrapping,
    "passes": passing,
    "aborts": aborting,
}


def run(kind: str, folder: Path, turns: int) -> tuple[Held, Held, list[str]]:
    """Do the work so often: what was held after a fifth of it, and at its end, and faults."""
    work = KINDS[kind](folder, logits(load_plain(folder)))
    first = max(3, turns // 5)
    for turn in range(first):
        work(turn)
    before = Held.now()
    for turn in range(first, turns):
        work(turn)
    after = Held.now()
    return before, after, after.faults_since(before, turns - first)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was held; 1 when anything has grown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wraps", type=int, default=1000)
    parser.add_argument("--passes", type=int, default=10_000)
    parser.add_argument("--aborts", type=int, default=500)
    options: Any = vars(parser.parse_args(arguments))
    import transformers

    from tests.support.models import save_random

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    faults = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_random("llama", Path(scratch) / "m", "fp32", seed=7, max_shard_size="200KB")
        for kind in KINDS:
            before, after, found = run(kind, folder, options[kind])
            faults += len(found)
            print(f"{kind} {options[kind]}: {before} -> {after} {found or 'flat'}", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
