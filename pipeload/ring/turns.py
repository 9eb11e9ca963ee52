"""Requests that take turns on several ranks: in the same rounds, and in the same order in each.

[Note: members on ranks] Each rank has a convoy of the same members. A member waits for what other
ranks compute of it in its own turn, while they compute for the next ones: so it flows through all
ranks as through a pipeline. That nobody waits in a circle rests on one rule: no rank begins its
next block for any member before it has sent the one before for all, whoever is first. So those of a
round begin their first block when all have come there, the oldest first, and each lets the others
have their turns behind each block; and what is sent is not waited for, see lane.py.

Between two rounds ranks agree on who is left: one that has ended on one rank alone ends on the
others, before anybody is told of it. Then on how many of these have room on each.
"""

from __future__ import annotations

import json
import weakref
import zlib
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch

from pipeload.budget.limit_errors import no_room_on_a_rank
from pipeload.errors import MemoryLimitError
from pipeload.ring.passing import Passing
from pipeload.ring.told import (
    could_not_begin,
    does_something_else,
    ended_alone,
    runs_others_at_once,
    told,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeload.engine.convoy import Convoy
    from pipeload.engine.convoy_members import Member
    from pipeload.engine.pass_state import PassState
    from pipeload.ring.group import Group


class _Asks(IntEnum):
    """What ranks agree on; negative, as passes are numbered from 1 on."""

    ROUND = -1
    NUMBER = -2
    ROOM = -3
    SEED = -4
    ANY = -5
    VALUE = -6
    LEFT = -7


_NO_ROOM = 2
"""Says a rank that has none; 1: that something else has failed."""


class Turns:
    """See [Note: members on ranks]. Also what is asked between two results, by whoever waits."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.own = Passing(group, group.lane())
        """Of all that takes no turns."""
        self._convoy: weakref.ref[Convoy] | None = None
        self._lanes: list[Passing] = []
        """Those of members, used again as members leave."""
        self._members: weakref.WeakKeyDictionary[PassState, Passing] = weakref.WeakKeyDictionary()
        self._beginning: list[Passing] = []
        """Those of this round that are not in their first block yet, the oldest first."""
        self._came: set[Passing] = set()
        """Of these, those which have come there."""
        self._running: set[Passing] = set()
        """Those of this round whose passes are not over."""

    @property
    def waited_seconds(self) -> float:
        """For other ranks, so far."""
        return self._group.waited_seconds

    def check(self) -> None:
        """Refuse to go on where nothing can be asked any more.

        Raises:
            GroupError: the one that names the rank that was lost, if this one has lost it.
        """
        self._group.check_loss()
        self._group.check()

    def break_off(self, why: str) -> None:
        """Have every rank know that this one cannot go on."""
        self._group.break_off(why)

    def join(self, convoy: Convoy, at_once: int | None) -> None:
        """Have this be the convoy whose members take turns, from now on.

        `at_once`: the most of them that run; None: as many as help.

        Raises:
            GroupError: a rank is lost, does something else, or has another `at_once`.
        """
        if convoy.rounds.peers is not self:
            self._convoy, convoy.rounds.peers = weakref.ref(convoy), self
        found = self._ask_all(_Asks.NUMBER, convoy.started, at_once or 0)
        others = [rank for rank, (_, most, _) in enumerate(found) if most != (at_once or 0)]
        if others:
            raise runs_others_at_once(self._group, others[0])
        convoy.started = max(started for started, *_ in found)

    # -- what a relay asks, in a member's turn or in none -----------------------------------------

    def now(self) -> Passing:
        """Where the calling thread's passes stand."""
        convoy = None if self._convoy is None else self._convoy()
        if convoy is None or not convoy.has_turn():
            return self.own
        found = self._members.get(convoy.state_of_thread())
        if found is None:  # it was told that its pass does not begin, as on all ranks
            found = Passing(self._group, self.own.lane)
            found.expected = False
        return found

    def begin_in_order(self, passing: Passing) -> None:
        """Let others have their turns until all of the round have come here, and it is the next."""
        if passing not in self._beginning:
            return
        self._came.add(passing)
        while self._beginning[0] is not passing or not self._came.issuperset(self._beginning):
            self.hand_over()
        self.leave(passing)

    def go_on_together(self, passing: Passing) -> None:
        """Let others have their turns until none of the round has sent fewer blocks.

        None has as a rule. But one may have handed over more often in its block, as where residents
        have just been given up.
        """
        while any(other.sent < passing.sent for other in self._running):
            self.hand_over()

    def leave(self, passing: Passing) -> None:
        """Nobody is to wait for this one to begin."""
        self._came.discard(passing)
        if passing in self._beginning:
            self._beginning.remove(passing)

    def hand_over(self) -> None:
        """Let others have their turns."""
        convoy = None if self._convoy is None else self._convoy()
        if convoy is not None and convoy.has_turn():
            convoy.hand_over()

    @property
    def handed_over(self) -> int:
        """How often anybody has."""
        convoy = None if self._convoy is None else self._convoy()
        return 0 if convoy is None else convoy.handed_over

    # -- what a convoy asks, between two rounds ----------------------------------------------------

    def over(self, state: PassState) -> None:
        """The pass of a member is over, if it had begun."""
        if (passing := self._members.get(state)) is not None:
            self._running.discard(passing)
            self.leave(passing)

    def same_left(self, waiting: Sequence[Member]) -> bool:
        """Whether those that wait here wait on all ranks; each of the others gets an error.

        Raises:
            GroupError: a rank is lost, or does something else.
        """
        mine = [member.number for member in waiting]
        known = zlib.crc32(json.dumps(mine).encode())
        if all(there == known for there in self._ask(_Asks.LEFT, known)):
            return True
        there = self._group.gather_json(mine, "requests are compared")
        for member in waiting:
            lacking = [rank for rank, numbers in enumerate(there) if member.number not in numbers]
            if lacking:
                member.error = ended_alone(self._group, lacking[0])
        return False

    def agree(
        self, waiting: Sequence[Member], admitted: int, error: Exception | None
    ) -> tuple[int, Exception | None]:
        """For how many of those that wait there is room on all ranks; why not even for the first.

        `admitted` and `error` say so of this one.

        Raises:
            GroupError: a rank is lost, or does something else.
        """
        failed = 0 if error is None else _NO_ROOM if isinstance(error, MemoryLimitError) else 1
        group, found = self._group, self._ask_all(_Asks.ROUND, admitted, failed)
        if not any(bad for _, bad, _ in found):
            admitted = min(room for room, *_ in found)
            self._begin_round(waiting, admitted)
            return admitted, None
        limits = [getattr(error, name, 0) for name in ("limit", "smallest_limit")]
        texts = group.gather_json([told(error), limits], "a refusal is told")
        rank = next(rank for rank, (_, bad, _) in enumerate(found) if bad)
        if rank != group.rank:  # of the first that has failed, whatever has here: all do the same
            text, limits = texts[rank]
            error = (
                no_room_on_a_rank(group.name(rank), text, *limits)
                if found[rank][1] == _NO_ROOM
                else could_not_begin(group, rank, text)
            )
        return 0, error

    def _begin_round(self, waiting: Sequence[Member], admitted: int) -> None:
        """Give those a lane that have none, the lowest that is free: the same on all ranks."""
        states = [member.state for member in waiting]
        known = ((state, self._members.get(state)) for state in states)
        self._members = weakref.WeakKeyDictionary(
            (state, passing) for state, passing in known if passing is not None
        )
        used = {*self._members.values()}
        self._beginning, self._came = [], set()
        for state in states[:admitted]:
            if state not in self._members:
                self._members[state] = passing = self._free_lane(used)
                used.add(passing)
            self._members[state].expected, self._members[state].sent = True, 0
            self._beginning.append(self._members[state])
        self._running = {*self._beginning}

    def _free_lane(self, used: set[Passing]) -> Passing:
        free = next((passing for passing in self._lanes if passing not in used), None)
        if free is not None:
            free.begin_anew()
            return free
        group, number = self._group, len(self._lanes) + 1
        group.have_lanes(number + 1)
        self._lanes.append(made := Passing(group, group.lane(number)))
        return made

    # -- what is the same on all ranks ------------------------------------------------------------

    def all_have_room(self, *, here: bool) -> bool:
        """Whether one more request helps on each rank.

        Raises:
            GroupError: a rank is lost, or does something else.
        """
        return all(self._ask(_Asks.ROOM, int(here)))

    def same_seed(self, seed: int) -> int:
        """That of rank 0.

        Raises:
            GroupError: a rank is lost, or does something else.
        """
        return self._ask(_Asks.SEED, seed)[0]

    def any_says(self, yes: bool) -> bool:
        """Whether any rank says so.

        Raises:
            GroupError: a rank is lost, or does something else.
        """
        return any(self._ask(_Asks.ANY, int(yes)))

    def from_rank_0(self, value: Any) -> Any:
        """What rank 0 has as `value`, which JSON can hold.

        Raises:
            GroupError: a rank is lost, or does something else.
        """
        self._ask(_Asks.VALUE, 0)
        mine = None if self._group.rank else value
        return self._group.gather_json(mine, "rank 0 tells the others")[0]

    def _ask(self, what: _Asks, value: int) -> list[int]:
        return [found for found, *_ in self._ask_all(what, value)]

    def _ask_all(self, what: _Asks, *values: int) -> list[list[int]]:
        """In the form of `Passing.exchange`: one that begins a pass meanwhile is told apart."""
        group = self._group
        mine = [int(what), *values, *[0] * (3 - len(values))]
        found = [t.tolist() for t in group.gather(torch.tensor(mine), "requests are compared")]
        others = [rank for rank, (kind, *_) in enumerate(found) if kind != what]
        if others:
            raise does_something_else(group, others[0])
        return [rest for _, *rest in found]
