"""Units that stay in host memory: copied to the device each time they run, and read once.

[Note: whole units, spread] Keeping a part of every unit would save the same bytes, but each unit
would still wait for the disk. A unit that is all there needs only the link, so while it is copied
the disk reads for the next one; spread over the pass, such units hide the reads between them.
"""

from __future__ import annotations

import logging
import math
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pipeload.devices.device_buffers import DevicePlacement, lock
from pipeload.devices.weights_on_device import fail
from pipeload.system.memory import physical_bytes
from pipeload.weights.arena import Arena
from pipeload.weights.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeload.budget.plan import UnitPlan
    from pipeload.checkpoint.file_reads import FileSet
    from pipeload.devices.device_buffers import DeviceSlot
    from pipeload.prefetch.unit import Unit
    from pipeload.weights.arena import Region, Work
    from pipeload.weights.device_interface import Device
    from pipeload.weights.placement import Convert

_CPU = torch.device("cpu")
_LOCKED_SHARE = 0.5
_log = logging.getLogger("pipeload")
_GOLDEN = (math.sqrt(5) - 1) / 2


def choose_hosted(units: Sequence[UnitPlan], budget: int) -> frozenset[str]:
    """The names of units that stay in `budget` bytes of host memory, spread over the pass."""
    order = sorted(range(len(units)), key=lambda index: (index * _GOLDEN % 1.0, index))
    chosen = []
    for index in order:
        nbytes = units[index].streamed.nbytes
        if 0 < nbytes <= budget:
            chosen.append(units[index].name)
            budget -= nbytes
    return frozenset(chosen)


def host_within(units: Sequence[UnitPlan], budget: int) -> tuple[UnitPlan, ...]:
    """The same units, of which `budget` bytes stay in host memory."""
    return with_hosted(units, choose_hosted(units, budget))


def with_hosted(units: Sequence[UnitPlan], hosted: frozenset[str]) -> tuple[UnitPlan, ...]:
    """The same units, those of that name in host memory; a unit that stays is the same object."""
    return tuple(
        unit if unit.hosted == (unit.name in hosted) else replace(unit, hosted=not unit.hosted)
        for unit in units
    )


class _Part:
    """A unit's streamed part in host memory. It goes with the last placement that knows it."""

    def __init__(
        self, plan: UnitPlan, device: Device, files: FileSet, convert: Convert, *, locked: bool
    ) -> None:
        layout = plan.streamed
        self.plan = plan
        self.arena = arena = Arena(layout.nbytes, device=_CPU, huge=False)
        self.host = Placement(layout, arena.take(layout.nbytes), files, convert)
        self.filled = False
        self.locked = locked and lock(arena, device)


class Hosting:
    """What is there of the units that stay in host memory."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.pays = not device.unified
        """Whether anything is saved by it."""
        # Memory that is locked is nobody else's, whatever happens: the rest is copied as it is.
        self._most_locked = int(physical_bytes() * _LOCKED_SHARE)
        self._parts: weakref.WeakValueDictionary[str, _Part] = weakref.WeakValueDictionary()

    @property
    def held_bytes(self) -> int:
        """Bytes that are there, or being read."""
        # References in one step: the dispatcher's thread may add one meanwhile.
        parts = [reference() for reference in self._parts.valuerefs()]
        return sum(part.host.nbytes for part in parts if part is not None)

    @property
    def locked(self) -> bool:
        """Whether all that is there is locked in its place."""
        parts = [reference() for reference in self._parts.valuerefs()]
        return all(part.locked for part in parts if part is not None)

    def place(
        self, unit: Unit, slot: DeviceSlot, files: FileSet, convert: Convert
    ) -> DevicePlacement:
        """What brings a unit into a buffer."""
        plan = unit.plan
        if not plan.hosted:
            return DevicePlacement(plan.streamed, slot, files, convert)
        part = self._parts.get(plan.name)
        if part is None or part.plan is not plan:
            locked = self.held_bytes + plan.streamed.nbytes <= self._most_locked
            try:
                part = _Part(plan, self._device, files, convert, locked=locked)
            except MemoryError as error:  # it is read as if it were not to stay
                _log.debug("block %r cannot stay in host memory: %s", plan.name, error)
                return DevicePlacement(plan.streamed, slot, files, convert)
            self._parts[plan.name] = part
        return _HostedPlacement(part, slot, files, convert)


class _HostedPlacement(DevicePlacement):
    """A unit that is read into memory of its own, and from there copied into buffers."""

    def __init__(self, part: _Part, slot: DeviceSlot, files: FileSet, convert: Convert) -> None:
        super().__init__(part.plan.streamed, slot, files, convert)
        self._part = part

    def read_jobs(self, chunk_bytes: int) -> list[Work]:
        """The unit is read the first time alone: there are no reads after that."""
        try:
            self._prepare()
        except Exception as error:  # no memory; whoever waits for the unit is told
            return [fail(self.slot.device, error)]
        return [] if self._part.filled else self._part.host.read_jobs(chunk_bytes)

    @property
    def quick(self) -> bool:
        """What is there needs no more than a copy."""
        return self._part.locked and (self._part.filled or not self._layout.conversions)

    def _prepare(self) -> Placement:
        if not self._pairs:
            self._show(self._part.host, self._part.arena)
        return self._part.host

    def _convert_all(self, scratch: Region | None) -> None:
        if not self._part.filled:
            super()._convert_all(scratch)
            self._part.filled = True
