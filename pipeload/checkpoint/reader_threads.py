"""Threads that read: each runs one job after the other and reports how it went."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from pipeload.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from pipeload.checkpoint.hung_reads import Stalls

Scratch = TypeVar("Scratch")
Job = Callable[[Scratch], int]
"""Gets working memory of the thread it runs in, returns the bytes it read."""


# Each direct read of 16 MB is split by the kernel into many requests at once, so more threads
# gained nothing where it was measured; through the page cache a few more copy in parallel.
_READERS = 4
_CASTING_READERS = 2
_JOIN_SECONDS = 5.0
READER_DIED = object()
"""The tag of an outcome that says that its thread has ended by an error, perhaps within a job."""


def reader_count(*, casting: bool) -> int:
    """How many threads read at once where nobody says; `casting`: weights into another dtype."""
    return _CASTING_READERS if casting else _READERS


class Outcome(NamedTuple):
    """What became of a job that a thread has run."""

    tag: object
    """What the job was submitted with, or `READER_DIED`."""
    nbytes: int
    error: BaseException | None
    finished: float
    """`time.perf_counter()` at its end."""


class ReaderPool(Generic[Scratch]):
    """Threads that run read jobs in the order they were submitted and report each outcome."""

    def __init__(self, report: Callable[[Outcome], None], scratch: Sequence[Scratch]) -> None:
        """Start one thread per entry of `scratch`, which is that thread's working memory."""
        self._jobs: queue.SimpleQueue[tuple[object, Job[Scratch]] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(
                target=_read_forever,
                args=(self._jobs, self._closed, report, region),
                name=f"pipeload-reader-{number}",
                daemon=True,
            )
            for number, region in enumerate(scratch)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # no memory for a stack, or an interrupt
            self.close()
            raise

    def submit(self, tag: object, work: Job[Scratch]) -> None:
        """Queue a job. Never blocks."""
        self._jobs.put((tag, work))

    def close(self) -> None:
        """Let every thread end after the job it is at; queued ones are dropped. Does not wait."""
        self._closed.set()
        for _ in self._threads:
            self._jobs.put(None)

    def join(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the threads to end."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))


def _read_forever(
    jobs: queue.SimpleQueue[tuple[object, Job[Scratch]] | None],
    closed: threading.Event,
    report: Callable[[Outcome], None],
    scratch: Scratch,
) -> None:
    # A function, not a method: a thread must not keep alive whoever owns the pool.
    try:
        while (job := jobs.get()) is not None and not closed.is_set():
            tag, work = job
            try:
                nbytes, error = work(scratch), None
            except BaseException as caught:
                nbytes, error = 0, forget_frames(caught)
            del job, work
            report(Outcome(tag, nbytes, error, time.perf_counter()))
            del tag, error
    except BaseException as caught:  # thrown in from outside; the job it was at may be lost
        report(Outcome(READER_DIED, 0, forget_frames(caught), 0.0))


_Error = TypeVar("_Error", bound=BaseException)


def forget_frames(error: _Error) -> _Error:
    """Take off its traceback, and those of what it came from.

    Their frames hold memory of weights, which is to go when a load has failed, whoever keeps the
    error.
    """
    one: BaseException | None = error
    while one is not None and one.__traceback__ is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return error


def reader_died(error: BaseException | None) -> UnsupportedOperationError:
    """Make what is said when a thread that reads was ended by `error`."""
    return UnsupportedOperationError(
        f"a thread that reads was ended from outside ({type(error).__name__}), perhaps in the "
        "middle of a read. Load the model again."
    )


def _alive(outcome: Outcome) -> Outcome:
    if outcome.tag is READER_DIED:
        raise reader_died(outcome.error)
    return outcome


class PinnedRead(NamedTuple):
    """How a batch of jobs went that was waited for."""

    nbytes: int
    reads: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second that all reads of the batch made together."""
        return self.nbytes / self.seconds if self.seconds else 0.0


def run_jobs(
    jobs: Sequence[Job[Scratch]], scratch: Sequence[Scratch], stalls: Stalls
) -> PinnedRead:
    """Run `jobs` on one thread per entry of `scratch` and wait for all of them.

    Raises:
        ReadError: a read failed; the rest are still finished first. Or `stalls` knows of one that
            hangs: then nothing may use the memory again that these jobs write to.
        UnsupportedOperationError: a thread was ended from outside.
    """
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    started = time.perf_counter()
    pool = ReaderPool(outcomes.put, scratch)
    try:
        for job in jobs:
            pool.submit(None, job)
        finished = [_alive(_next_outcome(outcomes, stalls)) for _ in jobs]
    finally:
        pool.close()
    seconds = time.perf_counter() - started
    pool.join(_JOIN_SECONDS)  # they have nothing to do any more; one that hangs is not waited for
    error = next((outcome.error for outcome in finished if outcome.error is not None), None)
    if error is not None:
        try:
            # Nobody asked this thread to exit.
            raise error if isinstance(error, Exception) else reader_died(error)
        finally:
            del error, finished  # else a cycle keeps what these frames hold
    return PinnedRead(sum(outcome.nbytes for outcome in finished), len(finished), seconds)


def _next_outcome(outcomes: queue.SimpleQueue[Outcome], stalls: Stalls) -> Outcome:
    since = time.monotonic()
    while True:
        with contextlib.suppress(queue.Empty):
            return outcomes.get(timeout=stalls.tick)
        stalls.check(since)
