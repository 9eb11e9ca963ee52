"""The buffers that streamed weights pass through: who is in each, and how much was ever written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipeload.budget.counters import Counters


class Buffer(Protocol):
    """Memory that one unit after the other is read into."""

    def discard(self, start: int = 0) -> None:
        """Give back what lies behind the first `start` bytes."""


class Slots:
    """Numbered buffers, each held by one unit or by none. Only the dispatcher changes them."""

    def __init__(self, regions: Sequence[Any], counters: Counters) -> None:
        """`counters.buffer_bytes` follows what is really in memory."""
        self.regions: Sequence[Any] = regions
        """`Buffer`s, all of one kind, which whoever places a unit there knows."""
        self.occupants: list[int | None] = [None] * len(regions)
        """Numbers of units."""
        self.touched = [0] * len(regions)
        """Bytes of each buffer that were written since it last gave memory back."""
        self._counters = counters

    def first(self, may_go: Callable[[int], bool]) -> int | None:
        """The first buffer that is free, or held by a unit that may go."""
        for slot, occupant in enumerate(self.occupants):
            if occupant is None or may_go(occupant):
                return slot
        return None

    def enter(self, slot: int, unit: int, nbytes: int) -> None:
        """`unit` is read into it, and takes `nbytes` bytes."""
        self.occupants[slot] = unit
        self._touch(slot, max(self.touched[slot], nbytes))

    def leave(self, slot: int) -> None:
        """Nobody holds it any more; its memory stays for the next one."""
        self.occupants[slot] = None

    def shrink(self, slot: int, nbytes: int) -> None:
        """Give back what lies behind the first `nbytes` bytes."""
        if self.touched[slot] > nbytes:
            self.regions[slot].discard(nbytes)
            self._touch(slot, nbytes)

    def _touch(self, slot: int, nbytes: int) -> None:
        self._counters.buffer_bytes += nbytes - self.touched[slot]
        self.touched[slot] = nbytes
