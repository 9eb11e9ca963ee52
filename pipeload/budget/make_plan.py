"""From a model on the meta device and a checkpoint to a plan: what is streamed, what stays.

[Note: the price of memory] While reading is the bottleneck, a byte that is not held costs the time
of reading it in every pass, whatever it belongs to: blocks, head, cache. Embedding rows cost next
to nothing to read, so a table is never held. How finely to cut is weighed in the same currency:
smaller units leave smaller buffers, and each costs the time of handing it over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from pipeload._sizes import format_size, show_limit
from pipeload.budget.accounts import ACCOUNTANT
from pipeload.budget.cut import CHUNKS, Grain
from pipeload.budget.plan import SLOTS, Plan
from pipeload.budget.reserve import limit_for, page_table_bytes
from pipeload.budget.residency import Residency
from pipeload.checkpoint.files import resolve_io_mode
from pipeload.checkpoint.stalls import DEFAULT_SECONDS
from pipeload.errors import MemoryLimitError
from pipeload.system.library_pages import lower_floor
from pipeload.system.memory import allowed_bytes, free_page_cache_bytes, rss_bytes
from pipeload.weights.arena import DTYPES, HUGE_PAGE
from pipeload.weights.layout import lay_out
from pipeload.weights.mapped import MappedFiles, can_map
from pipeload.weights.placement import scratch_bytes
from pipeload.weights.whole_shape import WINDOW_BYTES, WholeShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pipeload.budget.cut import Divider, Parts, Touched
    from pipeload.budget.residency import Choice
    from pipeload.weights.device import Device

SMALLEST_SLACK_BYTES = 6_000_000
"""What a limit that is reported as workable has beyond what was needed when it was computed: the
same process, started again, differs by some megabytes."""
MAPPED = "mapped"
"""How a model that fits is read: `Plan.io_mode`, not an option of the user's."""
# Each direct read of 16 MB is split by the kernel into many requests at once, so more threads
# gained nothing where it was measured; through the page cache a few more copy in parallel.
_READERS = 4
_CASTING_READERS = 2
TABLE_KEEP_BYTES = 4 << 20
"""How much of an embedding table stays once its rows were read."""


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

    @property
    def origin(self) -> str:
        """For a refusal: what a limit is made of that nobody named."""
        if not self.found_out:
            return ""
        return (
            f' Nobody named it: "auto" leaves a part of the {format_size(allowed_bytes())} that '
            "this process may use to everything else; name one to use more."
        )


class Build(NamedTuple):
    """A plan, and what it was made from."""

    parts: Parts
    residency: Residency
    plan: Plan
    stream_mode: str
    """How files are read; `plan.io_mode` unless everything is mapped."""
    read_timeout: float | None
    device: Device | None = None


def make_plan(
    divider: Divider,
    touched: Callable[[], Touched | None],
    files: Sequence[Path],
    reserve: int,
    options: Options,
    *,
    leaving: int = 0,
) -> Build:
    """Split the limit between what is there, what a pass needs, residents and buffers.

    Args:
        divider: cuts the model into units.
        touched: weights that are used while the module that owns them does not run; None when that
            cannot be known.
        files: the checkpoint's.
        reserve: bytes that a pass needs beside weights.
        options: what the user asked for.
        leaving: bytes that this process holds and will not when the model is streamed.

    Raises:
        MemoryLimitError: the limit is too small; says the smallest that works.
        OptionError: the files refuse the way of reading that was asked for.
    """
    chunks = [size for size in CHUNKS if size <= divider.largest_block] or [CHUNKS[-1]]
    known = touched()
    outside = known or divider.unknown()
    coarse = [_Cut(divider, Grain(modules=False, chunk_bytes=c), options, outside) for c in chunks]
    fine = [Grain(modules=True, chunk_bytes=c) for c in (chunks if known is not None else ())]
    finest = _Cut(divider, fine[-1], options, outside) if fine else coarse[-1]
    # After cutting: trying out products of rows has made torch take on what it takes on. What
    # running needs of the libraries comes back, out of the reserve.
    lower_floor()
    limit, floor = options.memory_limit, rss_bytes() + ACCOUNTANT.untouched_bytes()
    floor -= leaving
    spent = floor + reserve
    chosen = _cheapest(coarse, limit - spent)
    if chosen is None and fine:  # whole blocks do not fit
        others = [_Cut(divider, grain, options, outside) for grain in fine[:-1]]
        chosen = _cheapest([*others, finest], limit - spent)
    cuts = [*coarse, finest]
    if finest.parts.uncut and WholeShape.is_free():  # slower than all others, so the last
        cuts.append(_Cut(divider, finest.grain._replace(anyhow=True), options, outside))
        chosen = chosen or _cheapest(cuts[-1:], limit - spent)
    least = min(cuts, key=lambda cut: cut.least)
    # Not `limit`'s page tables, but its own; and the process grows a little by being told.
    smallest = limit_for(spent - page_table_bytes(limit) + least.least) + SMALLEST_SLACK_BYTES
    if chosen is None:
        raise _too_small(options, smallest, least, floor=floor, reserve=reserve)
    cut, choice = chosen
    units = cut.residency.plans(choice)
    streamed_bytes = sum(unit.streamed_bytes for unit in units)
    room = free_page_cache_bytes() - max(0, limit - floor)
    kept = [layout for unit in units for layout in unit.resident]
    mapped = options.may_map and MappedFiles.supported()
    mapped = mapped and all(map(can_map, (cut.pinned_layout, *kept)))
    stream_mode = resolve_io_mode(options.io_mode, files, fits_cache=0 < streamed_bytes < room)
    fits = options.io_mode == "auto" and not streamed_bytes and mapped
    plan = Plan(
        memory_limit=limit,
        smallest_limit=smallest,
        floor_bytes=floor,
        reserve_bytes=reserve + cut.working,
        pinned_bytes=cut.pinned,
        units=units,
        scratch_bytes=cut.scratch,
        readers=cut.readers,
        io_mode=MAPPED if fits else stream_mode,  # see [Note: mapped or copied]
        disk_rate=options.disk_rate,
    )
    return Build(cut.parts, cut.residency, plan, stream_mode, options.read_timeout)


