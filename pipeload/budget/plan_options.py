"""What the user asked for, as far as planning goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeload.checkpoint.hung_reads import DEFAULT_SECONDS

if TYPE_CHECKING:
    from pipeload.weights.device_interface import Device


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for, checked and parsed. Sizes in bytes."""

    memory_limit: int
    io_mode: str
    readers: int | None
    disk_rate: float | None
    read_timeout: float | None = DEFAULT_SECONDS
    """Seconds after which a read is taken to hang; None: never."""
    may_map: bool = True
    """Whether files may be mapped; else they are read even where everything fits."""
    device: Device | None = None
    """Where the model computes, if not on the CPU."""
    device_limit: int = 0
    """What may be taken there. `memory_limit` is the process's in any case."""
    found_out: bool = False
    """Whether nobody named `memory_limit`."""
