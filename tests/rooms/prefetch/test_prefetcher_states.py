"""Any mix of calls, failures and held-up reads keeps every block's bytes its own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from pipeload import ReadError, UnsupportedModelError
from pipeload.prefetch.unit import Ticket, UnitState
from tests.support.fake_disk import Rig, in_use, run_machine
from tests.support.streaming import WAIT_SECONDS, finish_messages, in_thread

UNITS = st.integers(0, 5)


class PrefetcherMachine(RuleBasedStateMachine):
    """The model's thread, at its worst. `held` is what it believes to be bound."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[int] = set()
        self.ill: set[int] = set()  # a read that began then may be waited for now
        self.rig: Rig | None = None

    @initialize(
        kinds=st.text("SSRBC", min_size=6, max_size=6),
        slots=st.integers(1, 3),
        readers=st.integers(1, 3),
    )
    def start(self, kinds: str, slots: int, readers: int) -> None:
        self.rig = Rig(kinds, slots=slots, readers=readers)
        self.slots = slots

    @property
    def alive(self) -> Rig:
        assert self.rig is not None
        return self.rig

    def streams(self, index: int) -> bool:
        return self.alive.prefetcher.units[index].streams

    @rule(index=UNITS)
    def acquire(self, index: int) -> None:
        rig = self.alive
        full = sum(self.streams(held) for held in self.held) >= self.slots
        impossible = full and self.streams(index) and index not in self.held
        waiting = in_thread(rig.prefetcher.acquire, index)
        rig.files.opened.set()
        if impossible:
            with pytest.raises(UnsupportedModelError):
                waiting.result(WAIT_SECONDS)
            return
        try:
            waiting.result(WAIT_SECONDS)
        except ReadError:
            assert index in self.ill
        else:
            self.held.add(index)
            rig.check_values(index)

    @rule(index=UNITS)
    def release(self, index: int) -> None:
        self.alive.prefetcher.release(index)
        self.held.discard(index)

    @rule()
    def reset(self) -> None:
        in_thread(self.alive.prefetcher.reset).result(WAIT_SECONDS)
        self.held.clear()

    @rule(index=UNITS)
    def die_while_waiting(self, index: int) -> None:
        """Ctrl-C in an acquire: nobody waits for the ticket any more; the next pass resets."""
        dispatcher = self.alive.dispatcher
        ticket = Ticket(index)
        self.alive.prefetcher._tell()
        dispatcher.inbox.put(lambda: dispatcher.wanted(ticket))
        self.reset()

    @rule(failing=st.sets(UNITS))
    def change_the_disk(self, failing: set[int]) -> None:
        self.alive.files.failing = failing
        self.ill |= failing

    @precondition(lambda self: self.rig is not None)
    @rule()
    def hold_reads_up(self) -> None:
        self.alive.files.opened.clear()

    @rule()
    def let_reads_go_on(self) -> None:
        self.alive.files.opened.set()

    @invariant()
    def no_two_in_one_slot(self) -> None:
        if self.rig is None:
            return
        finish_messages(self.rig.prefetcher)
        units: Any = self.rig.prefetcher.units
        taken = [unit.slot for unit in units if unit.slot is not None]
        assert len(taken) == len(set(taken)) <= self.slots
        for index, unit in enumerate(units):
            occupant = unit.slot is not None and self.rig.dispatcher._slots.occupants[unit.slot]
            assert unit.slot is None or occupant == index
            if unit.ready:
                assert unit.state in (UnitState.RESIDENT, UnitState.IN_USE)
                self.rig.check_values(index)

    @invariant()
    def what_is_held_stays(self) -> None:
        for index in self.held:
            assert in_use(self.alive.prefetcher, index)
            self.alive.check_values(index)

    def teardown(self) -> None:
        """Whatever happened: with a well disk and open reads, a whole pass works."""
        if self.rig is None:
            return
        rig = self.rig
        try:
            rig.files.failing = set()
            rig.files.opened.set()
            self.reset()
            rig.rest()
            in_thread(rig.run, *range(6), *range(6)).result(WAIT_SECONDS)
        finally:
            rig.files.opened.set()
            rig.prefetcher.close()
        assert not rig.prefetcher._thread.is_alive()


def test_any_order_of_events() -> None:
    """Checked by hypothesis; see the rules above."""
    run_machine(PrefetcherMachine, 60)
