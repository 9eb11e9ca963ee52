"""Reads of single experts: what was asked for, and what has come. Used by one thread at a time.

They have threads of their own beside those of the prefetcher, so that what a router has just chosen
waits for no unit that is only read ahead.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch

from pipeload.checkpoint.reader_threads import READER_DIED, ReaderPool, reader_died
from pipeload.errors import ReadError, UnsupportedOperationError
from pipeload.prefetch.fault_messages import name_block
from pipeload.system.pages import ceil_page
from pipeload.weights.arena import Arena
from pipeload.weights.expert_bank import READERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipeload.budget.read_counters import Counters
    from pipeload.checkpoint.hung_reads import Stalls
    from pipeload.checkpoint.reader_threads import Outcome
    from pipeload.weights.arena import Region, Work

_JOIN_SECONDS = 5.0


class Slice(NamedTuple):
    """One expert's part of one parameter."""

    layer: int
    name: str
    """Of the parameter."""
    expert: int


class ExpertReads:
    """Has slices read by a few threads, and waits for them.

    [Note: no report is lost] Whoever waits may be interrupted between any two instructions. So what
    readers report stays in line until it was written down, and writing it down again changes
    nothing: a slice is there once none of the numbers of its reads is left. What is being read at
    all the readers themselves know, whom nothing interrupts.
    """

    def __init__(self, counters: Counters, stalls: Stalls, scratch_bytes: int) -> None:
        """`scratch_bytes`: working memory that each thread needs."""
        self.stall_seconds = 0.0
        """How long somebody has waited for slices."""
        self._counters, self._stalls = counters, stalls
        self._scratch_bytes = scratch_bytes
        self._pool: ReaderPool[Region | None] | None = None
        self._closer: Callable[[], object] | None = None
        self._reports = _Reports()
        self._numbers = itertools.count()
        self._left: dict[Slice, set[int]] = {}
        """Numbers of the reads that are still to come, of each slice that is wanted."""
        self._errors: dict[Slice, BaseException] = {}
        self._wanted = _Wanted()
        self._busy_since = 0.0
        self._hangs = False
        """Whether a read did not come back: nobody waits for the others then."""

    def submit(self, part: Slice, jobs: Sequence[Work]) -> None:
        """Have a slice read."""
        if self._pool is None:
            each = ceil_page(self._scratch_bytes)
            arena = Arena(READERS * each, device=torch.device("cpu"), huge=True)
            regions: list[Region | None] = [arena.take(each) for _ in range(READERS)]
            self._pool = ReaderPool(self._reports.add, regions)
            # Also at exit: a reader must not be torn out of torch, which aborts the process.
            self._closer = weakref.finalize(self, _end, self._pool)
        if not self._left:
            self._busy_since = time.perf_counter()
        numbers = set()
        for job in jobs:
            number = next(self._numbers)
            self._pool.submit((self._wanted, part, number), self._wanted.only(job, number))
            numbers.add(number)
        self._left[part] = numbers

    def wait(self, part: Slice, module: str) -> None:
        """Return once a slice is there.

        Raises:
            ReadError: the disk failed, or does not answer. Names `module`.
        """
        if part in self._left:
            started = time.perf_counter()
            try:
                self._wait_while(lambda: part in self._left)
            except ReadError as error:
                raise name_block(error, module) from None
            finally:
                self.stall_seconds += time.perf_counter() - started
        failed = self._errors.get(part)
        if failed is not None:
            raise name_block(failed, module)

    def is_over(self, part: Slice) -> bool:
        """Whether nothing of a slice is still to come: it is there, or has failed."""
        self._note_reports()
        return part not in self._left

    def came(self, part: Slice) -> bool:
        """Wait for a slice that nobody is in need of; whether it is there."""
        if self._hangs and part in self._left:
            return False
        try:
            self._wait_while(lambda: part in self._left)
        except ReadError:  # the next who needs it will see
            return False
        return part not in self._errors

    def cancel(self) -> None:
        """Nothing is wanted any more: what has not begun is not read, and what has, is done."""
        before, self._wanted = self._wanted, _Wanted()
        before.over = True
        try:
            if not self._hangs and not _is_ours():
                self._wait_while(lambda: bool(before.running))
        except (ReadError, UnsupportedOperationError):
            pass  # what hangs may yet fill its slice; of a dead reader the next who waits is told
        finally:
            self._hangs = False
            self._left.clear()
            self._errors.clear()

    def close(self) -> None:
        """End the threads; they start again with the next read. May be called again."""
        self.cancel()
        self._pool, self._reports = None, _Reports()
        if self._closer is not None:
            self._closer()

    def _wait_while(self, some_are_left: Callable[[], bool]) -> None:
        since = time.monotonic()
        self._note_reports()
        while some_are_left():
            if not self._reports.arrived(self._stalls.tick):
                try:
                    self._stalls.check(since)
                except ReadError:
                    self._hangs = True
                    raise
            self._note_reports()

    def _note_reports(self) -> None:
        """Write down what has come: see [Note: no report is lost]."""
        reports = self._reports
        while (outcome := reports.first()) is not None:
            self._note(outcome)
            reports.remove(outcome)

    def _note(self, outcome: Outcome) -> None:
        if outcome.tag is READER_DIED:
            raise reader_died(outcome.error)
        assert isinstance(outcome.tag, tuple)  # noqa: S101 - as it was submitted
        wanted, part, number = outcome.tag
        numbers = self._left.get(part, set()) if wanted is self._wanted else set()
        if number not in numbers:
            return
        if outcome.error is not None:
            self._errors.setdefault(part, outcome.error)
        self._counters.expert_bytes_read += outcome.nbytes
        if len(numbers) > 1:
            numbers.discard(number)
            return
        del self._left[part]
        if not self._left:
            self._counters.expert_read_seconds += outcome.finished - self._busy_since


class _Reports:
    """What readers have to say, in line until it is removed."""

    def __init__(self) -> None:
        self._line: deque[Outcome] = deque()
        self._bell = threading.Event()

    def add(self, outcome: Outcome) -> None:
        """Called by readers."""
        self._line.append(outcome)
        self._bell.set()

    def arrived(self, seconds: float) -> bool:
        """Wait for one; whether one has come."""
        came = self._bell.wait(seconds)
        self._bell.clear()
        return came

    def first(self) -> Outcome | None:
        """The first in line."""
        return self._line[0] if self._line else None

    def remove(self, outcome: Outcome) -> None:
        """Take it out of the line, if it is there."""
        if self._line and self._line[0] is outcome:
            self._line.popleft()


class _Wanted:
    """Reads that are wanted, or not wanted any more, together."""

    def __init__(self) -> None:
        self.over = False
        """Whether they are not wanted any more: those that have not begun do nothing then."""
        self.running: set[int] = set()
        """Numbers of those that have begun. Written by the readers."""

    def only(self, job: Work, number: int) -> Work:
        """A read that is left out once it is not wanted any more."""

        def read(scratch: Region | None) -> int:
            self.running.add(number)  # before it looks: see `ExpertReads.cancel`
            try:
                return 0 if self.over else job(scratch)
            finally:
                self.running.discard(number)

        return read


def _end(pool: ReaderPool[Region | None]) -> None:
    pool.close()
    if not _is_ours():
        pool.join(_JOIN_SECONDS)


def _is_ours() -> bool:
    """Whether this thread reads: where it drops the last of a model, it cannot wait for itself."""
    return threading.current_thread().name.startswith("pipeload-")
