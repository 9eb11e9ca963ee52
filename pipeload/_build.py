"""From a model on the meta device and a checkpoint to a plan: what is streamed, what stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pipeload._arena import DTYPES, HUGE_PAGE
from pipeload._layout import Weight, ceil_page, lay_out
from pipeload._mapped import MappedFiles, can_map
from pipeload._memory import free_page_cache_bytes, rss_bytes
from pipeload._placement import SCRATCH_BYTES
from pipeload._plan import Plan
from pipeload._reader import resolve_io_mode
from pipeload._reserve import limit_for, page_table_bytes
from pipeload._residency import UnitSpec, choose, is_tiny, smallest_budget, split
from pipeload._sizes import format_size
from pipeload.errors import MemoryLimitError, UnsupportedModelError
from pipeload_hooks import Block, find_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import nn

SLOTS = 2
SMALLEST_SLACK_BYTES = 2_000_000
"""What a limit that is reported as workable has beyond what was needed when it was computed."""
MAPPED = "mapped"
"""How a model that fits is read: `Plan.io_mode`, not an option of the user's."""
# Each direct read of 16 MB is split by the kernel into many requests at once, so more threads
# gained nothing where it was measured; through the page cache a few more copy in parallel.
_READERS = 4
_CASTING_READERS = 2


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for, checked and parsed. Sizes in bytes."""

    memory_limit: int
    io_mode: str
    readers: int | None
    disk_rate: float | None


class Parts(NamedTuple):
    """Which weights are streamed block by block, and which are always there."""

    blocks: list[Block]
    specs: list[UnitSpec]
    pinned: list[Weight]
    others_bytes: int
    """Bytes of the parameters that the library loads or initialises itself."""

    @property
    def conversion_bytes(self) -> int:
        """The most that one run of the library's operations takes beside sources and results."""
        groups: dict[str, list[Weight]] = {}
        for spec in self.specs:
            for weight in spec.weights:
                if weight.group is not None:
                    groups.setdefault(weight.group, []).append(weight)
        return max((_transient_bytes(group) for group in groups.values()), default=0)

    @property
    def needs_scratch(self) -> bool:
        """Whether any weight is cast while it is read."""
        streamed = (weight for spec in self.specs for weight in spec.weights)
        return any(w.group is None and not w.raw for w in (*self.pinned, *streamed))

    @property
    def taken(self) -> list[str]:
        """Names of all weights that are not left to the library."""
        return [w.name for w in self.pinned] + [w.name for spec in self.specs for w in spec.weights]


def divide(model: nn.Module, weights: Mapping[str, Weight], tied: frozenset[str]) -> Parts:
    """Group `weights` by the block that holds them; small, tied and integer ones are pinned.

    Raises:
        UnsupportedModelError: the model has no repeated blocks with weights to stream.
    """
    blocks: list[Block] = []
    specs: list[UnitSpec] = []
    for block in find_blocks(model):
        names = [f"{block.name}.{name}" for name, _ in block.module.named_parameters()]
        streamed = [
            weights[name] for name in names if name in weights and _streamable(weights[name], tied)
        ]
        streamed = _whole_groups(streamed, weights)
        if streamed:
            blocks.append(block)
            specs.append(UnitSpec(block.name, tuple(streamed)))
    if not blocks:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no repeated blocks whose weights lie in the checkpoint, "
            "so there is nothing to stream. Load it without pipeload."
        )
    chosen = {weight.name for spec in specs for weight in spec.weights}
    pinned = [
        weight for name, weight in weights.items() if name not in chosen and weight.group is None
    ]
    taken = chosen | {weight.name for weight in pinned}
    others = sum(
        parameter.numel() * parameter.element_size()
        for name, parameter in model.named_parameters()
        if name not in taken and name not in tied  # a tied one shares the other's memory
    )
    return Parts(blocks, specs, pinned, others)


