"""Builds a streaming model: memory, weights that stay, reader threads, then hooks and guards."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from pipeload.budget.governor import Governor
from pipeload.budget.host_memory import TABLE_KEEP_BYTES
from pipeload.budget.make_plan import MAPPED, Build
from pipeload.checkpoint.files import FileSet
from pipeload.checkpoint.headers import stamps_of
from pipeload.checkpoint.readers import run_jobs
from pipeload.engine import forks, guards
from pipeload.engine.adapters import Adapters
from pipeload.engine.edits import Edits
from pipeload.engine.first_pass import FirstPass
from pipeload.engine.handle import Handle
from pipeload.engine.module_copies import allow_copies
from pipeload.engine.notebook_bar import NotebookBar, in_notebook
from pipeload.engine.own_weights import OwnWeights
from pipeload.engine.streamer import Streamer
from pipeload.engine.table_seats import TableSeat
from pipeload.hf import library
from pipeload.hf.marks import mark_initialised
from pipeload.prefetch.prefetcher import Prefetcher
from pipeload.prefetch.unit import Unit
from pipeload.system.pressure import watch
from pipeload.weights.arena import DTYPES
from pipeload.weights.kept import Home
from pipeload.weights.layout import Weight, lay_out
from pipeload.weights.placement import make_scratch, scratch_bytes
from pipeload.weights.row_table import RowTable
from pipeload_hooks import (
    Binding,
    bind,
    note_changes,
    placeholder,
    plain_kind,
    put_parameter,
    set_parameter,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import nn

    from pipeload.budget.pass_needs import PassNeeds
    from pipeload.budget.plan import Plan
    from pipeload.budget.reserve import PassHint
    from pipeload.checkpoint.stalls import Stalls
    from pipeload.engine.backend import PlacesLike, Target
    from pipeload.engine.seats import Seat
    from pipeload.formats.bitsandbytes.stored import Prepared
    from pipeload.weights.placement import Convert, Place

CHUNK_BYTES = 16 << 20
"""The most one read call asks for."""


class Source(Protocol):
    """A model, and what fills it."""

    @property
    def model(self) -> Any:
        """The library's model."""

    @property
    def files(self) -> Sequence[Path]:
        """Where its weights are."""

    def converter(self) -> Convert:
        """Makes weights that are not in the files as they are."""

    def prepared(self, name: str) -> Prepared | None:
        """What shows a quantised weight; None for any other."""


