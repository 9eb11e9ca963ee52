"""A weight that is stored in GGUF's blocks, or as floats of another dtype, order or value."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pipeload.formats.gguf.blocks import Blocks
from pipeload.weights.arena import DTYPE_CODES
from pipeload.weights.layout import Slices, Weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from pipeload.checkpoint.headers import TensorEntry
    from pipeload.formats.format import Held, Shown

_STACKED = 3  # dimensions


class BlockWeight:
    """A `PackedWeight` that its module shows as floats, like any other."""

    couples_rows = False

    def __init__(
        self, name: str, dtype: torch.dtype, entries: Sequence[TensorEntry], blocks: Blocks
    ) -> None:
        """`dtype` is what the model has it in, `blocks` how it is made where it is no stack.

        Of several `entries`, which are stacks of as many matrices, those of a slice lie one below
        the other.
        """
        first, stacked = entries[0], is_stack(entries[0])
        rows = sum(entry.shape[1] for entry in entries) if stacked else first.shape[0]
        shape = (first.shape[0], rows, first.shape[2]) if stacked else first.shape
        count = math.prod(shape)
        self.counts: Mapping[str, int] = {name: count}
        self.weight = Weight(
            name,
            DTYPE_CODES[dtype],
            shape,
            count * dtype.itemsize,
            tuple(entries),
            repacked=blocks,
            slices=Slices(made=False, unpacks=_matrix) if stacked else None,
        )

    def statistics_bytes(self, _takes: Callable[[int], int]) -> int:
        """Count nothing: scales lie in the blocks."""
        return 0

    def held_by_products(self, _dtype: torch.dtype) -> Iterable[Held]:
        """Count nothing: products are those of floats."""
        return ()

    def show(self) -> Shown | None:
        """Build nothing: its module shows the parameter."""
        return None

    def leave_to_streaming(self) -> None:
        """Do nothing: the library has not seen it."""


def is_stack(entry: TensorEntry) -> bool:
    """Whether a stored tensor is several matrices, as of experts."""
    return len(entry.shape) == _STACKED and entry.shape[1] > 1


def _matrix(source: TensorEntry) -> Blocks:
    return Blocks(source.dtype, source.nbytes // math.prod(source.shape[:-1]))
