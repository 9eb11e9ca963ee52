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
import weakref
from typing import TYPE_CHECKING

import torch

from pipeload.system.pages import drops_at_once, map_over
from pipeload.weights.arena import HUGE_PAGE, Arena

if TYPE_CHECKING:
    from collections.abc import Callable

# What one page of page tables covers: only then does the kernel give that back, too, when all of a
# block is dropped.
_BLOCK = HUGE_PAGE


class NanArena(Arena):
    """An arena in main memory for something large of which little is ever there at once."""

    def __init__(self, nbytes: int, *, block: NanBlock | None = None) -> None:
        """Reserve `nbytes` bytes of address space.

        Args:
            nbytes: how many.
            block: one that several arenas show; None: one of its own.

        Raises:
            MemoryError: the system refuses the address space, or that many mappings.
        """
        super().__init__(nbytes, device=torch.device("cpu"), huge=False, sparse=True)
        shown = NanBlock(min(_BLOCK, self.nbytes)) if block is None else block
        if self.nbytes:
            shown.show_in(self._address + self._skip, self.nbytes)
        if block is None:
            shown.close()

    def drop(self) -> None:
        """Give all memory back."""
        self.discard(0, self.nbytes)


class NanBlock:
    """A block of NaN in memory, which arenas show where nothing was read. Made when first shown.

    Larger ones cost memory, and leave more of the mappings that the kernel allows a process. The
    kernel counts them for the control group, not for the process.
    """

    def __init__(self, nbytes: int) -> None:
        """`nbytes`: whole pages; of huge pages, if an arena is larger."""
        self.nbytes = nbytes
        self._descriptor: int | None = None
        self._closer: Callable[[], object] | None = None

    def show_in(self, address: int, nbytes: int) -> None:
        """Map it again and again over so much address space, where the system can do that."""
        if self._descriptor is None:
            descriptor = _memory_file() if drops_at_once() else None
            if descriptor is None:
                return
            self._closer = weakref.finalize(self, os.close, descriptor)
            self._descriptor = descriptor
            with os.fdopen(descriptor, "wb", closefd=False) as file:
                file.write(b"\xff" * self.nbytes)
        for offset in range(0, nbytes, self.nbytes):
            size = min(self.nbytes, nbytes - offset)
            map_over(address + offset, size, self._descriptor)

    def close(self) -> None:
        """Nobody can write to it any more, nor show it once more; it goes with the last arena."""
        if self._closer is not None:
            self._closer()


def _memory_file() -> int | None:
    """An empty file in memory; None without such files (an old C library, a sandbox)."""
    with contextlib.suppress(AttributeError, OSError):
        return os.memfd_create("pipeload-nan", os.MFD_CLOEXEC)
    return None
