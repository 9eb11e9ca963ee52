"""Builds a streaming model: memory, weights that stay, reader threads, then hooks and guards."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pipeload import _guards, _transformers
from pipeload._arena import DTYPES, Arena, Region
from pipeload._build import MAPPED, Parts
from pipeload._handle import Handle
from pipeload._layout import Layout, Weight, lay_out
from pipeload._mapped import MappedFiles, MappedPlacement
from pipeload._placement import SCRATCH_BYTES, Placement
from pipeload._prefetcher import Prefetcher
from pipeload._reader import FileSet, run_jobs
from pipeload._restore import Restorer
from pipeload._streamer import Streamer
from pipeload._unit import Unit
from pipeload_hooks import placeholder, set_parameter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from pipeload._placement import Convert, Place
    from pipeload._plan import Plan, UnitPlan

CHUNK_BYTES = 16 << 20
"""The most one read call asks for."""


class Assembly:
    """A model between the library's loader and its first pass: weights there, hooks to come."""

    def __init__(self, pending: _transformers.PendingLoad, parts: Parts, plan: Plan) -> None:
        """Allocate memory, read what is always resident, and start reading the first blocks.

        Raises:
            ReadError: the disk failed.
        """
        model = pending.model
        self._parts = parts
        pinned = lay_out(parts.pinned)
        files = FileSet(pending.checkpoint.files, plan.io_mode)
        held = 0 if plan.io_mode == MAPPED else plan.resident
        device = torch.device("cpu")
        kept = Arena(held, device=device, huge=False)
        passing = Arena(plan.buffers + plan.scratch_bytes, device=device, huge=True)
        scratch = _scratch(passing, plan)
        convert = pending.converter()
        if plan.io_mode == MAPPED:
            mapped = MappedFiles(pending.checkpoint.files)
            place: Callable[[Layout], Place] = partial(MappedPlacement, files=mapped)
        else:
            place = partial(_take_place, arena=kept, files=files, convert=convert)
        pinned_place = place(pinned)
        read = run_jobs(pinned_place.read_jobs(CHUNK_BYTES), scratch)
        self.plan = plan
        self._filled = _set_parameters(model, parts, pinned_place)
        units = [_unit(unit, place) for unit in plan.units]
        slots = [passing.take(plan.slot_bytes) for _ in range(plan.slots)]
        prefetcher = Prefetcher(
            units,
            slots=slots,
            files=files,
            convert=convert,
            scratch=scratch,
            chunk_bytes=CHUNK_BYTES,
        )
        parameters = [(self._of(unit.resident), self._of(unit.streamed)) for unit in plan.units]
        self._streamer = Streamer(parts.blocks, parameters, prefetcher, files, read)

    def _of(self, layout: Layout) -> dict[str, nn.Parameter]:
        return {weight.name: self._filled[weight.name][0] for weight in layout.weights}

    def finish(self, model: Any) -> None:
        """Put hooks and guards on the loaded model and give it its handle."""
        blocks = self._parts.blocks
        modules = _transformers.pretrained_modules(model)
        self._streamer.attach(blocks, modules)
        undo = _guards.install(model, modules, [block.module for block in blocks])
        _transformers.disable_auto_compile(model)
        for name in (_transformers.AUTO_COMPILE, "pipeload"):
            undo.append(partial(_guards.forget, weakref.ref(model), name))
        handle = Handle(
            model,
            self.plan,
            self._streamer,
            undo,
            Restorer(self.plan, self._streamer, self._filled),
        )
        object.__setattr__(model, "pipeload", handle)


def _set_parameters(
    model: nn.Module, parts: Parts, pinned: Place
) -> Mapping[str, tuple[nn.Parameter, Weight]]:
    """Replace every meta parameter that is ours: pinned ones by values, others by placeholders."""
    originals = dict(model.named_parameters())
    filled: dict[str, tuple[nn.Parameter, Weight]] = {}
    streamed = [weight for spec in parts.specs for weight in spec.weights]
    for weight in (*parts.pinned, *streamed):
        data = pinned.views.get(weight.name)
        if data is None:
            data = placeholder(weight.shape, DTYPES[weight.dtype], torch.device("cpu"))
        parameter = set_parameter(
            model, weight.name, data, requires_grad=originals[weight.name].requires_grad
        )
        # The library initialises what lacks this mark.
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # noqa: SLF001
        filled[weight.name] = (parameter, weight)
    return filled


def _unit(plan: UnitPlan, place: Callable[[Layout], Place]) -> Unit:
    if not plan.resident.nbytes:
        return Unit(plan, None, loaded=True)
    return Unit(plan, place(plan.resident), loaded=False)


def _take_place(layout: Layout, *, arena: Arena, files: FileSet, convert: Convert) -> Place:
    return Placement(layout, arena.take(layout.nbytes), files, convert)


def _scratch(arena: Arena, plan: Plan) -> list[Region | None]:
    if not plan.scratch_bytes:
        return [None] * plan.readers
    return [arena.take(SCRATCH_BYTES) for _ in range(plan.readers)]
