"""What two limits buy on a device: the record that a user sees, and how it is made."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pipeload._sizes import counted, format_size, show_limit
from pipeload._text_tables import Row
from pipeload.budget.accounts import ACCOUNTANT
from pipeload.budget.cut import CHUNKS, Grain
from pipeload.budget.make_plan import SMALLEST_SLACK_BYTES, Build
from pipeload.budget.plan import SLOTS, Plan
from pipeload.budget.reserve import limit_for, page_table_bytes, process_bytes
from pipeload.budget.residency import Residency
from pipeload.checkpoint.files import resolve_io_mode
from pipeload.devices.accounts import account_of
from pipeload.devices.host_tier import choose_hosted, with_hosted, worth_hosting
from pipeload.devices.views import device_bytes
from pipeload.errors import MemoryLimitError
from pipeload.system.library_pages import lower_floor
from pipeload.system.memory import free_page_cache_bytes, rss_bytes
from pipeload.weights.device import aligned
from pipeload.weights.layout import lay_out
from pipeload.weights.placement import scratch_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pipeload.budget.cut import Divider, Touched
    from pipeload.budget.make_plan import Options
    from pipeload.budget.plan import UnitPlan
    from pipeload.weights.device import Device
    from pipeload.weights.layout import Weight

_READERS = 4
_CASTING_READERS = 2


@dataclass(frozen=True, slots=True)
class DevicePlan(Plan):
    """What two limits buy. Figures of `Plan` are of the device; those that follow, of the host."""

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

    @property
    def between_bytes(self) -> int:
        """Bytes of the device that its allocator takes for what stays, and nobody can use."""
        return sum(unit.between for unit in self.units)

    @property
    def unused(self) -> int:
        """Bytes of the device's limit that nothing is planned for."""
        fixed = self.floor_bytes + self.reserve_bytes + self.between_bytes
        return self.memory_limit - fixed - self.resident - self.buffers

    @property
    def hosted_bytes(self) -> int:
        """Host memory of the units that stay there."""
        return sum(unit.streamed.nbytes for unit in self.units if unit.hosted)

    @property
    def enough_hosted_bytes(self) -> int | None:
        """Host memory for blocks with which a pass is as fast as with more; None if not known."""
        if self.disk_rate is None:
            return None
        return worth_hosting(
            self.link_bytes_per_pass,
            disk_rate=self.disk_rate,
            link_rate=self.link_rate,
            compute_seconds=self._compute_seconds,
        )

    @property
    def _compute_seconds(self) -> float:
        """Least time that computing takes for one row; 0 if not known."""
        weights = self.resident + self.link_bytes_per_pass
        return weights / self.compute_rate if self.compute_rate else 0.0

    @property
    def bytes_per_pass(self) -> int:
        """Bytes read from disk in one forward pass."""
        return sum(unit.streamed_bytes for unit in self.units if not unit.hosted)

    @property
    def fits(self) -> bool:
        """Whether everything is on the device."""
        return not any(unit.streamed.nbytes for unit in self.units)

    @property
    def staging_bytes(self) -> int:
        """Host memory that streamed weights pass through."""
        largest = max((u.streamed.nbytes for u in self.units if not u.hosted), default=0)
        return self.slots * largest

    @property
    def link_bytes_per_pass(self) -> int:
        """Bytes copied to the device in one forward pass."""
        return sum(weight.nbytes for unit in self.units for weight in unit.streamed.weights)

    @property
    def seconds_per_pass(self) -> float | None:
        """Least time that reading, copying and computing one row take; None without a disk rate."""
        if self.disk_rate is None:
            return None
        copying = self.link_bytes_per_pass / self.link_rate if self.link_rate else 0.0
        return max(self.bytes_per_pass / self.disk_rate, copying, self._compute_seconds)

    @property
    def host_unused(self) -> int:
        """Bytes of the host's limit that nothing is planned for."""
        fixed = self.host_floor_bytes + self.host_reserve_bytes + self.staging_scratch_bytes
        return self.host_memory_limit - fixed - self.staging_bytes - self.hosted_bytes

    def host_figures(self) -> dict[str, object]:
        """For programs: the device, and the figures of the host; sizes in bytes."""
        return {
            "device": self.device,
            "host_memory_limit": self.host_memory_limit,
            "host_smallest_limit": self.host_smallest_limit,
            "host_floor_bytes": self.host_floor_bytes,
            "host_reserve_bytes": self.host_reserve_bytes,
            "staging_bytes": self.staging_bytes,
            "hosted_bytes": self.hosted_bytes,
            "enough_hosted_bytes": self.enough_hosted_bytes,
            "link_bytes_per_pass": self.link_bytes_per_pass,
            "link_bytes_per_second": self.link_rate,
            "compute_bytes_per_second": self.compute_rate,
        }

    def _rows(self) -> list[Row]:
        """Where each byte of both limits goes, one row per purpose."""
        blocks = f"parts of {counted(len(self.units), 'block')}"
        smallest = f"smallest that works: {format_size(self.smallest_limit)}"
        enough = self.enough_hosted_bytes
        less = enough is not None and enough < self.hosted_bytes
        hosted = f"; {format_size(enough or 0)} would do" if less else ""
        host_smallest = f"smallest that works: {format_size(self.host_smallest_limit)}"
        buffers = f"{self.slots} x {format_size(self.slot_bytes)}"
        rows = [
            ("in use", self.floor_bytes, f"on {self.device}, before"),
            ("reserve", self.reserve_bytes, "cache, activations, logits, workspaces"),
            ("always there", self.pinned_bytes, "embeddings, head, small parameters"),
            ("resident", self.resident - self.pinned_bytes, blocks),
            ("between them", self.between_bytes, "lost where the allocator cuts them out"),
            ("buffers", self.buffers, buffers),
            ("unused", self.unused, self._why_unused()),
            ("device limit", self.memory_limit, smallest),
            ("process floor", self.host_floor_bytes, "interpreter, libraries"),
            ("host reserve", self.host_reserve_bytes, "conversions; libraries; kernel tables"),
            ("staging", self.staging_bytes, buffers),
            ("scratch", self.staging_scratch_bytes, "what is read once passes through it"),
            ("kept in host", self.hosted_bytes, f"whole blocks: copied, not read{hosted}"),
            ("host unused", self.host_unused, ""),
            ("host limit", self.host_memory_limit, host_smallest),
        ]
        return [Row(name, format_size(max(0, size)), note) for name, size, note in rows]

    def _caption(self) -> str:
        """What is read and copied in each pass, and how."""
        how = f"({self.io_mode}, {counted(self.readers, 'reader')})"
        text = f"{format_size(self.bytes_per_pass)} read per pass {how}, "
        text += f"{format_size(self.link_bytes_per_pass)} copied to {self.device}"
        if self.seconds_per_pass and not self.fits:
            rates = [rate for rate in (self.disk_rate, self.link_rate) if rate]
            text += f": {self.seconds_per_pass:.3g} s at "
            text += " and ".join(f"{format_size(round(rate))}/s" for rate in rates)
        return text


