"""Builds a session: memory, weights that stay, reader threads, then hooks and guards."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from pipeload.budget.governor import Governor
from pipeload.budget.host_memory import kept_bytes
from pipeload.budget.make_plan import MAPPED, Build
from pipeload.checkpoint.file_reads import FileSet
from pipeload.checkpoint.headers import stamps_of
from pipeload.checkpoint.reader_threads import run_jobs
from pipeload.engine import forks, guarded_methods
from pipeload.engine.adapter_watch import Adapters
from pipeload.engine.edited_weights import Edits
from pipeload.engine.expert_routing import Experts
from pipeload.engine.handle import Handle
from pipeload.engine.hooking import Hooks
from pipeload.engine.module_copies import allow_copies
from pipeload.engine.own_weights import OwnWeights
from pipeload.engine.passes import Passes
from pipeload.engine.replan import Replan
from pipeload.engine.session import Session
from pipeload.engine.streamer import Streamer
from pipeload.engine.table_parameters import TableSeat
from pipeload.engine.teardown import Undo
from pipeload.hf import library
from pipeload.hf.marks import mark_initialised
from pipeload.prefetch.prefetcher import Prefetcher
from pipeload.prefetch.unit import Unit
from pipeload.system.pressure import watch
from pipeload.weights.arena import DTYPES
from pipeload.weights.kept_pieces import KeptPieces
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
    from pipeload.budget.reserve import PassHint
    from pipeload.checkpoint.hung_reads import Stalls
    from pipeload.engine.backend import PlaceMaker, Target
    from pipeload.engine.site_parameters import Seat
    from pipeload.engine.teardown import Step
    from pipeload.formats.format import Shown
    from pipeload.weights.placement import Convert, Place

CHUNK_BYTES = 16 << 20
"""The most one read call asks for."""


class Origin(Protocol):
    """Where a model comes from: the library, or the user who has it in memory."""

    @property
    def model(self) -> Any:
        """The model, of a class of the library's."""

    @property
    def files(self) -> Sequence[Path]:
        """The files that its weights are in."""

    def converter(self) -> Convert:
        """What makes weights that are not in the files as they are."""

    def shown(self, name: str) -> Shown | None:
        """What shows a quantised weight; None for any other."""


