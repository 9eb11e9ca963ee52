"""Address space that costs nothing until it is read into, and reads as NaN until then.

[Note: why not zeros] Anonymous memory that nobody has filled reads as zeros, which go through a
model without a trace. So one block of bytes 0xFF, which are NaN in every float dtype, is mapped
privately again and again over the whole arena: a page that is written gets memory of its own, one
that is dropped shows the block again. For a table of 2 GiB that was 2 MB for the block, 0.25 MB for
the kernel's 1024 mappings and 7 ms once; direct reads into such pages took as long as into
anonymous ones. With blocks of 1 MB the mappings cost what the smaller block saves. Where the system
has no files in memory, or does not show them again, what nobody has filled does read as zeros.
"""

from __future__ import annotations

import contextlib
import os

import torch

from pipeload.system.pages import drops_at_once, map_over
from pipeload.weights.arena import HUGE_PAGE, Arena

# What one page of page tables covers: only then does the kernel give that back, too, when all of a
# block is dropped.
_BLOCK = HUGE_PAGE


class NanArena(Arena):
    """An arena in main memory for something large of which little is ever there at once."""

    def __init__(self, nbytes: int, *, block_bytes: int = _BLOCK) -> None:
        """Reserve `nbytes` bytes of address space.

        Args:
            nbytes: how many.
            block_bytes: of the block, a multiple of 2 MiB: larger ones cost memory, and leave more
                of the mappings that the kernel allows a process.

        Raises:
            MemoryError: the system refuses the address space, or that many mappings.
        """
        super().__init__(nbytes, device=torch.device("cpu"), huge=False, sparse=True)
        descriptor = _memory_file() if self.nbytes and drops_at_once() else None
        if descriptor is not None:
            self._map_nan(descriptor, block_bytes)

    def drop(self) -> None:
        """Give all memory back."""
        self.discard(0, self.nbytes)

    def _map_nan(self, descriptor: int, block_bytes: int) -> None:
        address, size = self._address + self._skip, min(block_bytes, self.nbytes)
        # Closed once it is mapped: nobody can write to it any more.
        with os.fdopen(descriptor, "wb") as block:
            block.write(b"\xff" * size)
            block.flush()
            for offset in range(0, self.nbytes, size):
                map_over(address + offset, min(size, self.nbytes - offset), descriptor)


def _memory_file() -> int | None:
    """An empty file in memory; None without such files (an old C library, a sandbox)."""
    with contextlib.suppress(AttributeError, OSError):
        return os.memfd_create("pipeload-nan", os.MFD_CLOEXEC)
    return None
