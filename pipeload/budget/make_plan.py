"""From a model on the meta device and a checkpoint to a plan: what is streamed, what stays.

Pure: cuts of a model, what was measured and what was asked for go in, and a plan comes out.

[Note: the price of memory] While reading is the bottleneck, a byte that is not held costs the time
of reading it in every pass, whatever it belongs to: blocks, head, cache. Embedding rows cost next
to nothing to read, so a table is never held. How finely to cut is weighed in the same currency:
smaller units leave smaller buffers, and each costs the time of handing it over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

from pipeload.budget.buffer_count import BUFFER_COUNT
from pipeload.budget.experts_in_plan import ExpertsShare
from pipeload.budget.plan import Plan
from pipeload.budget.residency import Residency
from pipeload.checkpoint.io_mode import choose_io_mode
from pipeload.checkpoint.reader_threads import reader_count
from pipeload.weights.layout import lay_out
from pipeload.weights.mapped import can_map

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from pipeload.budget.cut_fineness import Cutting, Cuttings
    from pipeload.budget.device_in_plan import DeviceShare
    from pipeload.budget.measured_host import Measured
    from pipeload.budget.model_parts import Parts
    from pipeload.budget.plan import UnitPlan
    from pipeload.budget.plan_options import Options
    from pipeload.budget.residency import Choice
    from pipeload.budget.unit_menus import Takes
    from pipeload.weights.device_interface import Device

MAPPED = "mapped"
"""How a model that fits is read: `Plan.io_mode`, not an option of the user's."""
_HARDLY_LONGER = 1.02


class Costs(NamedTuple):
    """What a model takes of a memory whatever is streamed. In bytes."""

    pinned: int
    """Weights that are always there."""
    working: int
    """Kept free for conversions, and for products that are computed in ranges of rows."""
    scratch: int
    """Working memory of the readers."""


class Memory(Protocol):
    """The memory that weights are planned for: the process's, or a device's. Sizes in bytes."""

    @property
    def limit(self) -> int:
        """What may be taken of it."""

    @property
    def floor_bytes(self) -> int:
        """What was taken before."""

    @property
    def reserve_bytes(self) -> int:
        """What is kept free for passes, and for whatever else is taken on while it runs."""

    @property
    def may_map(self) -> bool:
        """Whether weights that stay may be shown as mapped files."""

    @property
    def takes(self) -> Takes | None:
        """What its allocator takes for weights that stay together; None: what their layout says."""

    @property
    def keeps_stored(self) -> bool:
        """Whether weights that are unpacked may stay as they are stored."""

    def costs(self, parts: Parts, readers: int, /) -> Costs:
        """What a model that is cut like this takes, whatever is streamed."""

    def smallest_limit(self, needed: int, /) -> int:
        """The smallest limit that holds `needed` bytes."""

    def refuse(self, smallest: int, cut: CostedCut, /) -> NoReturn:
        """Say that the limit is too small.

        Raises:
            MemoryLimitError: always.
        """

    def share(
        self, cut: CostedCut, units: Sequence[UnitPlan], /
    ) -> tuple[Sequence[UnitPlan], DeviceShare | None]:
        """What a device has beside its memory, and the units with what of it they take.

        Raises:
            MemoryLimitError: host memory is too small for it.
        """


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
    cuttings: Cuttings,
    measured: Measured,
    options: Options,
    memory: Memory,
    files: Sequence[Path],
) -> Build:
    """Split a limit between what is there, what a pass needs, residents and buffers.

    Args:
        cuttings: the ways to cut the model.
        measured: what was found before: `memory` is made of it.
        options: what the user asked for.
        memory: where weights are when they are computed with.
        files: the checkpoint's, for errors.

    Raises:
        MemoryLimitError: the limit is too small; says the smallest that works.
        OptionError: the files refuse the way of reading that was asked for.
    """
    spent = memory.floor_bytes + memory.reserve_bytes
    cut, choice, smallest = _choose(cuttings, measured, options, memory, spent)
    units, share = memory.share(cut, cut.residency.plans(choice))
    experts = _experts_share(cut.parts, choice.cache_bytes)
    # With what stays as it is stored: that may change.
    streamed = sum(unit.streamed.read_bytes for unit in units if not unit.hosted)
    streamed += sum(table.weight.read_bytes for table in cut.parts.tables if table.in_block)
    if experts is not None:
        streamed += experts.total_bytes - experts.cache_bytes
    room = measured.page_cache_bytes - max(0, options.memory_limit - measured.floor_bytes)
    stream_mode = choose_io_mode(
        options.io_mode, files, measured.direct_refusal, fits_cache=0 < streamed < room
    )
    kept = [layout for unit in units for layout in unit.resident]
    mapped = memory.may_map and all(map(can_map, (lay_out(cut.parts.pinned), *kept)))
    fits = options.io_mode == "auto" and not streamed and mapped
    plan = Plan(
        memory_limit=memory.limit,
        smallest_limit=smallest,
        floor_bytes=memory.floor_bytes,
        reserve_bytes=memory.reserve_bytes + cut.costs.working,
        pinned_bytes=cut.costs.pinned,
        units=tuple(units),
        scratch_bytes=cut.costs.scratch,
        readers=cut.readers,
        io_mode=MAPPED if fits else stream_mode,  # see [Note: mapped or copied]
        disk_rate=options.disk_rate,
        experts=experts,
        whole_experts=cut.parts.whole_experts,
        device_share=share,
    )
    device = options.device
    return Build(cut.parts, cut.residency, plan, stream_mode, options.read_timeout, device)


