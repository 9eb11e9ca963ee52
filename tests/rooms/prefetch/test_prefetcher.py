"""Blocks are read ahead in time, in order, and never over one another."""

from __future__ import annotations

import gc
import threading
import time
from typing import TYPE_CHECKING

import pytest

from pipeload.errors import ReadError, UnsupportedModelError, UnsupportedOperationError
from pipeload.prefetch import prefetcher
from pipeload.prefetch.unit import UnitState
from tests.support.fake_disk import Rig, in_use
from tests.support.streaming import WAIT_SECONDS, in_thread

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Six streamed blocks and two slots."""
    made = Rig("SSSSSS")
    made.rest()
    yield made
    made.files.opened.set()
    made.prefetcher.close()


def test_the_first_blocks_are_read_before_anybody_asks(rig: Rig) -> None:
    """As many as there are slots."""
    assert rig.files.reads == [0, 1]
    assert rig.prefetcher.acquire(0) == 0.0


def test_the_next_block_is_read_while_one_is_in_use(rig: Rig) -> None:
    """A slot that was given back is filled at once."""
    rig.run(0)
    rig.prefetcher.acquire(1)
    rig.files.wait_for_read(2)
    assert in_use(rig.prefetcher, 1)
    rig.check_values(1)


def test_the_first_block_is_read_behind_the_last(rig: Rig) -> None:
    """The next pass begins with what was read at the end of this one."""
    rig.run(0, 1, 2, 3, 4)
    rig.prefetcher.acquire(5)
    rig.files.wait_for_read(0, times=2)
    rig.rest()
    assert rig.files.reads == [0, 1, 2, 3, 4, 5, 0]
    assert rig.prefetcher.counters.misses == 0
    rig.prefetcher.release(5)
    rig.rest()
    assert rig.prefetcher.counters.hits == 6


def test_a_surprise_is_served_at_once(rig: Rig) -> None:
    """It takes the place of what was read ahead, and reading goes on behind it."""
    rig.prefetcher.acquire(4)
    rig.check_values(4)
    rig.files.wait_for_read(5)
    rig.prefetcher.release(4)
    rig.run(0, 1)
    assert rig.prefetcher.counters.misses >= 1


@pytest.mark.parametrize("order", [(0, 2, 4), (5, 3, 1), (0, 1, 2), (1, 2, 3, 4), (3,), (4, 2)])
def test_another_order_is_learned(rig: Rig, order: tuple[int, ...]) -> None:
    """What followed last time is expected again: the third time round, nothing is missed."""
    rig.run(*order, *order, order[0])
    rig.rest()
    missed = rig.prefetcher.counters.misses
    for index in (*order[1:], *order):
        rig.run(index)
        rig.rest()
    assert rig.prefetcher.counters.misses == missed


def test_a_block_that_runs_twice_in_a_row(rig: Rig) -> None:
    """It may have to be read again, but is right, and the ones behind it still come."""
    rig.run(0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 0, 0)
    rig.run(0, 1, 2, 3, 4, 5)


def test_a_read_under_way_is_waited_for(rig: Rig) -> None:
    """It is not begun a second time."""
    rig.files.opened.clear()
    rig.run(0)
    rig.files.wait_for_read(2)
    rig.run(1)
    waiting = in_thread(rig.prefetcher.acquire, 2)
    rig.files.opened.set()
    assert waiting.result(WAIT_SECONDS) > 0
    rig.check_values(2)
    assert rig.files.reads.count(2) == 1


def test_what_is_needed_sooner_is_kept(rig: Rig) -> None:
    """After a pass that died, the slot of the next block is not taken for a later one."""
    rig.run(0)
    rig.prefetcher.acquire(1)
    rig.rest()
    assert rig.prefetcher.units[2].slot == 0
    rig.prefetcher.reset()
    rig.rest()
    assert rig.files.reads == [0, 1, 2, 3]
    assert rig.prefetcher.units[2].ready
    assert rig.prefetcher.units[2].slot == 0


def test_nested_blocks_hold_a_slot_each(rig: Rig) -> None:
    """As many as there are slots may be in use at once; one more is an error, not a hang."""
    rig.prefetcher.acquire(2)
    rig.prefetcher.acquire(5)
    with pytest.raises(UnsupportedModelError, match=r"'block\.3' runs inside 2 other"):
        rig.prefetcher.acquire(3)
    rig.check_values(2)
    rig.check_values(5)
    rig.prefetcher.release(5)
    rig.run(3)
    rig.prefetcher.release(2)
    rig.run(0, 1, 2, 3, 4, 5)


def test_a_block_in_use_may_be_asked_for_again(rig: Rig) -> None:
    """A pass that died without a word left it in use."""
    rig.prefetcher.acquire(0)
    rig.prefetcher.acquire(0)
    rig.check_values(0)
    rig.prefetcher.release(0)
    rig.prefetcher.release(0)
    rig.run(0, 1, 2, 3, 4, 5)


def test_an_end_in_the_middle_of_a_read(rig: Rig) -> None:
    """What was being read is begun anew: after a new start nobody waits for it."""
    rig.files.opened.clear()
    rig.run(0)
    rig.files.wait_for_read(2)
    closing = in_thread(rig.prefetcher.close)
    deadline = time.monotonic() + WAIT_SECONDS
    while not rig.dispatcher._reads._pool._closed.is_set() and time.monotonic() < deadline:
        time.sleep(0.001)
    rig.files.opened.set()
    closing.result(WAIT_SECONDS)
    rig.prefetcher.start()
    units = rig.prefetcher.units
    plans, slot_bytes = [unit.plan for unit in units], units[0].plan.streamed.nbytes
    in_thread(rig.prefetcher.resplit, plans, slot_bytes).result(WAIT_SECONDS)
    rig.run(1, 2, 3, 4, 5, 0, 1)


def test_a_failed_read_is_raised_and_tried_again(rig: Rig) -> None:
    """Each acquire tries; read ahead does not go on trying."""
    rig.files.failing = {2, 3}
    rig.run(0, 1)
    rig.rest()
    assert rig.files.reads.count(2) == 1
    for tries in (2, 3):
        with pytest.raises(ReadError, match=r"block 'block\.2': reading 'streamed' failed"):
            rig.prefetcher.acquire(2)
        assert rig.files.reads.count(2) == tries
    rig.files.failing = set()
    rig.run(2, 3, 4, 5, 0, 1, 2)


def test_a_failed_conversion_names_its_block() -> None:
    """Whatever goes wrong in a reader is the waiter's error."""
    rig = Rig("C" * 14)
    rig.run(0, 12)
    with pytest.raises(ReadError, match=r"block 'block\.13': .*ValueError: thirteen"):
        rig.prefetcher.acquire(13)
    rig.run(0, 1, 2)
    rig.prefetcher.close()