class _Cut:
    """A model cut at one grain, and the memory that this takes whatever is streamed. In bytes."""

    def __init__(
        self,
        divider: Divider,
        grain: Grain,
        options: Options,
        touched: Touched,
    ) -> None:
        self.grain = grain
        self.parts = parts = divider.divide(grain, touched)
        self.residency = Residency(parts.specs, slots=SLOTS)
        casting = parts.needs_scratch
        self.readers = options.readers or (_CASTING_READERS if casting else _READERS)
        self.scratch = scratch_bytes(self.readers) if casting else 0
        self.pinned_layout = lay_out(parts.pinned)
        tables = sum(min(table.weight.nbytes, TABLE_KEEP_BYTES) for table in parts.tables)
        self.pinned = self.pinned_layout.nbytes + tables + parts.others_bytes
        ranges = (parts.specs[i] for site in parts.sites if site.whole for i in site.units)
        window = max((weight.nbytes for spec in ranges for weight in spec.weights), default=0)
        self.working = parts.conversion_bytes + HUGE_PAGE + min(window, WINDOW_BYTES)
        self.fixed = self.working + self.pinned + self.scratch

    @property
    def least(self) -> int:
        """The least that it takes, with nothing resident that can be streamed."""
        return self.fixed + self.residency.smallest


def _cheapest(cuts: Sequence[_Cut], budget: int) -> tuple[_Cut, Choice] | None:
    """The cut whose passes take least time with `budget` bytes; None if none fits."""
    found = [(cut, cut.residency.choose(budget - cut.fixed)) for cut in cuts]
    fitting = [(cut, choice) for cut, choice in found if choice is not None]
    return min(fitting, key=lambda pair: pair[1].seconds, default=None)


def _too_small(
    options: Options, smallest: int, cut: _Cut, *, floor: int, reserve: int
) -> MemoryLimitError:
    """Says what the smallest limit is made of: sizes that add up to it."""
    limit = options.memory_limit
    largest = max(cut.parts.specs, key=lambda spec: sum(weight.nbytes for weight in spec.weights))
    rest = smallest - floor - reserve - cut.pinned - cut.residency.smallest
    return MemoryLimitError(
        f"memory_limit={show_limit(limit)} is too small. This process holds "
        f"{format_size(floor)} already, a pass needs {format_size(reserve)}, weights that are "
        f"always resident take {format_size(cut.pinned)}, two buffers for the largest unit, "
        f"{largest.name!r}, {format_size(cut.residency.smallest)}, and all else "
        f"{format_size(rest)}. The smallest limit that works here is {smallest} bytes "
        f"({format_size(smallest)}); fewer tokens or sequences at once (tokens=, batch=) lower it."
        f"{_uncut(cut)}{options.origin}",
        limit=limit,
        smallest_limit=smallest,
    )


def _uncut(cut: _Cut) -> str:
    """What could be smaller on another processor."""
    weights = [w for spec in cut.parts.specs for w in spec.weights if w.name in cut.parts.uncut]
    if not weights:
        return ""
    largest = max(weights, key=lambda weight: weight.nbytes)
    return (
        f" {largest.name!r} ({format_size(largest.nbytes)}) is read as a whole: with the kernels "
        f"that this processor has for {DTYPES[largest.dtype]} and {torch.get_num_threads()} "
        "threads, ranges of its rows would give other bits. Another dtype= or number of threads "
        "may let it be cut."
    )
