"""What may stay of each unit, and what that takes: the arithmetic that residency chooses by."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeload.system.pages import PAGE, ceil_page
from pipeload.weights.layout import lay_out

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pipeload.weights.layout import Layout, Weight

    Takes = Callable[[Sequence[Weight]], int]

_MAX_PIECES = 12
_GOLDEN = (math.sqrt(5) - 1) / 2
# For weighing alone: nobody has measured this disk and processor yet, and the order of choices
# hardly depends on them. Bytes per second, of unpacking those that are made; seconds to
# start a unit's reads and to hand it over.
READ_RATE = 2e9
_UNPACK_RATE = 8e9
_COMPUTE_RATE = 12e9
_UNIT_SECONDS = 2e-4


@dataclass(frozen=True, slots=True)
class Piece:
    """Weights that stay or go together."""

    weights: tuple[Weight, ...]
    hold_bytes: int
    read_bytes: int
    """Bytes read from disk for it."""
    stored: tuple[Layout, ...]
    """What all of it can be unpacked from; none where something of it cannot."""

    @property
    def stored_bytes(self) -> int:
        """Memory that this takes; 0 for none."""
        return sum(layout.nbytes for layout in self.stored)


class Menu:
    """All ways to split one unit: streamed bytes (ascending) and the pieces that make them."""

    def __init__(self, pieces: Sequence[Piece], *, packs: bool) -> None:
        """`packs`: whether pieces may be kept as they are stored."""
        options: dict[int, int] = {}
        for mask in range(1 << len(pieces)):
            size = sum(piece.hold_bytes for piece in chosen(pieces, mask))
            options.setdefault(size, mask)
        self.sizes = sorted(options)
        self.masks = [options[size] for size in self.sizes]
        self.total = self.sizes[-1]
        self.packs = packs and all(piece.stored for piece in pieces)
        """Whether what is streamed may be kept as it is stored."""
        stored = (sum(piece.stored_bytes for piece in chosen(pieces, m)) for m in self.masks)
        self.stored = [*stored]
        """What that takes for each of these."""
        self.reads = [sum(p.read_bytes for p in chosen(pieces, m)) for m in self.masks]
        """Bytes read from disk for each of these."""

    def fit(self, slot_bytes: int) -> int:
        """Index of the largest streamed part that fits a slot."""
        return bisect.bisect_right(self.sizes, slot_bytes) - 1


def chosen(pieces: Sequence[Piece], mask: int) -> list[Piece]:
    """Those whose bit is set."""
    return [piece for bit, piece in enumerate(pieces) if mask >> bit & 1]


def pieces_of(weights: Sequence[Weight], takes: Takes | None) -> list[Piece]:
    """At most a dozen pieces; weights made by one conversion stay together."""
    groups: dict[str, list[Weight]] = {}
    for weight in weights:
        groups.setdefault(weight.group or weight.name, []).append(weight)
    pieces = sorted(
        (_piece(group, takes) for group in groups.values()),
        key=lambda piece: piece.hold_bytes,
        reverse=True,
    )
    head, tail = pieces[: _MAX_PIECES - 1], pieces[_MAX_PIECES - 1 :]
    if tail:
        merged = tuple(itertools.chain.from_iterable(piece.weights for piece in tail))
        stored = tuple(itertools.chain.from_iterable(piece.stored for piece in tail))
        whole = all(piece.stored for piece in tail)
        nbytes = sum(piece.hold_bytes for piece in tail)
        reads = sum(piece.read_bytes for piece in tail)
        head.append(Piece(merged, nbytes, reads, stored if whole else ()))
    return head


def _piece(group: Sequence[Weight], takes: Takes | None) -> Piece:
    nbytes = max(hold_bytes(group), 0 if takes is None else takes(group))
    stored = [weight.as_stored() for weight in group]
    layouts = tuple(lay_out([weight]) for weight in stored if weight is not None)
    reads = group[0].read_bytes if group[0].group else sum(w.read_bytes for w in group)
    return Piece(tuple(group), nbytes, reads, layouts if len(layouts) == len(group) else ())


def hold_bytes(group: Sequence[Weight]) -> int:
    """Never less than what `lay_out` takes: each extent may lose a page at either end."""
    if group[0].raw:
        return ceil_page(group[0].nbytes) + PAGE
    made = sum(weight.nbytes + PAGE for weight in group)
    if group[0].group is None:
        return ceil_page(made)
    return ceil_page(made + sum(ceil_page(source.nbytes) + PAGE for source in group[0].sources))


def menus_of(pieces: Sequence[Sequence[Piece]], *, packs: bool) -> list[Menu]:
    """One menu per unit; units alike share theirs."""
    cache: dict[tuple[tuple[int, int], ...], Menu] = {}
    menus = []
    for part in pieces:
        key = tuple((piece.hold_bytes, piece.stored_bytes) for piece in part)
        if key not in cache:
            cache[key] = Menu(part, packs=packs)
        menus.append(cache[key])
    return menus


def slot_sizes(menus: Sequence[Menu]) -> list[int]:
    """Slot sizes worth trying, ascending."""
    return sorted(
        {size for menu in {id(m): m for m in menus}.values() for size in menu.sizes} - {0}
    )


def streamed_bytes(menus: Sequence[Menu], picks: Sequence[int]) -> int:
    """What all units stream."""
    return sum(menu.sizes[pick] for menu, pick in zip(menus, picks, strict=True))


def memory_bytes(menus: Sequence[Menu], picks: Sequence[int], slots: int) -> int:
    """What residents and buffers take, with nothing kept as it is stored."""
    streamed = [menu.sizes[pick] for menu, pick in zip(menus, picks, strict=True)]
    return sum(menu.total for menu in menus) - sum(streamed) + slots * max(streamed)


def pass_seconds(
    menus: Sequence[Menu], picks: Sequence[int], slots: int, packed: Collection[int] = ()
) -> float:
    """How long a pass takes, once it follows others: one unit is read while others compute.

    `packed`: units that are unpacked from memory.
    """
    clock = read = 0.0  # when the unit before has run, and when the last one was read
    freed = [0.0] * slots
    turn, before = 0, 0.0
    for _ in range(2):
        before = clock
        for index, (menu, pick) in enumerate(zip(menus, picks, strict=True)):
            size = menu.sizes[pick]
            if size:
                seconds = size / _UNPACK_RATE if menu.packs else size / READ_RATE
                if menu.packs and index not in packed:
                    seconds = max(seconds, menu.reads[pick] / READ_RATE)
                read = max(read, freed[turn]) + seconds + _UNIT_SECONDS
                clock = max(clock, read)
            clock += menu.total / _COMPUTE_RATE
            if size:
                freed[turn] = clock
                turn = (turn + 1) % slots
    return clock - before


def spread(count: int) -> list[int]:
    """The numbers of units in an order that spreads those taken first over the pass."""
    return sorted(range(count), key=lambda index: (index * _GOLDEN % 1.0, index))


def spend(
    menus: Sequence[Menu],
    picks: list[int],
    spare: int,
    *,
    of: Collection[int] | None = None,
    packed: bool = False,
) -> int:
    """Make more resident with what is left, of the unit that streams most of itself first.

    Of units whose numbers are in `of`, if it is not None. What they were kept as, as they are
    stored, goes for it where they are `packed`. Returns what is left then.
    """

    def entry(index: int) -> tuple[float, float, int]:
        menu = menus[index]
        # Units alike are taken in an order that spreads them over the pass.
        return -menu.sizes[picks[index]] / max(1, menu.total), index * _GOLDEN % 1.0, index

    which = range(len(picks)) if of is None else of
    heap = [entry(index) for index in which if picks[index]]
    heapq.heapify(heap)
    while heap:
        index = heapq.heappop(heap)[2]
        menu, pick = menus[index], picks[index]
        step = menu.sizes[pick] - menu.sizes[pick - 1]
        if packed:
            step -= menu.stored[pick] - menu.stored[pick - 1]
        if step > spare:
            continue  # nor will it fit later
        picks[index] = pick - 1
        spare -= step
        if pick > 1:
            heapq.heappush(heap, entry(index))
    return spare
