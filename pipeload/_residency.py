"""Chooses which weights stay and which are read every pass. Pure: sizes in, a choice out.

[Note: why every block keeps a part] Blocks run in a fixed cycle, so a cache that drops the least
recently used block never hits; a fixed resident set is optimal (Belady's rule on a cycle). Which
bytes it holds does not change how many are read, but it changes what the buffers cost: if each
block keeps the same share, each streams less, so two buffers shrink with it, and every block's
computing hides its own part of the reading. Whole resident blocks would leave the buffers at full
size, and the disk idle while they run.
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeload._layout import PAGE, Weight, ceil_page, lay_out
from pipeload._plan import UnitPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

# Parameters below these are not worth a read of their own: norms, biases and their like stay.
_TINY_BYTES = 16 << 10
_TINY_VECTOR_BYTES = 64 << 10
_MAX_PIECES = 12
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """A block before planning: its name and every weight that may be streamed."""

    name: str
    weights: tuple[Weight, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Which pieces of each unit are streamed: a bit mask over its pieces."""

    streamed: tuple[int, ...]
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """Weights that stay or go together."""

    weights: tuple[Weight, ...]
    hold_bytes: int


class _Menu:
    """All ways to split one unit: streamed bytes (ascending) and the pieces that make them."""

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        options: dict[int, int] = {}
        for mask in range(1 << len(pieces)):
            size = sum(piece.hold_bytes for bit, piece in enumerate(pieces) if mask >> bit & 1)
            options.setdefault(size, mask)
        self.sizes = sorted(options)
        self.masks = [options[size] for size in self.sizes]
        self.total = self.sizes[-1]

    def fit(self, slot_bytes: int) -> int:
        """Index of the largest streamed part that fits a slot."""
        return bisect.bisect_right(self.sizes, slot_bytes) - 1


class Residency:
    """All that a budget for residents and buffers can buy for one set of units.

    Asked again whenever the budget changes while the model runs, so everything that does not depend
    on it is computed once.
    """

    def __init__(self, units: Sequence[UnitSpec], *, slots: int) -> None:
        self.units = tuple(units)
        self._slots = slots
        self._pieces = [_pieces(unit.weights) for unit in units]
        self._menus = _menus(self._pieces)
        self._plans: dict[tuple[int, int], UnitPlan] = {}
        self.everything = sum(menu.total for menu in self._menus)
        """The budget, in bytes, from which on nothing is streamed."""
        self.smallest = self._smallest_budget()
        """The smallest budget, in bytes, for which `choose` finds a split."""

    def choose(self, budget: int) -> Choice | None:
        """Split every unit so that residents and buffers fit `budget` and least is read.

        Returns None when the budget is too small for any split.
        """
        if self.everything <= budget:
            return Choice(tuple(0 for _ in self.units), 0)
        menus = self._menus
        picks = _best_picks(menus, budget, self._slots) if budget >= self.smallest else None
        if picks is None:
            return None
        slot_bytes = max(menu.sizes[pick] for menu, pick in zip(menus, picks, strict=True))
        masks = (menu.masks[pick] for menu, pick in zip(menus, picks, strict=True))
        return Choice(tuple(masks), slot_bytes)

    def plans(self, choice: Choice) -> tuple[UnitPlan, ...]:
        """Lay out both parts of every unit; a unit split as before gets the same object."""
        return tuple(self._plan(index, mask) for index, mask in enumerate(choice.streamed))

    def _plan(self, index: int, mask: int) -> UnitPlan:
        plan = self._plans.get((index, mask))
        if plan is None:
            pieces = self._pieces[index]
            kept = [p.weights for bit, p in enumerate(pieces) if not mask >> bit & 1]
            passing = [w for bit, p in enumerate(pieces) if mask >> bit & 1 for w in p.weights]
            plan = UnitPlan(self.units[index].name, tuple(map(lay_out, kept)), lay_out(passing))
            self._plans[index, mask] = plan
        return plan

    def _smallest_budget(self) -> int:
        menus = self._menus
        splits = (
            _memory(menus, [menu.fit(size) for menu in menus], self._slots)
            for size in _slot_sizes(menus)
        )
        return min(self.everything, *splits) if menus else 0


