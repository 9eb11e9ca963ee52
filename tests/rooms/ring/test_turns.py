"""What ranks agree on, where the other rank says what it is told to."""

from __future__ import annotations

import json
import zlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from pipeload.errors import GroupError, MemoryLimitError
from pipeload.ring.turns import Turns, _Asks

if TYPE_CHECKING:
    from pipeload.engine.convoy_members import Member

MINE = [1, 2]


class FakeGroup:
    """Rank 0 of two; the other one has other members, or could not make room for them."""

    def __init__(self, members: list[int], failed: int = 0) -> None:
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
        asked = int(tensor[0])
        there = [asked, known, 0, 0] if asked == _Asks.LEFT else [asked, 1, self.failed, 0]
        return [tensor, torch.tensor(there)]

    def gather_json(self, value: Any, _doing: str) -> list[Any]:
        refused = isinstance(value[-1], list)
        other = ["ZeroDivisionError.", [5, 7]] if refused else self.members
        found: list[Any] = json.loads(json.dumps([value, other]))
        return found


class State:
    """Where a member's passes stand."""


def waiting() -> list[Member]:
    """Two members, of which the first has begun before."""
    members: Any = [
        SimpleNamespace(number=number, passes=2 - number, state=State(), error=None)
        for number in MINE
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
        assert turns.same_left(members)
        assert turns.agree(members, 2, None) == (1, None)
    assert group.lanes == 2


@pytest.mark.parametrize(
    ("failed", "kind", "said"),
    [
        (1, GroupError, "rank 1 could not begin the pass: ZeroDivisionError. Check"),
        (2, MemoryLimitError, "rank 1 has no room for the pass: ZeroDivisionError. Raise"),
    ],
)
def test_what_fails_there_fails_here(failed: int, kind: type[Exception], said: str) -> None:
    """In the words of the first that has failed."""
    turns, members = turns_of(FakeGroup(MINE, failed)), waiting()
    for admitted, own in ((2, None), (0, ValueError("own"))):
        room, error = turns.agree(members, admitted, own)
        if own is None:
            assert room == 0
            assert type(error) is kind
            assert str(error).startswith(said)
            if isinstance(error, MemoryLimitError):
                assert (error.limit, error.smallest_limit) == (5, 7)
        else:  # this is rank 0, whose error comes first
            assert error is own


def test_members_that_one_rank_alone_has() -> None:
    """They end here, too."""
    members = waiting()
    assert not turns_of(FakeGroup([1])).same_left(members)
    assert [member.error is not None for member in members] == [False, True]
    assert "the request has ended on rank 1 alone" in str(members[1].error)
    assert not turns_of(FakeGroup([1, 2, 3])).same_left(waiting())


def test_none_goes_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those in a round, until it is over for them."""
    turns, members = turns_of(FakeGroup(MINE)), waiting()
    turns._begin_round(members, 2)
    first, other = (turns._members[member.state] for member in members)
    handed: list[int] = []

    def hand_over() -> None:
        handed.append(other.sent)
        other.sent += 1

    monkeypatch.setattr(turns, "hand_over", hand_over)
    first.sent = 2
    turns.go_on_together(first)
    assert handed == [0, 1]
    first.sent = 9
    turns.over(members[1].state)
    turns.go_on_together(first)
    assert len(handed) == 2
