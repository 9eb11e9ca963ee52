"""Units that passes share: read once by those in step, never more held than by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from pipeload.engine.shared_units import SharedUnits
from pipeload.errors import ReadError
from tests.support.fake_disk import Rig

if TYPE_CHECKING:
    from collections.abc import Iterator


class Turns:
    """Passes that take turns with the units of a rig."""

    def __init__(self, kinds: str, count: int) -> None:
        self.rig = Rig(kinds)
        self.passes = [SimpleNamespace(held=set()) for _ in range(count)]
        self.now = self.passes[0]
        self.units = SharedUnits(cast("Any", self), self.rig.prefetcher)
        for one in self.passes:
            self.units.begin(id(one))

    def use(self, number: int, *units: int) -> None:
        """A pass runs a site."""
        self.now = self.passes[number]
        for unit in units:
            self.units.acquire(unit)
            self.rig.check_values(unit)
        for unit in units:
            self.units.release(unit)
        assert self.now.held == set()

    def end(self, number: int) -> None:
        self.now = self.passes[number]
        self.units.end(id(self.now))


@pytest.fixture
def turns() -> Iterator[Turns]:
    made = Turns("SSSSSS", 3)
    yield made
    made.rig.prefetcher.close()


def test_passes_in_step_read_once(turns: Turns) -> None:
    """Each unit comes once for all; it goes when the last has used it."""
    for _ in range(2):
        for unit in range(6):
            for number in range(3):
                turns.use(number, unit)
                assert turns.rig.prefetcher.held == ({unit} if number < 2 else set())
    turns.rig.rest()
    assert all(turns.rig.files.reads.count(unit) <= 3 for unit in range(6))
    assert turns.rig.dispatcher.counters.misses <= 1


def test_one_that_leaves_owes_nothing(turns: Turns) -> None:
    """Units that only it still had to use go with it."""
    turns.use(0, 0)
    turns.use(1, 0)
    turns.end(2)
    assert turns.rig.prefetcher.held == set()
    turns.use(0, 1)
    turns.end(1)
    assert turns.rig.prefetcher.held == set()
    turns.end(0)


def test_passes_that_go_ways_of_their_own(turns: Turns) -> None:
    """Three of them have two buffers between them: none is kept from any for long."""
    for step in range(6):
        for number in range(3):
            turns.use(number, (step + 2 * number) % 6)
            assert len(turns.rig.prefetcher.held) <= 1


def test_sites_of_several_units(turns: Turns) -> None:
    """All are there together, for each."""
    for number in range(3):
        turns.use(number, 0, 1)
    assert turns.rig.prefetcher.held == set()


def test_a_unit_that_cannot_be_read(turns: Turns) -> None:
    """Nobody takes it to be there; once the disk answers, it is read."""
    turns.rig.files.failing.add(3)
    for number in range(3):
        turns.now = turns.passes[number]
        with pytest.raises(ReadError):
            turns.units.acquire(3)
        assert turns.now.held == set()
    turns.rig.files.failing.clear()
    for number in range(3):
        turns.use(number, 3)
    assert turns.rig.prefetcher.held == set()
