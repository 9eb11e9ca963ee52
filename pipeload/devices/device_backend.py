"""What a model on a device is put together from, and the choice between it and the CPU."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pipeload.budget.buffer_count import BUFFER_COUNT
from pipeload.devices.device_buffers import DeviceSlot, SlotSize
from pipeload.devices.device_ledger import DeviceLedger
from pipeload.devices.device_parameters import DeviceSeat
from pipeload.devices.device_residents import DevicePlace
from pipeload.devices.device_restore import DeviceRestorer
from pipeload.devices.host_tier import Hosting
from pipeload.engine.backend import CpuTarget
from pipeload.hf import marks
from pipeload.weights.placement import make_scratch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch
    from torch import nn

    from pipeload.budget.ledger import Ledger
    from pipeload.budget.make_plan import Build
    from pipeload.budget.plan import Plan
    from pipeload.budget.read_counters import Counters
    from pipeload.checkpoint.file_reads import FileSet
    from pipeload.engine.backend import PlaceMaker, Target
    from pipeload.engine.teardown import Step
    from pipeload.prefetch.dispatcher import MakePlace
    from pipeload.weights.arena import Region
    from pipeload.weights.device_interface import Device
    from pipeload.weights.layout import Layout, Weight
    from pipeload.weights.placement import Convert, Place


class DeviceTarget:
    """A device: weights are copied there."""

    def __init__(self, device: Device, build: Build) -> None:
        self._device = device
        self._size, self._hosting = SlotSize(build.plan.units), Hosting(device)
        self._slots = [DeviceSlot(device, self._size) for _ in range(BUFFER_COUNT)]
        self.where = device.where
        self.place: MakePlace = self._hosting.place
        self.seat = partial(DeviceSeat, device)
        self.restorer = partial(DeviceRestorer, device)

    def ledger(self, build: Build, counters: Counters, *, pressure: bool) -> Ledger:
        """The device's memory, and the host's beside it. `pressure`: refused for a device."""
        assert not pressure  # noqa: S101 - see make_request
        return DeviceLedger(
            self._device,
            build,
            counters,
            size=self._size,
            slots=self._slots,
            hosting=self._hosting,
        )

    def places(
        self, files: FileSet, convert: Convert, _wholes: list[Weight], _mapped: list[Path] | None
    ) -> PlaceMaker:
        """Weights that stay get memory of the device."""
        return _DevicePlaces(self._device, files, convert)

    def slots(self, _build: Build) -> list[DeviceSlot]:
        """Staging and memory of the device."""
        return self._slots

    def scratch(self, plan: Plan) -> list[Region | None]:
        """Every reader has some: weights that stay pass through it."""
        return make_scratch(plan.readers)

    def needs_scratch(self, _layout: Layout) -> bool:
        """Whatever stays is read into scratch first."""
        return True

    def bring_along(self, model: nn.Module) -> Iterator[Step]:
        """Move what pipeload does not fill, and say where the model is, as pipelines ask."""
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.device != self.where and not parameter.is_meta:
                    parameter.data = parameter.data.to(self.where)
            for name, buffer in list(module.named_buffers(recurse=False)):
                if buffer.device != self.where:
                    module._buffers[name] = buffer.to(self.where)  # noqa: SLF001 - its own
        yield from marks.place(model, self.where)


class _DevicePlaces:
    """Each layout gets memory of its own on the device."""

    def __init__(self, device: Device, files: FileSet, convert: Convert) -> None:
        self._device, self._files, self._convert = device, files, convert

    def make(self, layout: Layout) -> Place:
        """A layout gets memory of its own on the device."""
        return DevicePlace(layout, self._device, self._files, self._convert)

    def whole(self, weight: Weight) -> torch.Tensor:
        """No weight is cut by rows on a device."""
        raise NotImplementedError(weight.name)


def make_target(build: Build) -> Target:
    """What a model of that plan is built for."""
    return CpuTarget() if build.device is None else DeviceTarget(build.device, build)