def _best_picks(menus: Sequence[_Menu], budget: int, slots: int) -> list[int] | None:
    """The split that streams least: mostly that with the smallest buffers that fit.

    Larger buffers may fill the budget better, but not by more than they take.
    """
    best: list[int] | None = None
    everything = sum(menu.total for menu in menus)
    for slot_bytes in _slot_sizes(menus):
        if best is not None and _streamed(menus, best) <= everything + slots * slot_bytes - budget:
            break
        picks = [menu.fit(slot_bytes) for menu in menus]
        spare = budget - _memory(menus, picks, slots)
        if spare >= 0:
            _spend(menus, picks, spare)
            if best is None or _streamed(menus, picks) < _streamed(menus, best):
                best = picks
    return best


def is_tiny(weight: Weight) -> bool:
    """Whether a weight is too small to stream."""
    return weight.nbytes <= (_TINY_BYTES if len(weight.shape) > 1 else _TINY_VECTOR_BYTES)


def _pieces(weights: Sequence[Weight]) -> list[_Piece]:
    """At most a dozen pieces; weights made by one conversion stay together."""
    groups: dict[str, list[Weight]] = {}
    for weight in weights:
        groups.setdefault(weight.group or weight.name, []).append(weight)
    pieces = sorted(
        (_Piece(tuple(group), _hold_bytes(group)) for group in groups.values()),
        key=lambda piece: piece.hold_bytes,
        reverse=True,
    )
    head, tail = pieces[: _MAX_PIECES - 1], pieces[_MAX_PIECES - 1 :]
    if tail:
        merged = tuple(itertools.chain.from_iterable(piece.weights for piece in tail))
        head.append(_Piece(merged, sum(piece.hold_bytes for piece in tail)))
    return head


def _hold_bytes(group: Sequence[Weight]) -> int:
    """Never less than what `lay_out` takes: each extent may lose a page at either end."""
    if group[0].raw:
        return ceil_page(group[0].nbytes) + PAGE
    made = sum(weight.nbytes + PAGE for weight in group)
    if group[0].group is None:
        return ceil_page(made)
    return ceil_page(made + sum(ceil_page(source.nbytes) + PAGE for source in group[0].sources))


def _menus(pieces: Sequence[Sequence[_Piece]]) -> list[_Menu]:
    """One menu per unit; units alike share theirs."""
    cache: dict[tuple[int, ...], _Menu] = {}
    menus = []
    for part in pieces:
        key = tuple(piece.hold_bytes for piece in part)
        if key not in cache:
            cache[key] = _Menu(part)
        menus.append(cache[key])
    return menus


def _slot_sizes(menus: Sequence[_Menu]) -> list[int]:
    """Slot sizes worth trying, ascending."""
    return sorted(
        {size for menu in {id(m): m for m in menus}.values() for size in menu.sizes} - {0}
    )


def _streamed(menus: Sequence[_Menu], picks: Sequence[int]) -> int:
    return sum(menu.sizes[pick] for menu, pick in zip(menus, picks, strict=True))


def _memory(menus: Sequence[_Menu], picks: Sequence[int], slots: int) -> int:
    streamed = [menu.sizes[pick] for menu, pick in zip(menus, picks, strict=True)]
    return sum(menu.total for menu in menus) - sum(streamed) + slots * max(streamed)


def _spend(menus: Sequence[_Menu], picks: list[int], spare: int) -> None:
    """Make more resident with what is left: a small step per unit, spread evenly over them."""
    order = sorted(range(len(menus)), key=lambda index: (index * _GOLDEN) % 1.0)
    progress = True
    while progress:
        progress = False
        for index in order:
            menu, pick = menus[index], picks[index]
            step = menu.sizes[pick] - menu.sizes[pick - 1] if pick else math.inf
            if step <= spare:
                picks[index] = pick - 1
                spare -= int(step)
                progress = True
