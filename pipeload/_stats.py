"""What happened so far, as a frozen record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Running totals of the reads. Written by the dispatcher alone."""

    bytes_read: int = 0
    reads: int = 0
    read_seconds: float = 0.0
    hits: int = 0
    misses: int = 0
    resident_bytes: int = 0
    """Weights that units keep, read or being read."""
    buffer_bytes: int = 0
    """The part of the buffers that was ever written to."""


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of a streaming model's work since it was loaded."""

    passes: int
    """Forward passes that ended without an error."""
    tokens: int
    """Tokens they produced: what the cache grew by, times the batch."""
    bytes_read: int
    """Bytes read from disk, weights loaded once included."""
    reads: int
    """Read calls that made up those bytes."""
    read_seconds: float
    """Seconds during which at least one read was in flight."""
    stall_seconds: float
    """Seconds that blocks waited for their weights."""
    compute_seconds: float
    """Seconds inside forward passes that were not waiting."""
    hits: int
    """Blocks whose weights were there or under way when they ran."""
    misses: int
    """Blocks whose read began only when they ran."""
    resident_bytes: int
    """Bytes of weights that are not read again."""
    buffer_bytes: int
    """Bytes of the buffers that streamed weights pass through."""
    peak_rss_bytes: int
    """The most memory this process ever held."""
    memory_limit: int
    """The limit it must stay under."""

    @property
    def tokens_per_pass(self) -> float:
        """Tokens for each time the weights were read: above the batch size only with drafts."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def read_rate(self) -> float:
        """Bytes per second while reading, 0.0 before the first read."""
        return self.bytes_read / self.read_seconds if self.read_seconds else 0.0
