"""Catches code that reads a block's weight while it is evicted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from pipeload_hooks._binding import is_placeholder
from pipeload_hooks._evicted import HARMLESS, parameters_in
from pipeload_hooks._modes import PassMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_WITHOUT = frozenset({torch.Tensor, torch.dtype, torch.Size, int, float, bool, str, type(None)})
"""Types of arguments that are no parameters and hold none."""


class Rows(Protocol):
    """A table that is not there as a whole, but whose rows can be had."""

    def bind(self, ids: torch.Tensor) -> None:
        """Have these rows there, and show them in the weight. May read the disk."""

    def unbind(self) -> None:
        """Let them go."""

    def keep(self) -> None:
        """Have all rows there, and shown, from now on. Raises where they do not fit."""


class EvictedWeightWatch(PassMode):
    """While active in a thread, every torch function that gets an evicted weight is refused.

    But for a table: rows that are picked by their numbers are read, and a copy of them is given;
    whatever else uses it has it kept as a whole.

    Meant for the first pass of each kind: what a model reads does not depend on the token.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        refuse: Callable[[str, str], None],
        tables: Mapping[int, Rows] | None = None,
        ended: Callable[[], bool] | None = None,
    ) -> None:
        """Watch the parameters whose `id` is in `names`; `refuse(function, name)` raises.

        `tables` are those of them that are tables, by `id`. `ended` tells whether the watched pass
        died without a word: whoever asks for a weight then is not that pass.
        """
        super().__init__()
        self._names = names
        self._refuse = refuse
        self._tables = tables or {}
        self._ended = ended
        self.has_served = False
        """Whether a table was used past its module: this watch is then needed in every pass."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self.active and func not in HARMLESS:
            if func is torch.Tensor.__getitem__ and id(args[0]) in self._tables:
                return self._pick(*args)
            for value in args if not kwargs else (*args, *kwargs.values()):
                if type(value) not in _WITHOUT:  # most: with adapters, every pass comes by here
                    self._look(func, value)
        return func(*args, **kwargs) if kwargs else func(*args)

    def _look(self, func: Callable[..., Any], value: object) -> None:
        for parameter in parameters_in((value,)):
            name = self._names.get(id(parameter))
            if name is None or not is_placeholder(parameter) or self._has_died():
                continue
            if (table := self._tables.get(id(parameter))) is not None:
                self.has_served = True
                table.keep()
            else:
                self._refuse(getattr(func, "__name__", str(func)), name)

    def _pick(self, table: torch.Tensor, index: Any) -> Any:
        if not is_placeholder(table) or self._has_died():
            return table[index]
        rows = rows_of(table, index)
        if rows is None:
            self._look(torch.Tensor.__getitem__, table)
            return table[index]
        self.has_served = True
        source = self._tables[id(table)]
        source.bind(rows)
        try:
            return table[index].clone()  # the rows themselves go again
        finally:
            source.unbind()

    def _has_died(self) -> bool:
        if self._ended is not None and self._ended():
            self.end()
        return not self.active


def rows_of(table: torch.Tensor, index: object) -> torch.Tensor | None:
    """The rows that `table[index]` takes; None where it is not by number that it takes them."""
    first = index[0] if isinstance(index, tuple) and index else index
    if isinstance(first, torch.Tensor):
        return first % table.shape[0] if first.dtype in {torch.int32, torch.int64} else None
    if isinstance(first, (int, slice)) and not isinstance(first, bool):
        return torch.arange(table.shape[0])[first]
    return None