@pytest.mark.parametrize("kinds", ["RRRR", "RSRS", "BBBB", "SRRR", "BRSC"])
def test_resident_parts_are_read_once(kinds: str) -> None:
    """Three passes over any mix read each resident part once, and streamed parts in time."""
    rig = Rig(kinds)
    for _ in range(3):
        rig.run(*range(len(kinds)))
    rig.rest()
    having = [index for index, kind in enumerate(kinds) if kind in "RB"]
    assert sorted(rig.files.resident_reads) == having
    assert all(rig.prefetcher.units[index].kept.unread == [] for index in range(len(kinds)))
    rig.prefetcher.close()


def test_one_block_that_streams() -> None:
    """It stays in its slot for good."""
    rig = Rig("RSR")
    for _ in range(4):
        rig.run(0, 1, 2)
        rig.rest()
    assert rig.files.reads == [1]
    rig.prefetcher.close()


def test_reset_while_reading(rig: Rig) -> None:
    """A read that nobody waits for any more ends as a read ahead."""
    rig.files.opened.clear()
    rig.run(0)
    rig.prefetcher.acquire(1)
    rig.files.wait_for_read(2)
    rig.prefetcher.reset()
    assert rig.prefetcher.units[2].state is UnitState.LOADING
    assert not in_use(rig.prefetcher, 1)
    rig.files.opened.set()
    rig.run(0, 1, 2, 3, 4, 5)


def test_close_ends_the_wait_and_the_threads(rig: Rig) -> None:
    """Whoever waits gets an error, and so does whoever comes later."""
    rig.files.opened.clear()
    rig.run(0, 1)
    waiting = in_thread(rig.prefetcher.acquire, 2)
    rig.files.wait_for_read(2)
    while not rig.dispatcher._tickets:
        pass
    closing = in_thread(rig.prefetcher.close)
    with pytest.raises(UnsupportedOperationError, match="removed while a pass waited"):
        waiting.result(WAIT_SECONDS)
    rig.files.opened.set()
    closing.result(WAIT_SECONDS)
    assert not rig.prefetcher._thread.is_alive()
    assert not any(thread.is_alive() for thread in rig.dispatcher._reads._pool._threads)
    with pytest.raises(UnsupportedOperationError, match="streaming has ended"):
        rig.prefetcher.acquire(4)
    rig.prefetcher.close()


def test_a_forgotten_prefetcher_ends_its_threads() -> None:
    """Nobody has to call close."""
    rig = Rig("SSS")
    rig.rest()
    threads = [rig.prefetcher._thread, *rig.dispatcher._reads._pool._threads]
    del rig
    gc.collect()
    for thread in threads:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()


def test_what_ends_in_a_reader_is_waited_for_at_exit() -> None:
    """There nobody can wait for it; a thread that is left when Python ends aborts the process."""
    held = [Rig("SSSSSS").prefetcher]
    thread = held[0]._thread
    gate = threading.Event()
    held[0]._inbox.put(lambda: assert_set(gate))
    reader = threading.Thread(target=held.clear, name="pipeload-reader")
    reader.start()
    reader.join(WAIT_SECONDS)
    gc.collect()
    assert thread.is_alive()
    at_exit = in_thread(prefetcher._wait_for_ending)
    gate.set()
    at_exit.result(WAIT_SECONDS)
    assert not thread.is_alive()


def assert_set(gate: threading.Event) -> None:
    assert gate.wait(WAIT_SECONDS)


def test_a_dead_dispatcher_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in the one thread that everything depends on is an error, not a hang."""
    monkeypatch.setattr("pipeload.checkpoint.hung_reads._TICK_SECONDS", 0.01)
    monkeypatch.setattr(threading, "excepthook", lambda *_args: None)
    rig = Rig("SSSS")
    rig.rest()

    def fail() -> None:
        raise AssertionError("a bug")

    rig.prefetcher._inbox.put(fail)
    with pytest.raises(
        UnsupportedOperationError, match=r"has ended: .*a bug\. Load the model again"
    ):
        rig.prefetcher.acquire(3)
