"""A weight that is stored in GGUF's blocks, or as floats of another dtype or order."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pipeload.formats.gguf.blocks import Blocks
from pipeload.weights.arena import DTYPE_CODES
from pipeload.weights.layout import Weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

    from pipeload.checkpoint.headers import TensorEntry
    from pipeload.formats.format import Held, Shown


class BlockWeight:
    """A `PackedWeight` that its module shows as floats, like any other."""

    couples_rows = False

    def __init__(
        self, name: str, dtype: torch.dtype, entry: TensorEntry, order: tuple[int, ...]
    ) -> None:
        """`dtype` is what the model has it in; `order` that of its rows: see `Blocks`."""
        count = math.prod(entry.shape)
        self.counts: Mapping[str, int] = {name: count}
        self.weight = Weight(
            name,
            DTYPE_CODES[dtype],
            entry.shape,
            count * dtype.itemsize,
            (entry,),
            repacked=Blocks(entry.dtype, entry.nbytes // max(1, entry.shape[0]), order),
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