class Assembly:
    """A model between the library's loader and its first pass: weights there, hooks to come."""

    def __init__(
        self,
        source: Source,
        build: Build,
        target: Target,
        needs: PassNeeds,
        hint: PassHint,
        *,
        pressure: bool,
    ) -> None:
        """Allocate memory, read what is always resident, and start reading the first units.

        Raises:
            ReadError: the disk failed.
        """
        parts, plan = build.parts, build.plan
        self._parts = parts
        self._pressure = pressure
        self._undo: list[Callable[[], None]] = []
        paths = source.files
        stamps = stamps_of(entry for weight in parts.weights for entry in weight.sources)
        files = FileSet(paths, build.stream_mode, build.read_timeout, stamps)
        convert = source.converter()
        wholes = [site.whole for site in parts.sites if site.whole is not None]
        mapped = list(paths) if plan.io_mode == MAPPED else None
        self._target = target
        places = self._places = target.places(files, convert, wholes, mapped)
        scratch = target.scratch(plan)
        pinned = places.make(lay_out(parts.pinned))
        read = run_jobs(pinned.read_jobs(CHUNK_BYTES), scratch, files.stalls)
        self._prepared: dict[str, Prepared] = {}
        self._filled = self._set_parameters(source, build, pinned)
        self._companions = {name: packed.companions for name, packed in self._prepared.items()}
        prefetcher = Prefetcher(
            [_unit(build, index, places) for index in range(len(plan.units))],
            slots=target.slots(build),
            place=target.place,
            files=files,
            convert=convert,
            scratch=scratch,
            chunk_bytes=CHUNK_BYTES,
        )
        ledger = target.ledger(build, prefetcher.counters, pressure=pressure)
        self._governor = Governor(build, needs, hint, ledger)
        model = source.model
        self._governor.name = f"{type(model).__name__} of {getattr(model, 'name_or_path', '')!r}"
        self._governor.join()
        self._read = _reader_of(target, places, plan.readers, files.stalls, self._governor)
        self._seats = self._make_seats()
        self._streamer = Streamer(
            seats=self._seats,
            tables=self._tables(files),
            prefetcher=prefetcher,
            governor=self._governor,
            files=files,
            pinned_read=read,
            whole=places.whole,
        )
        forks.know(self._streamer)

    def _set_parameters(
        self, source: Source, build: Build, pinned: Place
    ) -> Mapping[str, tuple[nn.Parameter, Weight]]:
        """Fill every parameter that is ours: pinned ones with values, others with placeholders."""
        model, where = source.model, self._target.where
        originals = dict(model.named_parameters())
        filled: dict[str, tuple[nn.Parameter, Weight]] = {}
        for weight in build.parts.weights:
            name = weight.name
            parameter, data = originals[name], pinned.views.get(name)
            prepared = source.prepared(name)
            if prepared is not None:
                self._prepared[name], parameter = prepared, prepared.parameter
                put_parameter(model, name, parameter)
                if data is not None:
                    binding = Binding({name: parameter}, {name: prepared.companions})
                    bind(binding.pair({name: data}))
            else:
                if data is None:
                    data = placeholder(weight.shape, DTYPES[weight.dtype], where)
                if parameter.is_meta:
                    requires_grad = parameter.requires_grad
                    parameter = set_parameter(model, name, data, requires_grad=requires_grad)
                else:
                    parameter.data = data  # adapters may hold on to the parameter
            mark_initialised(parameter)
            filled[name] = (parameter, weight)
        return filled

    def _make_seats(self) -> list[Seat]:
        tables = {table.weight.name for table in self._parts.tables}
        seats = []
        for site in self._parts.sites:
            specs = (self._parts.specs[index] for index in site.units)
            weights = [site.whole] if site.whole else [w for spec in specs for w in spec.weights]
            names = [weight.name for weight in weights]
            parameters = {name: self._filled[name][0] for name in names}
            companions = {
                name: self._companions[name] for name in names if name in self._companions
            }
            shared = not tables.isdisjoint(names)
            seats.append(self._target.seat(site, parameters, companions, shared=shared))
        return seats

    def _tables(self, files: FileSet) -> list[TableSeat]:
        return [
            TableSeat(
                table.modules,
                table.weight.name,
                self._filled[table.weight.name][0],
                RowTable(table.weight, files, keep_bytes=TABLE_KEEP_BYTES),
            )
            for table in self._parts.tables
        ]

    def at_removal(self, act: Callable[[], None]) -> None:
        """Have `act` called when the handle is removed; to be said before `finish`."""
        self._undo.append(act)

    def give_up(self) -> None:
        """Take off whatever `finish` has put on, and stop reading: somebody interrupted it."""
        self._streamer.detach()
        while self._undo:
            self._undo.pop()()
        self._governor.leave()
        self._streamer.prefetcher.close()
        self._streamer.files.close()

    def finish(self, model: Any, root: nn.Module | None = None) -> None:
        """Put hooks and guards on the loaded model and give it its handle.

        `root` is a module around it that the user has put there.
        """
        self._target.settle(model, self._undo)
        for prepared in self._prepared.values():
            self._undo.append(prepared.activate())
        modules = library.pretrained_modules(model)
        weights = self._own_weights()
        undo = self._undo
        adapters = Adapters(model, root or model, weights, undo)
        parameters = [parameter for parameter, _ in self._filled.values()]
        undo.append(partial(_make_plain, parameters))
        for parameter in parameters:
            note_changes(parameter)
        edits = Edits(self._seats, self._streamer.tables, weights.own, self._streamer.files)
        undo.append(edits.disarm)
        self._streamer.attach(modules, adapters, edits)
        sites = [site.module for site in self._parts.sites]
        guards.install(model, modules, sites, weights, undo)
        allow_copies(model, weights, undo)
        library.disable_auto_compile(model)
        for name in (library.AUTO_COMPILE, "pipeload"):
            undo.append(partial(guards.forget, weakref.ref(model), name))
        self._governor.adopt = _weak_adopt(self._streamer)
        if self._pressure:
            watch(self._governor.look_around)
        undo += guards.guard_packed(model, self._companions)
        if in_notebook():
            undo.append(FirstPass(model, NotebookBar()).stop)
        restore = self._target.restorer(
            self._places, self._streamer, self._filled, self._companions
        )
        handle = Handle(model, self._streamer, undo, restore)
        object.__setattr__(model, "pipeload", handle)

    def _own_weights(self) -> OwnWeights:
        moving = {*self._parts.streamed, *(table.weight.name for table in self._parts.tables)}
        own = {id(parameter): weight for parameter, weight in self._filled.values()}
        hidden = {k: w for k, w in own.items() if w.name in moving or w.guarded}
        return OwnWeights(own, hidden, self._read)


def _make_plain(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.__class__ = plain_kind(parameter)


def _reader_of(
    target: Target, places: PlacesLike, readers: int, stalls: Stalls, governor: Governor
) -> Callable[[Weight], torch.Tensor]:
    """Reads single weights into memory that is not streamed."""

    def read(weight: Weight) -> torch.Tensor:
        layout = lay_out([weight])
        extra = scratch_bytes(readers) if layout.casts else 0
        governor.shrink(governor.budget - layout.nbytes - weight.nbytes - extra)
        place = places.make(layout)
        # Not the readers' own: they may be reading ahead, or one that hangs may come back to it.
        scratch = make_scratch(readers) if target.needs_scratch(layout) else [None] * readers
        run_jobs(place.read_jobs(CHUNK_BYTES), scratch, stalls)
        # As plain copies lie in memory, not as the file's pages do: that can change results.
        return place.views[weight.name].clone()

    return read


def _weak_adopt(streamer: Streamer) -> Callable[[Plan], bool]:
    """The streamer holds its governor; a reference back would keep both until a collection."""
    reference = weakref.WeakMethod(streamer.adopt)

    def adopt(plan: Plan) -> bool:
        method = reference()
        return method is not None and method(plan)

    return adopt


def _unit(build: Build, index: int, places: PlacesLike) -> Unit:
    plan, (first, *_) = build.plan.units[index], build.parts.specs[index].weights
    rows = (first.first_row, first.first_row + first.shape[0]) if first.whole else (0, 0)
    return Unit(plan, Home(places.make, plan.resident), rows=rows)
