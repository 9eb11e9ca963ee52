"""The figures of `pipeload bench`, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeload._sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class LimitResult:
    """One limit's result. Bytes and seconds; rates in bytes per second."""

    memory_limit: int
    tokens_per_second: float
    seconds: float
    """T: seconds per decoded token."""
    least_seconds: float
    """T* with B measured while nothing else ran."""
    rho: float
    rho_busy: float
    """rho with B measured under the same computing; on a device, rho once more."""
    rate_share: float
    """Read rate while reading, over B under the same computing."""
    held_share: float
    """Bytes held over R*."""
    disk_rate: float
    busy_disk_rate: float
    read_rate: float
    resident_seconds: float
    """C."""
    stall_seconds: float
    bytes_per_token: float
    reads_per_token: float
    misses_per_token: float
    peak_rss: int
    io_mode: str
    device: str = "cpu"
    host_memory_limit: int = 0
    link_rate: float = 0.0
    """L."""
    copied_per_token: float = 0.0
    peak_device: int = 0


_MORE_THAN_ALL = 1.005  # shown as more than 1.00

_COLUMNS: tuple[tuple[str, Callable[[LimitResult], str]], ...] = (
    ("limit", lambda r: format_size(r.memory_limit)),
    ("tok/s", lambda r: f"{r.tokens_per_second:.2f}"),
    ("T ms", lambda r: f"{r.seconds * 1000:.0f}"),
    ("T* ms", lambda r: f"{r.least_seconds * 1000:.0f}"),
    ("rho", lambda r: f"{r.rho:.2f}"),
    ("rho busy", lambda r: f"{r.rho_busy:.2f}"),
    ("C ms", lambda r: f"{r.resident_seconds * 1000:.0f}"),
    ("B GB/s", lambda r: f"{r.disk_rate / 1e9:.2f}"),
    ("B busy", lambda r: f"{r.busy_disk_rate / 1e9:.2f}"),
    ("read", lambda r: f"{r.read_rate / 1e9:.2f}"),
    ("held/R*", lambda r: f"{r.held_share:.2f}"),
    ("stall ms", lambda r: f"{r.stall_seconds * 1000:.0f}"),
    ("MB/tok", lambda r: f"{r.bytes_per_token / 1e6:.0f}"),
    ("reads/tok", lambda r: f"{r.reads_per_token:.0f}"),
    ("misses", lambda r: f"{r.misses_per_token:.1f}"),
    ("VmHWM", lambda r: format_size(r.peak_rss)),
    ("cache", lambda r: "past it" if r.io_mode == "direct" else r.io_mode),
)


_DEVICE_COLUMNS: tuple[tuple[str, Callable[[LimitResult], str]], ...] = (
    ("device", lambda r: r.device),
    ("host limit", lambda r: format_size(r.host_memory_limit)),
    ("L GB/s", lambda r: f"{r.link_rate / 1e9:.1f}"),
    ("copied MB", lambda r: f"{r.copied_per_token / 1e6:.0f}"),
    ("reserved", lambda r: format_size(r.peak_device)),
)


def table(rows: Sequence[LimitResult]) -> str:
    """The figures as a table with one line for each limit."""
    on_device = any(row.device != "cpu" for row in rows)
    columns = list(_COLUMNS)
    if on_device:
        columns = [column for column in columns if "busy" not in column[0]]
        columns += _DEVICE_COLUMNS
    cells = [[name for name, _ in columns]]
    cells += [[show(row) for _, show in columns] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(columns))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )


def legend(rows: Sequence[LimitResult]) -> str:
    """What has to be known to read the table."""
    lines = [
        "T: a token's time. T*: the least it could take, the longer of C (all weights in memory)",
        "and of what must be read over B (the disk's rate). rho = T*/T: 1 is the best possible.",
    ]
    if any(row.device != "cpu" for row in rows):
        lines.append("L: the rate of copies to the device, which bound T* as well.")
    else:
        lines.append("busy: with B measured while as much is computed beside it.")
    if any(max(row.rho, row.rho_busy) > _MORE_THAN_ALL for row in rows):
        lines += [
            "rho above 1: the disk, or another process, gave more while T was measured than while",
            "B and C were. More --rounds bring it closer to 1.",
        ]
    return "\n".join(lines)
