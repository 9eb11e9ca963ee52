"""Which form each Linear gets so that all of them stay within a size and lose least. Pure.

Losses of Linears are taken to add up. So whatever is worth most a byte is taken first: upgrades
along the lower convex hull of each Linear's sizes and losses, as long as there is room. That is
what one Lagrange multiplier for all of them finds, and what is left over is used as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class Option(NamedTuple):
    """One form of a Linear."""

    nbytes: int
    """That it takes."""
    loss: float
    """That it is thought to bring."""


class _Upgrade(NamedTuple):
    worth: float
    """Loss that goes, a byte."""
    name: str
    nbytes: int
    start: int
    """The number of the option that it builds on."""
    to: int
    """And of the one that it leads to."""


def spend(options: Mapping[str, Sequence[Option]], room: int) -> dict[str, int] | None:
    """Choose one of the options of each Linear: its number, by the Linear's name.

    Args:
        options: of each Linear, in any order.
        room: bytes for all of them together.

    Returns:
        None where the smallest ones take more than that.
    """
    chosen = {name: _smallest(found) for name, found in options.items()}
    room -= sum(options[name][number].nbytes for name, number in chosen.items())
    if room < 0:
        return None
    upgrades = (one for name, found in options.items() for one in _upgrades(name, found))
    # Those of one Linear are in order: on a hull, each is worth no more than the one before.
    for upgrade in sorted(upgrades, key=lambda one: -one.worth):
        # Without what it builds on, which had no room, it is left out, too.
        if upgrade.start == chosen[upgrade.name] and upgrade.nbytes <= room:
            room -= upgrade.nbytes
            chosen[upgrade.name] = upgrade.to
    return chosen


def _smallest(options: Sequence[Option]) -> int:
    return min(range(len(options)), key=lambda number: options[number])


def _upgrades(name: str, options: Sequence[Option]) -> Iterator[_Upgrade]:
    """From the smallest option on, to what brings most a byte, and so on."""
    here = _smallest(options)
    while found := list(_better(name, options, here)):
        best = max(found, key=lambda one: (one.worth, one.nbytes))
        yield best
        here = best.to


def _better(name: str, options: Sequence[Option], here: int) -> Iterator[_Upgrade]:
    now = options[here]
    for number, one in enumerate(options):
        nbytes = one.nbytes - now.nbytes
        if nbytes > 0 and one.loss < now.loss:
            yield _Upgrade((now.loss - one.loss) / nbytes, name, nbytes, here, number)
