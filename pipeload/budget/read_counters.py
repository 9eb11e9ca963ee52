"""What reading has come to so far: counted by one thread, looked at by all."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Running totals of the reads. Written by the dispatcher alone, but for those of experts."""

    bytes_read: int = 0
    reads: int = 0
    read_seconds: float = 0.0
    made_bytes: int = 0
    """Bytes of weights that were made of what is stored while nothing was read."""
    make_seconds: float = 0.0
    hits: int = 0
    misses: int = 0
    resident_bytes: int = 0
    """Weights that units keep, read or being read."""
    buffer_bytes: int = 0
    """The part of the buffers that was ever written to."""
    expert_bytes: int = 0
    """Experts that stay. These are written by the thread whose pass runs."""
    expert_hits: int = 0
    expert_misses: int = 0
    expert_bytes_read: int = 0
    expert_read_seconds: float = 0.0
