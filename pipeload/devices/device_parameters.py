"""Sites whose weights are on a device: bound behind the copy, let go behind the computing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from pipeload.engine.site_parameters import Seat

if TYPE_CHECKING:
    from pipeload.devices.device_buffers import DevicePlacement, DeviceSlot
    from pipeload.prefetch.unit import Unit
    from pipeload.weights.device_interface import Device


class DeviceSeat(Seat):
    """A `Seat` that orders the device's work.

    See [Note: three tiers] in weights/device_interface.py.
    """

    def __init__(self, device: Device, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._device = device
        self._slot: DeviceSlot | None = None
        """The buffer that it computes with."""

    def bind(self, unit: Unit) -> None:
        """Give every parameter its values; what computes with them waits for their copy."""
        if unit.slot is not None:
            slot = cast("DevicePlacement", unit.slots[unit.slot]).slot
            if slot.copied is not None:
                self._device.wait(slot.copied)
            self._slot = slot
        super().bind(unit)

    def unbind(self) -> None:
        """Put placeholders back; the buffer may be written to once what was enqueued has run."""
        # In this order: after an interrupt in between, whoever recovers comes here again.
        if self._slot is not None:
            self._slot.computed = self._device.computed()
            self._slot = None
        super().unbind()
