"""Decides, before every pass and inside it, how much of one model may stay in memory.

[Note: who yields] A pass needs what it needs, and so does the user's code; weights are the only
thing that can be had again from the disk. So residents yield to both, before the need and not after
it, down to nothing; only then is a pass refused. They come back as they stream by, which costs no
read of its own. When they come back is the policy's to say; what is there, the ledger's.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

from pipeload.budget import limit_errors
from pipeload.budget.eviction_policy import Patience
from pipeload.budget.ledger import TooLarge
from pipeload.budget.pass_shape import PassShape
from pipeload.budget.passes_in_turns import Called, needs_in_turns
from pipeload.budget.plan_for_limit import Planner
from pipeload.system.memory import PeakSince

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from pipeload.budget.ledger import Ledger
    from pipeload.budget.make_plan import Build
    from pipeload.budget.pass_needs import PassNeeds
    from pipeload.budget.passes_in_turns import Call
    from pipeload.budget.plan import Plan
    from pipeload.budget.reserve import PassHint

_SPARE_BYTES = 16_000_000
"""At each round in which somebody waits."""


class Governor:
    """One model's budget for residents and buffers, in bytes: an `Owner` of its ledger."""

    name = "a model"

    def __init__(self, build: Build, needs: PassNeeds, hint: PassHint, ledger: Ledger) -> None:
        self.ledger, self._planner = ledger, Planner(build, ledger)
        self._plan = build.plan
        self.adopt: Callable[[Plan], bool] | None = None
        """Puts a plan into force if no pass runs; set once somebody can."""
        self.peak = PeakSince()
        self._needs = needs
        self._hint, self._hint_need = hint, hint.pass_bytes(needs)
        self._budget = self._cap(build.plan.memory_limit)
        self._patience = Patience()
        self._need, self._running = 0, False
        self._granted = 0
        """The most that a pass was granted in full, at this limit."""

    @property
    def plan(self) -> Plan:
        """What is to be kept and streamed: in force once no pass is in the way."""
        return self._plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._plan = plan
        self.ledger.follow(plan)

    def join(self) -> None:
        """Have the model counted from now on."""
        self.ledger.join(self)

    def put_into_force_by(self, adopt: Callable[[Plan], bool]) -> None:
        """Have plans put into force by the method `adopt`, as long as its object lives."""
        self.adopt = _weakly(adopt)  # of whoever holds this governor

    def leave(self) -> None:
        """Have it counted no more. May be called again."""
        self.ledger.leave(self)

    def forget(self) -> bool:
        """In a forked child: count it no more. Whether its memory can be given back there."""
        return self.ledger.forget(self)

    def held_bytes(self) -> int:
        """Weights and buffers of this model in memory now."""
        return self.ledger.held_bytes(self._plan)

    def promised_bytes(self) -> int:
        """What it may come to hold."""
        return max(self.held_bytes(), self.ledger.fixed_bytes + self.budget)

    def least_bytes(self) -> int:
        """What it holds with nothing resident that can be streamed."""
        return self.ledger.fixed_bytes + self._planner.smallest

    def running_bytes(self) -> int:
        """What its running pass was granted."""
        return self._need if self._running else 0

    @property
    def budget(self) -> int:
        """What residents and buffers may take."""
        return min(self._budget, self._planner.everything)

    @property
    def wants(self) -> tuple[int, int]:
        """The least and the most that residents and buffers can make use of."""
        return self._planner.smallest, self._planner.everything

    def shrink(self, budget: int) -> bool:
        """Give back down to `budget`, now; False when a pass is running."""
        with self.ledger.account.lock:
            budget = max(budget, self._planner.smallest)
            if not self.put_into_force(self._plan_for(budget)):
                return False
            self._budget = budget
            return True

    def look_around(self) -> None:
        """Give back what the control group does not allow any more, if no pass is running.

        One that is running looks by itself.
        """
        room = self._room(self._limit, self.ledger.account.other_bytes())
        if room < self._budget > self._planner.smallest:
            self.shrink(room)

    def before_pass(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], module: nn.Module | None = None
    ) -> None:
        """Make room for a pass with these arguments: `plan` is to be in force before it runs.

        `module`: what is called, if it is a part of the model.

        Raises:
            MemoryLimitError: it does not fit even with nothing resident.
        """
        self.before_passes([Called(module, args, kwargs)])

    def before_passes(self, calls: Sequence[Call]) -> int:
        """Make room for passes that take turns, for as many of the first ones as there is room for.

        Returns how many they are, at least one.

        Raises:
            MemoryLimitError: the first does not fit even with nothing resident.
        """
        ledger, planner = self.ledger, self._planner
        account, smallest = ledger.account, planner.smallest
        with account.lock:
            needs = needs_in_turns(self._needs, calls)
            account.note_pass(self)
            other = ledger.begin_pass(self.held_bytes())
            self.peak.look(ledger.process_bytes)
            in_force = ledger.limit_in_force(self._plan.memory_limit)
            others = account.promised_to_others(self)
            room = planner.room(in_force, other, others)
            admitted = max(1, sum(ledger.corrected(need) <= room - smallest for need in needs))
            need = needs[admitted - 1]
            self._need = ledger.corrected(need)
            room -= self._need
            if room < smallest:
                room += account.reclaim(self, smallest - room)
            if room < smallest:
                args, kwargs = calls[0].args, calls[0].kwargs
                shape, limit = self._needs.shape(args, kwargs), self._plan.memory_limit
                # What the process took on during some pass, for whatever reason, revokes no promise
                # as long as the limit holds: what is set aside for that is there to be used.
                promised = need <= self._hint_need and self._hint.covers(shape)
                # So with one that is no larger than what ran: who looked for the batch that just
                # fits has found one.
                asked = need if promised else self._need
                least = self._others() + self.least_bytes() + asked
                promised = promised or self._need <= self._granted
                if not promised or not ledger.allows(least, limit):
                    free = ledger.uncorrected(room + self._need - smallest)
                    found = TooLarge(shape, self._need, free, planner.wanted(limit, room))
                    ledger.refuse_pass(found, self._needs, limit)
                room = smallest
            elif self._need > self._granted:
                self._granted = self._need
            self._running = True
            shared, others = account.share(self, room), account.promised_to_others(self)
            room = max(smallest, min(room, planner.cap(in_force, others), shared))
            self._patience.note(room)
            changed, before = ledger.look_beside(), self._plan
            self._aim(room)
            if changed and self._plan is before:
                self.plan = self._plan_for(self._budget)
            return admitted

    def pass_bytes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """What a pass with these arguments would move now; None where it does not fit.

        Read from disk, or on a device what is copied there, read first or not. In bytes.
        """
        with self.ledger.account.lock:
            room = self._room(self._limit, self.ledger.account.other_bytes())
            room -= self.pass_need(args, kwargs)
            budget = min(room, self._cap(self._limit))
            if budget < self._planner.smallest:
                return None
            return self.ledger.moved_bytes(self._plan_for(budget))

    def pass_need(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """What a pass with these arguments takes, in bytes."""
        with self.ledger.account.lock:  # it may try what a pass that begins is trying
            return self.ledger.corrected(self._needs.for_pass(args, kwargs))

    def spare_bytes(self) -> int:
        """What passes and caches may take now, if nothing is resident."""
        with self.ledger.account.lock:
            room = self._room(self._limit, self.ledger.account.other_bytes())
            return room - self._planner.smallest

    def bytes_alone(self, prompt: int, tokens: int, batch: int) -> tuple[int, int]:
        """What the cache of `batch` sequences of `tokens` takes, and the pass of any prompts."""
        with self.ledger.account.lock:  # as above
            first = self._needs.for_shape(PassShape(prompt, batch)) if prompt else 0
            return self._needs.cache_bytes(tokens, batch), first

    def give_back_spare(self) -> None:
        """Have some go of what is kept for speed alone: somebody waits for memory."""
        account = self.ledger.account
        with account.lock:
            if account.spare is not None:
                account.spare(_SPARE_BYTES)

    def inside_pass(self) -> None:
        """Look again before a site runs: somebody else may have taken memory meanwhile."""
        ledger, account = self.ledger, self.ledger.account
        if not ledger.looks_inside:
            return
        with account.lock:
            other = ledger.inside_pass()
            self.peak.look(ledger.process_bytes)
            limit = ledger.limit_in_force(self._plan.memory_limit)
            room = self._planner.room(limit, other, account.promised_to_others(self))
            if room < self._patience.latest:  # this pass allows no more, whatever it began with
                self._patience.lower(room)
            if room < self._budget > self._planner.smallest:
                self._aim(max(room, self._planner.smallest))

    def make_room(self, nbytes: int, name: str) -> None:
        """Have `nbytes` be free beside what the running pass still needs, for module `name`.

        Raises:
            MemoryLimitError: they are not even with nothing resident.
        """
        with self.ledger.account.lock:
            other = self.ledger.account.other_bytes()
            pending = max(0, self._need - self.ledger.taken_by_pass(other))
            room = self._room(self._limit, other) - pending - nbytes
            if room < self._planner.smallest:
                room += self.ledger.account.reclaim(self, self._planner.smallest - room)
            if room < self._planner.smallest:
                limit = self.plan.memory_limit
                wanted = self._planner.wanted(limit, room)
                raise limit_errors.weight_needed_whole(name, nbytes, limit, wanted)
            self._patience.lower(room)
            if room < self._budget:
                self._aim(room)

    def after_pass(self) -> None:
        """The pass is over, whatever became of it."""
        self._running = False
        self.ledger.end_pass(self._need, self.held_bytes(), self._plan.memory_limit)

    def let_run(self) -> None:
        """The pass begins, and nobody will say that it is over: nothing is set aside for it."""
        self._running = False

    def check_limit(self, limit: int) -> None:
        """Whether another limit holds this model beside what is there now.

        Raises:
            MemoryLimitError: it is too small; says one that works.
        """
        account, planner = self.ledger.account, self._planner
        other, others = account.other_bytes(), account.least_of_others(self)
        # What a running pass took is gone after it; what it was granted may not be taken yet.
        other -= min(self.ledger.taken_by_pass(other), self.running_bytes())
        room = min(planner.cap(limit, others), planner.room(limit, other, others))
        if room < planner.smallest:
            smallest = planner.wanted(limit, room)
            raise limit_errors.new_limit_too_small(limit, smallest, self.ledger.device)

    def take_limit(self, limit: int) -> None:
        """Plan for another limit; what is over it goes now, or before the next site of a pass."""
        account = self.ledger.account
        with account.lock:
            self.ledger.take_limit(limit)
            room = min(self._cap(limit), self._room(limit, account.other_bytes()))
            self._patience.forget()
            self._granted = 0
            self._budget = max(self._planner.smallest, account.share(self, room))
            self.plan = dataclasses.replace(self._plan_for(self._budget), memory_limit=limit)
            if self._force(self.plan) and self.ledger.trim():
                self._force(self._plan_for(self._planner.smallest))
                self.ledger.trim()
                self._force(self.plan)

    def put_into_force(self, plan: Plan) -> bool:
        """Have that plan from now on; False when a pass is running."""
        forced = self._force(plan)
        if forced:
            self.plan = plan
        return forced

    def _force(self, plan: Plan) -> bool:
        """Have units be as a plan says; False when a pass is running, and nobody minds."""
        if self.adopt is None:
            return False
        self.ledger.follow(plan)  # before the first unit comes
        adopted = self.adopt(plan)
        if not adopted:
            self.ledger.follow(self.plan)
        return adopted

    @property
    def _limit(self) -> int:
        return self.ledger.limit_in_force(self.plan.memory_limit)

    def _others(self) -> int:
        return self.ledger.account.promised_to_others(self)

    def _cap(self, limit: int) -> int:
        return self._planner.cap(limit, self._others())

    def _room(self, limit: int, other: int) -> int:
        return self._planner.room(limit, other, self._others())

    def _plan_for(self, budget: int) -> Plan:
        return self._planner.plan_for(budget, self.plan)

    def _aim(self, room: int) -> None:
        limit = self._plan.memory_limit
        target = self._patience.aim(room, self._budget, lambda: self._cap(self._limit), limit)
        target = max(self._budget if target is None else target, self._planner.smallest)
        if target != self._budget:
            self.plan, self._budget = self._plan_for(target), target


def _weakly(adopt: Callable[[Plan], bool]) -> Callable[[Plan], bool]:
    reference = weakref.WeakMethod(adopt)

    def adopt_weakly(plan: Plan) -> bool:
        return (method := reference()) is not None and method(plan)

    return adopt_weakly
