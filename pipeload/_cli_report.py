"""The figures of a run, for people and for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from pipeload._sizes import format_size

if TYPE_CHECKING:
    from pipeload._handle import Handle
    from pipeload._plan import Plan
    from pipeload._stats import Stats

# Reading is hidden behind computing as long as blocks wait for less than this share of a pass.
_HIDDEN = 0.05


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run took. Sizes in bytes, times in seconds."""

    prompt_tokens: int
    new_tokens: int
    memory_limit: int
    peak_rss_bytes: int
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
    io_mode: str
    readers: int
    bottleneck: str
    """"disk" when blocks waited for their weights, else "compute"."""

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)

    def table(self) -> str:
        """For people, one line per figure."""
        speed = "-" if self.tokens_per_second is None else f"{self.tokens_per_second:.3g}"
        rows = [
            ("memory limit", format_size(self.memory_limit)),
            ("peak memory", format_size(self.peak_rss_bytes)),
            (
                "read from disk",
                f"{format_size(self.bytes_read)}, {self.read_bytes_per_second / 1e9:.3g} GB/s while reading",
            ),
            ("waited for disk", f"{self.stall_seconds:.3g} s"),
            ("computed", f"{self.compute_seconds:.3g} s"),
            ("first token", f"after {self.load_seconds + self.first_token_seconds:.3g} s"),
            ("speed", f"{speed} tokens/s after the first, {self.new_tokens} tokens"),
            ("tokens per pass", f"{self.tokens_per_pass:.3g}"),
            ("bottleneck", self.bottleneck),
        ]
        return "\n".join(f"{name:<16}{value}" for name, value in rows)


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
    return Figures(
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        memory_limit=stats.memory_limit,
        peak_rss_bytes=stats.peak_rss_bytes,
        resident_bytes=stats.resident_bytes,
        buffer_bytes=stats.buffer_bytes,
        bytes_per_pass=plan.bytes_per_pass,
        bytes_read=stats.bytes_read,
        read_seconds=stats.read_seconds,
        read_bytes_per_second=stats.read_rate,
        stall_seconds=stats.stall_seconds,
        compute_seconds=stats.compute_seconds,
        load_seconds=load_seconds,
        first_token_seconds=first_token_seconds,
        tokens_per_second=(new_tokens - 1) / later_seconds if later_seconds else None,
        passes=stats.passes,
        tokens_per_pass=new_tokens / stats.passes if stats.passes else 0.0,
        hits=stats.hits,
        misses=stats.misses,
        io_mode=plan.io_mode,
        readers=plan.readers,
        bottleneck=_bottleneck(first, stats, fits=plan.fits),
    )


def describe_plan(plan: Plan) -> str:
    """What is going to happen, in a line or two."""
    limit = format_size(plan.memory_limit)
    if plan.fits:
        return f"memory limit {limit}: all weights fit; after the first pass nothing is read"
    kept = plan.resident - plan.pinned_bytes
    share = kept / (kept + plan.bytes_per_pass)
    text = (
        f"memory limit {limit}: {share:.0%} of the layers' weights stay in memory, "
        f"{format_size(plan.bytes_per_pass)} are read per token ({plan.io_mode}, {plan.readers} readers)"
    )
    if plan.seconds_per_pass is not None and plan.disk_rate is not None:
        rate = format_size(round(plan.disk_rate))
        text += f"\nexpected: at least {plan.seconds_per_pass:.2g} s per token at {rate}/s"
    return text


def _bottleneck(first: Stats, last: Stats, *, fits: bool) -> str:
    """Judged by the passes after the first; by the first if it stayed alone."""
    if last.passes > first.passes:
        if fits:
            return "compute"
        stall = last.stall_seconds - first.stall_seconds
        compute = last.compute_seconds - first.compute_seconds
    else:
        stall, compute = last.stall_seconds, last.compute_seconds
    return "disk" if stall > _HIDDEN * (stall + compute) else "compute"
