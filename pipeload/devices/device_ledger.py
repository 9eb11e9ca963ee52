"""A device's memory, for the governor of a model that computes there; the process's beside it.

[Note: what holds a device's limit] Before each pass residents yield to what it needs, as on the
host. Beside that the allocator itself is told the limit, where it takes one: it then gives back
what it keeps for later before it takes more, and refuses what is over it. So nothing is measured
between two blocks. An allocation that is refused ends that pass with torch's own OutOfMemoryError,
and the next pass begins clean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from pipeload.budget import limit_errors
from pipeload.budget.shared_limit import ACCOUNTANT, Accountant
from pipeload.devices.host_share import HostShare, share_of
from pipeload.devices.shared_device_limit import account_of, device_limit
from pipeload.system.memory import parse_limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeload.budget.ledger import Owner, TooLarge
    from pipeload.budget.make_plan import Build
    from pipeload.budget.pass_needs import PassNeeds
    from pipeload.budget.plan import Plan
    from pipeload.budget.read_counters import Counters
    from pipeload.devices.device_buffers import DeviceSlot, SlotSize
    from pipeload.devices.host_tier import Hosting
    from pipeload.weights.device_interface import Device


class DeviceLedger:
    """A `Ledger`: tensors on the device are counted. Sizes in bytes."""

    looks_inside = False
    process_bytes = 0

    def __init__(
        self,
        device: Device,
        build: Build,
        counters: Counters,
        *,
        size: SlotSize,
        slots: Sequence[DeviceSlot],
        hosting: Hosting,
    ) -> None:
        """`size`, `slots` and `hosting`: of the model's buffers, and of units in host memory."""
        plan = build.plan
        self._device, self._counters = device, counters
        self.device = str(device.where)
        self._size, self._slots = size, slots
        self._slack = share_of(plan).slack_bytes
        self.hosting = hosting
        self.host = HostShare(plan, hosting, slots)
        self.account = account_of(device)
        self.fixed_bytes = plan.pinned_bytes

    def limit_in_force(self, limit: int) -> int:
        """The limit: control groups have no part in a device's memory."""
        return limit

    def tables_bytes(self, _limit: int) -> int:
        """The kernel's tables are in host memory."""
        return 0

    def limit_for(self, nbytes: int) -> int:
        """The smallest limit that leaves so much: that much."""
        return nbytes

    def taken_bytes(self, _limit: int, other: int) -> int:
        """Tensors of others, and what its libraries take on later."""
        return other + self._slack

    def allows(self, _nbytes: int, _limit: int) -> bool:
        """The allocator holds the limit, whatever happens."""
        return True

    def held_bytes(self, plan: Plan) -> int:
        """Weights and buffers of this model on the device now."""
        buffers = sum(slot.device_bytes for slot in self._slots)
        return plan.pinned_bytes + self._counters.resident_bytes + buffers

    def moved_bytes(self, plan: Plan) -> int:
        """What is copied to the device in each pass, read first or not."""
        return plan.link_bytes_per_pass

    # -- passes ----------------------------------------------------------------------------------

    def corrected(self, need: int) -> int:
        """The estimate as it is: nothing is measured in a pass."""
        return need

    def uncorrected(self, nbytes: int) -> int:
        """The estimate as it is: none was raised."""
        return nbytes

    def begin_pass(self, _held: int) -> int:
        """Tensors of others that are there now."""
        ACCOUNTANT.note_pass(self.host)
        return self.account.other_bytes()

    def inside_pass(self) -> int:
        """What `begin_pass` counts; passes do not ask for it."""
        return self.account.other_bytes()

    def taken_by_pass(self, _other: int) -> int:
        """Nothing is measured in a pass."""
        return 0

    def end_pass(self, _need: int, _held: int, limit: int) -> None:
        """Where the allocator takes no limit, it gives back here what is over it."""
        if not self._device.caps and self._device.reserved_bytes() > limit:
            self._device.trim()

    # -- plans -----------------------------------------------------------------------------------

    def complete(self, plan: Plan, before: Plan) -> Plan:
        """The plan with as much in host memory as is allowed there."""
        return self.host.complete(plan, before)

    def follow(self, plan: Plan) -> None:
        """Buffers have this plan's size before the first unit comes into one."""
        self._size.follow(plan.units)

    def look_beside(self) -> bool:
        """Measure what may stay in host memory; whether that is another amount now."""
        return self.host.look()

    def take_limit(self, _limit: int) -> None:
        """The account has told the allocator."""

    def trim(self) -> bool:
        """Have the allocator give back what nobody uses; whether it holds much around the rest.

        Allocators cut tensors of up to 10 MB out of segments that go back as a whole only.
        """
        self._device.trim()
        between = self._device.reserved_bytes() - self._device.allocated_bytes()
        return 2 * between > self._device.slack_bytes

    # -- membership ------------------------------------------------------------------------------

    def join(self, owner: Owner) -> None:
        """Have both accounts count the model from now on."""
        self.host.serve(owner)
        ACCOUNTANT.join(self.host, share_of(owner.plan).host_memory_limit)
        self.account.join(owner, owner.plan.memory_limit)

    def leave(self, owner: Owner) -> None:
        """Have them count it no more. May be called again."""
        ACCOUNTANT.leave(self.host)
        self.account.leave(owner)

    def forget(self, owner: Owner) -> bool:
        """In a forked child: count it no more. The device is left alone: it is the parent's."""
        ACCOUNTANT.leave(self.host)
        Accountant.leave(self.account, owner)
        return False

    def set_limit(self, memory_limit: int | str, host_memory_limit: int | str | None) -> None:
        """Change the device's limit, for all models that stream to it, and the process's.

        Raises:
            MemoryLimitError: one is too small; nothing changes.
            OptionError: one is no size.
        """
        limit = device_limit(self._device, memory_limit)
        with self.account.lock:
            self.account.check_change(limit)  # before the other one has changed
            if host_memory_limit is not None:
                ACCOUNTANT.set_limit(parse_limit(host_memory_limit))
            self.account.set_limit(limit)

    def figures(self) -> dict[str, Any]:
        """What `Stats` shows of the device."""
        return {
            "device": self.device,
            "host_memory_limit": share_of(self.host.plan).host_memory_limit,
            "copied_bytes": sum(slot.copied_bytes for slot in self._slots),
            "peak_device_bytes": self._device.peak_bytes(),
            "locked": self.hosting.locked and all(slot.locked for slot in self._slots),
        }

    # -- refusals --------------------------------------------------------------------------------

    def refuse_pass(self, found: TooLarge, needs: PassNeeds, limit: int) -> NoReturn:
        """Say that a pass is too large for the device, and what would fit.

        Raises:
            PassMemoryLimitError: always.
        """
        raise limit_errors.pass_too_large(found, needs, limit, device=self.device)
