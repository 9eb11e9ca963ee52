"""What a model on a device is put together from, and the choice between it and the CPU."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pipeload import _hf_marks
from pipeload._device_buffers import DeviceSlot, SlotSize
from pipeload._device_governor import DeviceGovernor
from pipeload._device_place import DevicePlace
from pipeload._device_restore import DeviceRestorer
from pipeload._device_seats import DeviceSeat
from pipeload._hosting import Hosting
from pipeload._placement import make_scratch
from pipeload._plan import SLOTS
from pipeload._targets import CpuTarget

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch
    from torch import nn

    from pipeload._arena import Region
    from pipeload._build import Build
    from pipeload._device import Device
    from pipeload._dispatcher import MakePlace
    from pipeload._layout import Layout, Weight
    from pipeload._placement import Convert, Place
    from pipeload._plan import Plan
    from pipeload._reader import FileSet
    from pipeload._targets import PlacesLike, Target


class DeviceTarget:
    """A device: weights are copied there."""

    def __init__(self, device: Device, build: Build) -> None:
        self._device = device
        size, hosting = SlotSize(build.plan.units), Hosting(device)
        self._slots = [DeviceSlot(device, size) for _ in range(SLOTS)]
        self.where = device.where
        self.place: MakePlace = hosting.place
        self.governor = partial(DeviceGovernor, size=size, slots=self._slots, hosting=hosting)
        self.seat = partial(DeviceSeat, device)
        self.restorer = partial(DeviceRestorer, device)

    def places(
        self, files: FileSet, convert: Convert, _wholes: list[Weight], _mapped: list[Path] | None
    ) -> PlacesLike:
        """Memory of the device."""
        return _DevicePlaces(self._device, files, convert)

    def slots(self, _build: Build) -> list[DeviceSlot]:
        """Staging and memory of the device."""
        return self._slots

    def scratch(self, plan: Plan) -> list[Region | None]:
        """What stays passes through it."""
        return make_scratch(plan.readers)

    def needs_scratch(self, _layout: Layout) -> bool:
        """What stays passes through it."""
        return True

    def settle(self, model: nn.Module, undo: list[Callable[[], None]]) -> None:
        """Move what pipeload does not fill, and say where the model is, as pipelines ask."""
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.device != self.where and not parameter.is_meta:
                    parameter.data = parameter.data.to(self.where)
            for name, buffer in list(module.named_buffers(recurse=False)):
                if buffer.device != self.where:
                    module._buffers[name] = buffer.to(self.where)  # noqa: SLF001 - its own
        _hf_marks.place(model, self.where, undo)


class _DevicePlaces:
    """Each layout gets memory of its own on the device."""

    def __init__(self, device: Device, files: FileSet, convert: Convert) -> None:
        self._device, self._files, self._convert = device, files, convert

    def make(self, layout: Layout) -> Place:
        """Memory for a layout."""
        return DevicePlace(layout, self._device, self._files, self._convert)

    def whole(self, weight: Weight) -> torch.Tensor:
        """No weight is cut by rows on a device."""
        raise NotImplementedError(weight.name)


def make_target(build: Build) -> Target:
    """What a model of that plan is built for."""
    return CpuTarget() if build.device is None else DeviceTarget(build.device, build)
