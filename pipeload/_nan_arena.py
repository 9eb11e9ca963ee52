"""Address space that costs nothing until it is read into, and reads as NaN until then.

[Note: why not zeros] Anonymous memory that nobody has filled reads as zeros, which go through a
model without a trace. So one block of bytes 0xFF, which are NaN in every float dtype, is mapped
privately again and again over the whole arena: a page that is written gets memory of its own, one
that is dropped shows the block again. For a table of 2 GiB that was 2 MB for the block, 0.25 MB for
the kernel's 1024 mappings and 7 ms once; direct reads into such pages took as long as into
anonymous ones. With blocks of 1 MB the mappings cost what the smaller block saves.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import torch

from pipeload._arena import HUGE_PAGE, MAP_NORESERVE, Arena

# What one page of page tables covers: only then does the kernel give that back, too, when all of a
# block is dropped.
_BLOCK = HUGE_PAGE
_MAP_FIXED = 0x10  # on every system; not in Python's mmap module
_READ_WRITE = 0x3


class NanArena(Arena):
    """An arena in main memory for something large of which little is ever there at once."""

    def __init__(self, nbytes: int) -> None:
        """Reserve `nbytes` bytes of address space.

        Raises:
            MemoryError: the system refuses the address space, or that many mappings.
        """
        super().__init__(nbytes, device=torch.device("cpu"), huge=False, sparse=True)
        if sys.platform == "linux" and self.nbytes:
            self._map_nan()

    def drop(self) -> None:
        """Give all memory back."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def _map_nan(self) -> None:
        address = torch.frombuffer(self._view, dtype=torch.uint8).data_ptr()
        size = min(_BLOCK, self.nbytes)
        # Closed once it is mapped: nobody can write to it any more.
        with os.fdopen(os.memfd_create("pipeload-nan", os.MFD_CLOEXEC), "wb") as block:
            block.write(b"\xff" * size)
            block.flush()
            for offset in range(0, self.nbytes, size):
                _map_over(address + offset, min(size, self.nbytes - offset), block.fileno())


def _map_over(address: int, nbytes: int, descriptor: int) -> None:
    """Put a private mapping of a file's start in the place of what is mapped at `address`."""
    system_mmap = ctypes.CDLL(None, use_errno=True).mmap
    system_mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | MAP_NORESERVE
    mapped = system_mmap(
        ctypes.c_void_p(address),
        ctypes.c_size_t(nbytes),
        ctypes.c_int(_READ_WRITE),
        ctypes.c_int(flags),
        ctypes.c_int(descriptor),
        ctypes.c_long(0),
    )
    if mapped != address:
        reason = os.strerror(ctypes.get_errno())
        raise MemoryError(f"cannot map {nbytes} bytes of address space for a table: {reason}")