class Assembly:
    """A model between the library's loader and its first pass: weights there, hooks to come."""

    def __init__(
        self,
        origin: Origin,
        build: Build,
        target: Target,
        needs: PassNeeds,
        hint: PassHint,
        *,
        pressure: bool,
    ) -> None:
        """Allocate memory, read what is always resident, and start reading the first units.

        Nothing is left behind when this raises.

        Raises:
            ReadError: the disk failed.
        """
        self._undo = Undo()
        self._dropped = weakref.finalize(self, self._undo)
        self._dropped.atexit = False
        self._build, self._target, self._pressure = build, target, pressure
        self._shown: dict[str, Shown] = {}
        try:
            self._open(origin, needs, hint)
        except BaseException:
            self.give_up()
            raise

    def _open(self, origin: Origin, needs: PassNeeds, hint: PassHint) -> None:
        build, target = self._build, self._target
        parts, plan = build.parts, build.plan
        paths = origin.files
        stamps = stamps_of(entry for weight in parts.weights for entry in weight.sources)
        self._files = files = FileSet(paths, build.stream_mode, build.read_timeout, stamps)
        self._undo.push(files.close)
        convert = origin.converter()
        wholes = [site.whole for site in parts.sites if site.whole is not None]
        mapped = list(paths) if plan.io_mode == MAPPED else None
        self._places = places = target.places(files, convert, wholes, mapped)
        scratch = target.scratch(plan)
        pinned = places.make(lay_out(parts.pinned))
        self._pinned_read = run_jobs(pinned.read_jobs(CHUNK_BYTES), scratch, files.stalls)
        self._filled = self._set_parameters(origin, pinned)
        self._companions = {name: packed.companions for name, packed in self._shown.items()}
        self._prefetcher = Prefetcher(
            [_unit(build, index, places) for index in range(len(plan.units))],
            slots=target.slots(build),
            place=target.place,
            files=files,
            convert=convert,
            scratch=scratch,
            chunk_bytes=CHUNK_BYTES,
        )
        self._undo.push(self._prefetcher.close)
        counters = self._prefetcher.counters
        ledger = target.ledger(build, counters, pressure=self._pressure)
        self._governor = Governor(build, needs, hint, ledger)
        model = origin.model
        self._governor.name = f"{type(model).__name__} of {getattr(model, 'name_or_path', '')!r}"
        self._undo.push(self._governor.leave)
        self._governor.join()
        self._seats, self._tables = self._make_seats(), self._make_tables()
        self._experts = Experts(build, self._filled, files, convert, counters)
        self._undo.push(self._experts.close)
        forks.know(self)

    def _set_parameters(
        self, origin: Origin, pinned: Place
    ) -> Mapping[str, tuple[nn.Parameter, Weight]]:
        """Fill every parameter that is ours: pinned ones with values, others with placeholders."""
        model, where = origin.model, self._target.where
        originals = dict(model.named_parameters())
        filled: dict[str, tuple[nn.Parameter, Weight]] = {}
        for weight in self._build.parts.weights:
            name = weight.name
            parameter, data = originals[name], pinned.views.get(name)
            shown = origin.shown(name)
            if shown is not None:
                self._shown[name], parameter = shown, shown.parameter
                put_parameter(model, name, parameter)
                if data is not None:
                    binding = Binding({name: parameter}, {name: shown.companions})
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
        parts = self._build.parts
        tables = {table.weight.name for table in parts.tables}
        seats = []
        for site in parts.sites:
            specs = (parts.specs[index] for index in site.units)
            weights = [site.whole] if site.whole else [w for spec in specs for w in spec.weights]
            names = [weight.name for weight in weights]
            parameters = {name: self._filled[name][0] for name in names}
            companions = {
                name: self._companions[name] for name in names if name in self._companions
            }
            shared = not tables.isdisjoint(names)
            seats.append(self._target.seat(site, parameters, companions, shared=shared))
        return seats

    def _make_tables(self) -> list[TableSeat]:
        return [
            TableSeat(
                table.modules,
                table.weight.name,
                self._filled[table.weight.name][0],
                RowTable(table.weight, self._files, keep_bytes=kept_bytes(table)),
            )
            for table in self._build.parts.tables
        ]

    def at_removal(self, act: Step) -> None:
        """Have `act` called when the model is taken down, before what is there already goes."""
        self._undo.push(act)

    def give_up(self) -> None:
        """Take down what there is, whatever interrupted it: see [Note: one way down]."""
        self._undo()

    def forget(self) -> bool:
        """In a child that is forked while the library loads: see [Note: what a child has]."""
        return self._governor.forget()

    def abandon(self) -> None:
        """In such a child: give the memory of the weights back."""
        self._prefetcher.abandon()

    def finish(self, model: Any, root: nn.Module | None = None) -> None:
        """Put hooks and guards on the loaded model and give it its handle.

        `root` is a module around it that the user has put there.
        """
        undo = self._undo
        undo.push_all(self._target.bring_along(model))
        for shown in self._shown.values():
            undo.push(shown.activate())
        modules = library.pretrained_modules(model)
        weights = self._own_weights()
        adapters = Adapters(model, weights)
        undo.push(adapters.remove)
        adapters.watch(root or model)
        parameters = [parameter for parameter, _ in self._filled.values()]
        undo.push(partial(_make_plain, parameters))
        for parameter in parameters:
            note_changes(parameter)
        session = self._stream(modules, adapters, weights)
        sites = [site.module for site in self._build.parts.sites]
        undo.push_all(guarded_methods.install(model, modules, sites, weights))
        undo.push_all(allow_copies(model, weights))
        for name in (library.AUTO_COMPILE, "pipeload"):
            undo.push(partial(guarded_methods.take_off, weakref.ref(model), name))
        library.disable_auto_compile(model)
        self._governor.put_into_force_by(session.passes.adopt)
        if self._pressure:
            watch(self._governor.look_around)
        undo.push_all(guarded_methods.guard_packed(model, self._companions))
        restore = self._target.restorer(self._places, session, self._filled, self._companions)
        object.__setattr__(model, "pipeload", Handle(model, session, restore))

    def _stream(
        self, pass_modules: Sequence[nn.Module], adapters: Adapters, weights: OwnWeights
    ) -> Session:
        """Make what runs with every pass, and put on the hooks that call it."""
        seats, tables, prefetcher = self._seats, self._tables, self._prefetcher
        experts = self._experts
        edits = Edits(seats, [*tables, *experts.seats], weights.own, self._files)
        self._undo.push(edits.disarm)
        edits.arm()
        hooks = Hooks(seats, tables, experts.seats, pass_modules)
        replan = Replan(
            seats=seats,
            hooks=hooks,
            edits=edits,
            prefetcher=prefetcher,
            governor=self._governor,
            experts=experts,
            whole=self._places.whole,
        )
        streamer = Streamer(
            seats=seats,
            tables=tables,
            replan=replan,
        )
        passes = Passes(
            streamer=streamer,
            replan=replan,
            files=self._files,
            adapters=adapters,
            pass_modules=pass_modules,
        )
        self._undo.push(passes.modes.end)
        weakref.finalize(passes, self._undo).atexit = False
        self._dropped.detach()
        forks.know(passes)
        self._undo.push(hooks.detach)
        hooks.attach(passes)
        return Session(
            files=self._files,
            prefetcher=prefetcher,
            governor=self._governor,
            streamer=streamer,
            passes=passes,
            experts=experts,
            pinned_read=self._pinned_read,
            away=self._build.parts.away,
            close=self._undo,
        )

    def _own_weights(self) -> OwnWeights:
        pinned = {weight.name for weight in self._build.parts.pinned}
        own = {id(parameter): weight for parameter, weight in self._filled.values()}
        hidden = {k: w for k, w in own.items() if w.name not in pinned or w.guarded}
        read = _reader_of(
            self._target,
            self._places,
            self._build.plan.readers,
            self._files.stalls,
            self._governor,
        )
        return OwnWeights(own, hidden, read)


def _make_plain(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.__class__ = plain_kind(parameter)


def _reader_of(
    target: Target, places: PlaceMaker, readers: int, stalls: Stalls, governor: Governor
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


def _unit(build: Build, index: int, places: PlaceMaker) -> Unit:
    plan, (first, *_) = build.plan.units[index], build.parts.specs[index].weights
    rows = (first.first_row, first.first_row + first.shape[0]) if first.whole else (0, 0)
    return Unit(plan, KeptPieces(places.make, plan.resident, plan.stored), rows=rows)
