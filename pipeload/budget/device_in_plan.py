"""The part of a plan that only a model on a device has: host memory beside it, and its rates."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """What a device adds to a plan, whose other figures are then the device's. Sizes in bytes."""

    device: str
    """Where the model computes."""
    host_memory_limit: int
    """What this process may hold in host memory."""
    host_smallest_limit: int
    """The smallest that works with the same limit of the device."""
    host_floor_bytes: int
    """Interpreter, libraries and everything else that was there before."""
    host_reserve_bytes: int
    """Kept free for what the process takes on, conversions, and the kernel's own tables."""
    staging_scratch_bytes: int
    """Working memory of the readers."""
    link_rate: float | None
    """Bytes per second from host memory to the device; None when nobody measured."""
    compute_rate: float | None
    """Bytes of weights per second in products with one row; None when nobody measured."""
    host_slack_bytes: int
    """Host memory that the device's libraries take on later."""
    host_conversion_bytes: int
    """Host memory in which weights are made that the file does not hold as they are."""
    slack_bytes: int
    """Of the reserve, what the device's libraries take on later, and its allocator."""

    def copy_seconds(self, nbytes: int) -> float:
        """Least time in which so many bytes come to the device; 0 if not known."""
        return nbytes / self.link_rate if self.link_rate else 0.0

    def compute_seconds(self, nbytes: int) -> float:
        """Least time in which one row is multiplied with so many bytes of weights; 0 if unknown."""
        return nbytes / self.compute_rate if self.compute_rate else 0.0


def worth_hosting(
    streamed: int, *, disk_rate: float | None, link_rate: float | None, compute_seconds: float = 0.0
) -> int:
    """How many of the streamed bytes it pays to keep in host memory.

    Reading the rest then takes no longer than copying everything, or than computing. With unknown
    rates (bytes per second) the disk is taken for the slowest by far.
    """
    if not disk_rate:
        return streamed
    copying = streamed / link_rate if link_rate else 0.0
    return max(0, math.ceil(streamed - disk_rate * max(copying, compute_seconds)))
