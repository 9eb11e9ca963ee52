"""Keeps two limits for a model on a device: that of the device's memory, and the process's.

[Note: what holds a device's limit] Before each pass residents yield to what it needs, as on the
host. Beside that the allocator itself is told the limit, where it takes one: it then gives back
what it keeps for later before it takes more, and refuses what is over it. So nothing is measured
between two blocks. An allocation that is refused ends that pass with torch's own OutOfMemoryError,
and the next pass begins clean.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING, Any, cast

from pipeload._sizes import format_size
from pipeload.budget.accounts import ACCOUNTANT, Accountant
from pipeload.budget.governor import MIN_STEP_BYTES, PATIENCE, STEPS, Governor
from pipeload.budget.out_of_memory import PassMemoryLimitError
from pipeload.devices.accounts import account_of, device_limit
from pipeload.devices.host_share import HostShare
from pipeload.devices.host_tier import choose_hosted, with_hosted
from pipeload.errors import MemoryLimitError
from pipeload.system.memory import parse_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from pipeload.budget.counters import Counters
    from pipeload.budget.make_plan import Build
    from pipeload.budget.pass_needs import PassNeeds
    from pipeload.budget.pass_shape import PassShape
    from pipeload.budget.plan import Plan, UnitPlan
    from pipeload.budget.reserve import PassHint
    from pipeload.devices.host_tier import Hosting
    from pipeload.devices.make_plan import DevicePlan
    from pipeload.devices.slots import DeviceSlot, SlotSize
    from pipeload.weights.device import Device


class DeviceGovernor(Governor):
    """One model's budget for residents and buffers on a device, in bytes."""

    def __init__(
        self,
        build: Build,
        needs: PassNeeds,
        hint: PassHint,
        counters: Counters,
        *,
        pressure: bool,
        size: SlotSize,
        slots: Sequence[DeviceSlot],
        hosting: Hosting,
    ) -> None:
        device = build.device
        assert device is not None  # noqa: S101 - only then there is such a governor
        self._device: Device = device
        self._account = account_of(device)
        self._size = size
        self.hosting = hosting
        self._inner_adopt: Callable[[Plan], bool] | None = None
        super().__init__(build, needs, hint, counters, pressure=pressure)
        plan = cast("DevicePlan", build.plan)
        self._slots = slots
        self._host = HostShare(self, slots)
        self.hosted_budget = plan.hosted_bytes
        self._recent_host: deque[int] = deque(maxlen=PATIENCE)
        self._fixed = plan.pinned_bytes
        self._spent = plan.floor_bytes + plan.reserve_bytes + plan.pinned_bytes
        self._spent -= self._account.promised_to_others(None)
        self._slack = plan.reserve_bytes - self._hint_need
        self._budget = self._cap(plan.memory_limit)

    @property
    def plan(self) -> Plan:
        """What is to be kept and streamed: in force once no pass is in the way."""
        return self._plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._plan = plan
        self._size.follow(plan.units)

    @property
    def device_plan(self) -> DevicePlan:
        """The same."""
        return cast("DevicePlan", self._plan)

    @device_plan.setter
    def device_plan(self, plan: DevicePlan) -> None:
        self.plan = plan

    @property
    def adopt(self) -> Callable[[Plan], bool] | None:
        """Puts a plan into force if no pass runs; set once somebody can."""
        return None if self._inner_adopt is None else self._adopt

    @adopt.setter
    def adopt(self, adopt: Callable[[Plan], bool] | None) -> None:
        self._inner_adopt = adopt

    def _adopt(self, plan: Plan) -> bool:
        """Buffers have their new size before the first unit comes into one."""
        self._size.follow(plan.units)
        adopted = self._inner_adopt is not None and self._inner_adopt(plan)
        if not adopted:
            self._size.follow(self.plan.units)
        return adopted

    # -- both accounts ---------------------------------------------------------------------------

    def join(self) -> None:
        """Count from now on."""
        plan = self.device_plan
        ACCOUNTANT.join(self._host, plan.host_memory_limit)
        self._account.join(self, plan.memory_limit)

    def leave(self) -> None:
        """Count no more."""
        ACCOUNTANT.leave(self._host)
        self._account.leave(self)

    def forget(self) -> bool:
        """In a forked child: count it no more. The device is left alone: it is the parent's."""
        ACCOUNTANT.leave(self._host)
        Accountant.leave(self._account, self)
        return False

    def set_limit(self, memory_limit: int | str, host_memory_limit: int | str | None) -> None:
        """Change the device's limit, for all models that stream to it, and the process's."""
        limit = device_limit(self._device, memory_limit)
        with self._account.lock:
            self._account.check_change(limit)  # before the other one has changed
            if host_memory_limit is not None:
                ACCOUNTANT.set_limit(parse_limit(host_memory_limit))
            self._account.set_limit(limit)

    def device_figures(self) -> dict[str, Any]:
        """What `Stats` shows of a device."""
        return {
            "device": str(self._device.where),
            "host_memory_limit": self.device_plan.host_memory_limit,
            "copied_bytes": sum(slot.copied_bytes for slot in self._slots),
            "peak_device_bytes": self._device.peak_bytes(),
            "locked": self.hosting.locked and all(slot.locked for slot in self._slots),
        }

    # -- Client of the device's account ----------------------------------------------------------

    def held_bytes(self) -> int:
        """Weights and buffers of this model on the device now."""
        buffers = sum(slot.device_bytes for slot in self._slots)
        return self.plan.pinned_bytes + self._counters.resident_bytes + buffers

    def _cap(self, limit: int, others: int | None = None) -> int:
        others = self._account.promised_to_others(self) if others is None else others
        return min(self._residency.everything, limit - self._spent - others)

    def _room(self, limit: int, other: int, others: int | None = None) -> int:
        others = self._account.promised_to_others(self) if others is None else others
        return limit - other - self._fixed - self._slack - others

    def look_around(self) -> None:
        """Control groups have no part in a device's memory."""

    # -- passes ----------------------------------------------------------------------------------

    def _before_pass(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], module: nn.Module | None
    ) -> None:
        self._need = need = self._needs.for_pass(args, kwargs, module)
        limit = self.plan.memory_limit
        room = self._room(limit, self._account.other_bytes()) - need
        if room < self._residency.smallest:
            room += self._account.reclaim(self, self._residency.smallest - room)
        if room < self._residency.smallest:
            shape = self._needs.shape(args, kwargs)
            if not (need <= self._hint_need and self._hint.covers(shape)):
                raise self._too_large(shape, room)
            room = self._residency.smallest
        self._running = True
        room = min(room, self._cap(limit), self._account.share(self, room))
        room = max(room, self._residency.smallest)
        self._recent.append(room)
        rehosted = self._look_at_host()
        before = self.plan
        self._aim(room)
        if rehosted and self.plan is before:
            self.plan = self._plan_for(self._budget)

    def _look_at_host(self) -> bool:
        """Measure what may stay in host memory; returns whether that is another amount now."""
        if not self.hosting.pays:
            return False
        limit = self.device_plan.host_memory_limit
        room, was = max(0, self._host.room(limit)), self.hosted_budget
        self._recent_host.append(room)
        if room < was:
            self.hosted_budget = room
        elif len(self._recent_host) == PATIENCE:
            least = min(self._recent_host)
            if least >= was + 2 * max(MIN_STEP_BYTES, limit // STEPS):
                self.hosted_budget = least
        return self.hosted_budget != was and not self.plan.fits

    def pass_bytes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """What such a pass would copy to the device now, read first or not; None: does not fit."""
        with self._account.lock:
            need = self._needs.for_pass(args, kwargs)
            limit = self.plan.memory_limit
            room = self._room(limit, self._account.other_bytes()) - need
            budget = min(room, self._cap(limit))
            fits = budget >= self._residency.smallest
            if not fits:
                return None
            return cast("DevicePlan", self._plan_for(budget)).link_bytes_per_pass

    def inside_pass(self) -> None:
        """See [Note: what holds a device's limit]."""

    def after_pass(self) -> None:
        """The pass is over."""
        self._running = False
        if not self._device.caps and self._device.reserved_bytes() > self.plan.memory_limit:
            self._device.trim()

    def check_limit(self, limit: int) -> None:
        """Whether another limit of the device holds this model beside what is there now.

        Raises:
            MemoryLimitError: it is too small; says one that works.
        """
        other, others = self._account.other_bytes(), self._account.least_of_others(self)
        room = min(self._cap(limit, others), self._room(limit, other, others))
        if room < self._residency.smallest:
            smallest = limit + self._residency.smallest - room
            raise MemoryLimitError(
                f"memory_limit={limit} bytes ({format_size(limit)}) of {self._device.where} is too "
                f"small for this model; {smallest} bytes ({format_size(smallest)}) work now.",
                limit=limit,
                smallest_limit=smallest,
                device=str(self._device.where),
            )

    def _take_limit(self, limit: int) -> None:
        room = min(self._cap(limit), self._room(limit, self._account.other_bytes()))
        self._recent.clear()
        self._budget = max(self._residency.smallest, self._account.share(self, room))
        self.plan = dataclasses.replace(self._plan_for(self._budget), memory_limit=limit)
        if self.adopt is not None and self.adopt(self.plan):
            self._gather()

    def _gather(self) -> None:
        """After residents went: what an allocator holds around those that stay may be over a limit.

        Allocators cut tensors of up to 10 MB out of segments that go back as a whole only.
        """
        self._device.trim()
        between = self._device.reserved_bytes() - self._device.allocated_bytes()
        if 2 * between > self._device.slack_bytes and self.adopt is not None:
            self.adopt(self._plan_for(self._residency.smallest))
            self._device.trim()
            self.adopt(self.plan)

    # -- arithmetic ------------------------------------------------------------------------------

    @property
    def _limit(self) -> int:
        return self.plan.memory_limit

    def _plan_for(self, budget: int) -> Plan:
        plan = cast("DevicePlan", super()._plan_for(budget))
        return self._with_hosted(plan, self.hosted_budget)

    def _with_hosted(self, plan: DevicePlan, budget: int) -> DevicePlan:
        """The plan with as much in host memory as that. Units that stay as they are keep theirs."""
        units = with_hosted(plan.units, choose_hosted(plan.units, budget))
        # See [Note: buffers of another size] in slots.py.
        resized = plan.slot_bytes != self.plan.slot_bytes
        units = tuple(
            old if not resized and _alike(old, new) else dataclasses.replace(new)
            for old, new in zip(self.plan.units, units, strict=True)
        )
        return dataclasses.replace(plan, units=units)

    def host(self, budget: int) -> bool:
        """Keep so much in host memory from now on; False when a pass is running."""
        budget = budget if self.hosting.pays else 0
        plan = self._with_hosted(self.device_plan, budget)
        if self.adopt is None or not self.adopt(plan):
            return False
        self.hosted_budget, self.plan = budget, plan
        return True

    def _too_large(self, shape: PassShape, room: int) -> MemoryLimitError:
        limit = self.plan.memory_limit
        free = max(0, room + self._need - self._residency.smallest)
        wanted = limit + self._residency.smallest - room
        prompt = (
            ""
            if shape.sizes
            else "; the longest prompt that fits at this batch is "
            f"{self._needs.longest_tokens(free, shape.batch)} tokens"
        )
        return PassMemoryLimitError(
            f"this pass ({shape}) needs "
            f"{self._need} bytes ({format_size(self._need)}) on {self._device.where} beside the "
            f"weights, and with nothing resident {free} ({format_size(free)}) are free within "
            f"memory_limit={limit}: it would run out of memory. A limit of {wanted} bytes "
            f"({format_size(wanted)}) makes this one fit{prompt}.",
            limit=limit,
            smallest_limit=wanted,
            device=str(self._device.where),
        )


def _alike(one: UnitPlan, other: UnitPlan) -> bool:
    """Whether both keep and stream the same, in the same places."""
    same = one.streamed is other.streamed and one.hosted == other.hosted
    pairs = zip(one.resident, other.resident, strict=False)
    same = same and len(one.resident) == len(other.resident)
    return same and all(mine is its for mine, its in pairs)
