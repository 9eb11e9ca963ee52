"""Which units are likely to be needed next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Order(Protocol):
    """What the dispatcher reads ahead by. Its thread alone asks and tells.

    A wrong guess costs time and nothing else: a unit that was not expected is read once it is
    waited for.
    """

    def arrive(self, unit: int) -> None:
        """The model has come to `unit`."""

    def upcoming(self) -> Iterable[int]:
        """Units that are likely to follow the current one, the nearest first.

        The first that is not there is read next; those before it are kept.
        """


class LastSeen:
    """What followed a unit last time will follow it again; before that, the next one of the list.

    So it learns of early exit, repeated blocks and skipped towers from one pass.
    """

    def __init__(self, units: int) -> None:
        """So many `units` run in a circle, as far as anybody knows."""
        self._followed_by = [(unit + 1) % units for unit in range(units)]
        self._current = units - 1

    def arrive(self, unit: int) -> None:
        """The model has come to `unit`."""
        self._followed_by[self._current] = unit
        self._current = unit

    def upcoming(self) -> Iterator[int]:
        """What is expected after the current unit, up to that one itself."""
        unit = self._current
        for _ in self._followed_by:
            unit = self._followed_by[unit]
            yield unit
            if unit == self._current:
                return
