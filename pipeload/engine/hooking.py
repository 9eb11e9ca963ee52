"""The hooks on one model: around its sites and tables, and where its passes begin and end."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from pipeload.engine.expert_parameters import ExpertsSource
from pipeload.engine.table_parameters import TableSource
from pipeload_hooks import Attachment, SplitSource, attach, attach_split

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.utils.hooks import RemovableHandle

    from pipeload.engine.expert_parameters import ExpertSeat
    from pipeload.engine.site_parameters import Seat
    from pipeload.engine.table_parameters import TableSeat


class Source(SplitSource, TableSource, ExpertsSource, Protocol):
    """What all hooks on a model call: of sites, tables, experts, and where a pass may begin."""

    def begin(self, module: Any, args: Any, kwargs: Any, /) -> None:
        """A call begins that may be a pass."""

    def end(self, module: Any, args: Any, output: Any, /) -> None:
        """A call is over that `begin` was called for."""

    def begin_settled(self, module: Any, args: Any, kwargs: Any, /) -> None:
        """A pass begins that needs no other hook."""

    def arrive_at(self, module: Any, args: Any, kwargs: Any, /) -> None:
        """A part is called, perhaps past the hooks of the model."""


class Hooks:
    """Puts hooks on and takes them off. It holds both modules and what hooks call weakly."""

    def __init__(
        self,
        seats: Sequence[Seat],
        tables: Sequence[TableSeat],
        experts: Sequence[ExpertSeat],
        pass_modules: Sequence[nn.Module],
    ) -> None:
        """`pass_modules` are those at which a pass may begin, the outermost first."""
        self._seats, self._tables, self._experts = seats, tables, experts
        self._pass_modules = [weakref.ref(module) for module in pass_modules]
        self._source: weakref.ref[Source] | None = None
        self._attachment = Attachment()
        self._pass_hooks: list[RemovableHandle] = []
        self._entries = [weakref.ref(module) for module in self._find_entries()]

    def _find_entries(self) -> Iterator[nn.Module]:
        """What a call of each model runs first of its weights, as far as their order tells."""
        modules = {seat.module(): seat for seat in self._seats}
        models = [reference() for reference in self._pass_modules]
        for model in models:
            inner = [] if model is None else list(model.modules())[1:]
            for module in inner:
                if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                    continue  # nobody calls it
                if not modules.keys().isdisjoint(module.modules()):
                    seat = modules.get(module)
                    # What is cut by rows is no place to learn that it is to be cut.
                    if module not in models and (seat is None or seat.whole is None):
                        yield module
                    break

    def sites(self) -> list[int]:
        """Sites that carry hooks."""
        return self._attachment.sites()

    def outermost(self) -> nn.Module | None:
        """The model itself; None when it is gone."""
        return self._pass_modules[0]() if self._pass_modules else None

    def begins_at(self, module: nn.Module) -> bool:
        """Whether a call of it is a pass by itself."""
        return any(reference() is module for reference in self._pass_modules)

    def site_of(self, module: nn.Module) -> int | None:
        """The site that a module is, None if it is none."""
        return next((i for i, seat in enumerate(self._seats) if seat.module() is module), None)

    def attach(self, source: Source) -> None:
        """Put all hooks on. They call `source`, and hold it: this does not."""
        self._source = weakref.ref(source)
        self.attach_sites()
        self.attach_passes()

    def _alive_source(self) -> Source:
        source = None if self._source is None else self._source()
        if source is None:
            raise ReferenceError("the model that streamed is gone")
        return source

    def attach_sites(self) -> None:
        """Put hooks around every site and every table that carries none."""
        source = self._alive_source()
        hooked = set(self._attachment.sites())
        for index, seat in enumerate(self._seats):
            module = seat.module()
            if index in hooked or module is None or not seat.parameters:
                continue
            if seat.whole is not None and isinstance(module, nn.Linear):
                self._attachment.add(index, *attach_split(module, index, source))
            else:
                self._attachment.add(index, *attach(module, index, source))
        for table in self._tables:
            table.attach(source)
        for experts in self._experts:
            experts.attach(source)

    def attach_passes(self) -> None:
        """Have hooks where a pass may begin, in the place of those that were."""
        source = self._alive_source()
        self._detach_passes()
        for module in filter(None, (reference() for reference in self._pass_modules)):
            # Before the hooks of its sites.
            self._pass_hooks += [
                module.register_forward_pre_hook(source.begin, prepend=True, with_kwargs=True),
                module.register_forward_hook(source.end, always_call=True),
            ]

    def attach_settled(self) -> None:
        """Have hooks at the model, and wherever a call past them arrives, and no others."""
        source = self._alive_source()
        self._detach_passes()
        places = [(self._pass_modules[0], source.begin_settled)]
        inner = dict.fromkeys((*self._pass_modules[1:], *self._entries))
        places += [(reference, source.arrive_at) for reference in inner]
        for place, (reference, hook) in enumerate(places):
            if (module := reference()) is not None:
                # A pass begins before others' hooks at the model, as where something streams.
                self._pass_hooks.append(
                    module.register_forward_pre_hook(hook, prepend=not place, with_kwargs=True)
                )

    def detach_site(self, index: int) -> None:
        """Take the hooks off one site: nothing is left to do for it."""
        self._attachment.remove(index)

    def detach_shared_tables(self) -> None:
        """Take the hooks off tables whose rows are all in the weight of a head now."""
        names = {name for seat in self._seats if seat.shared for name in seat.parameters}
        for table in self._tables:
            if not names.isdisjoint(table.parameters):
                table.detach()

    def detach(self) -> None:
        """Take all hooks off. May be called again."""
        self._attachment.remove()
        for table in self._tables:
            table.detach()
        for experts in self._experts:
            experts.detach()
        self._detach_passes()

    def _detach_passes(self) -> None:
        while self._pass_hooks:
            self._pass_hooks.pop().remove()
