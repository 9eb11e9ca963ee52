"""Weights of the library's quantised Linears of Gemma: they unpack them in each product."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn

from pipeload.formats.format import Shown
from pipeload.formats.integers.packed_weight import unusable
from pipeload_hooks import Companion, placeholder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pipeload.formats.format import Held, Stored
    from pipeload.weights.layout import Weight

_COPIES: Final = 3
"""Of inputs and outputs, where those are rounded."""


class UnpackedInProducts(NamedTuple):
    """What a product holds beside its tensors."""

    rows: int
    """Of the weight."""
    columns: int
    item: int
    """Bytes of a number in the input's dtype."""

    def of(self, rows: int) -> int:
        """The weight as bytes, as floats and times its scales; copies of inputs and outputs."""
        weight = self.rows * self.columns * (1 + 2 * self.item)
        return weight + rows * _COPIES * (self.rows + self.columns) * self.item


class _Values:
    """Tells whether a weight is there: its module does not look."""

    values: torch.Tensor | None = None


class GemmaWeight:
    """A `PackedWeight`. Scales are parameters like any other."""

    couples_rows = False

    def __init__(self, name: str, module: Any, stored: Stored) -> None:
        """Check what the checkpoint has.

        Raises:
            CheckpointError: the weight is missing, or of another shape or dtype.
        """
        self._name, self._module, self._where = name, module, stored.where
        weight = stored.plain(name)
        if weight is None or not weight.raw:
            raise unusable(name, module, stored)
        self._weight = replace(weight, guarded=True)

    @property
    def weight(self) -> Weight:
        """What is streamed of it."""
        return self._weight

    @property
    def counts(self) -> Mapping[str, int]:
        """As many numbers as the Linear had; what goes with it stands for none."""
        scales = ("weight_scale", "input_activation_scale", "output_activation_scale")
        stem = self._name.removesuffix("weight")
        count = self._module.out_features * self._module.in_features
        return {self._name: count, **dict.fromkeys([f"{stem}{one}" for one in scales], 0)}

    def statistics_bytes(self, _takes: Callable[[int], int]) -> int:
        """Count nothing: scales are parameters."""
        return 0

    def held_by_products(self, dtype: torch.dtype) -> Iterable[Held]:
        """What products take."""
        sizes = self._module.out_features, self._module.in_features
        return [UnpackedInProducts(*sizes, dtype.itemsize)]

    def show(self) -> Shown:
        """Give the module a parameter, and what tells whether its values are there."""
        weight = self._module.weight
        empty = placeholder(weight.shape, weight.dtype, torch.device(self._where))
        parameter = nn.Parameter(empty, requires_grad=False)
        return Shown(parameter, [Companion(_Values(), "values", None)], _nothing)

    def leave_to_streaming(self) -> None:
        """Do nothing: the library does not ask what its own modules hold."""


def _nothing() -> Callable[[], None]:
    return lambda: None
