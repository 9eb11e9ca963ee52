"""Page-aligned anonymous memory: allocated once, cut into regions, never moved.

[Note: huge pages for what is read again] Measured with direct reads on a virtual disk: 2.9 GB/s
into 2 MB pages against 1.8 GB/s into 4 kB ones, since the kernel pins and maps 512 times fewer of
them. But the first touch of a huge page is slow there: all of it is cleared, out of memory that
the host may have taken back. So buffers, which are read into every pass, lie in huge pages, and
what is read once does not. Computing took the same time in both.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from pipeload.system.pages import MAP_NORESERVE, PAGE, ceil_page, floor_page, give_back

if TYPE_CHECKING:
    from pipeload.checkpoint.reader_threads import Job

HUGE_PAGE = 2 << 20
# A page of page tables, eight bytes each, covers one. With pages of 64 kB (some kernels on ARM)
# that is 512 MB: the first touch would take far more memory than was planned.
_HUGE_PAGES_FIT = PAGE * (PAGE // 8) == HUGE_PAGE

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""safetensors dtype codes that torch has a dtype for."""

DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}


class Region(NamedTuple):
    """A page-aligned part of an arena."""

    arena: Arena
    offset: int
    nbytes: int

    def buffer(self, start: int, nbytes: int) -> memoryview:
        """Show writable bytes from `start` in the region, for a read to land in."""
        assert start + nbytes <= self.nbytes  # noqa: S101 - behind it lies somebody else's
        return self.arena.buffer(self.offset + start, nbytes)

    def tensor(self, start: int, dtype: str, shape: tuple[int, ...], nbytes: int) -> torch.Tensor:
        """Show the bytes at `start` in the region as a tensor."""
        return self.arena.tensor(self.offset + start, dtype, shape, nbytes)

    def discard(self, start: int = 0) -> None:
        """Give everything from `start` on back to the system: see `Arena.discard`."""
        self.arena.discard(self.offset + start, self.nbytes - start)


Work: TypeAlias = "Job[Region | None]"
"""A job of a reader: reads or makes weights. Its thread's region is scratch."""


class Arena:
    """Memory of a fixed size on one device. Pages cost nothing until they are written.

    Nothing is set aside for it either (MAP_NORESERVE): an arena may be larger than memory if only
    parts of it are ever written.
    """

    def __init__(
        self, nbytes: int, *, device: torch.device, huge: bool, sparse: bool = False
    ) -> None:
        """Reserve address space for `nbytes` bytes, in huge pages if `huge`.

        With `sparse` the kernel puts small pages there whatever its settings.

        Raises:
            MemoryError: the system refuses the address space.
        """
        self.device = device
        self.nbytes = ceil_page(nbytes)
        self._taken = 0
        # Room to start on a huge page; the kernel would not use huge pages at the start otherwise.
        size = self.nbytes + HUGE_PAGE
        try:
            self._map = _anonymous(size, huge=huge, sparse=sparse)
        except OSError as error:
            raise MemoryError(
                f"the system refuses {size} bytes of address space for weights: {error}. Have it "
                "promise more memory than it has (vm.overcommit_memory=0 on Linux, a larger paging "
                "file on Windows)."
            ) from error
        self._address: int = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._skip = -self._address % HUGE_PAGE
        self._view = memoryview(self._map)[self._skip : self._skip + self.nbytes]

    @property
    def address(self) -> int:
        """Where the arena begins."""
        return self._address + self._skip

    def take(self, nbytes: int) -> Region:
        """Take the next `nbytes` bytes, rounded up to whole pages."""
        region = Region(self, self._taken, ceil_page(nbytes))
        if region.offset + region.nbytes > self.nbytes:
            raise MemoryError(
                f"arena of {self.nbytes} bytes has no room for {nbytes} after {self._taken}"
            )
        self._taken += region.nbytes
        return region

    def discard(self, offset: int, nbytes: int) -> None:
        """Give the whole pages of a part back to the system.

        They read as zeros from then on, where the system has no means but to take them out of sight
        (Windows) as before.
        """
        start, stop = ceil_page(offset), floor_page(offset + nbytes)
        if stop > start:
            give_back(self._map, self._address, self._skip + start, stop - start)

    def buffer(self, offset: int, nbytes: int) -> memoryview:
        """Show writable bytes, for a read to land in."""
        return self._view[offset : offset + nbytes]

    def tensor(self, offset: int, dtype: str, shape: tuple[int, ...], nbytes: int) -> torch.Tensor:
        """Show the bytes at `offset` as a tensor. It shares the memory; nothing is copied.

        Any offset will do: the format does not align tensors, and a plain load does not either.
        """
        # A view made in inference mode would turn the parameter it is bound to into an inference
        # tensor.
        with torch.inference_mode(False):
            if not nbytes:
                return torch.empty(shape, dtype=DTYPES[dtype])
            # From the buffer: a view of another tensor would have to lie at a multiple of the item.
            return torch.frombuffer(self.buffer(offset, nbytes), dtype=DTYPES[dtype]).view(shape)


def _anonymous(size: int, *, huge: bool, sparse: bool) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows: nobody else sees it in any case
        return mmap.mmap(-1, size)
    # Private: shared anonymous memory would be counted as shmem and survive a fork as one copy.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size, flags=flags | MAP_NORESERVE)
    wish = "MADV_HUGEPAGE" if huge and _HUGE_PAGES_FIT else "MADV_NOHUGEPAGE"
    advice = getattr(mmap, wish, None)
    if (huge or sparse) and advice is not None:
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, still right
            memory.madvise(advice)
    return memory
