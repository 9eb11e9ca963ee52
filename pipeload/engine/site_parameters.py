"""Sites on the model's side: parameters, and the views prepared for them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from pipeload.engine.evictable import Evictable
from pipeload.engine.on_disk_tensor import on_use_of
from pipeload.engine.row_products import RowProducts
from pipeload_hooks import Binding, bind, bind_for_long, unbind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import nn

    from pipeload.budget.model_parts import Site
    from pipeload.budget.plan import UnitPlan
    from pipeload.prefetch.unit import Unit
    from pipeload.weights.layout import Weight
    from pipeload_hooks import Bound, Companion


class Seat(Evictable):
    """A site and its parameters. It holds its module weakly."""

    def __init__(
        self,
        site: Site,
        parameters: Mapping[str, nn.Parameter],
        companions: Mapping[str, Sequence[Companion]],
        *,
        shared: bool,
    ) -> None:
        """`parameters` are those that may be streamed, by name; `shared`: with a table."""
        self.shared = shared
        self.name = site.name
        self.module = weakref.ref(site.module)
        self.units = site.units
        self.chosen: Sequence[int] = site.units
        """Those of its units that its next run needs: all, unless somebody knows which."""
        self.whole = site.whole
        self.products = None if site.whole is None else RowProducts(site.whole, site.ranges)
        """How it computes from ranges of rows, if it does."""
        self.partly = site.whole is not None and site.rows_here < site.whole.shape[0]
        """Whether other ranks compute some of its rows: all of them are never here."""
        self._packed = frozenset(companions)
        super().__init__(Binding(parameters, companions, on_use_of))
        self._plan: UnitPlan | None = None
        self._resident: list[Bound] = []
        self._streamed: dict[int, list[Bound]] = {}
        self._passing: list[Bound] = []

    def bind(self, unit: Unit) -> None:
        """Give every parameter its values, out of a unit that is there."""
        if self._plan is not unit.plan:
            self.evict()
            self._resident = self._binding.pair(unit.kept.views)
            bind_for_long(self._resident)
            self._plan = unit.plan
        elif self.shared:
            bind_for_long(self._resident)  # the table has put its placeholder there since
        if unit.slot is not None:
            if unit.slot not in self._streamed:
                self._streamed[unit.slot] = self._binding.pair(unit.slots[unit.slot].views)
            self._passing = self._streamed[unit.slot]
            bind(self._passing)

    def bind_whole(self, show: Callable[[Weight], torch.Tensor]) -> None:
        """All ranges of rows are there, one behind the other: have `show` make one tensor."""
        if not self._resident and self.whole is not None:
            self._resident = self._binding.pair({self.whole.name: show(self.whole)})
        bind_for_long(self._resident)  # also when it was before: a table may share the parameter

    def bind_once(self, values: torch.Tensor) -> None:
        """Show the whole weight until `unbind`."""
        if self.whole is not None:
            self._passing = self._binding.pair({self.whole.name: values})
            bind(self._passing)

    def unbind(self) -> None:
        """Put placeholders into what was streamed; what is resident stays bound."""
        unbind(self._passing)
        self._passing = []

    def evict(self) -> None:
        """Put placeholders into everything: other parts will be resident from now on."""
        self._binding.evict()
        self._plan = None
        self._resident, self._passing = [], []
        self._streamed.clear()

    def packed(self, name: str) -> bool:
        """Whether that parameter is quantised."""
        return name in self._packed

    def let_go(self, name: str, units: Sequence[Unit]) -> None:
        """Never again touch that parameter, nor the memory that it shows. Nothing is passing."""
        parameter = self.parameters[name]
        self._binding.forget(name)
        for index in self.units:
            kept = units[index].kept
            kept.leave(name if self.whole is None else None)
        self._resident = [one for one in self._resident if one.parameter is not parameter]
        self._streamed.clear()

    def replaced(self) -> bool:
        """Whether the module computes with another weight than the one it had."""
        module = self.module()
        weight = None if module is None else module._parameters.get("weight")  # noqa: SLF001
        return all(weight is not parameter for parameter in self.parameters.values())

    def settled(self, units: Sequence[Unit]) -> bool:
        """Whether everything is resident and bound, so that nothing is left to do for it."""
        mine = [units[index] for index in self.units]
        if self.partly:
            return False
        if self.whole is not None:
            return bool(self._resident) and not any(unit.streams for unit in mine)
        return self._plan is mine[0].plan and not mine[0].streams
