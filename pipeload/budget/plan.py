"""What a limit buys: the record that a user sees, and where each of its bytes goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeload._sizes import counted, format_size
from pipeload._text_tables import Row, Tabled

if TYPE_CHECKING:
    from pipeload.weights.layout import Layout, Weight

SLOTS = 2
"""Buffers: one unit is in use while the next one is read."""


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """What one unit keeps and what it reads each pass."""

    name: str
    resident: tuple[Layout, ...]
    """One for each piece that stays or goes by itself."""
    streamed: Layout
    hosted: bool = False
    """Of a model on a device: whether the streamed part stays in host memory, so that it is copied
    each time, and read once."""
    between: int = 0
    """Of a model on a device: bytes that its allocator takes for what stays, and nobody can use."""

    @property
    def resident_bytes(self) -> int:
        """Bytes held once the block ran, until the limit is needed for something else."""
        return sum(layout.nbytes for layout in self.resident)

    @property
    def resident_weights(self) -> tuple[Weight, ...]:
        """Everything that is held."""
        return tuple(weight for layout in self.resident for weight in layout.weights)

    @property
    def streamed_bytes(self) -> int:
        """Bytes read from disk each time the block runs."""
        return self.streamed.read_bytes


@dataclass(frozen=True, slots=True)
class Plan(Tabled):
    """What a limit buys. Frozen; all sizes in bytes. A notebook shows it as a table."""

    memory_limit: int
    """The limit that was planned for."""
    smallest_limit: int
    """The smallest limit that works with the same hint."""
    floor_bytes: int
    """Interpreter, libraries and everything else that was there before."""
    reserve_bytes: int
    """Kept free for cache, activations and logits of the hint, for conversions of weights that the
    checkpoint holds in another form, and for the kernel's own tables."""
    pinned_bytes: int
    """Always resident: small parameters, the rows of embedding tables that are kept, and whatever
    cannot be streamed."""
    units: tuple[UnitPlan, ...] = field(repr=False)
    """What is read at once, in the order it is needed: blocks, or where these are too large their
    modules and ranges of rows; the head always in ranges of rows."""
    scratch_bytes: int
    """Working memory of the readers for dtype casts."""
    readers: int
    """Threads that read at once."""
    io_mode: str
    """"direct" (past the page cache), "buffered" (through it), "uncached" (dropped after), or
    "mapped": everything fits, and its files are only read ahead."""
    disk_rate: float | None
    """Bytes per second that `seconds_per_pass` assumes; None when nobody measured."""

    @property
    def slot_bytes(self) -> int:
        """Size of one buffer: what the unit that streams most needs."""
        return max(unit.streamed.nbytes for unit in self.units)

    @property
    def slots(self) -> int:
        """Number of buffers, 0 when nothing streams."""
        return 0 if self.fits else SLOTS

    @property
    def buffers(self) -> int:
        """Bytes of all buffers."""
        return self.slot_bytes * self.slots

    @property
    def resident(self) -> int:
        """Bytes of weights that are never read again: pinned ones and resident parts of blocks."""
        return self.pinned_bytes + sum(unit.resident_bytes for unit in self.units)

    @property
    def bytes_per_pass(self) -> int:
        """Bytes read from disk in one forward pass."""
        return sum(unit.streamed_bytes for unit in self.units)

    @property
    def seconds_per_pass(self) -> float | None:
        """Least time that reading alone takes per pass, None without a disk rate."""
        return None if self.disk_rate is None else self.bytes_per_pass / self.disk_rate

    @property
    def unused(self) -> int:
        """Bytes of the limit that nothing is planned for."""
        fixed = self.floor_bytes + self.reserve_bytes + self.scratch_bytes
        return self.memory_limit - fixed - self.resident - self.buffers

    @property
    def fits(self) -> bool:
        """Whether everything is resident, so that nothing is streamed after the first pass."""
        return self.bytes_per_pass == 0

    def _rows(self) -> list[Row]:
        """Where each byte of the limit goes, one row per purpose."""
        units = f"parts of {counted(len(self.units), 'unit')}: blocks, modules or ranges of rows"
        smallest = f"smallest that works: {format_size(self.smallest_limit)}"
        rows = [
            ("process floor", self.floor_bytes, "interpreter, libraries, everything loaded before"),
            (
                "reserve",
                self.reserve_bytes,
                "cache, activations, logits, conversions; kernel tables",
            ),
            ("always resident", self.pinned_bytes, "small parameters, embedding rows"),
            ("resident units", self.resident - self.pinned_bytes, units),
            ("buffers", self.buffers, f"{self.slots} x {format_size(self.slot_bytes)}"),
            ("scratch", self.scratch_bytes, "dtype casts while reading"),
            ("unused", self.unused, self._why_unused()),
            ("memory limit", self.memory_limit, smallest),
        ]
        return [Row(name, format_size(max(0, size)), note) for name, size, note in rows]

    def _why_unused(self) -> str:
        return "all weights fit" if self.fits else "smaller than the smallest piece"

    def _caption(self) -> str:
        """What is read in each pass, and how."""
        how = f"({self.io_mode}, {counted(self.readers, 'reader')})"
        reading = f"{format_size(self.bytes_per_pass)} read per pass {how}"
        if self.seconds_per_pass:
            rate = format_size(round(self.disk_rate or 0))
            reading += f", at {rate}/s: {self.seconds_per_pass:.3g} s"
        return reading