def make_device_plan(
    divider: Divider,
    touched: Callable[[], Touched | None],
    files: Sequence[Path],
    pass_bytes: int,
    options: Options,
    *,
    buffers: int,
    leaving: int = 0,
) -> Build:
    """Split both limits between what is there, what a pass needs, residents and buffers.

    Blocks stay whole here: ranges of rows are exact by what was tried on the processor alone.

    Args:
        divider: cuts the model into blocks; head and tables are left whole.
        touched: as for `make_plan`.
        files: the checkpoint's.
        pass_bytes: what a pass needs on the device beside weights.
        options: what the user asked for; with a device.
        buffers: bytes of what the model has beside parameters.
        leaving: bytes that this process holds and will not when the model is streamed.

    Raises:
        MemoryLimitError: one of the limits is too small; says the smallest that works.
        OptionError: the files refuse the way of reading that was asked for.
    """
    device, limit = options.device, options.device_limit
    assert device is not None  # noqa: S101 - asked for with one
    grain = Grain(modules=False, chunk_bytes=CHUNKS[0])
    parts = divider.divide(grain, touched() or divider.unknown())
    residency = Residency(parts.specs, slots=SLOTS, takes=partial(_taken, device))
    pinned = device_bytes(lay_out(parts.pinned)) + parts.others_bytes + buffers
    account = account_of(device)
    floor = device.allocated_bytes() + account.untouched_bytes()
    reserve = pass_bytes + device.slack_bytes
    least = floor + reserve + pinned + residency.smallest
    choice = residency.choose(limit - floor - reserve - pinned)
    if choice is None:
        raise _device_too_small(
            str(device.where), limit, least, floor=floor, reserve=reserve, pinned=pinned
        )
    units = residency.plans(choice)
    readers = options.readers or (_CASTING_READERS if parts.needs_scratch else _READERS)
    streamed = sum(unit.streamed_bytes for unit in units)
    lower_floor()
    device.warm_up()  # what computing needs of the libraries' code comes back
    host_limit = options.memory_limit
    host_floor = rss_bytes() + ACCOUNTANT.untouched_bytes() - leaving
    host_slack, conversions = device.host_slack_bytes, parts.conversion_bytes + _converted(units)
    host_reserve = process_bytes(host_limit) + host_slack + conversions
    slots = 0 if not streamed else SLOTS
    staging = slots * max(unit.streamed.nbytes for unit in units)
    scratch = scratch_bytes(readers)
    needed = host_floor + host_reserve + staging + scratch
    host_least = limit_for(needed - page_table_bytes(host_limit)) + SMALLEST_SLACK_BYTES
    if needed > host_limit:
        raise _host_too_small(options, host_least, host_floor, staging)
    link_rate = device.link_rate() if options.disk_rate else None
    compute_rate = device.compute_rate() if options.disk_rate else None
    budget = 0 if device.unified else host_limit - needed
    units = with_hosted(units, choose_hosted(units, budget))
    streamed = sum(unit.streamed_bytes for unit in units if not unit.hosted)
    room = free_page_cache_bytes() - max(0, host_limit - host_floor)
    stream_mode = resolve_io_mode(options.io_mode, files, fits_cache=0 < streamed < room)
    plan = DevicePlan(
        memory_limit=limit,
        smallest_limit=least,
        floor_bytes=floor,
        reserve_bytes=reserve,
        pinned_bytes=pinned,
        units=units,
        scratch_bytes=0,
        readers=readers,
        io_mode=stream_mode,
        disk_rate=options.disk_rate,
        device=str(device.where),
        host_memory_limit=host_limit,
        host_smallest_limit=host_least,
        host_floor_bytes=host_floor,
        host_reserve_bytes=host_reserve,
        staging_scratch_bytes=scratch,
        link_rate=link_rate,
        compute_rate=compute_rate,
        host_slack_bytes=host_slack,
        host_conversion_bytes=conversions,
    )
    return Build(parts, residency, plan, stream_mode, options.read_timeout, device)