class CostedCut:
    """A model cut at one grain, and the memory that this takes whatever is streamed. In bytes."""

    def __init__(self, cutting: Cutting, options: Options, memory: Memory) -> None:
        self.parts = parts = cutting.parts
        self.residency = Residency(
            parts.specs,
            slots=BUFFER_COUNT,
            takes=memory.takes,
            experts_bytes=parts.experts_bytes,
            keeps_stored=memory.keeps_stored,
        )
        self.readers = options.readers or reader_count(casting=parts.needs_scratch)
        self.costs = memory.costs(parts, self.readers)
        self.fixed = sum(self.costs)

    @property
    def least(self) -> int:
        """The least that it takes, with nothing resident that can be streamed."""
        return self.fixed + self.residency.smallest


def _choose(
    cuttings: Cuttings, measured: Measured, options: Options, memory: Memory, spent: int
) -> tuple[CostedCut, Choice, int]:
    """The cut to take, what of it stays, and the smallest limit that some cut needs.

    `spent`: bytes of the limit that no weight can have.

    Raises:
        MemoryLimitError: none fits.
    """

    def costed(ways: Iterable[Cutting]) -> list[CostedCut]:
        return [CostedCut(way, options, memory) for way in ways]

    budget = memory.limit - spent
    coarse, (finest,) = costed(cuttings.coarse), costed([cuttings.finest])
    cuts = [*coarse, finest]
    chosen = _cheapest(coarse, budget)
    # What buffers do not take holds more where it is kept as it is stored: so fine cuts may pay.
    packs = any(cut.residency.packs for cut in coarse)
    if chosen is None or (packs and chosen[1].slot_bytes):
        chosen = _cheapest([*coarse, *costed(cuttings.fine())], budget)
    anyhow = cuttings.anyhow() if measured.zeros_are_free else None
    if anyhow is not None:  # slower than all others, so the last
        cuts += costed([anyhow])
        chosen = chosen or _cheapest(cuts[-1:], budget)
    least = min(cuts, key=lambda cut: cut.least)
    smallest = memory.smallest_limit(spent + least.least)
    if chosen is None:
        memory.refuse(smallest, least)
    return (*chosen, smallest)


def _cheapest(cuts: Sequence[CostedCut], budget: int) -> tuple[CostedCut, Choice] | None:
    """The cut whose passes take least time with `budget` bytes; None if none fits.

    Where blocks are unpacked, which takes as long as a fast disk, the one that reads least of those
    that hardly take longer.
    """
    found = [(cut, cut.residency.choose(budget - cut.fixed)) for cut in cuts]
    fitting = [(cut, choice) for cut, choice in found if choice is not None]
    least = min((choice.seconds for _, choice in fitting), default=0.0)
    most = least * (_HARDLY_LONGER if any(cut.residency.packs for cut in cuts) else 1)
    near = [pair for pair in fitting if pair[1].seconds <= most]
    return min(near, key=lambda pair: (pair[1].read_bytes, pair[1].seconds), default=None)


def _experts_share(parts: Parts, cache_bytes: int) -> ExpertsShare | None:
    banks = parts.banks
    if not banks:
        return None
    each = [(bank.held_by.routed or 0, bank) for bank in banks]
    known = all(routed for routed, _ in each)
    routed = sum(min(count, bank.experts) * bank.expert_bytes for count, bank in each)
    weights = [weight for bank in banks for weight in bank.weights]
    return ExpertsShare(
        layers=len(banks),
        experts=sum(bank.experts for bank in banks),
        total_bytes=parts.experts_bytes,
        window_bytes=parts.expert_window_bytes,
        routed_bytes=routed if known else None,
        cache_bytes=cache_bytes,
        read_share=sum(w.read_bytes for w in weights) / sum(w.nbytes for w in weights),
    )
