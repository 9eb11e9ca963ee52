"""The figures of a run, for people and for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from pipeload._sizes import counted, format_size
from pipeload._text_tables import Row, Tabled
from pipeload.engine.stats import expert_rows, past_the_cache, work_rows

if TYPE_CHECKING:
    from pipeload.budget.plan import Plan
    from pipeload.engine.handle import Handle
    from pipeload.engine.stats import Stats


@dataclass(frozen=True, slots=True)
class Figures(Tabled):
    """What a run took. Sizes in bytes, times in seconds."""

    prompt_tokens: int
    new_tokens: int
    memory_limit: int
    peak_rss_bytes: int
    peak_since_load_bytes: int
    resident_bytes: int
    buffer_bytes: int
    bytes_per_pass: int
    bytes_read: int
    read_seconds: float
    read_bytes_per_second: float
    stall_seconds: float
    compute_seconds: float
    load_seconds: float
    first_token_seconds: float
    tokens_per_second: float | None
    """Of the tokens after the first; None when there was only one."""
    passes: int
    tokens_per_pass: float
    hits: int
    misses: int
    expert_hits: int
    expert_misses: int
    expert_bytes_read: int
    io_mode: str
    readers: int
    disk_busy: float
    """Share of the time after the first token during which a read was in flight."""
    compute_busy: float
    """Share of that time in which a block computed."""
    bottleneck: str
    """"disk" or "compute": whichever was busy for longer."""
    device: str
    """Where the model computed. What follows is of a device alone."""
    host_memory_limit: int
    """The process's; `memory_limit` is the device's then."""
    copied_bytes: int
    peak_device_bytes: int
    locked: bool
    """Whether copies came out of locked memory."""

    def as_dict(self) -> dict[str, object]:
        """The figures by name, for JSON."""
        return asdict(self)

    def _rows(self) -> list[Row]:
        """The figures for people, a row for each."""
        speed = "-" if self.tokens_per_second is None else f"{self.tokens_per_second:.3g}"
        disk = "disk" if past_the_cache(self.io_mode) else "reading"
        bottleneck = disk if self.bottleneck == "disk" else self.bottleneck
        busy = f"({disk} busy {self.disk_busy:.0%}, compute {self.compute_busy:.0%} of the time)"
        return [
            *work_rows(self),
            Row("computed on", self.device),
            Row("first token", f"after {self.load_seconds + self.first_token_seconds:.3g} s"),
            Row("speed", f"{speed} tokens/s after the first, {counted(self.new_tokens, 'token')}"),
            Row("tokens per pass", f"{self.tokens_per_pass:.3g}"),
            *expert_rows(self.expert_hits, self.expert_misses),
            Row("bottleneck", f"{bottleneck} {busy}"),
        ]


def count(
    handle: Handle,
    first: Stats,
    *,
    prompt_tokens: int,
    new_tokens: int,
    load_seconds: float,
    first_token_seconds: float,
    later_seconds: float,
) -> Figures:
    """Gather the figures; `first` are the statistics when the first token came."""
    stats, plan = handle.stats(), handle.plan
    disk, compute = _busy(first, stats, first_token_seconds, later_seconds, fits=plan.fits)
    return Figures(
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        memory_limit=stats.memory_limit,
        peak_rss_bytes=stats.peak_rss_bytes,
        peak_since_load_bytes=stats.peak_since_load_bytes,
        resident_bytes=stats.resident_bytes,
        buffer_bytes=stats.buffer_bytes,
        bytes_per_pass=plan.bytes_per_pass,
        bytes_read=stats.bytes_read,
        read_seconds=stats.read_seconds,
        read_bytes_per_second=stats.read_rate,
        stall_seconds=stats.stall_seconds,
        # Passes that read nothing are not timed; all of their time is computing.
        compute_seconds=stats.compute_seconds + (later_seconds if plan.fits else 0.0),
        load_seconds=load_seconds,
        first_token_seconds=first_token_seconds,
        tokens_per_second=(new_tokens - 1) / later_seconds if later_seconds else None,
        passes=stats.passes,
        tokens_per_pass=new_tokens / stats.passes if stats.passes else 0.0,
        hits=stats.hits,
        misses=stats.misses,
        expert_hits=stats.expert_hits,
        expert_misses=stats.expert_misses,
        expert_bytes_read=stats.expert_bytes_read,
        io_mode=plan.io_mode,
        readers=plan.readers,
        disk_busy=disk,
        compute_busy=compute,
        bottleneck="disk" if disk > compute else "compute",
        device=stats.device,
        host_memory_limit=stats.host_memory_limit,
        copied_bytes=stats.copied_bytes,
        peak_device_bytes=stats.peak_device_bytes,
        locked=stats.locked,
    )


def describe_limits(plan: Plan) -> str:
    """The limit, or both with the device that one of them is of."""
    limit = f"memory limit {format_size(plan.memory_limit)}"
    if (share := plan.device_share) is not None:
        limit += f" of {share.device}, {format_size(share.host_memory_limit)} of host memory"
    return limit


def describe_plan(plan: Plan) -> str:
    """What is going to happen, in a line or two."""
    limits = describe_limits(plan)
    if plan.fits:
        return f"{limits}: all weights fit; after the first pass nothing is read"
    copied = None if plan.device_share is None else plan.link_bytes_per_pass
    kept = plan.resident - plan.pinned_bytes
    share = kept / (kept + (plan.bytes_per_pass if copied is None else copied))
    text = (
        f"{limits}: {share:.0%} of the layers' weights stay "
        f"{'in memory' if copied is None else 'on the device'},\n"
        f"{format_size(plan.bytes_per_pass)} are read per token "
        f"({plan.io_mode}, {counted(plan.readers, 'reader')})"
    )
    if plan.stored_bytes:
        text += f",\n{format_size(plan.stored_bytes)} stay as they are stored, and are unpacked"
    if plan.experts is not None:
        text += f",\nwith a cache of {format_size(plan.experts.cache_bytes)} for experts"
    if copied is not None:
        text += f",\n{format_size(copied)} are copied to the device"
    if plan.seconds_per_pass is not None and plan.disk_rate is not None:
        rate = format_size(round(plan.disk_rate))
        text += f",\nwhich takes {plan.seconds_per_pass:.2g} s at {rate}/s, the rate while loading"
    return text


def _busy(
    first: Stats, last: Stats, first_seconds: float, later_seconds: float, *, fits: bool
) -> tuple[float, float]:
    """How busy disk and compute were after the first token; before it, if it stayed alone."""
    if not later_seconds:
        reading, computing, seconds = last.read_seconds, last.compute_seconds, first_seconds
    elif fits:
        return 0.0, 1.0  # nothing is read, and such passes are not timed
    else:
        reading = last.read_seconds - first.read_seconds
        computing = last.compute_seconds - first.compute_seconds
        seconds = later_seconds
    return min(1.0, reading / seconds), min(1.0, computing / seconds)
