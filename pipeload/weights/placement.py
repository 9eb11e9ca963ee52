"""A layout at a place in an arena: the reads that fill it and the tensors that show it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from pipeload.system.pages import PAGE, ceil_page, floor_page
from pipeload.weights.arena import DTYPES, Arena, Region
from pipeload.weights.layout import Cast, Conversion, Extent, Layout, Weight

if TYPE_CHECKING:
    from pipeload.checkpoint.file_reads import FileSet
    from pipeload.checkpoint.headers import TensorEntry
    from pipeload.weights.arena import Work

CAST_CHUNK_BYTES = 4 << 20

Convert = Callable[[Conversion, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], None]
"""Runs the library's operations on stored tensors by checkpoint key, into weights by name."""


# The plan has memory for one at a time.
one_conversion = threading.Lock()


class Place(Protocol):
    """Weights at their place: tensors that show them, and jobs that fill them."""

    @property
    def nbytes(self) -> int:
        """Size of the layout in bytes."""

    @property
    def views(self) -> Mapping[str, torch.Tensor]:
        """The weights by name."""

    def read_jobs(self, chunk_bytes: int) -> list[Work]:
        """List reads of at most `chunk_bytes`. They may run in any order and at once."""

    def convert_jobs(self) -> list[Work]:
        """List what is to be done once all reads are."""

    @property
    def quick(self) -> bool:
        """Whether these take no time, so that no reader is needed for them. Known after reads."""

    def drop(self) -> None:
        """Give the memory back to the system. The views show nothing of use from then on."""


class Placement:
    """A layout in a region. Views are prepared once; filling is a list of independent jobs."""

    quick = False

    def __init__(self, layout: Layout, region: Region, files: FileSet, convert: Convert) -> None:
        self._layout = layout
        self._region = region
        self._files = files
        self._convert = convert
        self.nbytes = layout.nbytes
        self.views: dict[str, torch.Tensor] = dict(self._make_views())

    def read_jobs(self, chunk_bytes: int) -> list[Work]:
        """List reads of at most `chunk_bytes`, in file order, to be run in any and at once."""
        jobs = [
            job for extent in self._layout.extents for job in self._extent_jobs(extent, chunk_bytes)
        ]
        for cast in self._layout.casts:
            jobs += self._cast_jobs(cast, chunk_bytes)
        return jobs

    def convert_jobs(self) -> list[Work]:
        """List what is to be done once all reads are."""
        return [
            partial(self._run_conversion, conversion) for conversion in self._layout.conversions
        ]

    def drop(self) -> None:
        """Give the memory back to the system. The views read as zeros from then on."""
        for weight, offset in self._placed():
            if weight.whole is None:
                self._region.discard()
            else:  # its first and last page hold rows of its neighbours
                self._region.arena.discard(self._region.offset + offset, weight.nbytes)

    def _placed(self) -> list[tuple[Weight, int]]:
        placed = list(self._layout.raw) + [
            (cast.weight, cast.offset) for cast in self._layout.casts
        ]
        for conversion in self._layout.conversions:
            placed += zip(conversion.weights, conversion.offsets, strict=True)
        return placed

    def _make_views(self) -> Iterator[tuple[str, torch.Tensor]]:
        for weight, offset in self._placed():
            yield (
                weight.name,
                self._region.tensor(offset, weight.dtype, weight.shape, weight.nbytes),
            )

    def _extent_jobs(self, extent: Extent, chunk_bytes: int) -> Iterator[Work]:
        first, stop, offset = extent.pages
        for start in range(first, stop, chunk_bytes):
            end = min(start + chunk_bytes, stop)
            into = self._region.buffer(offset + start - first, end - start)
            yield partial(self._read, extent, start, end, into)

    def _read(
        self, extent: Extent, start: int, end: int, into: memoryview, _scratch: Region | None
    ) -> int:
        return self._files.read_pages(extent.file, start, end, into)

    def _cast_jobs(self, cast: Cast, chunk_bytes: int) -> Iterator[Work]:
        if cast.weight.repacked is not None:
            into = self.views[cast.weight.name]
            yield from repacked_jobs(cast.weight.repacked_parts(), into, self._files)
            return
        (source,) = cast.weight.sources
        elements = cast.weight.nbytes // DTYPES[cast.weight.dtype].itemsize
        step = min(chunk_bytes, CAST_CHUNK_BYTES) // DTYPES[source.dtype].itemsize
        for start in range(0, elements, step):
            yield partial(self._read_cast, cast, source, start, min(start + step, elements))

    def _read_cast(
        self, cast: Cast, source: TensorEntry, start: int, stop: int, scratch: Region | None
    ) -> int:
        item = DTYPES[source.dtype].itemsize
        scratch = scratch_of(scratch)
        count, at = read_into(scratch, self._files, source, start * item, stop * item)
        stored = scratch.tensor(at, source.dtype, (stop - start,), (stop - start) * item)
        self.views[cast.weight.name].view(-1)[start:stop].copy_(stored)
        return count

    def _run_conversion(self, conversion: Conversion, _scratch: Region | None) -> int:
        stored = {
            source.name: self._region.tensor(offset, source.dtype, source.shape, source.nbytes)
            for source, offset in conversion.sources
        }
        with one_conversion:
            self._convert(conversion, stored, self.views)
        return 0


