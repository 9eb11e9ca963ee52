"""Says what reaches each expert while a float model reads a text: rows, and what it makes of them.

A pre-hook sees which rows go where. What the second matrix multiplies is seen where the library
applies the gate: to all rows at once, in the order of their experts, as its grouped products have
them. Where it does so otherwise, nothing is known of the second one's inputs.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.utils.hooks import RemovableHandle

    Seen = Callable[[int, int, torch.Tensor], None]
    """Told which of the two matrices, the expert, and rows of its input."""


class _Routing:
    """Which rows of one call go to which experts."""

    def __init__(self, ids: torch.Tensor, experts: int) -> None:
        self._count = ids.shape[-1]
        numbers, self._pairs = ids.reshape(-1).long().sort(stable=True)
        found, counts = numbers.unique_consecutive(return_counts=True)
        stops = counts.cumsum(0).tolist()
        self.pairs = len(numbers)
        self._parts = [
            (expert, slice(start, stop))
            for expert, start, stop in zip(found.tolist(), [0, *stops], stops, strict=False)
            if 0 <= expert < experts
        ]

    def first(self, hidden: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Rows of input by their experts."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        for expert, part in self._parts:
            yield expert, rows[self._pairs[part] // self._count]

    def second(self, inner: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Rows of what the gate gave, which are in the order of the experts."""
        for expert, part in self._parts:
            yield expert, inner[part]


@contextlib.contextmanager
def listen(module: Any, experts: int, seen: Seen) -> Iterator[None]:
    """Have `seen` called with what the experts of one of the library's modules multiply.

    `experts`: how many it has.
    """
    running: list[_Routing] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden, ids = (*args, *kwargs.values())[:2]
        running[:] = [_Routing(ids, experts)]
        for expert, rows in running[0].first(hidden):
            seen(0, expert, rows)

    def gated(inner: torch.Tensor) -> torch.Tensor:
        if running and len(inner) == running[0].pairs:
            for expert, rows in running.pop().second(inner):
                seen(1, expert, rows)
        return inner

    handles: list[RemovableHandle] = [module.register_forward_pre_hook(before, with_kwargs=True)]
    try:
        if module.has_gate:
            apply_gate = module._apply_gate  # noqa: SLF001 - what the library itself calls
            module._apply_gate = lambda made: gated(apply_gate(made))  # noqa: SLF001 - as above
        elif isinstance(module.act_fn, nn.Module):
            handles.append(module.act_fn.register_forward_hook(lambda *given: gated(given[-1])))
        yield
    finally:
        vars(module).pop("_apply_gate", None)
        for handle in handles:
            handle.remove()
