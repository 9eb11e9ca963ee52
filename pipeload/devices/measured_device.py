"""What a plan for a device is made beside: its memory and its rates, looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeload.devices.shared_device_limit import account_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeload.weights.device_interface import Device


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """What planning knows of a device. Frozen; sizes in bytes, rates in bytes per second."""

    name: str
    """What torch calls it, with its index."""
    unified: bool
    """Whether its memory is the host's."""
    allocated_bytes: int
    """Memory of tensors that are there."""
    promised_bytes: int
    """What models that stream there already may come to hold, and do not hold yet."""
    slack_bytes: int
    """What its libraries take on later, and its allocator between tensors."""
    host_slack_bytes: int
    """What its libraries take on later in host memory."""
    link_rate: float | None
    """From host memory; None where nobody asked, or there is no room to measure it."""
    compute_rate: float | None
    """Of weights in products with one row: as for the link."""
    takes: Callable[[int], int]
    """What its allocator takes for so many bytes."""


def measure_device(device: Device, *, rates: bool) -> MeasuredDevice:
    """Look at a device. Its rates, where they are asked for, are measured once and remembered."""
    return MeasuredDevice(
        name=str(device.where),
        unified=device.unified,
        allocated_bytes=device.allocated_bytes(),
        promised_bytes=account_of(device).untouched_bytes(),
        slack_bytes=device.slack_bytes,
        host_slack_bytes=device.host_slack_bytes,
        link_rate=device.link_rate() if rates else None,
        compute_rate=device.compute_rate() if rates else None,
        takes=device.takes,
    )
