"""Which units are expected next, and that the dispatcher reads by nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pipeload.prefetch.read_order import LastSeen
from tests.support.fake_disk import Rig

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.mark.parametrize(
    ("arrivals", "upcoming"),
    [
        ([], [0, 1, 2, 3]),  # nobody has come anywhere: the first comes next
        ([0], [1, 2, 3, 0]),
        ([0, 1, 2, 0], [1, 2, 0]),  # early exit: what was left out is not expected
        ([0, 2, 3, 0], [2, 3, 0]),  # a skipped one
        ([0, 0], [0]),  # one that runs again and again
        ([0, 1, 0, 2], [3, 0, 2]),  # what followed last counts
    ],
)
def test_what_followed_last_follows_again(arrivals: list[int], upcoming: list[int]) -> None:
    """A circle at first, corrected by what is seen."""
    order = LastSeen(4)
    for unit in arrivals:
        order.arrive(unit)
    assert list(order.upcoming()) == upcoming


class Known:
    """An order that somebody else knows."""

    def __init__(self, expected: Sequence[int]) -> None:
        self.expected = expected
        self.arrived: list[int] = []

    def arrive(self, unit: int) -> None:
        self.arrived.append(unit)

    def upcoming(self) -> Sequence[int]:
        return self.expected


def test_the_dispatcher_reads_what_the_order_says() -> None:
    """Two buffers, so the two that are named first; a surprise is read all the same."""
    order = Known([4, 2, 1])
    rig = Rig("SSSSS", order=order)
    rig.rest()
    assert sorted(rig.files.reads) == [2, 4]
    rig.run(4, 2)
    assert rig.prefetcher.counters.misses == 0
    rig.run(0)
    rig.rest()
    assert rig.prefetcher.counters.misses == 1
    assert order.arrived == [4, 2, 0]
    rig.prefetcher.close()
