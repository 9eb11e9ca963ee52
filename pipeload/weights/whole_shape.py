"""Address space of the size of a whole weight, of which some rows are there.

[Note: a weight of zeros] What kernel a product goes through depends on sizes and addresses, not on
values. Private memory that was never written is one page of zeros, shown everywhere, which counts
as nobody's memory: so a product of the whole size can be computed with a few megabytes of real
rows. That shows whether ranges of rows give the same bits; and where they do not, it gives the
rows' share of the whole product itself, with whole products for price. Systems other than Linux
set memory aside for zeros that are read: there it takes the whole weight's size while it lives.
"""

from __future__ import annotations

import sys

import torch

from pipeload.weights.arena import DTYPE_CODES, Arena

KERNEL_ALIGN = 64
"""Kernels look at addresses modulo this, at most."""
WINDOW_BYTES = 4 << 20
"""The most that rows with values take, about."""


class WholeShape:
    """A weight `[total, columns]` of zeros. Its rows may be written and cleared."""

    def __init__(self, total: int, columns: int, dtype: torch.dtype, offset: int) -> None:
        """Have it begin `offset` bytes after an aligned address.

        Raises:
            MemoryError: the system refuses the address space.
        """
        row_bytes = columns * dtype.itemsize
        nbytes = total * row_bytes
        self.window_rows = max(1, WINDOW_BYTES // row_bytes)
        """How many rows may have values at once."""
        self._arena = Arena(
            nbytes + KERNEL_ALIGN, device=torch.device("cpu"), huge=False, sparse=True
        )
        self.weight = self._arena.tensor(offset, DTYPE_CODES[dtype], (total, columns), nbytes)

    @staticmethod
    def is_free() -> bool:
        """Tell whether it takes no memory but for rows with values."""
        return sys.platform.startswith("linux")

    def clear(self) -> None:
        """Have all rows be zeros again, and give their memory back."""
        self._arena.discard(0, self._arena.nbytes)
