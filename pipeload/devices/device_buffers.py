"""Buffers on a device: see [Note: three tiers] in weights/device_interface.py."""

from __future__ import annotations

import contextlib
import weakref
from functools import partial
from typing import TYPE_CHECKING

import torch

from pipeload.devices.weights_on_device import copies, device_bytes, fail, raise_failure, show
from pipeload.system.pages import ceil_page
from pipeload.weights.arena import Arena, Region
from pipeload.weights.placement import Convert, Placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeload.budget.plan import UnitPlan
    from pipeload.checkpoint.file_reads import FileSet
    from pipeload.weights.arena import Work
    from pipeload.weights.device_interface import Device, Event
    from pipeload.weights.layout import Layout

_CPU = torch.device("cpu")


class SlotSize:
    """What a buffer has to hold, in bytes: the governor says, the dispatcher's thread looks."""

    def __init__(self, units: Sequence[UnitPlan]) -> None:
        self.host = self.device = 0
        self.follow(units)

    def follow(self, units: Sequence[UnitPlan]) -> None:
        """Any of these units may come into a buffer from now on."""
        self.host = max((u.streamed.nbytes for u in units if not u.hosted), default=0)
        self.device = max(device_bytes(unit.streamed) for unit in units)


class DeviceSlot:
    """One buffer: staging in host memory, and memory on the device for the same unit.

    [Note: buffers of another size] Memory of a device cannot be given back in part. So when the
    size changes, both are made anew as soon as the next unit comes; every unit must then have
    another plan, so that no prepared view of the old memory is used again.
    """

    def __init__(self, device: Device, size: SlotSize) -> None:
        self.device, self._size = device, size
        self._arena: Arena | None = None
        self._memory: torch.Tensor | None = None
        self.locked = True
        """Whether the staging is locked in its place; it was not where the last one was refused."""
        self.copied_bytes = 0
        """All that was copied into the device memory."""
        # A copy that nobody waited for must not land in memory that is somebody else's by then.
        settle = weakref.finalize(self, _settle, device)
        settle.atexit = False
        self.copied: Event | None = None
        """The last copy out of the staging."""
        self.computed: Event | None = None
        """The last computing with the device memory."""

    @property
    def device_bytes(self) -> int:
        """Bytes that it takes on the device."""
        return 0 if self._memory is None else self._memory.numel()

    @property
    def host_bytes(self) -> int:
        """Bytes of the staging."""
        return 0 if self._arena is None else self._arena.nbytes

    def memory(self, layout: Layout) -> torch.Tensor:
        """Memory on the device for a unit. Nobody uses the buffer."""
        wanted = max(device_bytes(layout), self._size.device)
        if self._memory is not None and self.device_bytes != wanted:
            self._release()
        if self._memory is None:
            self._memory = self.device.allocate(wanted)
            # Whoever had that memory before may still be computing with it.
            self.computed = self.device.computed()
        return self._memory

    def staging(self, layout: Layout) -> Region:
        """Host memory for a unit. Nobody uses the buffer."""
        wanted = ceil_page(max(layout.nbytes, self._size.host))
        if self._arena is not None and self._arena.nbytes != wanted:
            self._release_staging()
        if self._arena is None:
            self._arena = Arena(wanted, device=_CPU, huge=True)
            self.locked = lock(self._arena, self.device)
        return Region(self._arena, 0, wanted)

    def discard(self, start: int = 0) -> None:
        """A unit takes no more than `start` bytes from now on."""
        if self.host_bytes > ceil_page(start):
            self._release_staging()
        if self.device_bytes > max(start, self._size.device):
            self._release()

    def wait_until_free(self) -> None:
        """Return once nothing is copied out of the staging any more."""
        if self.copied is not None:
            self.copied.synchronize()

    def _release(self) -> None:
        self.device.synchronize()
        self._memory = None
        self.device.trim()

    def _release_staging(self) -> None:
        self.device.synchronize()
        self._arena = self.copied = None


def lock(arena: Arena, device: Device) -> bool:
    """Lock it in its place for as long as it lives; False if the driver refuses."""
    locked = device.pin(arena.address, arena.nbytes)
    if locked:
        # With the arena: prepared views may keep it for longer than whoever made it.
        unpin = weakref.finalize(arena, device.unpin, arena.address)
        unpin.atexit = False
    return locked


def _settle(device: Device) -> None:
    with contextlib.suppress(Exception):  # the driver may be gone
        device.synchronize()


class DevicePlacement:
    """A unit's streamed part in a buffer: read into the staging, then copied."""

    def __init__(self, layout: Layout, slot: DeviceSlot, files: FileSet, convert: Convert) -> None:
        self.slot = slot
        self.nbytes = layout.nbytes
        self._layout, self._files, self._convert = layout, files, convert
        self._copy_bytes = sum(weight.nbytes for weight in layout.weights)
        self._host: Placement | None = None
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.views: dict[str, torch.Tensor] = {}
        """Nothing before it was read once."""

    def read_jobs(self, chunk_bytes: int) -> list[Work]:
        """Reads into the staging, each behind the copy that still comes out of it."""
        try:
            host = self._prepare()
        except Exception as error:  # no memory; whoever waits for the unit is told
            return [fail(self.slot.device, error)]
        return [partial(self._read, job) for job in host.read_jobs(chunk_bytes)]

    def _prepare(self) -> Placement:
        if self._host is None:
            staging = self.slot.staging(self._layout)
            host = Placement(self._layout, staging, self._files, self._convert)
            self._show(host, staging.arena)
            self._host = host
        return self._host

    def _show(self, host: Placement, arena: Arena) -> None:
        # In the host's order: neighbours there are neighbours here, and go in one copy.
        weights = sorted(self._layout.weights, key=lambda w: host.views[w.name].data_ptr())
        self.views, places = show(weights, self.slot.memory(self._layout))
        self._pairs = copies(places, host.views, arena)

    @property
    def quick(self) -> bool:
        """A copy out of locked memory is only enqueued."""
        return self.slot.locked and not self._layout.conversions

    def convert_jobs(self) -> list[Work]:
        """The conversions and, behind them, the copy."""
        return [self._copy]

    def drop(self) -> None:
        """Nothing is given back: the memory is the buffer's."""

    def _read(self, job: Work, scratch: Region | None) -> int:
        self.slot.wait_until_free()
        return job(scratch)

    def _convert_all(self, scratch: Region | None) -> None:
        for job in self._prepare().convert_jobs():
            job(scratch)

    def _copy(self, scratch: Region | None) -> int:
        self._convert_all(scratch)
        slot = self.slot
        try:
            slot.copied = slot.device.copy(self._pairs, slot.computed)
        except Exception as error:
            raise_failure(slot.device, error)
        slot.copied_bytes += self._copy_bytes
        return 0