class UnpackedPlacement(Placement):
    """A layout whose every weight is unpacked from what is in memory: nothing is read."""

    def __init__(
        self,
        layout: Layout,
        region: Region,
        files: FileSet,
        convert: Convert,
        stored: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        """`stored` gives the stored bytes of [rows, bytes], by weight, once they are there."""
        super().__init__(layout, region, files, convert)
        self._stored = stored

    def read_jobs(self, _chunk_bytes: int) -> list[Work]:
        """List nothing: all is there, or being read by others."""
        return []

    def convert_jobs(self) -> list[Work]:
        """List what unpacks some rows each. They may run in any order and at once."""
        stored = self._stored()
        return [
            partial(_unpack, cast.weight, range(*rows), stored[cast.weight.name], self.views)
            for cast in self._layout.casts
            for rows in steps(cast.weight)
        ]


def _unpack(
    weight: Weight,
    rows: range,
    stored: torch.Tensor,
    views: Mapping[str, torch.Tensor],
    _scratch: Region | None,
) -> int:
    assert weight.repacked is not None  # noqa: S101 - only such are kept as they are stored
    wanted, repacked = weight.repacked.part(rows.start, rows.stop)
    into = views[weight.name][rows.start : rows.stop]
    repacked.fill(stored[wanted.start : wanted.stop], into.view(len(rows), -1))
    return 0


def steps(weight: Weight) -> Iterable[tuple[int, int]]:
    """Say which rows of one that is repacked to take at once."""
    assert weight.repacked is not None  # noqa: S101 - see above
    rows = weight.shape[0]
    return weight.repacked.steps(rows, weight.nbytes // max(1, rows))


def scratch_of(scratch: Region | None) -> Region:
    """Give the reader's own scratch: a plan with such reads always makes one."""
    assert scratch is not None  # noqa: S101 - see above
    return scratch


def read_into(
    scratch: Region, files: FileSet, source: TensorEntry, start: int, stop: int
) -> tuple[int, int]:
    """Read a tensor's bytes from `start` to `stop`, which may lie anywhere in a page.

    Returns how many bytes were read, and where the first one lies in the scratch.
    """
    begin, end = source.start + start, source.start + stop
    first, last = floor_page(begin), ceil_page(end)
    count = files.read_pages(source.file, first, last, scratch.buffer(0, last - first))
    return count, begin - first


def repacked_jobs(
    parts: Iterable[tuple[int, Weight]], into: torch.Tensor, files: FileSet
) -> Iterator[Work]:
    """List reads that fill `into` with weights that are repacked, each from its first row on."""
    for first, weight in parts:
        below = into if into.ndim == len(weight.shape) else into.view(-1, weight.shape[-1])
        for start, stop in steps(weight):
            rows = below[first + start : first + stop]
            yield partial(read_rows, weight, range(start, stop), rows, files)


def read_rows(
    weight: Weight, rows: range, into: torch.Tensor, files: FileSet, scratch: Region | None
) -> int:
    """Do the same as `read_repacked` with a reader's own scratch."""
    return read_repacked(weight, rows, into, files, scratch_of(scratch))


def read_repacked(
    weight: Weight, rows: range, into: torch.Tensor, files: FileSet, scratch: Region
) -> int:
    """Read what rows of a weight are made of, and make them; returns the bytes read.

    Args:
        weight: one that is repacked.
        rows: those of its rows that are wanted.
        into: where to, contiguous.
        files: where from.
        scratch: for the stored rows.
    """
    assert weight.repacked is not None  # noqa: S101 - see above
    (source,) = weight.sources
    wanted, repacked = weight.repacked.part(rows.start, rows.stop)
    # bitsandbytes stores its packed weights flat: only what unpacks goes by the stored rows.
    row_bytes = source.nbytes // (source if repacked.unpacks else weight).shape[0]
    first, nbytes = wanted.start * row_bytes, len(wanted) * row_bytes
    count, at = read_into(scratch, files, source, first, first + nbytes)
    out = into.view(len(into), -1)
    dtype, width = ("U8", row_bytes) if repacked.unpacks else (weight.dtype, out.shape[1])
    repacked.fill(scratch.tensor(at, dtype, (len(wanted), width), nbytes), out)
    return count


SCRATCH_BYTES = CAST_CHUNK_BYTES + 2 * PAGE
"""Working memory that one reader needs for casts: a chunk that starts anywhere in a page."""


def scratch_bytes(readers: int) -> int:
    """Bytes of working memory that so many readers need."""
    return readers * ceil_page(SCRATCH_BYTES)


def make_scratch(readers: int) -> list[Region | None]:
    """Make working memory for so many readers."""
    arena = Arena(scratch_bytes(readers), device=torch.device("cpu"), huge=True)
    return [arena.take(SCRATCH_BYTES) for _ in range(readers)]
