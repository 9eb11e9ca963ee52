"""Chooses which weights stay and which are read every pass. Pure: sizes in, a choice out.

[Note: why every block keeps a part] Blocks run in a fixed cycle, so a cache that drops the least
recently used block never hits; a fixed resident set is optimal (Belady's rule on a cycle). Which
bytes it holds does not change how many are read, but it changes what the buffers cost: if each
block keeps the same share, each streams less, so two buffers shrink with it, and every block's
computing hides its own part of the reading. Whole resident blocks would leave the buffers at full
size, and the disk idle while they run.

[Note: even shares] While the limit is small, the disk is always busy and the least bytes are the
least time. When most is resident, computing takes as long as reading, and what counts is that each
unit's reading is hidden behind the units before it, of which only as many as there are buffers are
read ahead. So memory goes first to the unit that would stream the largest share of itself, and
between splits that read about the same a simulated pass decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pipeload.budget.plan import UnitPlan
from pipeload.budget.unit_menus import (
    READ_RATE,
    chosen,
    memory_bytes,
    menus_of,
    pass_seconds,
    pieces_of,
    slot_sizes,
    spend,
    spread,
    streamed_bytes,
)
from pipeload.weights.layout import Weight, lay_out

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pipeload.budget.unit_menus import Menu, Takes

# Parameters below these are not worth a read of their own: norms, biases and their like stay.
_TINY_BYTES = 16 << 10
_TINY_VECTOR_BYTES = 64 << 10
_HARDLY_MORE = 1.1
_SLOT_STEP = 1.03
_PACKED_SLOT_STEP = 1.1


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
    seconds: float
    """A pass's, for comparing choices: see [Note: even shares]."""
    read_bytes: int
    """What a pass reads of these units."""
    cache_bytes: int = 0
    """What is left for experts: a byte of any other weight is read in every pass, and theirs only
    when they are routed to."""
    packed: frozenset[int] = frozenset()
    """Numbers of units whose streamed part stays as it is stored."""


class Residency:
    """All that a budget for residents and buffers can buy for one set of units.

    Asked again whenever the budget changes while the model runs, so everything that does not depend
    on it is computed once.
    """

    def __init__(
        self,
        units: Sequence[UnitSpec],
        *,
        slots: int,
        takes: Takes | None = None,
        experts_bytes: int = 0,
        keeps_stored: bool = False,
    ) -> None:
        """Compute all that does not depend on a budget.

        Args:
            units: what is read at once.
            slots: buffers.
            takes: bytes that an allocator takes for weights that stay or go together.
            experts_bytes: of all experts that are read one by one.
            keeps_stored: whether what is unpacked may stay as it is stored.
        """
        self.units = tuple(units)
        self._slots = slots
        self._takes = takes
        self._pieces = [pieces_of(unit.weights, takes) for unit in units]
        self._menus = menus_of(self._pieces, packs=keeps_stored)
        self.packs = any(menu.packs for menu in self._menus)
        """Whether some units may be kept as they are stored."""
        self._plans: dict[tuple[int, int, bool], UnitPlan] = {}
        self._units_bytes = sum(menu.total for menu in self._menus)
        self.everything = self._units_bytes + experts_bytes
        """The budget, in bytes, from which on nothing is streamed."""
        self.smallest = self._smallest_budget()
        """The smallest budget, in bytes, for which `choose` finds a split."""

    def choose(self, budget: int) -> Choice | None:
        """Split every unit so that residents and buffers fit `budget` and passes take least time.

        Returns None when the budget is too small for any split.
        """
        menus = self._menus
        packed: frozenset[int] = frozenset()
        if self._units_bytes <= budget:
            picks: list[int] | None = [0] * len(menus)
        elif budget < self.smallest:
            picks = None
        elif self.packs:
            experts = self.everything > self._units_bytes
            picks, packed = _best_packed(menus, budget, self._slots, more=not experts)
        else:
            picks = _best_picks(menus, budget, self._slots)
        if picks is None:
            return None
        pairs = list(zip(menus, picks, strict=True))
        left = max(0, budget - memory_bytes(menus, picks, self._slots)) if menus else budget
        left -= sum(menus[index].stored[picks[index]] for index in packed)
        return Choice(
            streamed=tuple(menu.masks[pick] for menu, pick in pairs),
            slot_bytes=max((menu.sizes[pick] for menu, pick in pairs), default=0),
            seconds=pass_seconds(menus, picks, self._slots, packed),
            read_bytes=_read_bytes(menus, picks, packed),
            cache_bytes=min(left, self.everything - self._units_bytes),
            packed=packed,
        )

    def plans(self, choice: Choice) -> tuple[UnitPlan, ...]:
        """Lay out both parts of every unit; a unit split as before gets the same object."""
        return tuple(
            self._plan(index, mask, packed=index in choice.packed)
            for index, mask in enumerate(choice.streamed)
        )

    def _plan(self, index: int, mask: int, *, packed: bool = False) -> UnitPlan:
        plan = self._plans.get((index, mask, packed))
        if plan is None:
            pieces = self._pieces[index]
            kept = [piece.weights for piece in chosen(pieces, ~mask)]
            passing = chosen(pieces, mask)
            resident = tuple(map(lay_out, kept))
            between = 0
            if self._takes is not None:
                taken = sum(map(self._takes, kept))
                between = max(0, taken - sum(layout.nbytes for layout in resident))
            plan = UnitPlan(
                self.units[index].name,
                resident,
                lay_out(weight for piece in passing for weight in piece.weights),
                tuple(layout for piece in passing for layout in piece.stored) if packed else (),
                between=between,
            )
            self._plans[index, mask, packed] = plan
        return plan

    def _smallest_budget(self) -> int:
        menus = self._menus
        splits = (
            memory_bytes(menus, [menu.fit(size) for menu in menus], self._slots)
            for size in slot_sizes(menus)
        )
        return min(self._units_bytes, *splits) if menus else 0


