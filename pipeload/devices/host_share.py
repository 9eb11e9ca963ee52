"""The host memory of a model that streams to a device, for the process's accountant."""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Protocol

from pipeload._sizes import format_size
from pipeload.budget.accounts import ACCOUNTANT
from pipeload.budget.reserve import KERNEL_BYTES, WARM_UP_BYTES, limit_for, page_table_bytes
from pipeload.errors import MemoryLimitError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeload.budget.device_share import DeviceShare
    from pipeload.budget.plan import Plan
    from pipeload.devices.host_tier import Hosting
    from pipeload.devices.slots import DeviceSlot


class Owner(Protocol):
    """Whose host memory it is."""

    name: str
    plan: Plan
    """What is to be kept and streamed."""
    hosting: Hosting
    hosted_budget: int
    """What units may take that stay in host memory, in bytes."""

    def host(self, budget: int) -> bool:
        """Keep so much in host memory from now on; False when a pass is running."""


class HostShare:
    """What a model on a device holds in host memory: a `Client` of the process's accountant.

    Units that stay there can be given back; staging and scratch cannot.
    """

    def __init__(self, owner: Owner, slots: Sequence[DeviceSlot]) -> None:
        self._owner = weakref.ref(owner)
        self._slots = slots

    @property
    def _governor(self) -> Owner:
        governor = self._owner()
        assert governor is not None  # noqa: S101 - it holds this
        return governor

    @property
    def name(self) -> str:
        """The owner's."""
        return self._governor.name

    @property
    def plan(self) -> Plan:
        """The owner's."""
        return self._governor.plan

    @property
    def _share(self) -> DeviceShare:
        share = self.plan.device_share
        assert share is not None  # noqa: S101 - the owner's is a device's
        return share

    @property
    def budget(self) -> int:
        """What stays in host memory may take."""
        return self._governor.hosted_budget

    @property
    def wants(self) -> tuple[int, int]:
        """Nothing, or all that is streamed."""
        if not self._governor.hosting.pays:
            return 0, 0
        return 0, sum(unit.streamed.nbytes for unit in self.plan.units)

    def held_bytes(self) -> int:
        """What is there now."""
        hosted = self._governor.hosting.held_bytes
        slots = sum(slot.host_bytes for slot in self._slots)
        return self._share.staging_scratch_bytes + slots + hosted

    def promised_bytes(self) -> int:
        """What it may come to hold."""
        return max(self.held_bytes(), self.least_bytes() + self.plan.hosted_bytes)

    def least_bytes(self) -> int:
        """Staging, as it is or as it will be, and scratch."""
        there = sum(slot.host_bytes for slot in self._slots)
        return self._share.staging_scratch_bytes + max(there, self.plan.staging_bytes)

    def running_bytes(self) -> int:
        """A pass takes its memory on the device."""
        return 0

    def room(self, limit: int) -> int:
        """What may stay in host memory, measured now."""
        overhead = KERNEL_BYTES + page_table_bytes(limit) + self.least_bytes()
        overhead += self._share.host_conversion_bytes
        others = ACCOUNTANT.promised_to_others(self)
        # It will be that much soon.
        floor = self._share.host_floor_bytes + WARM_UP_BYTES + self._share.host_slack_bytes
        return limit - max(ACCOUNTANT.other_bytes(), floor) - overhead - others

    def shrink(self, budget: int) -> bool:
        """Give back down to `budget` now; False when a pass is running."""
        return self._governor.host(budget)

    def check_limit(self, limit: int) -> None:
        """Whether another limit of the process holds this model's staging.

        Raises:
            MemoryLimitError: it does not; says one that does.
        """
        room = self.room(limit)
        if room < 0:
            need = limit_for(limit - page_table_bytes(limit) - room)
            raise MemoryLimitError(
                f"host_memory_limit={limit} bytes ({format_size(limit)}) is too small for the "
                f"staging of a model that streams to {self._share.device}. Set at least {need} "
                f"bytes ({format_size(need)}).",
                limit=limit,
                smallest_limit=need,
            )

    def take_limit(self, limit: int) -> None:
        """Keep what it holds, as far as another limit of the process allows."""
        share = dataclasses.replace(self._share, host_memory_limit=limit)
        self._governor.plan = dataclasses.replace(self.plan, device_share=share)
        self._governor.host(max(0, self.room(limit)))
