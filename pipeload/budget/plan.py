"""What a limit buys: the record that a user sees, and where each of its bytes goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeload._sizes import counted, format_least, format_size
from pipeload._text_tables import Row, Tabled
from pipeload.budget.buffer_count import BUFFER_COUNT
from pipeload.budget.device_in_plan import worth_hosting

if TYPE_CHECKING:
    from pipeload.budget.device_in_plan import DeviceShare
    from pipeload.budget.experts_in_plan import ExpertsShare
    from pipeload.weights.layout import Layout, Weight


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """What one unit keeps and what it reads each pass."""

    name: str
    resident: tuple[Layout, ...]
    """One for each piece that stays or goes by itself."""
    streamed: Layout
    stored: tuple[Layout, ...] = ()
    """What the streamed part is unpacked from, if that stays: one for each of its weights."""
    hosted: bool = False
    """Of a model on a device: whether the streamed part stays in host memory, so that it is copied
    each time, and read once."""
    between: int = 0
    """Of a model on a device: bytes that its allocator takes for what stays, and nobody can use."""

    @property
    def resident_bytes(self) -> int:
        """Bytes held once the block ran, until the limit is needed for something else."""
        return sum(layout.nbytes for layout in self.resident) + self.stored_bytes

    @property
    def stored_bytes(self) -> int:
        """Those of them that are held as they are stored."""
        return sum(layout.nbytes for layout in self.stored)

    @property
    def weights_bytes(self) -> int:
        """Bytes of both parts, as they are computed with."""
        return self.resident_bytes - self.stored_bytes + self.streamed.nbytes

    @property
    def resident_weights(self) -> tuple[Weight, ...]:
        """Everything that is held."""
        return tuple(weight for layout in self.resident for weight in layout.weights)

    @property
    def streamed_bytes(self) -> int:
        """Bytes read from disk each time the block runs."""
        return 0 if self.stored else self.streamed.read_bytes


@dataclass(frozen=True, slots=True)
class Plan(Tabled):
    """What a limit buys. Frozen; all sizes in bytes. A notebook shows it as a table.

    For a model on a device, limit, floor, reserve and what is resident are of the device's memory.
    """

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
    experts: ExpertsShare | None = field(default=None, repr=False)
    """What is kept of experts that are read as they are routed to; None without any."""
    whole_experts: tuple[str, ...] = field(default=(), repr=False)
    """Why experts are read whole, with the block around them: each reason once; () where all are
    read as they are routed to, and where there are none."""
    device_share: DeviceShare | None = field(default=None, repr=False)
    """What a device adds: the host's limit and what is in host memory; None on the CPU."""

    kernel: str | None = None
    """What multiplies int4 and int8 weights by few rows of input, experts' too; None without."""

    @property
    def slot_bytes(self) -> int:
        """Size of one buffer: what the unit that streams most needs."""
        return max(unit.streamed.nbytes for unit in self.units)

    @property
    def slots(self) -> int:
        """Number of buffers, 0 when no unit streams."""
        return BUFFER_COUNT if self._units_stream else 0

    @property
    def buffers(self) -> int:
        """Bytes of all buffers."""
        return self.slot_bytes * self.slots

    @property
    def resident(self) -> int:
        """Bytes of weights that are never read again: pinned ones and resident parts of blocks."""
        return self.pinned_bytes + sum(unit.resident_bytes for unit in self.units)

    @property
    def stored_bytes(self) -> int:
        """Bytes of `resident` that are kept as they are stored, and unpacked in each pass."""
        return sum(unit.stored_bytes for unit in self.units)

    @property
    def made_per_pass(self) -> int:
        """Bytes of weights that are unpacked from them in one pass."""
        return sum(unit.streamed.nbytes for unit in self.units if unit.stored)

    @property
    def bytes_per_pass(self) -> int:
        """Bytes read from disk in one pass; of experts, what one token is likely to need."""
        experts = 0 if self.experts is None else self.experts.bytes_per_token
        return experts + sum(unit.streamed_bytes for unit in self.units if not unit.hosted)

    @property
    def seconds_per_pass(self) -> float | None:
        """Least time that reading takes per pass; on a device, or copying, or computing one row.

        None without a disk rate.
        """
        if self.disk_rate is None:
            return None
        reading, share = self.bytes_per_pass / self.disk_rate, self.device_share
        if share is None:
            return reading
        return max(reading, share.copy_seconds(self.link_bytes_per_pass), self._compute_seconds)

    @property
    def unused(self) -> int:
        """Bytes of the limit that nothing is planned for."""
        fixed = self.floor_bytes + self.reserve_bytes + self.scratch_bytes + self.between_bytes
        cache = 0 if self.experts is None else self.experts.cache_bytes
        return self.memory_limit - fixed - self.resident - self.buffers - cache

    @property
    def fits(self) -> bool:
        """Whether everything is resident, so that nothing is streamed after the first pass."""
        return not self._units_stream and (self.experts is None or self.experts.fits)

    @property
    def _units_stream(self) -> bool:
        return any(unit.streamed.nbytes for unit in self.units)

    # -- on a device -----------------------------------------------------------------------------

    @property
    def device(self) -> str | None:
        """Where the model computes; None on the CPU."""
        return None if self.device_share is None else self.device_share.device

    @property
    def host_memory_limit(self) -> int | None:
        """What this process may hold in host memory; None on the CPU, where it has one limit."""
        return None if self.device_share is None else self.device_share.host_memory_limit

    @property
    def host_smallest_limit(self) -> int | None:
        """The smallest that works there with the same limit of the device; None on the CPU."""
        return None if self.device_share is None else self.device_share.host_smallest_limit

    @property
    def between_bytes(self) -> int:
        """Bytes of the device that its allocator takes for what stays, and nobody can use."""
        return sum(unit.between for unit in self.units)

    @property
    def hosted_bytes(self) -> int:
        """Host memory of the units that stay there, to be copied to the device."""
        return sum(unit.streamed.nbytes for unit in self.units if unit.hosted)

    @property
    def enough_hosted_bytes(self) -> int | None:
        """Host memory for blocks with which a pass is as fast as with more; None if not known."""
        share = self.device_share
        if share is None or self.disk_rate is None:
            return None
        return worth_hosting(
            self.link_bytes_per_pass,
            disk_rate=self.disk_rate,
            link_rate=share.link_rate,
            compute_seconds=self._compute_seconds,
        )

    @property
    def staging_bytes(self) -> int:
        """Host memory that weights pass through on their way to a device; 0 on the CPU."""
        if self.device_share is None:
            return 0
        return self.slots * max((u.streamed.nbytes for u in self.units if not u.hosted), default=0)

    @property
    def link_bytes_per_pass(self) -> int:
        """Bytes copied to the device in one forward pass; 0 on the CPU."""
        if self.device_share is None:
            return 0
        return sum(weight.nbytes for unit in self.units for weight in unit.streamed.weights)

    @property
    def host_unused(self) -> int:
        """Bytes of the host's limit that nothing is planned for; 0 on the CPU."""
        share = self.device_share
        if share is None:
            return 0
        fixed = share.host_floor_bytes + share.host_reserve_bytes + share.staging_scratch_bytes
        return share.host_memory_limit - fixed - self.staging_bytes - self.hosted_bytes

    @property
    def _compute_seconds(self) -> float:
        """Least time that computing takes for one row; 0 if not known."""
        share = self.device_share
        nbytes = self.resident + self.link_bytes_per_pass
        return 0.0 if share is None else share.compute_seconds(nbytes)

    def host_figures(self) -> dict[str, object]:
        """For programs: the device, and the figures of the host, in bytes; empty on the CPU."""
        share = self.device_share
        if share is None:
            return {}
        return {
            "device": share.device,
            "host_memory_limit": share.host_memory_limit,
            "host_smallest_limit": share.host_smallest_limit,
            "host_floor_bytes": share.host_floor_bytes,
            "host_reserve_bytes": share.host_reserve_bytes,
            "staging_bytes": self.staging_bytes,
            "hosted_bytes": self.hosted_bytes,
            "enough_hosted_bytes": self.enough_hosted_bytes,
            "link_bytes_per_pass": self.link_bytes_per_pass,
            "link_bytes_per_second": share.link_rate,
            "compute_bytes_per_second": share.compute_rate,
        }

    # -- shown -----------------------------------------------------------------------------------

    def _rows(self) -> list[Row]:
        """Where each byte of the limits goes, one row per purpose."""
        rows = self._own_rows() if self.device_share is None else self._device_rows()
        return [Row(name, format_size(max(0, size)), note) for name, size, note in rows]

    def _own_rows(self) -> list[tuple[str, int, str]]:
        units = f"parts of {counted(len(self.units), 'unit')}: blocks, modules or ranges of rows"
        smallest = f"smallest that works: {format_least(self.smallest_limit)}"
        experts = [] if self.experts is None else self.experts.rows()
        window = 0 if self.experts is None else self.experts.window_bytes
        of_units = counted(sum(bool(unit.stored) for unit in self.units), "unit")
        packed = ("kept as stored", self.stored_bytes, f"{of_units}: unpacked, not read")
        stored = [packed] if self.stored_bytes else []
        return [
            ("process floor", self.floor_bytes, "interpreter, libraries, everything loaded before"),
            (
                "reserve",
                self.reserve_bytes - window,
                "cache, activations, logits, conversions; kernel tables",
            ),
            ("always resident", self.pinned_bytes, "small parameters, embedding rows"),
            ("resident units", self.resident - self.pinned_bytes - self.stored_bytes, units),
            *stored,
            ("buffers", self.buffers, f"{self.slots} x {format_size(self.slot_bytes)}"),
            ("scratch", self.scratch_bytes, "dtype casts while reading"),
            *experts,
            ("unused", self.unused, self._why_unused()),
            ("memory limit", self.memory_limit, smallest),
        ]

    def _device_rows(self) -> list[tuple[str, int, str]]:
        share = self.device_share
        assert share is not None  # noqa: S101 - only then they are asked for
        blocks = f"parts of {counted(len(self.units), 'block')}"
        smallest = f"smallest that works: {format_least(self.smallest_limit)}"
        enough = self.enough_hosted_bytes
        less = enough is not None and enough < self.hosted_bytes
        hosted = f"; {format_size(enough or 0)} would do" if less else ""
        host_smallest = f"smallest that works: {format_least(share.host_smallest_limit)}"
        buffers = f"{self.slots} x {format_size(self.slot_bytes)}"
        scratch = share.staging_scratch_bytes
        return [
            ("in use", self.floor_bytes, f"on {share.device}, before"),
            ("reserve", self.reserve_bytes, "cache, activations, logits, workspaces"),
            ("always there", self.pinned_bytes, "embeddings, head, small parameters"),
            ("resident", self.resident - self.pinned_bytes, blocks),
            ("between them", self.between_bytes, "lost where the allocator cuts them out"),
            ("buffers", self.buffers, buffers),
            ("unused", self.unused, self._why_unused()),
            ("device limit", self.memory_limit, smallest),
            ("process floor", share.host_floor_bytes, "interpreter, libraries"),
            ("host reserve", share.host_reserve_bytes, "conversions; libraries; kernel tables"),
            ("staging", self.staging_bytes, buffers),
            ("scratch", scratch, "what is read once passes through it"),
            ("kept in host", self.hosted_bytes, f"whole blocks: copied, not read{hosted}"),
            ("host unused", self.host_unused, ""),
            ("host limit", share.host_memory_limit, host_smallest),
        ]

    def _why_unused(self) -> str:
        return "all weights fit" if self.fits else "smaller than the smallest piece"

    def _caption(self) -> str:
        whole = "; ".join(self.whole_experts)
        note = f"\nExperts are read whole, with their blocks: {whole}." if whole else ""
        return self._reading() + note

    def _reading(self) -> str:
        """What is read in each pass, and copied, and how."""
        how = f"({self.io_mode}, {counted(self.readers, 'reader')})"
        about = "" if self.experts is None else "about "
        text = f"{about}{format_size(self.bytes_per_pass)} read per pass {how}"
        share, seconds = self.device_share, self.seconds_per_pass
        if share is None:
            rate = format_size(round(self.disk_rate or 0))
            return f"{text}, at {rate}/s: {seconds:.3g} s" if seconds else text
        text += f", {format_size(self.link_bytes_per_pass)} copied to {share.device}"
        if seconds and not self.fits:
            rates = [rate for rate in (self.disk_rate, share.link_rate) if rate]
            text += f": {seconds:.3g} s at "
            text += " and ".join(f"{format_size(round(rate))}/s" for rate in rates)
        return text