def _best_picks(menus: Sequence[Menu], budget: int, slots: int) -> list[int] | None:
    """The split whose passes take least time, of those that read hardly more than the least.

    Mostly that with the smallest buffers that fit. Larger ones may fill the budget better, but not
    by more than they take.
    """
    found: list[tuple[float, int, list[int]]] = []
    everything = sum(menu.total for menu in menus)
    least, fastest, tried = math.inf, math.inf, 0
    for slot_bytes in slot_sizes(menus):
        bound = everything + slots * slot_bytes - budget  # such buffers never leave less to stream
        if bound > least * _HARDLY_MORE or bound / READ_RATE >= fastest:
            break
        if found and slot_bytes < tried * _SLOT_STEP:
            continue
        picks = [menu.fit(slot_bytes) for menu in menus]
        spare = budget - memory_bytes(menus, picks, slots)
        if spare < 0:
            continue
        spend(menus, picks, spare)
        seconds, streamed, tried = (
            pass_seconds(menus, picks, slots),
            streamed_bytes(menus, picks),
            slot_bytes,
        )
        found.append((seconds, streamed, picks))
        least, fastest = min(least, streamed), min(fastest, seconds)
    near = [each for each in found if each[1] <= least * _HARDLY_MORE]
    return min(near)[2] if near else None


class _Packing(NamedTuple):
    """A split in which some units stay as they are stored."""

    read_bytes: int
    seconds: float
    picks: list[int]
    packed: frozenset[int]


def _best_packed(
    menus: Sequence[Menu], budget: int, slots: int, *, more: bool
) -> tuple[list[int], frozenset[int]]:
    """The split whose passes take least time, of those that read hardly more than the least.

    Also which units of it stay as they are stored. `more`: whether they may stay as floats after
    all, where all of them are there: nothing else has a use for that memory.

    [Note: packed first] A byte of what is stored saves the reading of itself, one of what is made
    of it that of a fraction; so what is resident otherwise comes last, and saves the unpacking.
    """
    found: list[_Packing] = []
    tried = math.inf
    for slot_bytes in reversed(slot_sizes(menus)):
        if slots * slot_bytes > budget or (found and slot_bytes * _PACKED_SLOT_STEP > tried):
            continue
        picks = [menu.fit(slot_bytes) for menu in menus]
        spare = budget - memory_bytes(menus, picks, slots)
        if spare >= 0:
            tried = slot_bytes
            found.append(_packing(menus, picks, spare, slots, more=more))
    if (plain := _best_picks(menus, budget, slots)) is not None:
        reads = _read_bytes(menus, plain, ())
        seconds = pass_seconds(menus, plain, slots)
        found.append(_Packing(reads, seconds, plain, frozenset()))
    least = min(each.read_bytes for each in found)
    near = [each for each in found if each.read_bytes <= least * _HARDLY_MORE]
    best = min(near, key=lambda each: each.seconds)
    return best.picks, best.packed


def _packing(
    menus: Sequence[Menu], picks: list[int], spare: int, slots: int, *, more: bool
) -> _Packing:
    """Spend what is left: on stored bytes, then on what streams still, then on floats of those."""
    packed = set()
    for index in spread(len(menus)):
        takes = menus[index].stored[picks[index]] if menus[index].packs else 0
        if 0 < takes <= spare:
            packed.add(index)
            spare -= takes
    spare = spend(menus, picks, spare, of={*range(len(menus))} - packed)
    if more:
        spend(menus, picks, spare, of=packed, packed=True)
    packed = {index for index in packed if picks[index]}
    reads = _read_bytes(menus, picks, packed)
    return _Packing(reads, pass_seconds(menus, picks, slots, packed), picks, frozenset(packed))


def _read_bytes(menus: Sequence[Menu], picks: Sequence[int], packed: Collection[int]) -> int:
    """What a pass reads; of units in `packed`, nothing."""
    numbered = enumerate(zip(menus, picks, strict=True))
    return sum(menu.reads[pick] for index, (menu, pick) in numbered if index not in packed)


def is_tiny(weight: Weight) -> bool:
    """Whether a weight is too small to stream."""
    return weight.nbytes <= (_TINY_BYTES if len(weight.shape) > 1 else _TINY_VECTOR_BYTES)
