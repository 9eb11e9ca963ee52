"""Budgets that change at any moment: every piece keeps its bytes, and every byte is counted."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from pipeload import ReadError, UnsupportedModelError
from pipeload.prefetch.unit import UnitState
from tests.support.fake_disk import PieceRig, in_use, run_machine
from tests.support.streaming import WAIT_SECONDS, in_thread

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT = 5
UNITS = st.integers(0, COUNT - 1)


class ResplitMachine(RuleBasedStateMachine):
    """The model's thread and a governor that cannot make up its mind."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[int] = set()
        self.ill: set[int] = set()
        self.old = 0
        """Bytes that units in use at the last resplit may hold beside the budget."""

    @initialize(readers=st.integers(1, 3), packed=st.booleans())
    def start(self, readers: int, packed: bool) -> None:
        self.rig = PieceRig(COUNT, readers=readers, packed=packed)

    def streams(self, index: int) -> bool:
        return self.rig.prefetcher.units[index].streams

    @rule(index=UNITS)
    def acquire(self, index: int) -> None:
        full = sum(self.streams(held) for held in self.held) >= 2
        impossible = full and self.streams(index) and index not in self.held
        waiting = in_thread(self.rig.prefetcher.acquire, index)
        self.rig.files.opened.set()
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

    @rule(index=UNITS)
    def release(self, index: int) -> None:
        self.rig.prefetcher.release(index)
        self.held.discard(index)

    @rule()
    def run_a_pass(self) -> None:
        self.rig.files.opened.set()
        self.rig.files.failing = set()
        self.reset()
        in_thread(self.rig.run, *range(COUNT)).result(WAIT_SECONDS)

    @rule()
    def reset(self) -> None:
        in_thread(self.rig.prefetcher.reset).result(WAIT_SECONDS)
        self.held.clear()

    @rule(part=st.floats(0, 1))
    def resplit(self, part: float) -> None:
        smallest, everything = self.rig.residency.smallest, self.rig.residency.everything
        waiting = in_thread(self.rig.resplit, smallest + int(part * (everything - smallest)))
        self.rig.files.opened.set()
        waiting.result(WAIT_SECONDS)
        self.old = 0
        for index in self.held:
            unit = self.rig.prefetcher.units[index]
            if unit.plan is not self.rig.plans[index]:
                self.old += unit.plan.resident_bytes + 2 * unit.plan.streamed.nbytes

    @rule(failing=st.sets(UNITS, max_size=3))
    def change_the_disk(self, failing: set[int]) -> None:
        self.rig.files.failing = failing
        self.ill |= failing

    @rule()
    def hold_reads_up(self) -> None:
        self.rig.files.opened.clear()

    @rule()
    def let_reads_go_on(self) -> None:
        self.rig.files.opened.set()

    def ask(self, look: Callable[[], None]) -> None:
        """Have the dispatcher itself look, so that nothing moves meanwhile."""
        answer: Future[None] = Future()

        def message() -> None:
            try:
                look()
                answer.set_result(None)
            except BaseException as error:
                answer.set_exception(error)

        self.rig.dispatcher.inbox.put(message)
        answer.result(WAIT_SECONDS)

    @invariant()
    def everything_is_counted(self) -> None:
        if hasattr(self, "rig"):
            self.ask(self._count)

    def _count(self) -> None:
        dispatcher, units = self.rig.dispatcher, self.rig.prefetcher.units
        counters = dispatcher.counters
        resident = sum(unit.kept.nbytes for unit in units)
        resident += sum(
            place.nbytes
            for unit in units
            if unit.state is UnitState.LOADING
            for place in unit.kept.unread
        )
        assert counters.resident_bytes == resident
        assert counters.buffer_bytes == sum(dispatcher._slots.touched)
        for region, touched in zip(self.rig.regions, dispatcher._slots.touched, strict=True):
            assert not any(region.buffer(touched, region.nbytes - touched))
        for unit in units:
            if unit.state is UnitState.ON_DISK:
                for place in unit.kept.unread:
                    assert not any(view.any() for view in place.views.values())
        assert resident + counters.buffer_bytes <= self.rig.budget + self.old

    @invariant()
    def no_two_in_one_slot(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.ask(self._slots)

    def _slots(self) -> None:
        units = self.rig.prefetcher.units
        taken = [unit.slot for unit in units if unit.slot is not None]
        assert len(taken) == len(set(taken))
        for index, unit in enumerate(units):
            assert unit.slot is None or self.rig.dispatcher._slots.occupants[unit.slot] == index
            if unit.ready:
                assert unit.state in (UnitState.RESIDENT, UnitState.IN_USE)
                self.rig.check_values(index)
        for index in self.held:
            assert in_use(self.rig.prefetcher, index)
            self.rig.check_values(index)

    def teardown(self) -> None:
        """With nothing in use, the smallest budget takes all back, and passes work."""
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        try:
            rig.files.failing = set()
            rig.files.opened.set()
            self.reset()
            for budget in (rig.residency.smallest, rig.residency.everything):
                in_thread(rig.resplit, budget).result(WAIT_SECONDS)
                counters = rig.prefetcher.counters
                in_thread(rig.run, *range(COUNT), *range(COUNT)).result(WAIT_SECONDS)
                rig.rest()
                assert counters.resident_bytes == sum(p.resident_bytes for p in rig.plans)
                assert counters.resident_bytes + counters.buffer_bytes <= budget
            assert counters.buffer_bytes == 0
        finally:
            rig.files.opened.set()
            rig.prefetcher.close()
        assert not rig.prefetcher._thread.is_alive()


def test_any_order_of_budgets() -> None:
    """Checked by hypothesis; see the rules above."""
    run_machine(ResplitMachine, 60)


def test_a_buffer_shrinks_under_a_unit_that_stays_in_it() -> None:
    """Another unit once filled it further than anybody will again."""
    rig = PieceRig(COUNT)
    rig.run(*range(COUNT))
    large = rig.plans[0].streamed.nbytes
    plans = [rig.residency._plan(index, 0b110) for index in range(COUNT)]
    small = plans[0].streamed.nbytes
    assert small < large
    for slot_bytes in (large, small):
        rig.prefetcher.resplit(plans, slot_bytes)
        rig.run(*range(COUNT))
        rig.rest()
        assert None not in rig.dispatcher._slots.occupants
    assert rig.prefetcher.counters.buffer_bytes == 2 * small
    rig.run(*range(COUNT))
    rig.prefetcher.close()
