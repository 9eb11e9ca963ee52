"""The host memory of a model that streams to a device, for the process's accountant."""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING

from pipeload.budget import limit_errors
from pipeload.budget.eviction_policy import Patience, step_bytes
from pipeload.budget.reserve import KERNEL_BYTES, WARM_UP_BYTES, limit_for, page_table_bytes
from pipeload.budget.shared_limit import ACCOUNTANT
from pipeload.devices.host_tier import host_within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeload.budget.device_in_plan import DeviceShare
    from pipeload.budget.ledger import Owner
    from pipeload.budget.plan import Plan, UnitPlan
    from pipeload.devices.device_buffers import DeviceSlot
    from pipeload.devices.host_tier import Hosting


def share_of(plan: Plan) -> DeviceShare:
    """What a plan for a device has beside the device's own figures."""
    share = plan.device_share
    assert share is not None  # noqa: S101 - the plan is a device's
    return share


class HostShare:
    """What a model on a device holds in host memory: a `Client` of the process's accountant.

    Units that stay there can be given back; staging and scratch cannot.
    """

    def __init__(self, plan: Plan, hosting: Hosting, slots: Sequence[DeviceSlot]) -> None:
        self._hosting, self._slots = hosting, slots
        self._owner: weakref.ref[Owner] | None = None
        self._patience = Patience()
        self.budget = plan.hosted_bytes
        """What units may take that stay in host memory, in bytes."""

    def serve(self, owner: Owner) -> None:
        """Have it be this one's, which holds it."""
        self._owner = weakref.ref(owner)

    @property
    def _governor(self) -> Owner:
        governor = None if self._owner is None else self._owner()
        assert governor is not None  # noqa: S101 - it holds this
        return governor

    @property
    def name(self) -> str:
        """What the model is called in errors."""
        return self._governor.name

    @property
    def plan(self) -> Plan:
        """The plan of the model's governor."""
        return self._governor.plan

    @property
    def wants(self) -> tuple[int, int]:
        """Nothing, or all that is streamed."""
        if not self._hosting.pays:
            return 0, 0
        return 0, sum(unit.streamed.nbytes for unit in self.plan.units)

    def held_bytes(self) -> int:
        """Staging, scratch and units that are in host memory now."""
        slots = sum(slot.host_bytes for slot in self._slots)
        return share_of(self.plan).staging_scratch_bytes + slots + self._hosting.held_bytes

    def promised_bytes(self) -> int:
        """What it may come to hold."""
        return max(self.held_bytes(), self.least_bytes() + self.plan.hosted_bytes)

    def least_bytes(self) -> int:
        """Staging, as it is or as it will be, and scratch."""
        there = sum(slot.host_bytes for slot in self._slots)
        return share_of(self.plan).staging_scratch_bytes + max(there, self.plan.staging_bytes)

    def running_bytes(self) -> int:
        """Nothing: a pass takes its memory on the device."""
        return 0

    def room(self, limit: int) -> int:
        """What may stay in host memory, measured now."""
        share = share_of(self.plan)
        overhead = KERNEL_BYTES + page_table_bytes(limit) + self.least_bytes()
        overhead += share.host_conversion_bytes
        others = ACCOUNTANT.promised_to_others(self)
        # It will be that much soon.
        floor = share.host_floor_bytes + WARM_UP_BYTES + share.host_slack_bytes
        return limit - max(ACCOUNTANT.other_bytes(), floor) - overhead - others

    def look(self) -> bool:
        """Measure what may stay in host memory; whether that is another amount now."""
        if not self._hosting.pays:
            return False
        limit = share_of(self.plan).host_memory_limit
        room, was = max(0, self.room(limit)), self.budget
        self._patience.note(room)
        allowed = self._patience.allowed
        if room < was:
            self.budget = room
        elif allowed is not None and allowed >= was + 2 * step_bytes(limit):
            self.budget = allowed
        return self.budget != was and not self.plan.fits

    def complete(self, plan: Plan, before: Plan, budget: int | None = None) -> Plan:
        """The plan with as much in host memory as that, after the plan `before`.

        Units that stay as they are keep theirs. `budget`: in bytes; the one in force if None.
        """
        units = host_within(plan.units, self.budget if budget is None else budget)
        # See [Note: buffers of another size] in device_buffers.py.
        resized = plan.slot_bytes != before.slot_bytes
        units = tuple(
            old if not resized and _alike(old, new) else dataclasses.replace(new)
            for old, new in zip(before.units, units, strict=True)
        )
        return dataclasses.replace(plan, units=units)

    def shrink(self, budget: int) -> bool:
        """Keep so much in host memory from now on; False when a pass is running."""
        budget = budget if self._hosting.pays else 0
        governor = self._governor
        if not governor.put_into_force(self.complete(governor.plan, governor.plan, budget)):
            return False
        self.budget = budget
        return True

    def check_limit(self, limit: int) -> None:
        """Whether another limit of the process holds this model's staging.

        Raises:
            MemoryLimitError: it does not; says one that does.
        """
        room = self.room(limit)
        if room < 0:
            smallest = limit_for(limit - page_table_bytes(limit) - room)
            device = share_of(self.plan).device
            raise limit_errors.new_limit_below_staging(limit, smallest, device)

    def take_limit(self, limit: int) -> None:
        """Keep what it holds, as far as another limit of the process allows."""
        share = dataclasses.replace(share_of(self.plan), host_memory_limit=limit)
        self._governor.plan = dataclasses.replace(self.plan, device_share=share)
        self.shrink(max(0, self.room(limit)))


def _alike(one: UnitPlan, other: UnitPlan) -> bool:
    """Whether both keep and stream the same, in the same places."""
    same = one.streamed is other.streamed and one.hosted == other.hosted
    pairs = zip(one.resident, other.resident, strict=False)
    same = same and len(one.resident) == len(other.resident)
    return same and all(mine is its for mine, its in pairs)
