"""Experts on the model's side: an experts module shows those that a router has chosen."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

from pipeload.engine.evictable import Evictable
from pipeload.engine.on_disk_tensor import on_use_of
from pipeload_hooks import Binding, attach_experts, bind, unbind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from pipeload.budget.model_parts import Bank
    from pipeload.weights.expert_bank import ExpertBank


class ExpertsSource(Protocol):
    """What hooks on an experts module call: it may run by itself, or inside a pass."""

    def route(self, layer: int, ids: torch.Tensor) -> None:
        """Have these experts of a layer there, or come while its module runs."""

    def unroute(self, layer: int) -> None:
        """The module has run. Must do nothing for one that was not routed."""

    def refuse_recording_of(self, layer: int) -> None:
        """Autograd would record experts that are gone by the time of backward: raise."""


class ExpertSeat(Evictable):
    """The parameters of one experts module, and the address space that they show while it runs."""

    def __init__(
        self, layer: int, bank: Bank, parameters: Mapping[str, nn.Parameter], memory: ExpertBank
    ) -> None:
        """`layer` is its number among the model's banks; `parameters` are by their full names."""
        self.layer, self.name, self.experts = layer, bank.held_by.name, bank.experts
        self._names = [tuple(weight.name for weight in weights) for weights in bank.of_each]
        own = enumerate(self._names if bank.held_by.own else ())
        self.owners = {name: expert for expert, names in own for name in names}
        """Whose own a parameter is, by its name; none where all have slices of the same."""
        self.sweeps, self.told_by = bank.held_by.sweeps, bank.held_by.told_by
        self.memory = memory
        self.module = weakref.ref(bank.held_by.module)
        super().__init__(Binding(parameters, on_use=on_use_of))
        self._pairs = self._binding.pair(memory.views)
        self._handles: list[RemovableHandle] = []

    def let_go(self, name: str) -> None:
        """Never again touch that parameter: whoever changed it has all of it in memory."""
        parameter = self.parameters[name]
        self._pairs = [pair for pair in self._pairs if pair.parameter is not parameter]
        self._binding.forget(name)

    def attach(self, source: ExpertsSource) -> None:
        """Put hooks on the module. Does nothing if they are on."""
        module = self.module()
        if not self._handles and module is not None:
            routed = _Routed(self, source)
            self._handles += attach_experts(module, routed, told_by=self.told_by)

    def detach(self) -> None:
        """Take the hooks off. May be called again."""
        while self._handles:
            self._handles.pop().remove()

    def names(self, expert: int) -> tuple[str, ...]:
        """The parameters that an expert has a part in, in the order in which they are used."""
        return self._names[expert if self.owners else 0]

    def experts_of(self, name: str) -> Sequence[int]:
        """Those that have a part in a parameter."""
        return [self.owners[name]] if self.owners else range(self.memory.slices(name))

    def drop(self, expert: int) -> None:
        """Give the memory of an expert back."""
        for name in self.names(expert):
            self.memory.drop(name, expert)

    def bind(self) -> None:
        """Show the address space."""
        bind(self._pairs)

    def unbind(self) -> None:
        """Put the placeholders back."""
        unbind(self._pairs)


class _Routed:
    """What the hooks of one experts module call."""

    def __init__(self, seat: ExpertSeat, source: ExpertsSource) -> None:
        self._seat, self._source = seat, source

    def experts_wanted(self, ids: torch.Tensor) -> None:
        """The module is about to compute with these."""
        self._source.route(self._seat.layer, ids)

    def experts_done(self) -> None:
        """The module has run."""
        self._source.unroute(self._seat.layer)

    def refuse_recording(self) -> None:
        """Training is not possible: experts go before backward could use them."""
        self._source.refuse_recording_of(self._seat.layer)
