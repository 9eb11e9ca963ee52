"""Reads of experts: nothing is taken for there that is not, whatever interrupts the waiting."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from pipeload.budget.read_counters import Counters
from pipeload.checkpoint.hung_reads import Stalls
from pipeload.engine.expert_reads import ExpertReads, Slice
from pipeload.errors import ReadError, UnsupportedOperationError
from tests.support.streaming import WAIT_SECONDS, in_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

ONE, OTHER = Slice(0, "up", 1), Slice(0, "up", 2)


@pytest.fixture
def reads() -> Iterator[ExpertReads]:
    stalls = Stalls(WAIT_SECONDS)
    stalls.tick = 0.01
    reads = ExpertReads(Counters(), stalls, 1)
    yield reads
    reads.close()


def test_work_that_reads_nothing_is_waited_for(reads: ExpertReads) -> None:
    """As while a slice is made of what was read: nothing is in flight, and nothing has come."""
    go_on, begun = threading.Event(), threading.Event()

    def work(_scratch: Any) -> int:
        begun.set()
        assert go_on.wait(WAIT_SECONDS)
        return 7

    reads.submit(ONE, [work, work])
    assert begun.wait(WAIT_SECONDS)
    waiting = in_thread(reads.wait, ONE, "module")
    with pytest.raises(TimeoutError):
        waiting.result(0.2)
    go_on.set()
    waiting.result(WAIT_SECONDS)
    assert reads._counters.expert_bytes_read == 14


@pytest.mark.parametrize("place", ["_note", "remove"])
def test_an_interrupt_loses_no_report(
    reads: ExpertReads, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Before it is written down, or after: the next who waits goes on."""
    owner = reads if place == "_note" else reads._reports
    original, left = getattr(owner, place), [1]

    def interrupted(outcome: Any) -> None:
        if left:
            left.pop()
            raise TimeoutError("a signal's")
        original(outcome)

    monkeypatch.setattr(owner, place, interrupted)
    reads.submit(ONE, [lambda _scratch: 5])
    with pytest.raises(TimeoutError):
        reads.wait(ONE, "module")
    assert reads.came(ONE)
    assert reads._counters.expert_bytes_read == 5


def test_what_is_cancelled_does_not_run_on(reads: ExpertReads) -> None:
    """What has begun is waited for; what has not is not read."""
    go_on, begun, ran = threading.Event(), threading.Semaphore(0), []

    def work(_scratch: Any) -> int:
        begun.release()
        assert go_on.wait(WAIT_SECONDS)
        ran.append(1)
        return 1

    reads.submit(ONE, [work] * 4)  # as many as there are readers
    for _ in range(4):
        assert begun.acquire(timeout=WAIT_SECONDS)
    reads.submit(OTHER, [work] * 20)
    cancelling = in_thread(reads.cancel)
    with pytest.raises(TimeoutError):
        cancelling.result(0.1)
    go_on.set()
    cancelling.result(WAIT_SECONDS)
    reads.submit(OTHER, [lambda _scratch: 3])
    assert reads.came(OTHER)
    assert len(ran) == 4


def test_closed_by_a_reader(reads: ExpertReads) -> None:
    """As when it drops the last reference to a model: it does not wait for itself."""
    closed = threading.Event()

    def close(_scratch: Any) -> int:
        reads.close()
        closed.set()
        return 0

    reads.submit(ONE, [close])
    assert closed.wait(WAIT_SECONDS)


def test_a_read_that_fails_is_that_slices_alone(reads: ExpertReads) -> None:
    def fail(_scratch: Any) -> int:
        raise ReadError("the disk")

    reads.submit(ONE, [fail, lambda _scratch: 1])
    reads.submit(OTHER, [lambda _scratch: 1])
    with pytest.raises(ReadError, match="block 'module': the disk"):
        reads.wait(ONE, "module")
    reads.wait(OTHER, "module")
    assert not reads.came(ONE)
    reads.cancel()
    reads.submit(ONE, [lambda _scratch: 1])
    reads.wait(ONE, "module")


def test_a_reader_that_is_killed_between_two_reads(
    reads: ExpertReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits is told, and does not wait for ever."""
    clock = time.perf_counter

    def die() -> float:
        if threading.current_thread().name.startswith("pipeload-reader"):
            raise SystemExit
        return clock()

    monkeypatch.setattr("pipeload.checkpoint.reader_threads.time.perf_counter", die)
    reads.submit(ONE, [lambda _scratch: 1])
    waiting = in_thread(reads.wait, ONE, "module")
    with pytest.raises(UnsupportedOperationError, match=r"SystemExit.*Load the model again"):
        waiting.result(WAIT_SECONDS)
