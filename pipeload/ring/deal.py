"""Which rank computes which block. Pure: sizes and rates in, owners and a prediction out.

[Note: dealt like cards] A rank can read ahead only into its buffers, and its residents never
change. With a range of blocks for each, all disks but one would wait most of the time: a pass would
take the sum of what each rank reads. Dealt out in turns, each rank fills its next buffer while
others compute and read, so all disks are always busy and a pass takes as long as the slowest. This
is how prima.cpp's ring of devices with slow disks is laid out (arXiv 2504.08791).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_NOISE = 1.25
_SHOWN_GAIN = 1.03
"""A machine with which passes are less than this faster is said to be of no use."""


@dataclass(frozen=True, slots=True)
class RankPower:
    """What one rank has for its share."""

    room_bytes: int
    """For weights: its limit without what is there beside them, buffers included."""
    disk_rate: float
    """Bytes per second that it reads."""
    compute_rate: float
    """Bytes of weights per second that it multiplies one token by."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank gets."""

    count: int
    """Whole parts."""
    nbytes: int
    """Of all its parts, and rows."""
    resident_bytes: int
    """What of them stays in memory."""

    @property
    def read_bytes(self) -> int:
        """What it reads in each pass."""
        return self.nbytes - self.resident_bytes


@dataclass(frozen=True, slots=True)
class Deal:
    """Who computes what, and how long a pass of one token is thought to take."""

    owners: tuple[int, ...]
    """The rank of each part."""
    shares: tuple[Share, ...]
    """Of each rank."""
    disk_seconds: float
    """Until the slowest rank has read its share."""
    chain_seconds: float
    """All computing, one block after the other, and what is sent."""
    steps: tuple[int, ...] = ()
    """How many steps of rows each rank gets, where rows are dealt out."""

    @property
    def seconds(self) -> float:
        """A pass of one token: whichever is longer."""
        return max(self.disk_seconds, self.chain_seconds)


def deal(
    sizes: Sequence[int],
    ranks: Sequence[RankPower],
    *,
    blocks: int | None = None,
    link_seconds: float = 0.0,
    steps: Sequence[int] = (),
) -> Deal:
    """Deal parts out so that a pass takes least time.

    Args:
        sizes: bytes of each part, in the order in which they run.
        ranks: those that take part.
        blocks: how many of the parts are blocks, the first ones, of which each rank gets one at
            least; None: all.
        link_seconds: how long it takes until all have what one part gave.
        steps: bytes of each step of rows, if a last part is dealt out by rows: at least as many as
            there are ranks, as each gets one at least.
    """
    count = len(sizes) if blocks is None else blocks
    first = _shared_out(sizes, ranks)
    targets = [0] * len(ranks)
    for size, owner in zip(sizes[:count], first, strict=False):
        targets[owner] += size
    owners = (*_in_turns(sizes[:count], targets), *first[count:])
    parts = [
        [n for n, owner in zip(sizes, owners, strict=True) if owner == r] for r in range(len(ranks))
    ]
    rows = _rows_shared_out(steps, ranks, [sum(mine) for mine in parts], max(sizes))
    shares, slowest, chain, together = [], 0.0, 0.0, 0.0
    for power, mine, more in zip(ranks, parts, rows, strict=True):
        nbytes = sum(mine) + sum(more)
        share = Share(len(mine), nbytes, nbytes - _streamed(power, nbytes, max(mine, default=0)))
        shares.append(share)
        slowest = max(slowest, share.read_bytes / power.disk_rate)
        chain += sum(mine) / power.compute_rate
        together = max(together, sum(more) / power.compute_rate)
    sent = len(sizes) + (len(ranks) if steps else 0)
    chain += together + (sent * link_seconds if len(ranks) > 1 else 0.0)
    return Deal(owners, tuple(shares), slowest, chain, tuple(map(len, rows)) if steps else ())


def helps(before: Deal, after: Deal) -> bool:
    """Whether passes are faster by more than it takes to notice."""
    return before.seconds > _SHOWN_GAIN * after.seconds


def _streamed(power: RankPower, nbytes: int, largest: int) -> int:
    """What has to be read of `nbytes` in each pass: nothing, or what two buffers leave no room for.

    Each part keeps the same share of itself, so buffers are as small as what streams of the largest
    is: of `streamed` bytes, 2 * largest * streamed / nbytes.
    """
    if nbytes <= power.room_bytes:
        return 0
    saved = 1 - 2 * largest / nbytes
    return min(nbytes, round((nbytes - power.room_bytes) / saved)) if saved > 0 else nbytes


def _shared_out(sizes: Sequence[int], ranks: Sequence[RankPower]) -> list[int]:
    """The rank of each part: the largest ones first, each to whoever has then read all soonest."""
    largest, taken, owners = max(sizes), [0] * len(ranks), [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = owner = _first_done(ranks, taken, sizes[place], largest)
        taken[owner] += sizes[place]
    return owners


def _rows_shared_out(
    steps: Sequence[int], ranks: Sequence[RankPower], taken: Sequence[int], largest: int
) -> list[list[int]]:
    """The steps of rows of each rank, each to whoever has then read all soonest."""
    found: list[list[int]] = [[] for _ in ranks]
    so_far = [*taken]
    for place, size in enumerate(steps):
        without = [rank for rank, mine in enumerate(found) if not mine]
        left = len(steps) - place
        among = without if len(without) >= left else range(len(ranks))
        owner = _first_done(ranks, so_far, size, largest, among)
        found[owner].append(size)
        so_far[owner] += size
    return found


def _first_done(
    ranks: Sequence[RankPower],
    taken: Sequence[int],
    more: int,
    largest: int,
    among: Iterable[int] | None = None,
) -> int:
    """Who has read all it has taken soonest, and `more`."""

    def until(rank: int) -> tuple[float, float]:
        power, nbytes = ranks[rank], taken[rank] + more
        seconds = _streamed(power, nbytes, largest) / power.disk_rate
        return seconds, nbytes / max(1, power.room_bytes)

    return min(range(len(ranks)) if among is None else among, key=until)


def even(rates: Sequence[float]) -> list[float]:
    """Rates as they are, or their mean where they differ by no more than measuring does."""
    if max(rates) > _NOISE * min(rates):
        return list(rates)
    return [sum(rates) / len(rates)] * len(rates)


def _in_turns(sizes: Sequence[int], targets: Sequence[int]) -> tuple[int, ...]:
    """Each block to whom most of his target is still missing; so each rank's blocks are spread."""
    whole = sum(targets)
    credit = [0.0] * len(targets)
    waits = set(range(len(targets)))  # nobody goes without
    owners: list[int] = []
    for place, size in enumerate(sizes):
        for rank, target in enumerate(targets):
            credit[rank] += size * target / whole
        among = waits if len(waits) >= len(sizes) - place else range(len(targets))
        owner = max(among, key=lambda rank: (credit[rank], -rank))
        credit[owner] -= size
        waits.discard(owner)
        owners.append(owner)
    return tuple(owners)
