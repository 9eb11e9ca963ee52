"""Where all members of a convoy begin a pass: what is done once for all of them."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Protocol

from pipeload.engine.convoy_members import GaveWayError
from pipeload.errors import MemoryLimitError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from pipeload.engine.convoy_members import Member
    from pipeload.engine.direct_calls import PassCall
    from pipeload.engine.pass_state import PassState
    from pipeload.engine.replan import Replan
    from pipeload.engine.shared_units import SharedUnits
    from pipeload.engine.streamer import Streamer

_MEASURED = 32
"""Rounds of which what they computed is remembered."""


class Passes(Protocol):
    """What rounds need of whoever knows where passes begin and end."""

    @property
    def model(self) -> nn.Module:
        """What streams."""

    def open_round(self, calls: Sequence[PassCall]) -> int:
        """Make room for passes that take turns, the first ones; returns how many. Or raises."""

    def recover(self) -> None:
        """Give back what the pass was holding whose turn it is."""

    def rest(self) -> None:
        """Be done with what passes have left behind that took no turns."""


class Peers(Protocol):
    """Other ranks that run the same members: what a convoy asks them."""

    @property
    def waited_seconds(self) -> float:
        """For other ranks, so far."""

    def same_left(self, waiting: Sequence[Member]) -> bool:
        """Whether those that wait here wait on all ranks; else others have errors to end by."""

    def agree(
        self, waiting: Sequence[Member], admitted: int, error: Exception | None
    ) -> tuple[int, Exception | None]:
        """For how many there is room on all ranks, the first ones; why there is not even for one.

        `admitted` and `error` say so of this one.
        """

    def over(self, state: PassState) -> None:
        """The pass of a member is over, if it had begun."""


class Rounds:
    """Opens rounds and ends them, for the member whose turn it is."""

    def __init__(
        self, own: PassState, streamer: Streamer, replan: Replan, units: SharedUnits
    ) -> None:
        """`own` has the log in which their time is counted."""
        self._own, self._streamer, self._replan, self._units = own, streamer, replan, units
        self.peers: Peers | None = None
        """Other ranks that run the same members; None where there are none."""
        self._round: tuple[float, float, int] | None = None
        """Seconds that passes had taken and waited when the round began, and how many they are."""
        self._computing: deque[float] = deque(maxlen=_MEASURED)

    @property
    def seconds_per_pass(self) -> float | None:
        """What one member's pass takes without waiting, as a rule; None before there was any."""
        return median(self._computing) if self._computing else None

    def leave(self, state: PassState) -> None:
        """The pass of a member is over, if it had begun."""
        self._units.end(id(state))
        if self.peers is not None:
            self.peers.over(state)

    def same_left(self, members: Sequence[Member]) -> bool:
        """Whether those that wait do so on all ranks; if not, some have errors to end by.

        Whoever waits for results is told only then: by all ranks of the same ones.
        """
        if self.peers is None:
            return True
        waiting = [member for member in members if member.call is not None]
        try:
            return self.peers.same_left(waiting)
        except Exception as lost:
            if waiting:
                waiting[0].error = lost  # others will meet it in their turn
            return not waiting

    def open(self, passes: Passes, members: Sequence[Member]) -> None:
        """Let as many passes begin as there is room for; all members wait for that."""
        self.end()
        waiting: Sequence[Member] = [member for member in members if member.call is not None]
        admitted, error = self._room(passes, waiting)
        if self.peers is not None:
            try:
                admitted, error = self.peers.agree(waiting, admitted, error)
            except Exception as lost:
                error = lost
        if error is not None:
            self._replan.governor.let_run()  # what room was made for does not begin
            _refuse(waiting, error)
            return
        if admitted < len(waiting):
            self._replan.governor.give_back_spare()  # there may be room in the next round
        for member in waiting[:admitted]:
            member.call = None
            self._units.begin(id(member.state))
        if self._replan.settled:
            self._replan.governor.let_run()  # nothing is left that says when passes are over
            return
        log = self._own.log
        log.start_clock()
        self._round = log.pass_seconds, self._waited, admitted

    @property
    def _waited(self) -> float:
        """Seconds that were waited for disks and other ranks."""
        others = 0.0 if self.peers is None else self.peers.waited_seconds
        return self._streamer.stall_seconds + others

    def _room(self, passes: Passes, waiting: Sequence[Member]) -> tuple[int, Exception | None]:
        """For how many passes there is room here, the first ones; why there is not even for one."""
        calls = [member.call for member in waiting if member.call is not None]
        try:
            return passes.open_round(calls), None
        except Exception as error:
            return 0, error

    def pause(self) -> None:
        """Nobody runs for a while: count no time."""
        if self._round is not None:
            self._own.log.lap()

    def end(self) -> None:
        """All passes of a round are over."""
        if self._round is None:
            return
        (began, stalled, passes), self._round = self._round, None
        log = self._own.log
        log.lap()
        waited = self._waited - stalled
        self._computing.append(max(0.0, log.pass_seconds - began - waited) / passes)
        self._replan.pass_ended()
        self._replan.governor.after_pass()
        if not self._replan.settled:
            self._replan.drop_settled()


def _refuse(waiting: Sequence[Member], error: Exception) -> None:
    """Have one of them end where not even the first has room, or can begin."""
    newest = next((one for one in reversed(waiting[1:]) if one.passes), None)
    if isinstance(error, MemoryLimitError) and newest is not None:
        newest.error = GaveWayError(error)
    else:
        waiting[0].error = error  # others will meet it in their turn
