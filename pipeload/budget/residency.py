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

import bisect
import heapq
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeload.budget.plan import UnitPlan
from pipeload.system.pages import PAGE, ceil_page
from pipeload.weights.layout import Weight, lay_out

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Takes = Callable[[Sequence[Weight]], int]

# Parameters below these are not worth a read of their own: norms, biases and their like stay.
_TINY_BYTES = 16 << 10
_TINY_VECTOR_BYTES = 64 << 10
_MAX_PIECES = 12
_GOLDEN = (math.sqrt(5) - 1) / 2
# For weighing alone: nobody has measured this disk and processor yet, and the order of choices
# hardly depends on them. Bytes per second; seconds to
# start a unit's reads and to hand it over.
_READ_RATE = 2e9
_COMPUTE_RATE = 12e9
_UNIT_SECONDS = 2e-4
_HARDLY_MORE = 1.1
_SLOT_STEP = 1.03


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
    cache_bytes: int = 0
    """What is left for experts: a byte of any other weight is read in every pass, and theirs only
    when they are routed to."""


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

    def __init__(
        self,
        units: Sequence[UnitSpec],
        *,
        slots: int,
        takes: Takes | None = None,
        experts_bytes: int = 0,
    ) -> None:
        """Compute all that does not depend on a budget.

        Args:
            units: what is read at once.
            slots: buffers.
            takes: bytes that an allocator takes for weights that stay or go together.
            experts_bytes: of all experts that are read one by one.
        """
        self.units = tuple(units)
        self._slots = slots
        self._takes = takes
        self._pieces = [_pieces(unit.weights, takes) for unit in units]
        self._menus = _menus(self._pieces)
        self._plans: dict[tuple[int, int], UnitPlan] = {}
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
        if self._units_bytes <= budget:
            picks: list[int] | None = [0] * len(menus)
        else:
            picks = _best_picks(menus, budget, self._slots) if budget >= self.smallest else None
        if picks is None:
            return None
        left = max(0, budget - _memory(menus, picks, self._slots)) if menus else budget
        pairs = list(zip(menus, picks, strict=True))
        return Choice(
            streamed=tuple(menu.masks[pick] for menu, pick in pairs),
            slot_bytes=max((menu.sizes[pick] for menu, pick in pairs), default=0),
            seconds=_pass_seconds(menus, picks, self._slots),
            cache_bytes=min(left, self.everything - self._units_bytes),
        )

    def plans(self, choice: Choice) -> tuple[UnitPlan, ...]:
        """Lay out both parts of every unit; a unit split as before gets the same object."""
        return tuple(self._plan(index, mask) for index, mask in enumerate(choice.streamed))

    def _plan(self, index: int, mask: int) -> UnitPlan:
        plan = self._plans.get((index, mask))
        if plan is None:
            pieces = self._pieces[index]
            kept = [p.weights for bit, p in enumerate(pieces) if not mask >> bit & 1]
            passing = [w for bit, p in enumerate(pieces) if mask >> bit & 1 for w in p.weights]
            resident = tuple(map(lay_out, kept))
            between = 0
            if self._takes is not None:
                taken = sum(map(self._takes, kept))
                between = max(0, taken - sum(layout.nbytes for layout in resident))
            plan = UnitPlan(self.units[index].name, resident, lay_out(passing), between=between)
            self._plans[index, mask] = plan
        return plan

    def _smallest_budget(self) -> int:
        menus = self._menus
        splits = (
            _memory(menus, [menu.fit(size) for menu in menus], self._slots)
            for size in _slot_sizes(menus)
        )
        return min(self._units_bytes, *splits) if menus else 0


def _best_picks(menus: Sequence[_Menu], budget: int, slots: int) -> list[int] | None:
    """The split whose passes take least time, of those that read hardly more than the least.

    Mostly that with the smallest buffers that fit. Larger ones may fill the budget better, but not
    by more than they take.
    """
    found: list[tuple[float, int, list[int]]] = []
    everything = sum(menu.total for menu in menus)
    least, fastest, tried = math.inf, math.inf, 0
    for slot_bytes in _slot_sizes(menus):
        bound = everything + slots * slot_bytes - budget  # such buffers never leave less to stream
        if bound > least * _HARDLY_MORE or bound / _READ_RATE >= fastest:
            break
        if found and slot_bytes < tried * _SLOT_STEP:
            continue
        picks = [menu.fit(slot_bytes) for menu in menus]
        spare = budget - _memory(menus, picks, slots)
        if spare < 0:
            continue
        _spend(menus, picks, spare)
        seconds, streamed, tried = (
            _pass_seconds(menus, picks, slots),
            _streamed(menus, picks),
            slot_bytes,
        )
        found.append((seconds, streamed, picks))
        least, fastest = min(least, streamed), min(fastest, seconds)
    near = [each for each in found if each[1] <= least * _HARDLY_MORE]
    return min(near)[2] if near else None


def _pass_seconds(menus: Sequence[_Menu], picks: Sequence[int], slots: int) -> float:
    """How long a pass takes, once it follows others: one unit is read while others compute."""
    clock = read = 0.0  # when the unit before has run, and when the last one was read
    freed = [0.0] * slots
    turn, before = 0, 0.0
    for _ in range(2):
        before = clock
        for menu, pick in zip(menus, picks, strict=True):
            size = menu.sizes[pick]
            if size:
                read = max(read, freed[turn]) + size / _READ_RATE + _UNIT_SECONDS
                clock = max(clock, read)
            clock += menu.total / _COMPUTE_RATE
            if size:
                freed[turn] = clock
                turn = (turn + 1) % slots
    return clock - before


def is_tiny(weight: Weight) -> bool:
    """Whether a weight is too small to stream."""
    return weight.nbytes <= (_TINY_BYTES if len(weight.shape) > 1 else _TINY_VECTOR_BYTES)


def _pieces(weights: Sequence[Weight], takes: Takes | None) -> list[_Piece]:
    """At most a dozen pieces; weights made by one conversion stay together."""

    def hold_bytes(group: Sequence[Weight]) -> int:
        return max(_hold_bytes(group), 0 if takes is None else takes(group))

    groups: dict[str, list[Weight]] = {}
    for weight in weights:
        groups.setdefault(weight.group or weight.name, []).append(weight)
    pieces = sorted(
        (_Piece(tuple(group), hold_bytes(group)) for group in groups.values()),
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
    """Make more resident with what is left, of the unit that streams most of itself first."""

    def entry(index: int) -> tuple[float, float, int]:
        menu = menus[index]
        # Units alike are taken in an order that spreads them over the pass.
        return -menu.sizes[picks[index]] / max(1, menu.total), index * _GOLDEN % 1.0, index

    heap = [entry(index) for index, pick in enumerate(picks) if pick]
    heapq.heapify(heap)
    while heap:
        index = heapq.heappop(heap)[2]
        menu, pick = menus[index], picks[index]
        step = menu.sizes[pick] - menu.sizes[pick - 1]
        if step > spare:
            continue  # nor will it fit later
        picks[index] = pick - 1
        spare -= step
        if pick > 1:
            heapq.heappush(heap, entry(index))
