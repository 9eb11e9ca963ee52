"""What ranks agree on, where the other rank says what it is told to."""

from __future__ import annotations

import json
import zlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from pipeload.errors import GroupError, MemoryLimitError
from pipeload.ring.turns import Turns

if TYPE_CHECKING:
    from pipeload.engine.convoy_members import Member

MINE = [[1, True], [2, False]]


class FakeGroup:
    """Rank 0 of two; the other one has other members, or could not make room for them."""

    def __init__(self, members: list[list[Any]], failed: int = 0) -> None:
        self.rank, self.size, self.hosts = 0, 2, ["here", "there"]
        self.members, self.failed = members, failed
        self.lanes = 1

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def lane(self, _number: int = 0) -> FakeGroup:
        return self

    def have_lanes(self, count: int) -> None:
        self.lanes = count

    def gather(self, tensor: torch.Tensor, _doing: str) -> list[torch.Tensor]:
        known = zlib.crc32(json.dumps(self.members).encode())
        return [tensor, torch.tensor([int(tensor[0]), known, 1, self.failed])]

    def gather_json(self, value: Any, _doing: str) -> list[Any]:
        other = [self.members, "ZeroDivisionError.", [5, 7]]
        found: list[Any] = json.loads(json.dumps([value, other]))
        return found


def waiting() -> list[Member]:
    """Two members, of which the first has begun before."""
    members: Any = [
        SimpleNamespace(number=number, passes=int(begun), state=object(), error=None)
        for number, begun in MINE
    ]
    found: list[Member] = members
    return found


def turns_of(group: FakeGroup) -> Turns:
    return Turns(cast("Any", group))


def test_as_many_as_have_room_on_each() -> None:
    """They have a lane each, the same in every round."""
    group, members = FakeGroup(MINE), waiting()
    turns = turns_of(group)
    for _ in range(2):
        agreed = turns.agree(members, 2, None)
        assert (agreed.waiting, agreed.admitted, agreed.again) == (members, 1, False)
    assert group.lanes == 2


@pytest.mark.parametrize(
    ("failed", "kind", "said"),
    [
        (1, GroupError, "rank 1 could not begin the pass: ZeroDivisionError. Check"),
        (2, MemoryLimitError, "rank 1 has no room for the pass: ZeroDivisionError. Raise"),
    ],
)
def test_what_fails_there_fails_here(failed: int, kind: type[Exception], said: str) -> None:
    """In the words of the other; an own error is one's own."""
    turns, members = turns_of(FakeGroup(MINE, failed)), waiting()
    agreed = turns.agree(members, 2, None)
    assert type(agreed.error) is kind
    assert str(agreed.error).startswith(said)
    if isinstance(agreed.error, MemoryLimitError):
        assert (agreed.error.limit, agreed.error.smallest_limit) == (5, 7)
    own = ValueError("own")
    assert turns.agree(members, 0, own).error is own


def test_members_that_one_rank_alone_has() -> None:
    """One that has begun is told; one that has not waits for the other rank to begin it."""
    members = waiting()
    for there, left, told in (([[1, True]], 1, [False, False]), ([[2, False]], 1, [True, False])):
        agreed = turns_of(FakeGroup(there)).agree(members, 2, None)
        assert agreed.again
        assert len(agreed.waiting) == left
        assert [member.error is not None for member in members] == told
    assert "the request has ended on rank 1 alone" in str(members[0].error)
