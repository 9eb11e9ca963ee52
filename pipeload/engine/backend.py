"""Where a model computes, as far as building it goes: the CPU, or a device.

Chosen once, when a model is put together. What runs afterwards knows nothing of it: places,
buffers, seats and governors are simply of one kind or of the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from pipeload.budget.buffer_count import BUFFER_COUNT
from pipeload.budget.host_ledger import HostLedger
from pipeload.engine.restore import Restorer
from pipeload.engine.site_parameters import Seat
from pipeload.hf import written_attention
from pipeload.prefetch.prefetcher import place_streamed
from pipeload.weights.arena import Arena, Region
from pipeload.weights.layout import lay_out
from pipeload.weights.placement import make_scratch
from pipeload.weights.resident_memory import ResidentMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from torch import nn

    from pipeload.budget.ledger import Ledger
    from pipeload.budget.make_plan import Build
    from pipeload.budget.plan import Plan
    from pipeload.budget.read_counters import Counters
    from pipeload.checkpoint.file_reads import FileSet
    from pipeload.engine.teardown import Step
    from pipeload.prefetch.buffers import Buffer
    from pipeload.prefetch.dispatcher import MakePlace
    from pipeload.weights.layout import Layout, Weight
    from pipeload.weights.placement import Convert, Place

_CPU = torch.device("cpu")


class PlaceMaker(Protocol):
    """Gives weights that stay their memory."""

    def make(self, layout: Layout) -> Place:
        """Memory for a layout: one piece of a unit, or everything that is pinned."""

    def whole(self, weight: Weight) -> torch.Tensor:
        """A weight that is cut by rows, whose ranges are all there."""


class Target(Protocol):
    """The parts that a streaming model is made of."""

    @property
    def where(self) -> torch.device:
        """The device that its parameters are on."""

    @property
    def place(self) -> MakePlace:
        """Puts a unit's streamed part into a buffer."""

    def places(
        self,
        files: FileSet,
        convert: Convert,
        wholes: list[Weight],
        mapped: list[Path] | None,
        /,
    ) -> PlaceMaker:
        """What gives weights that stay their memory, made of what `ResidentMemory` takes."""

    def slots(self, build: Build, /) -> Sequence[Buffer]:
        """The buffers that streamed weights pass through."""

    def scratch(self, plan: Plan) -> list[Region | None]:
        """Working memory, one entry per reader."""

    def needs_scratch(self, layout: Layout, /) -> bool:
        """Whether reading it takes working memory."""

    def ledger(self, build: Build, counters: Counters, /, *, pressure: bool) -> Ledger:
        """What is in the memory that the weights are planned for, as `HostLedger` takes it."""

    @property
    def seat(self) -> Callable[..., Seat]:
        """Makes a seat, of what `Seat` takes."""

    @property
    def restorer(self) -> Callable[..., Callable[[nn.Module], None]]:
        """Makes what puts real weights back, of the model's places and what `Restorer` takes."""

    def bring_along(self, model: nn.Module, /) -> Iterable[Step]:
        """Have all else that the model consists of be where its weights are.

        Gives what undoes that, each as soon as it is done.
        """


class CpuTarget:
    """The processor: weights are where they were read to."""

    def __init__(self) -> None:
        self.where = _CPU
        self.place: MakePlace = place_streamed
        self.seat = Seat

    def ledger(self, build: Build, counters: Counters, *, pressure: bool) -> Ledger:
        """The process's memory."""
        return HostLedger(build, counters, pressure=pressure)

    def places(
        self, files: FileSet, convert: Convert, wholes: list[Weight], mapped: list[Path] | None
    ) -> PlaceMaker:
        """Memory of the process, or the mapped files."""
        return ResidentMemory(files, convert, wholes, mapped)

    def slots(self, build: Build) -> list[Region]:
        """Address space for the largest unit, all of it streamed; pages come as they are used."""
        largest = max(lay_out(spec.weights).nbytes for spec in build.parts.specs)
        arena = Arena(BUFFER_COUNT * largest, device=_CPU, huge=True)
        return [arena.take(largest) for _ in range(BUFFER_COUNT)]

    def scratch(self, plan: Plan) -> list[Region | None]:
        """Working memory for every reader, where weights are cast."""
        return make_scratch(plan.readers) if plan.scratch_bytes else [None] * plan.readers

    def needs_scratch(self, layout: Layout) -> bool:
        """Whether any of its weights is cast."""
        return bool(layout.casts)

    def restorer(self, places: PlaceMaker, *parts: Any) -> Callable[[nn.Module], None]:
        """What it puts back comes from the files themselves."""
        return Restorer(places.make, *parts)

    def bring_along(self, model: nn.Module) -> Iterable[Step]:
        """All of it is in the processor's memory already; attention takes less of that."""
        return written_attention.serve(model)
