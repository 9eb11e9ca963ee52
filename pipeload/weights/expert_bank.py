"""All experts of one module as address space of full size, of which single slices are read.

A slice lies where it would lie in the plain parameter, as the file's page does, or for one that is
stacked or cast of stored tensors, at its offset behind a multiple of 64 bytes: see [Note: why a
weight keeps its place in the page] in layout.py. What was not read is NaN, where the system can.

[Note: borders] A slice that is no whole number of pages shares its first and last page with its
neighbours. Both are given back with it unless the neighbour is held. Where slices are the file's
own bytes, whole pages are read, and what falls on a neighbour's share of them are its own values.
A parameter that is one expert's own is one slice, and has address space of its own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pipeload.system.pages import PAGE, ceil_page, floor_page
from pipeload.weights.arena import DTYPES, HUGE_PAGE
from pipeload.weights.layout import Conversion
from pipeload.weights.nan_arena import NanArena, NanBlock
from pipeload.weights.placement import one_conversion, read_into, repacked_jobs, scratch_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch

    from pipeload.checkpoint.file_reads import FileSet
    from pipeload.checkpoint.headers import TensorEntry
    from pipeload.weights.arena import Region, Work
    from pipeload.weights.layout import Weight
    from pipeload.weights.placement import Convert

_CHUNK_BYTES = 2 << 20
READERS = 4
"""Threads that read experts at once, beside those that read units."""
_MOST_BLOCKS = 4096
"""Mappings of the NaN block that all banks of a model may come to; a process may have 65530."""


def scratch_bytes(weights: Iterable[Weight]) -> int:
    """Bytes of working memory of one thread that reads experts of these weights."""
    made = (_stored_bytes(weight) for weight in weights if _is_made(weight))
    return max(_CHUNK_BYTES + 2 * PAGE, *made, 0)


def making_bytes(weights: Iterable[Weight]) -> int:
    """What the library's operations take beside, for one slice: one at a time is made."""
    return max((w.slices.beside_bytes for w in weights if w.slices is not None), default=0)


def _is_made(weight: Weight) -> bool:
    return weight.slices is not None and weight.slices.made


def _stored_bytes(weight: Weight) -> int:
    """Whole pages of all that one slice is made of."""
    return sum(ceil_page(source.nbytes) + PAGE for source in weight.sources_of(0))


def slice_bytes(weight: Weight) -> int:
    """Bytes of one expert's slice."""
    return weight.nbytes // weight.slice_count


def held_bytes(weight: Weight) -> int:
    """The most that one expert's slice takes: see [Note: borders]."""
    size = slice_bytes(weight)
    whole_pages = not size % PAGE and not (weight.raw and weight.sources[0].start % PAGE)
    return size if whole_pages else ceil_page(size) + PAGE


