"""What limits leave for one model's residents and buffers, and the plans that this buys."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeload.budget.ledger import Ledger
    from pipeload.budget.make_plan import Build
    from pipeload.budget.plan import Plan


class Planner:
    """Arithmetic alone, with what was planned when the model was loaded. Sizes in bytes."""

    def __init__(self, build: Build, ledger: Ledger) -> None:
        plan = build.plan
        self._residency, self._ledger = build.residency, ledger
        self.smallest, self.everything = build.residency.smallest, build.residency.everything
        """The least that residents and buffers need, and the most that they can make use of."""
        # A model that fitted may have been mapped; what streams later is read.
        self._whole_mode, self._streaming_mode = plan.io_mode, build.stream_mode
        self._spent = plan.floor_bytes + plan.reserve_bytes + plan.pinned_bytes + plan.scratch_bytes
        self._spent -= ledger.tables_bytes(plan.memory_limit)
        self._spent -= ledger.account.promised_to_others(None)

    def cap(self, limit: int, others: int) -> int:
        """The most that a budget may be under a limit, beside what others are promised.

        More than was planned for the hint is never taken: the hint's memory stays free.
        """
        left = limit - self._ledger.tables_bytes(limit) - self._spent - others
        return min(self.everything, left)

    def room(self, limit: int, other: int, others: int) -> int:
        """What is there for residents, buffers and a pass, if everybody else keeps theirs.

        `other` is measured, `others` is promised.
        """
        taken = self._ledger.taken_bytes(limit, other)
        return limit - taken - self._ledger.fixed_bytes - others

    def wanted(self, limit: int, room: int) -> int:
        """The limit with which `room` would be just enough."""
        short = self.smallest - room
        return self._ledger.limit_for(limit - self._ledger.tables_bytes(limit) + short)

    def plan_for(self, budget: int, before: Plan) -> Plan:
        """What a budget of at least `smallest` buys, after the plan `before`."""
        choice = self._residency.choose(budget)
        assert choice is not None  # noqa: S101 - nobody asks for less than the smallest
        units = self._residency.plans(choice)
        streams = any(unit.streamed.nbytes for unit in units)
        experts = before.experts
        if experts is not None:
            experts = dataclasses.replace(experts, cache_bytes=choice.cache_bytes)
            streams = streams or not experts.fits
        io_mode = self._streaming_mode if streams else self._whole_mode
        plan = dataclasses.replace(before, units=units, io_mode=io_mode, experts=experts)
        return self._ledger.complete(plan, before)
