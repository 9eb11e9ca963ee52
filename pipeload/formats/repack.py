"""4-bit weights in another order than the file's, as they are read, in pieces.

Those of pipeload's own int4 checkpoints, made on another kind of processor: see `integers.order`.

And those of bitsandbytes, on AVX512-BF16 machines: there it puts a weight into tiles of 32 rows
before it first computes with it. The file keeps the plain order, two values of one row in a byte.
In a tile, a byte holds the same column of rows r (low half) and r + 16 (high half), and the columns
come one after the other. Its own conversion goes over 32-bit integers: 104 ms for 4096 x 4096 with
two threads, against 5 ms here with one. Seen in bitsandbytes 0.50.2; `bitsandbytes.stored` compares
both before it relies on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeload.formats.integers.order import BLOCK_ROWS, reorder

if TYPE_CHECKING:
    import torch

TILE_ROWS = 32
_HALF = TILE_ROWS // 2
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Repack:
    """From one order to another, by the names of both."""

    source: str
    target: str

    @staticmethod
    def rows(width: int) -> int:
        """How many rows of `width` bytes to take at once: whole tiles of any kind, about 1 MB."""
        return max(1, _CHUNK_BYTES // (width * BLOCK_ROWS)) * BLOCK_ROWS

    def fill(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out` with `stored`, both of the same dtype and [rows, width], in the other order.

        Args:
            stored: rows of a weight, the first of them at a multiple of `rows`.
            out: as many.
        """
        if self == AS_IT_IS:
            out.copy_(stored)
        elif self == BITSANDBYTES:
            repack(stored, out)
        else:
            reorder(stored, out, self.source, self.target)


BITSANDBYTES = Repack("bitsandbytes", "bitsandbytes tiles")
"""Its plain order, and what its CPU kernels read."""
AS_IT_IS = Repack("rows", "rows")
"""For what only has to lie elsewhere than in the file."""


def repack(stored: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out` with the tiles of `stored`; both uint8 of [rows, columns / 2], rows % 32 == 0."""
    rows, width = stored.shape
    tiles = stored.view(rows // TILE_ROWS, 2, _HALF, width)
    low, high = tiles[:, 0], tiles[:, 1]
    # The even column is the high half of a stored byte.
    even = high.bitwise_and(0xF0).bitwise_or_(low.bitwise_right_shift(4))
    odd = high.bitwise_left_shift(4).bitwise_or_(low.bitwise_and(0xF))
    made = out.view(rows // TILE_ROWS, width, _HALF, 2)
    made[..., 0].copy_(even.transpose(1, 2))
    made[..., 1].copy_(odd.transpose(1, 2))
