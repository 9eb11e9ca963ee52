"""Who computes what: spread like cards, by disks and memory, so that all disks end together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeload.ring.deal import RankPower, deal, even, helps

MB = 1_000_000


def power(room: int = 0, rate: float = 400.0, compute: float = 1e6) -> RankPower:
    """In megabytes, and megabytes per second."""
    return RankPower(room * MB, rate * MB, compute * MB)


def test_equal_ranks_take_turns() -> None:
    """Neighbours are never one rank's: each reads while the other computes."""
    made = deal([80 * MB] * 22, [power(200)] * 2)
    assert all(one != other for one, other in zip(made.owners, made.owners[1:], strict=False))
    assert [share.count for share in made.shares] == [11, 11]


def test_twice_the_disk_takes_twice_the_blocks() -> None:
    """And they are spread: never more than two of the fast one's come together."""
    made = deal([80 * MB] * 21, [power(160, rate=400), power(160, rate=200)])
    assert [share.count for share in made.shares] == [14, 7]
    assert "000" not in "".join(map(str, made.owners))


def test_memory_takes_blocks_as_well() -> None:
    """What stays in memory is not read, so whoever has more of it gets more."""
    made = deal([80 * MB] * 22, [power(900), power(300)])
    first, other = made.shares
    assert first.count > other.count
    assert first.read_bytes == pytest.approx(other.read_bytes, rel=0.25)


def test_the_prediction_is_the_formula() -> None:
    """Two disks, of what does not stay beside two buffers that shrink with it."""
    made = deal([100 * MB] * 20, [power(400)] * 2)
    share = made.shares[0]
    assert share.nbytes == 1000 * MB
    # streamed + resident = 1000, resident + 2 * streamed / 10 = 400
    assert share.read_bytes == pytest.approx(750 * MB, abs=MB)
    assert made.disk_seconds == pytest.approx(750 / 400, rel=0.01)
    assert made.seconds == made.disk_seconds


def test_the_head_counts() -> None:
    """Whoever has it gets fewer blocks, and it is the last to run."""
    made = deal([88 * MB] * 22 + [131 * MB], [power(500)] * 2, blocks=22)
    head = made.owners[-1]
    assert [made.shares[head].count, made.shares[1 - head].count] == [11, 12]


def test_rows_even_out_what_blocks_leave() -> None:
    """Of 22 blocks one of three has one more, and hardly any of the head."""
    made = deal([88 * MB] * 22, [power(450)] * 3, steps=[MB] * 131)
    assert sum(made.steps) == 131
    assert [made.shares[rank].count for rank in range(3)] == [
        8 if steps == min(made.steps) else 7 for steps in made.steps
    ]
    sizes = sorted(share.nbytes for share in made.shares)
    assert sizes == [681 * MB, 681 * MB, 705 * MB]
    two = deal([88 * MB] * 22, [power(450)] * 2, steps=[MB] * 131)
    assert sorted(two.steps) == [65, 66]


def test_rows_are_computed_at_once() -> None:
    """Blocks one after the other, and the head by all of them; rows are sent by each."""
    made = deal([100 * MB] * 2, [power(5000, compute=1000)] * 2, steps=[MB] * 100, link_seconds=1.0)
    assert made.chain_seconds == pytest.approx(0.2 + 0.05 + 4.0)


def test_what_measuring_tells_apart() -> None:
    """Disks that are about as fast are taken to be as fast."""
    assert even([400, 380, 420]) == [400, 400, 400]
    assert even([400, 200]) == [400, 200]


def test_links_and_computing_are_a_chain() -> None:
    """Blocks run one after the other, whoever runs them; a rank alone sends nothing."""
    ranks = [power(5000, compute=1000), power(5000, compute=500)]
    made = deal([100 * MB] * 10, ranks, link_seconds=0.01)
    assert made.disk_seconds == 0
    assert made.chain_seconds == pytest.approx(0.5 + 1.0 + 0.1)
    alone = deal([100 * MB] * 10, ranks[:1], link_seconds=0.01)
    assert alone.chain_seconds == pytest.approx(1.0)
    assert not helps(alone, made)


def test_a_slow_machine_is_told() -> None:
    """A tenth of the disk brings a tenth: noticed; a hundredth is not."""
    fast = [power(100, rate=1000)]
    alone = deal([100 * MB] * 40, fast)
    assert helps(alone, deal([100 * MB] * 40, [*fast, power(100, rate=100)]))
    assert not helps(alone, deal([100 * MB] * 40, [*fast, power(100, rate=10)]))


@given(
    st.lists(st.integers(1, 300), min_size=5, max_size=40),
    st.lists(st.builds(power, st.integers(-500, 9000), st.floats(1, 5000)), min_size=1, max_size=5),
    st.booleans(),
    st.integers(0, 40),
)
def test_each_part_has_an_owner_and_each_rank_a_block(
    sizes: list[int], ranks: list[RankPower], head: bool, steps: int
) -> None:
    """Whatever the sizes; residents are never more than the share, or the room."""
    blocks = len(sizes) - head
    if blocks < len(ranks):
        return
    rows = [MB] * (steps if steps >= len(ranks) else 0)
    made = deal([size * MB for size in sizes], ranks, blocks=blocks, steps=rows)
    assert sum(made.steps) == len(rows)
    assert all(made.steps)
    assert set(made.owners[:blocks]) == set(range(len(ranks)))
    assert sum(share.nbytes for share in made.shares) == (sum(sizes) + len(rows)) * MB
    for share, rank in zip(made.shares, ranks, strict=True):
        assert 0 <= share.resident_bytes <= share.nbytes
        assert share.resident_bytes <= max(0, rank.room_bytes) + 1
