"""Reads of single experts: what was asked for, and what has come. Used by one thread at a time.

They have threads of their own beside those of the prefetcher, so that what a router has just chosen
waits for no unit that is only read ahead.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from pipeload.checkpoint.reader_threads import READER_DIED, ReaderPool, reader_died
from pipeload.errors import ReadError
from pipeload.prefetch.fault_messages import name_block
from pipeload.system.pages import ceil_page
from pipeload.weights.arena import Arena
from pipeload.weights.expert_bank import READERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipeload.budget.counters import Counters
    from pipeload.checkpoint.reader_threads import Outcome
    from pipeload.checkpoint.stalls import Stalls
    from pipeload.weights.arena import Region, Work

_JOIN_SECONDS = 5.0


class Slice(NamedTuple):
    """One expert's part of one parameter."""

    layer: int
    name: str
    """Of the parameter."""
    expert: int


class ExpertReads:
    """Has slices read by a few threads, and waits for them."""

    def __init__(self, counters: Counters, stalls: Stalls, scratch_bytes: int) -> None:
        """`scratch_bytes`: working memory that each thread needs."""
        self.stall_seconds = 0.0
        """How long somebody has waited for slices."""
        self._counters, self._stalls = counters, stalls
        self._scratch_bytes = scratch_bytes
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._pool: ReaderPool[Region | None] | None = None
        self._closer: Callable[[], object] | None = None
        self._left: dict[Slice, int] = {}
        """Reads that are still to come, of each slice."""
        self._pending = 0
        """Reads that are still to come, wanted or not."""
        self._errors: dict[Slice, BaseException] = {}
        self._turn = [0]
        """Another number once what was asked for is not wanted any more."""
        self._busy_since = 0.0
        self._hangs = False
        """Whether a read did not come back: nobody waits for the others then."""

    def submit(self, part: Slice, jobs: Sequence[Work]) -> None:
        """Have a slice read."""
        if self._pool is None:
            each = ceil_page(self._scratch_bytes)
            arena = Arena(READERS * each, device=torch.device("cpu"), huge=True)
            regions: list[Region | None] = [arena.take(each) for _ in range(READERS)]
            self._pool = ReaderPool(self._outcomes.put, regions)
            # Also at exit: a reader must not be torn out of torch, which aborts the process.
            self._closer = weakref.finalize(self, _end, self._pool)
        if not self._left:
            self._busy_since = time.perf_counter()
        self._left[part] = len(jobs)
        turn = self._turn[0]
        self._pending += len(jobs)
        for job in jobs:
            self._pool.submit((turn, part), _unless_over(self._turn, turn, job))

    def wait(self, part: Slice, module: str) -> None:
        """Return once a slice is there.

        Raises:
            ReadError: the disk failed, or does not answer. Names `module`.
        """
        if part in self._left:
            started = time.perf_counter()
            try:
                self._collect(part)
            except ReadError as error:
                raise name_block(error, module) from None
            finally:
                self.stall_seconds += time.perf_counter() - started
        failed = self._errors.get(part)
        if failed is not None:
            raise name_block(failed, module)

    def came(self, part: Slice) -> bool:
        """Wait for a slice that nobody is in need of; whether it is there."""
        if self._hangs and part in self._left:
            return False
        try:
            self._collect(part)
        except ReadError:  # the next who needs it will see
            return False
        return part not in self._errors

    def cancel(self) -> None:
        """Nothing is wanted any more: what has not begun is not read, and what has, is done."""
        self._turn[0] += 1
        try:
            self._collect(None)
        except ReadError:  # one that hangs may yet fill its slice
            pass
        finally:
            self._hangs = False
            self._left.clear()
            self._errors.clear()

    def close(self) -> None:
        """End the threads; they start again with the next read. May be called again."""
        self.cancel()
        self._pool = None
        if self._closer is not None:
            self._closer()

    def _collect(self, part: Slice | None) -> None:
        """Wait for a slice, or for all that was ever asked for."""
        since = time.monotonic()
        while part in self._left if part is not None else self._pending and not self._hangs:
            with contextlib.suppress(queue.Empty):
                self._take(self._outcomes.get(timeout=self._stalls.tick))
                continue
            try:
                self._stalls.check(since)
            except ReadError:
                self._hangs = True
                raise
            if self._stalls.idle and self._outcomes.empty():  # an interrupt has lost an outcome
                self._pending = 0
                self._left.clear()

    def _take(self, outcome: Outcome) -> None:
        self._pending -= 1
        if outcome.tag is READER_DIED:
            raise reader_died(outcome.error)
        self._counters.expert_bytes_read += outcome.nbytes
        assert isinstance(outcome.tag, tuple)  # noqa: S101 - as it was submitted
        turn, part = outcome.tag
        if turn != self._turn[0] or part not in self._left:
            return
        if outcome.error is not None:
            self._errors.setdefault(part, outcome.error)
        self._left[part] -= 1
        if not self._left[part]:
            del self._left[part]
        if not self._left:
            self._counters.expert_read_seconds += outcome.finished - self._busy_since


def _end(pool: ReaderPool[Region | None]) -> None:
    pool.close()
    if not threading.current_thread().name.startswith("pipeload-"):  # it cannot wait for itself
        pool.join(_JOIN_SECONDS)


def _unless_over(turn: list[int], mine: int, job: Work) -> Work:
    """A read that is left out once nobody wants it any more."""

    def read(scratch: Region | None) -> int:
        return job(scratch) if turn[0] == mine else 0

    return read