def _taken(device: Device, weights: Sequence[Weight]) -> int:
    """Of the device, for weights that lie in one piece of its memory."""
    return device.takes(sum(aligned(weight.nbytes) for weight in weights))


def _converted(units: Sequence[UnitPlan]) -> int:
    """Host memory in which residents are made that the file does not hold as they are."""
    sizes = (sum(layout.nbytes for layout in unit.resident if layout.conversions) for unit in units)
    return 2 * max(sizes, default=0)  # two units are read at once


def _device_too_small(
    name: str, limit: int, smallest: int, *, floor: int, reserve: int, pinned: int
) -> MemoryLimitError:
    return MemoryLimitError(
        f"memory_limit={show_limit(limit)} of {name} is too small. "
        f"{format_size(floor)} are in use there, a pass needs {format_size(reserve)}, embeddings, "
        f"head and small weights take {format_size(pinned)}, and two buffers for the largest block "
        f"must fit. Set at least {smallest} bytes ({format_size(smallest)}); fewer tokens or "
        "sequences at once (tokens=, batch=) lower that.",
        limit=limit,
        smallest_limit=smallest,
        device=name,
    )


def _host_too_small(options: Options, smallest: int, floor: int, staging: int) -> MemoryLimitError:
    limit = options.memory_limit
    return MemoryLimitError(
        f"host_memory_limit={show_limit(limit)} is too small. This process holds "
        f"{format_size(floor)} already, and the staging between disk and device takes "
        f"{format_size(staging)}. Set at least {smallest} bytes ({format_size(smallest)}); with a "
        f"larger memory_limit less is enough.{options.origin}",
        limit=limit,
        smallest_limit=smallest,
    )
