"""Many passes that share one reading of the weights: a convoy.

[Note: how a convoy runs] Each member is a thread in a call of its own, of `generate` say, and each
computes alone, so that its bits are those of a run alone. They take turns: a member has its turn
until a site has run, or a range of rows of one; then the next one runs the same site with the same
weights, and when all have, these go. Turns are given, not taken: the one that ends its turn wakes
the next, so that nothing that a pass relies on is ever used by two at once.

Members begin their passes together, in a round: what plans, measures or lets go of hooks is done
when all of them wait for one. Those whose pass does not fit beside the others' wait for a later
one; the newest gives up what it has, and may be begun again, where the oldest could not go on.

Between the outcomes that a caller waits for, nobody runs: the caller's own random numbers, and
whatever else it does with the model, are then as they would be without.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeload.engine.convoy_members import Callers, Member, Party, forget_locals, outcome_after
from pipeload.engine.convoy_rounds import Rounds
from pipeload.engine.pass_state import Running
from pipeload.engine.shared_units import SharedUnits
from pipeload.engine.thread_context import RandomNumbers, ThreadContext, modules_outside
from pipeload.errors import UnsupportedOperationError
from pipeload.system.memory import share_one_heap

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeload.engine.convoy_rounds import Passes
    from pipeload.engine.direct_calls import PassCall
    from pipeload.engine.pass_state import PassState
    from pipeload.engine.replan import Replan
    from pipeload.engine.streamer import Streamer

_TICK_SECONDS = 0.5


class Convoy:
    """The members that run one model together. See [Note: how a convoy runs]."""

    def __init__(self, own: PassState, streamer: Streamer, replan: Replan) -> None:
        """`own` is where passes stand that take no turns."""
        self._own, self._streamer, self._replan = own, streamer, replan
        self._units = SharedUnits(streamer, replan.prefetcher)
        # Guards who is there, who has the turn, and who waits. All else is that one's who has it.
        self._lock = threading.Lock()
        self._members: list[Member] = []
        """The oldest first."""
        self._by_thread: dict[int, Member] = {}
        self._turn: Member | None = None
        self._callers = Callers()
        self._is_wanted = False
        """Whether a pass that is no member's waits for the end of all."""
        self.active = False
        """Whether other passes are kept from beginning."""
        self._passes: Passes | None = None
        """Held while there are members: it holds this."""
        self._outside: RandomNumbers | None = None
        """Those of the process, while a member has its turn."""
        self.rounds = Rounds(own, streamer, replan, self._units)
        self.started = 0
        """Members so far, by which they are numbered."""
        self.handed_over = 0
        """How often one has let the others have their turns."""

    def anew(self) -> Convoy:
        """One that has no members, in a forked child: those of this one are not there."""
        streamer, source = self._streamer, self._replan.prefetcher
        streamer.now, streamer.source, streamer.hand_over = self._own, source, None
        return Convoy(self._own, streamer, self._replan)

    # -- what callers ask ------------------------------------------------------------------------

    def state_of_thread(self) -> PassState:
        """Where the calling thread's passes stand."""
        member = self._by_thread.get(threading.get_ident()) if self.active else None
        return self._own if member is None else member.state

    def has_turn(self) -> bool:
        """Whether the calling thread is the member whose turn it is."""
        return self.active and threading.get_ident() in self._by_thread

    @property
    def threads(self) -> frozenset[int]:
        """Those of members, by their identity: where they wait, they have computed nothing yet."""
        return frozenset(self._by_thread)

    def start(
        self, party: Party, passes: Passes, work: Callable[[], Any], *, seed: int, name: str
    ) -> Member:
        """Have a thread called `name` do `work`, which calls the model, once somebody waits.

        `seed`: of its random numbers.

        Raises:
            RuntimeError: the system gives no thread.
        """
        share_one_heap()
        model = passes.model
        device = getattr(model, "device", None)
        context = ThreadContext(RandomNumbers(device, seed), modules_outside(model))
        self.started += 1
        member = Member(party, self._own.twin(), context, self.started)

        def run() -> None:
            with self._lock:
                self._members.append(member)
                self._by_thread[threading.get_ident()] = member
                self._passes = passes
                self._own.log.open_for(member.state.log)
                if party.closed:  # an interrupt came before: the one that waits has looked already
                    self._resume()
            member.entered.set()
            member.wake.acquire()
            self._travel(member, work)

        thread = threading.Thread(target=run, name=name, daemon=True)
        party.threads = [*filter(threading.Thread.is_alive, party.threads), thread]
        thread.start()
        member.entered.wait()
        return member

    def outcome(self, party: Party) -> tuple[Member, Any]:
        """Have members run until one of the party's ends: that one, and what came of it.

        Raises:
            UnsupportedOperationError: the caller is in a pass, which they would wait for.
        """
        if self._is_inside_call():
            raise UnsupportedOperationError(
                "results of generate_many() are waited for from inside a call of the same model, "
                "which the requests wait for in their turn. Take them outside of that call."
            )
        with contextlib.suppress(queue.Empty):
            return party.outcomes.get_nowait()
        with self._lock:
            self._callers.wait_for(party)
            self._resume()
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    return party.outcomes.get(timeout=_TICK_SECONDS)
        finally:
            with self._lock:
                self._callers.serve(party)

    def close(self, party: Party) -> None:
        """Have the party's members end, each at its next turn; returns when they have.

        Inside a call of the model, which they wait for, it returns at once.
        """
        party.closed = True
        if not any(map(threading.Thread.is_alive, party.threads)):
            return  # without the lock: whoever has it may be collecting a forgotten iterator
        with self._lock:
            self._resume()
        for thread in [] if self._is_inside_call() else party.threads:
            if thread.ident is not None:  # else the system gave none
                thread.join()

    def _is_inside_call(self) -> bool:
        gate = self._own.gate
        return self.has_turn() or (gate.owned() and not gate.died())

    def run_to_the_end(self) -> None:
        """Have members run, whoever waits for them, until all have ended."""
        with self._lock:
            if self._members:
                self._is_wanted = True
                self._resume()

    def _resume(self) -> None:
        if self._turn is None and self._members:
            self._give_turn(self._next(len(self._members) - 1))

    # -- what the member calls whose turn it is --------------------------------------------------

    def hand_over(self) -> None:
        """Let the others have their turns; nothing is in use that only this one knows of."""
        if (me := self._turn) is not None:
            self.handed_over += 1
            with self._lock:
                following = self._next(self._members.index(me))
            if following is not me:
                self._switch(me, following)
            me.check()

    def arrive(self, call: PassCall) -> bool:
        """Wait for a round in which there is room for this pass; False in a thread of no member.

        Raises:
            MemoryLimitError: there is none, whoever else gives way.
        """
        me = self._by_thread.get(threading.get_ident()) if self.active else None
        if me is None:
            return False
        self.leave_round()  # with a pass of which nobody has said that it was over
        me.call = call._replace(first=not me.passes)
        while me.call is not None:
            me.check(begins=True)
            with self._lock:
                following = self._next(index := self._members.index(me))
            if not following.can_run and not self.rounds.same_left(self._members):
                continue
            with self._lock:
                if resting := bool(self._callers.untold) and not following.can_run:
                    me.context.take_off()
                    self._tell(index)
            if resting:
                me.wake.acquire()
                self._take_turn(me)
                continue
            if not following.can_run:
                assert self._passes is not None  # noqa: S101 - as long as there are members
                self.rounds.open(self._passes, self._members)
                with self._lock:
                    following = self._next(-1)
            if following is not me:
                self._switch(me, following)
        me.check()
        me.passes += 1
        return True

    def leave_round(self) -> None:
        """The pass is over of whose turn it is."""
        self.rounds.leave(self._streamer.now)

    def _next(self, index: int) -> Member:
        """Whose turn follows that of a member by its place; where all wait, the next of them."""
        ring = self._members[index + 1 :] + self._members[: index + 1]
        return next((member for member in ring if member.can_run), ring[0])

    def _give_turn(self, member: Member) -> None:
        self._turn = member
        member.wake.release()

    def _switch(self, me: Member, following: Member) -> None:
        me.context.take_off()
        self._give_turn(following)
        me.wake.acquire()
        self._take_turn(me)

    def _take_turn(self, me: Member) -> None:
        if not self.active:
            self._begin()
        if self._outside is None:
            self._outside = RandomNumbers(me.context.device)
            self._own.log.start_clock()
        self._streamer.now = me.state
        me.context.put_on()

    # -- the life of a member, and of all --------------------------------------------------------

    def _travel(self, me: Member, work: Callable[[], Any]) -> None:
        try:
            self._take_turn(me)
            me.check()
            outcome = work()
        except BaseException as error:  # whoever waits gets it
            forget_locals(error)
            outcome = error
        self._leave(me, outcome)

    def _leave(self, me: Member, outcome: Any) -> None:
        outcome = outcome_after(partial(self._give_back, me), outcome)
        with self._lock:
            index = self._members.index(me)
            del self._members[index], self._by_thread[threading.get_ident()]
            self._own.log.close_for(me.state.log)
            over = not self._members
        while over and not self.rounds.same_left([]):
            pass  # on another rank some are to end yet
        if over:
            outcome = outcome_after(self._end, outcome)
        with self._lock:
            self._callers.untold.append((me, outcome))
        while not over:
            with self._lock:
                following = self._next(index - 1)
                if self.rounds.peers is not None and following.can_run:
                    # Elsewhere others may end first: they are told of in order, after the round.
                    self._give_turn(following)
                    return
            if self.rounds.same_left(self._members):
                break
        with self._lock:
            self._tell(index - 1)

    def _tell(self, index: int) -> None:
        """Give callers what has ended, the oldest first; the next one goes on if anyone waits."""
        go_on = self._callers.wait_for_more() or self._is_wanted
        go_on = go_on or any(member.party.closed for member in self._members)
        if not go_on:
            self._come_outside()
        self._callers.tell()
        self._turn = None
        if go_on and self._members:
            self._give_turn(self._next(index))

    def _give_back(self, me: Member) -> None:
        state = me.state
        died = state.inside or state.held or state.running is not Running.NOTHING
        try:
            if self._passes is not None and died:
                self._passes.recover()  # it died where no hook runs
            state.modes.discard()
            self.rounds.leave(state)
        finally:
            me.context.take_off()

    def _come_outside(self) -> None:
        """Have the process's own random numbers there, and count no time: nobody runs."""
        if self._outside is not None:
            self._outside.restore()
            self._outside = None
            self.rounds.pause()

    def _begin(self) -> None:
        """Keep other passes from beginning, once the one that runs is over."""
        self._own.gate.hold(self.run_to_the_end)
        try:
            if self._passes is not None:
                self._passes.rest()
        except BaseException:
            self._own.gate.let_go()  # the next member begins, and would wait for this one
            raise
        self._streamer.source, self._streamer.hand_over = self._units, self.hand_over
        self.active = True

    def _end(self) -> None:
        """Nobody is left: let others' passes begin."""
        try:
            self.rounds.end()
        finally:
            streamer = self._streamer
            streamer.source, streamer.hand_over = self._replan.prefetcher, None
            streamer.now, self.active = self._own, False
            with self._lock:
                self._is_wanted = False
                if not self._members:  # else one has come meanwhile
                    self._passes = None
            self._come_outside()
            self._own.gate.let_go()