def block_bytes(banks_bytes: int) -> int:
    """Choose the size of the NaN block for banks of so many bytes together."""
    least = -(-banks_bytes // _MOST_BLOCKS)
    return max(1, -(-least // HUGE_PAGE)) * HUGE_PAGE


class ExpertBank:
    """The parameters of one experts module, and the reads that fill a slice of each."""

    def __init__(
        self, weights: Sequence[Weight], files: FileSet, convert: Convert, block: NanBlock
    ) -> None:
        """Reserve address space; nothing is read. `files` must have the weights' files open.

        `convert` runs the library's operations, `block` is for what was not read.

        Raises:
            MemoryError: the system refuses the address space, or that many mappings.
        """
        self._slabs = {weight.name: _Slab(weight, files, convert, block) for weight in weights}

    @property
    def views(self) -> Mapping[str, torch.Tensor]:
        """The parameters by name, of full size."""
        return {name: slab.view for name, slab in self._slabs.items()}

    def slices(self, name: str) -> int:
        """How many slices a parameter has."""
        return self._slabs[name].slices

    def read_jobs(self, name: str, expert: int) -> list[Work]:
        """List the reads that fill a slice. It is held from now on; they may run at once."""
        return self._slabs[name].read_jobs(expert)

    def drop(self, name: str, expert: int) -> None:
        """Give the memory of a slice back."""
        self._slabs[name].drop(expert)

    def drop_all(self) -> None:
        """Give all memory back."""
        for slab in self._slabs.values():
            slab.drop_all()


class _Slab:
    """One parameter of a bank."""

    def __init__(self, weight: Weight, files: FileSet, convert: Convert, block: NanBlock) -> None:
        self._weight, self._files, self._convert = weight, files, convert
        self._lead = weight.sources[0].start % PAGE if weight.raw else 0
        self._size, self.slices = slice_bytes(weight), weight.slice_count
        self._arena = NanArena(self._lead + weight.nbytes, block=block)
        self.view = self._arena.tensor(self._lead, weight.dtype, weight.shape, weight.nbytes)
        self._flat = self.view.view(weight.slice_count, -1)
        self._held: set[int] = set()

    def _place(self, expert: int) -> int:
        return expert if self.slices > 1 else 0  # whose own parameter it is

    def read_jobs(self, expert: int) -> list[Work]:
        expert = self._place(expert)
        self._held.add(expert)
        if _is_made(self._weight):
            return [partial(self._make, expert)]
        if self._weight.slice_unpacking is not None:
            into = self._flat[expert].view(-1, self._weight.shape[-1])
            return [*repacked_jobs(self._weight.slice_parts(expert), into, self._files)]
        return [*(self._page_jobs(expert) if self._weight.raw else self._piece_jobs(expert))]

    def _page_jobs(self, expert: int) -> Iterator[Work]:
        (source,) = self._weight.sources_of(expert)
        first, stop = floor_page(source.start), ceil_page(source.stop)
        place = self._lead + expert * self._size - (source.start - first)
        for start in range(first, stop, _CHUNK_BYTES):
            end = min(start + _CHUNK_BYTES, stop)
            into = self._arena.buffer(place + start - first, end - start)
            yield partial(self._read_pages, source, start, end, into)

    def _read_pages(
        self, source: TensorEntry, start: int, end: int, into: memoryview, _scratch: Region | None
    ) -> int:
        return self._files.read_pages(source.file, start, end, into)

    def _piece_jobs(self, expert: int) -> Iterator[Work]:
        offset = 0
        for source in self._weight.sources_of(expert):
            item = DTYPES[source.dtype].itemsize
            count, step = source.nbytes // item, _CHUNK_BYTES // item
            for start in range(0, count, step):
                stop = min(start + step, count)
                into = self._flat[expert, offset + start : offset + stop]
                yield partial(self._read_piece, source, start, stop, into)
            offset += count

    def _read_piece(
        self,
        source: TensorEntry,
        start: int,
        stop: int,
        into: torch.Tensor,
        scratch: Region | None,
    ) -> int:
        item = DTYPES[source.dtype].itemsize
        scratch = scratch_of(scratch)
        count, at = read_into(scratch, self._files, source, start * item, stop * item)
        into.copy_(scratch.tensor(at, source.dtype, (stop - start,), (stop - start) * item))
        return count

    def _make(self, expert: int, scratch: Region | None) -> int:
        scratch, place, count = scratch_of(scratch), 0, 0
        stored: dict[str, torch.Tensor] = {}
        for source in self._weight.sources_of(expert):
            first, stop = floor_page(source.start), ceil_page(source.stop)
            into = scratch.buffer(place, stop - first)
            count += self._files.read_pages(source.file, first, stop, into)
            at = place + source.start - first
            stored[source.name] = scratch.tensor(at, source.dtype, source.shape, source.nbytes)
            place += stop - first
        conversion = Conversion((self._weight,), (), (), alone=True)
        into_view = {self._weight.name: self.view[expert : expert + 1]}
        with one_conversion:
            self._convert(conversion, stored, into_view)
        return count

    def drop(self, expert: int) -> None:
        expert = self._place(expert)
        self._held.discard(expert)
        start = self._lead + expert * self._size
        stop = start + self._size
        if self._size >= PAGE:  # else a page may be several neighbours'
            start = start if expert - 1 in self._held else floor_page(start)
            stop = stop if expert + 1 in self._held else ceil_page(stop)
        self._arena.discard(start, stop - start)

    def drop_all(self) -> None:
        self._held.clear()
        self._arena.drop()
