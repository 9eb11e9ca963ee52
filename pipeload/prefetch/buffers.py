"""The buffers that streamed weights pass through: who is in each, and how much was ever written.

How many there are says `budget.buffer_count`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from pipeload.prefetch.unit import UnitState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pipeload.budget.read_counters import Counters
    from pipeload.prefetch.unit import Unit
    from pipeload.weights.placement import Place


class Buffer(Protocol):
    """Memory that one unit after the other is read into."""

    def discard(self, start: int = 0) -> None:
        """Give back what lies behind the first `start` bytes."""


class Slots:
    """Numbered buffers, each held by one unit or by none. Only the dispatcher changes them."""

    def __init__(
        self,
        regions: Sequence[Any],
        units: Sequence[Unit],
        place: Callable[[Unit, Any], Place],
        counters: Counters,
    ) -> None:
        """`place` puts a unit's streamed part into one of `regions`.

        `counters.buffer_bytes` follows what is really in memory.
        """
        self.regions: Sequence[Any] = regions
        """`Buffer`s, all of one kind, which `place` knows."""
        self.occupants: list[int | None] = [None] * len(regions)
        """Numbers of units."""
        self.touched = [0] * len(regions)
        """Bytes of each buffer that were written since it last gave memory back."""
        self._units, self._place, self._counters = units, place, counters

    def free(self) -> int | None:
        """A buffer that nobody needs any more; None where there is none."""
        units = self._units
        return self._first(
            lambda held: units[held].state is UnitState.RESIDENT and units[held].used
        )

    def evictable(self) -> int | None:
        """A buffer that nobody computes with, though what was read into it may come next."""
        units = self._units
        return self._first(lambda held: units[held].state is UnitState.RESIDENT)

    def _first(self, may_go: Callable[[int], bool]) -> int | None:
        for slot, occupant in enumerate(self.occupants):
            if occupant is None or may_go(occupant):
                return slot
        return None

    def holders(self) -> Iterator[Unit]:
        """The units that hold a buffer now."""
        return (self._units[index] for index in self.occupants if index is not None)

    def doubt(self) -> None:
        """After a surprise: what was read ahead counts as used until it is found to come next."""
        for unit in self.holders():
            if unit.state is not UnitState.IN_USE:
                unit.used, unit.ready = True, False

    def enter(self, slot: int, index: int) -> Place:
        """Give the buffer to that unit, in the place of whoever was there; where it lies then."""
        unit, previous = self._units[index], self.occupants[slot]
        if previous is not None and previous != index:
            evicted = self._units[previous]
            evicted.state, evicted.slot, evicted.ready = UnitState.ON_DISK, None, False
        self.occupants[slot] = index
        self._touch(slot, max(self.touched[slot], unit.plan.streamed.nbytes))
        unit.slot = slot
        if slot not in unit.slots:
            unit.slots[slot] = self._place(unit, self.regions[slot])
        return unit.slots[slot]

    def leave(self, unit: Unit) -> None:
        """Take its buffer from a unit, if it has one; the memory stays for the next."""
        if unit.slot is not None:
            self.occupants[unit.slot] = None
            unit.slot = None

    def shrink(self, nbytes: int) -> None:
        """Give back what no unit needs, if the largest takes `nbytes` from now on."""
        for slot, occupant in enumerate(self.occupants):
            used = 0 if occupant is None else self._units[occupant].plan.streamed.nbytes
            kept = max(nbytes, used)
            if self.touched[slot] > kept:
                self.regions[slot].discard(kept)
                self._touch(slot, kept)

    def abandon(self) -> None:
        """Give all memory back: nothing is read again."""
        for unit in self._units:
            unit.slots.clear()
        for region in self.regions:
            region.discard()

    def _touch(self, slot: int, nbytes: int) -> None:
        self._counters.buffer_bytes += nbytes - self.touched[slot]
        self.touched[slot] = nbytes
