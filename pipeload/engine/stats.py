"""What happened so far, as a frozen record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pipeload._sizes import format_size
from pipeload._text_tables import Row, Tabled


class WorkRecord(Protocol):
    """What every record of a model's work holds. Sizes in bytes, times in seconds."""

    @property
    def memory_limit(self) -> int:
        """The limit."""

    @property
    def peak_rss_bytes(self) -> int:
        """The most memory the process ever held."""

    @property
    def peak_since_load_bytes(self) -> int:
        """The most since the model was loaded."""

    @property
    def bytes_read(self) -> int:
        """Read from disk."""

    @property
    def read_seconds(self) -> float:
        """Time in which something was read."""

    @property
    def stall_seconds(self) -> float:
        """Time that blocks waited."""

    @property
    def compute_seconds(self) -> float:
        """Time that passes computed."""

    @property
    def io_mode(self) -> str:
        """How it is read."""

    @property
    def device(self) -> str:
        """Where the model computes."""

    @property
    def host_memory_limit(self) -> int:
        """The process's limit where the other one is a device's; else 0."""

    @property
    def copied_bytes(self) -> int:
        """Copied to a device out of host memory."""

    @property
    def peak_device_bytes(self) -> int:
        """The most that a device's allocator ever held."""

    @property
    def locked(self) -> bool:
        """Whether copies come out of locked memory."""


_CACHED = ", in part from the page cache"


def past_the_cache(io_mode: str) -> bool:
    """Whether what is read so comes from the disk, and not perhaps from memory."""
    return io_mode in {"direct", "uncached"}


def work_rows(work: WorkRecord) -> list[Row]:
    """Memory, disk and computing, for people."""
    rate = work.bytes_read / work.read_seconds / 1e9 if work.read_seconds else 0.0
    reading = f"{format_size(work.bytes_read)}, {rate:.3g} GB/s while reading"
    disk = past_the_cache(work.io_mode)
    return [
        *_memory_rows(work),
        Row("read from disk", reading) if disk else Row("read", f"{reading}{_CACHED}"),
        Row(f"waited for {'disk' if disk else 'it'}", f"{work.stall_seconds:.3g} s"),
        Row("computed", f"{work.compute_seconds:.3g} s"),
    ]


def expert_rows(hits: int, misses: int) -> list[Row]:
    """How many experts were there when they were routed to, for people; nothing without any."""
    routed = hits + misses
    return [Row("experts found", f"{hits} of {routed}, {hits / routed:.0%}")] if routed else []


def _memory_rows(work: WorkRecord) -> list[Row]:
    peaks = [
        Row("peak memory", format_size(work.peak_rss_bytes)),
        Row("peak since load", format_size(work.peak_since_load_bytes)),
    ]
    if not work.host_memory_limit:
        return [Row("memory limit", format_size(work.memory_limit)), *peaks]
    how = "" if work.locked else ", out of memory that is not locked"
    return [
        Row("device limit", format_size(work.memory_limit)),
        Row(f"peak on {work.device}", format_size(work.peak_device_bytes)),
        Row("host limit", format_size(work.host_memory_limit)),
        *peaks,
        Row(f"copied to {work.device}", f"{format_size(work.copied_bytes)}{how}"),
    ]


@dataclass(frozen=True, slots=True)
class Stats(Tabled):
    """A snapshot of a streaming model's work since it was loaded. A notebook shows a table."""

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
    """Seconds inside forward passes that were not waiting. Passes that read nothing, as when all
    weights fit, are not timed."""
    hits: int
    """Blocks whose weights were there or under way when they ran."""
    misses: int
    """Blocks whose read began only when they ran."""
    resident_bytes: int
    """Bytes of weights that are not read again."""
    buffer_bytes: int
    """Bytes of the buffers that streamed weights pass through."""
    peak_rss_bytes: int
    """The most memory this process ever held, that of imports and of loading included."""
    peak_since_load_bytes: int
    """The most since this model was loaded: exact where it is the process's peak, else the most
    that was measured, before each pass and each block that carries hooks."""
    memory_limit: int
    """The limit it must stay under."""
    expert_hits: int = 0
    """Experts that were there when they were routed to, over all layers and passes."""
    expert_misses: int = 0
    """Experts that were read when they were routed to."""
    expert_bytes_read: int = 0
    """Bytes read for these, as a part of `bytes_read`."""
    expert_bytes: int = 0
    """Bytes of experts that are there now."""
    io_mode: str = "direct"
    """How it is read now: see `Plan.io_mode`."""
    device: str = "cpu"
    """Where the model computes. What follows is of a device alone."""
    host_memory_limit: int = 0
    """The limit of this process: `memory_limit` is the device's then."""
    copied_bytes: int = 0
    """Bytes copied to the device out of host memory, in passes."""
    peak_device_bytes: int = 0
    """The most that the device's allocator ever held."""
    locked: bool = False
    """Whether copies come out of memory locked in its place, so that they run beside all else."""

    @property
    def expert_hit_rate(self) -> float:
        """The share of experts that were there when they were routed to, 0.0 before any was."""
        routed = self.expert_hits + self.expert_misses
        return self.expert_hits / routed if routed else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens for each time the weights were read: above the batch size only with drafts."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def read_rate(self) -> float:
        """Bytes per second while reading, 0.0 before the first read."""
        return self.bytes_read / self.read_seconds if self.read_seconds else 0.0

    def _rows(self) -> list[Row]:
        """What was read and computed, within which memory, one row per figure."""
        return [
            *work_rows(self),
            Row("weights held", format_size(self.resident_bytes)),
            Row("buffers", format_size(self.buffer_bytes)),
            Row("units read late", f"{self.misses} of {self.hits + self.misses}"),
            *expert_rows(self.expert_hits, self.expert_misses),
            Row("passes", f"{self.passes}"),
            Row("tokens", f"{self.tokens}, {self.tokens_per_pass:.3g} per pass"),
        ]
