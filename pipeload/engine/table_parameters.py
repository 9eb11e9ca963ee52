"""Embedding tables on the model's side: rows are there while an embedding takes them.

[Note: one lookup at a time] Passes of a model that is all resident run beside each other, but a
table has room for the rows of one lookup. So each table has a gate, which a lookup that died does
not keep shut.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

import torch

from pipeload.budget import limit_errors
from pipeload.budget.shared_limit import ACCOUNTANT
from pipeload.engine.evictable import Evictable
from pipeload.engine.on_disk_tensor import on_use_of
from pipeload.system.memory import rss_bytes
from pipeload_hooks import Binding, PassGate, attach_rows, bind, bind_for_long, unbind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from pipeload.weights.row_table import RowTable


class TableSource(Protocol):
    """What hooks on an embedding call beside its rows: it may run by itself, or inside a pass."""

    def enter(self, module: nn.Module | None) -> None:
        """An embedding is about to run."""

    def leave(self, module: nn.Module | None) -> None:
        """An embedding has run."""


class TableSeat(Evictable):
    """A table's parameter and the embeddings that share it, held weakly."""

    def __init__(
        self, modules: Sequence[nn.Module], name: str, parameter: nn.Parameter, table: RowTable
    ) -> None:
        self.table = table
        self.bytes_read = 0
        super().__init__(Binding({name: parameter}, on_use=on_use_of))
        self._pairs = self._binding.pair({name: table.view})
        self._modules = [weakref.ref(module) for module in modules]
        self._handles: list[RemovableHandle] = []
        self._kept = False
        self.gate = PassGate()
        """Around a lookup."""

    def let_go(self, name: str) -> None:
        """Never again touch it: whoever changed it has all of it in memory."""
        self.detach()
        self._modules.clear()
        self._pairs.clear()
        self._binding.forget(name)

    @property
    def attached(self) -> bool:
        """Whether the embeddings carry hooks."""
        return bool(self._handles)

    def attach(self, source: TableSource) -> None:
        """Put hooks on the embeddings. Does nothing if they are on."""
        if not self._handles:
            for module in filter(None, (reference() for reference in self._modules)):
                self._handles += attach_rows(module, _Rows(self, module, source))

    def detach(self) -> None:
        """Take the hooks off. May be called again."""
        while self._handles:
            self._handles.pop().remove()

    def bind(self, ids: torch.Tensor) -> None:
        """Have the rows of `ids` read, and show them."""
        if not self._kept:
            self.bytes_read += self.table.fetch(ids)
            bind(self._pairs)
        else:
            bind_for_long(self._pairs)

    def keep(self) -> None:
        """Have all rows read, and show them from now on: the model uses them as one matrix.

        Raises:
            MemoryLimitError: they do not fit beside what the process holds.
        """
        if not self._kept:
            view = self.table.view
            need, limit = rss_bytes() + view.numel() * view.element_size(), ACCOUNTANT.limit
            if limit is not None and need > limit:
                (name,) = self.parameters
                raise limit_errors.table_needed_whole(name, limit, need)
            self.bytes_read += self.table.fetch(torch.arange(view.shape[0]))
            self._kept = True
        bind_for_long(self._pairs)

    def unbind(self) -> None:
        """Put the placeholder back, unless all is kept."""
        if self._kept:
            return
        unbind(self._pairs)
        self.table.release()


class _Rows:
    """What the hooks of one embedding call."""

    def __init__(self, seat: TableSeat, module: nn.Module, source: TableSource) -> None:
        self._seat, self._module, self._source = seat, weakref.ref(module), source

    def rows_wanted(self, ids: torch.Tensor) -> None:
        """The embedding is about to take these rows."""
        module = self._module()
        self._source.enter(module)
        # Not where the pass that this one waited for has put all rows there, for good.
        if module is not None and self._seat.attached:
            self._seat.gate.enter(module)
            self._seat.bind(ids)

    def rows_done(self) -> None:
        """The embedding has taken its rows."""
        module = self._module()
        if module is not None and self._seat.gate.owned():
            self._seat.unbind()
            self._seat.gate.leave(module)
        self._source.leave(module)