def make_plan(parts: Parts, files: Sequence[Path], reserve: int, options: Options) -> Plan:
    """Split the limit between what is there, what a pass needs, residents and buffers.

    Raises:
        MemoryLimitError: it is too small; says the smallest that works.
        OptionError: the files refuse the way of reading that was asked for.
    """
    limit, floor = options.memory_limit, rss_bytes()
    pinned_layout = lay_out(parts.pinned)
    pinned = pinned_layout.nbytes
    readers = options.readers or (_CASTING_READERS if parts.needs_scratch else _READERS)
    scratch = readers * ceil_page(SCRATCH_BYTES) if parts.needs_scratch else 0
    pinned += parts.others_bytes
    reserve += parts.conversion_bytes
    fixed = floor + reserve + pinned + scratch + HUGE_PAGE
    least = fixed - page_table_bytes(limit) + smallest_budget(parts.specs, slots=SLOTS)
    # Not `limit`'s page tables, but its own; and the process grows a little by being told.
    smallest = limit_for(least) + SMALLEST_SLACK_BYTES
    choice = choose(parts.specs, limit - fixed, slots=SLOTS)
    if choice is None:
        raise _too_small(limit, smallest, floor=floor, reserve=reserve, pinned=pinned)
    units = tuple(
        split(spec, streamed) for spec, streamed in zip(parts.specs, choice.streamed, strict=True)
    )
    kept = [unit.resident for unit in units]
    streamed_bytes = sum(unit.streamed_bytes for unit in units)
    room = free_page_cache_bytes() - max(0, limit - floor)
    mapped = MappedFiles.supported() and all(map(can_map, (pinned_layout, *kept)))
    if options.io_mode == "auto" and not streamed_bytes and mapped:
        io_mode = MAPPED  # see [Note: mapped or copied]
    else:
        io_mode = resolve_io_mode(options.io_mode, files, fits_cache=streamed_bytes < room)
    return Plan(
        memory_limit=limit,
        smallest_limit=smallest,
        floor_bytes=floor,
        reserve_bytes=reserve + HUGE_PAGE,
        pinned_bytes=pinned,
        units=units,
        slot_bytes=max(unit.streamed.nbytes for unit in units),
        slots=SLOTS if streamed_bytes else 0,
        scratch_bytes=scratch,
        readers=readers,
        io_mode=io_mode,
        disk_rate=options.disk_rate,
    )


def _transient_bytes(group: Sequence[Weight]) -> int:
    """Experts are stacked, then concatenated: two copies, and a third when they are cast first."""
    made = sum(weight.nbytes for weight in group)
    cast = any(source.dtype != group[0].dtype for source in group[0].sources)
    return made * (3 if cast else 2)


def _streamable(weight: Weight, tied: frozenset[str]) -> bool:
    # An evicted float is NaN and shows when it is read too early; an integer has no such value.
    return (
        weight.name not in tied and not is_tiny(weight) and DTYPES[weight.dtype].is_floating_point
    )


def _whole_groups(streamed: Sequence[Weight], everything: Mapping[str, Weight]) -> list[Weight]:
    """Drop conversions that do not stay within the block; the library loads those."""
    names = {weight.name for weight in streamed}
    broken = {w.group for w in everything.values() if w.group is not None and w.name not in names}
    return [weight for weight in streamed if weight.group is None or weight.group not in broken]


def _too_small(
    limit: int, smallest: int, *, floor: int, reserve: int, pinned: int
) -> MemoryLimitError:
    return MemoryLimitError(
        f"memory_limit={limit} bytes ({format_size(limit)}) is too small. This process holds "
        f"{format_size(floor)} already, a pass needs {format_size(reserve)}, weights that are "
        f"always resident take {format_size(pinned)}, and two buffers for the largest block must "
        f"fit. The smallest limit that works here is {smallest} bytes ({format_size(smallest)}); "
        "a smaller tokens= or batch= lowers it.",
        limit=limit,
        smallest_limit=smallest,
    )
