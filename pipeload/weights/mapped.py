"""Weights that stay for good, shown as a mapping of their file, as a plain load shows them.

[Note: mapped or copied] A model that fits is read once. Copying it into memory of our own would
have the kernel clear every page before the disk overwrites it, which took longer than the reading
itself on a virtual machine; pages of the page cache are filled without that. So a model that fits
stays mapped, and all that is done for it is to read ahead. Under a limit that does not hold
everything the kernel may drop mapped pages at any time, so there residents are copied.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from functools import partial
from typing import TYPE_CHECKING

import torch

from pipeload.system.pages import ceil_page, drops_at_once, floor_page
from pipeload.weights.arena import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pipeload.checkpoint.hung_reads import Stalls
    from pipeload.weights.arena import Region, Work
    from pipeload.weights.layout import Layout

_MADV_POPULATE_READ = 22  # Linux 5.14; not in Python's mmap module


class MappedFiles:
    """Private mappings of whole checkpoint files. They cost nothing until they are touched."""

    def __init__(self, names: Mapping[Path, str], stalls: Stalls) -> None:
        """`names` are what to open each file by: it may not have its path any more."""
        self._stalls = stalls
        self._maps: dict[Path, mmap.mmap] = {}
        self._descriptors: dict[Path, int] = {}
        for path, name in names.items():
            with open(name, "rb") as file:  # noqa: PTH123 - a link in /proc is no path
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    @staticmethod
    def supported() -> bool:
        """Whether this system can read a mapping ahead."""
        return drops_at_once() and hasattr(mmap, "MADV_WILLNEED")

    def tensor(
        self, path: Path, start: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Show values of a file, in the memory of its mapping."""
        # All in here: what a view as another dtype makes in inference mode is an inference tensor,
        # and a parameter becomes one with it.
        with torch.inference_mode(False):
            if not (count := math.prod(shape)):  # no registers, say
                return torch.empty(shape, dtype=dtype)
            view = memoryview(self._maps[path])[start : start + count * dtype.itemsize]
            return torch.frombuffer(view, dtype=dtype).view(shape)

    def populate(self, path: Path, first: int, stop: int) -> int:
        """Bring a range into the page cache and the page tables; returns its bytes.

        Both bounds lie on page borders. Where the kernel cannot do it at once, the pages come when
        they are touched, as in a plain load.
        """
        stop = min(stop, len(self._maps[path]))
        if stop <= first:
            return 0
        address = self.tensor(path, first, torch.uint8, (1,)).data_ptr()
        # By ctypes: it lets other threads run meanwhile, the mmap module's madvise does not.
        advise = ctypes.CDLL(None).madvise
        length = ctypes.c_size_t(stop - first)
        with self._stalls.reading(path, first):
            advise(ctypes.c_void_p(address), length, mmap.MADV_WILLNEED)
            advise(ctypes.c_void_p(address), length, _MADV_POPULATE_READ)
        return stop - first

    def discard(self, path: Path, first: int, stop: int) -> None:
        """Let the pages of a range go. Both bounds lie on page borders."""
        if stop > first:
            self._maps[path].madvise(mmap.MADV_DONTNEED, first, stop - first)


class MappedPlacement:
    """A layout of raw weights whose views are the files themselves."""

    quick = True

    def __init__(self, layout: Layout, files: MappedFiles) -> None:
        self._layout = layout
        self._files = files
        self.nbytes = layout.nbytes
        self.views = {
            weight.name: files.tensor(
                weight.sources[0].file, weight.sources[0].start, DTYPES[weight.dtype], weight.shape
            )
            for weight, _ in layout.raw
        }

    def read_jobs(self, chunk_bytes: int) -> list[Work]:
        """Reads of at most `chunk_bytes`, in file order."""
        return list(self._jobs(chunk_bytes))

    def convert_jobs(self) -> list[Work]:
        """List nothing: mapped weights are the file's bytes."""
        return []

    def drop(self) -> None:
        """Unmap nothing, but let the pages go; they come back from the file if they are touched."""
        for extent in self._layout.extents:
            self._files.discard(extent.file, ceil_page(extent.start), floor_page(extent.stop))

    def _jobs(self, chunk_bytes: int) -> Iterator[Work]:
        for extent in self._layout.extents:
            first, stop = floor_page(extent.start), ceil_page(extent.stop)
            for start in range(first, stop, chunk_bytes):
                end = min(start + chunk_bytes, stop)
                yield partial(self._populate, extent.file, start, end)

    def _populate(self, path: Path, start: int, end: int, _scratch: Region | None) -> int:
        return self._files.populate(path, start, end)


def can_map(layout: Layout) -> bool:
    """Whether every weight of `layout` is in its file as it is."""
    return not layout.casts and not layout.conversions
