"""Products of a weight that comes in ranges of rows: the whole one's bits, whatever is multiplied.

[Note: exact in any case] Whether ranges give the whole product's bits depends on the number of rows
of input, which only a pass knows. So each is tried when it first comes, once a process for every
size of weight. Where the answer is no, the rows of a range are put into zeros of the whole
weight's size, and the product of that is the whole one's, by its very call: exact, at the price of
a whole product for every few megabytes of rows. The planner cuts so that this is seldom needed,
and leaves weights whole, for which it often would be, as long as the limit holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from pipeload.errors import UnsupportedOperationError
from pipeload.weights.row_cuts import Cut, Given, RowRange, ranges_are_exact
from pipeload.weights.whole_shape import KERNEL_ALIGN, WholeShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeload.weights.layout import Weight

_REMEMBERED = 32
Multiply = Callable[[int, torch.Tensor], torch.Tensor]
"""Of the first row of a range and its values: its part of the product."""


class RowProducts:
    """How one Linear's products are computed from ranges of its rows."""

    def __init__(self, weight: Weight, ranges: Sequence[RowRange]) -> None:
        """`ranges` are those in which `weight` comes, or a part of it."""
        self._ranges = tuple(ranges)
        self._name, (self._rows, self._columns) = weight.name, weight.shape
        # A plain load maps what it does not cast: see [Note: why a weight keeps its place].
        self._offset = weight.sources[0].start % KERNEL_ALIGN if weight.raw else 0
        self._exact: set[tuple[Given, torch.dtype]] = set()

    def by_whole(
        self, module: nn.Module, given: torch.Tensor, dtype: torch.dtype
    ) -> Multiply | None:
        """What multiplies where ranges by themselves would give other bits; None where they do not.

        Args:
            module: with its own bias.
            given: the input.
            dtype: of the output, in which autocast has everything multiplied.

        Raises:
            UnsupportedOperationError: ranges are not exact, and this system has no other way.
        """
        described = Given.of(given)
        key = described, dtype
        if key in self._exact or not given.numel():
            return None
        weight: torch.Tensor | None = getattr(module, "weight", None)
        bias: torch.Tensor | None = getattr(module, "bias", None)
        cut = Cut(
            dtype=dtype,
            inputs=self._columns,
            ranges=self._ranges,
            offset=self._offset if weight is None or weight.dtype == dtype else 0,
            bias=bias is not None,
            requires_grad=weight is None or weight.requires_grad,
            weight_rows=self._rows,
        )
        if ranges_are_exact(cut, described):
            if len(self._exact) >= _REMEMBERED:
                self._exact.clear()  # each prompt may have a length of its own
            self._exact.add(key)
            return None
        if not WholeShape.is_free():
            raise UnsupportedOperationError(
                f"{self._name!r}, computed in ranges of rows, would not give the same bits as "
                f"a whole one for an input of shape {tuple(given.shape)} with {described.threads} "
                "threads. Load the model with a larger memory_limit, or call it with another "
                "number of rows or torch.set_num_threads() with another number."
            )
        return by_zeros(cut, given, bias)


def by_zeros(cut: Cut, given: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
    """Multiplies by zeros of the whole weight's size: see [Note: exact in any case]."""
    return _ByZeros(cut, given, bias).rows


class _ByZeros:
    """One product. What it holds goes with it."""

    def __init__(self, cut: Cut, given: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._cut = cut
        self._given = given.to(cut.dtype)
        self._bias = None if bias is None else bias.to(cut.dtype)
        self._zeros = WholeShape(cut.total, cut.inputs, cut.dtype, cut.offset)

    def rows(self, start: int, values: torch.Tensor) -> torch.Tensor:
        """[..., rows] of the range that begins at row `start`."""
        with torch.autocast("cpu", enabled=False):
            parts = [
                self._some(start + number * self._zeros.window_rows, window)
                for number, window in enumerate(values.split(self._zeros.window_rows))
            ]
        return torch.cat(parts, dim=-1)

    def _some(self, start: int, values: torch.Tensor) -> torch.Tensor:
        stop = start + len(values)
        weight = self._zeros.weight
        weight[start:stop].copy_(values)
        whole = nn.Parameter(weight, requires_grad=self._cut.requires_grad)
        made = functional.linear(self._given, whole, self._bias)[..., start:stop].clone()
        self._zeros.clear()
        return made
