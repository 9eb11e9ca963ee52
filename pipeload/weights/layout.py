"""Where each weight lies in memory: arithmetic from byte ranges in files to offsets.

[Note: why a weight keeps its place in the page] With one row of input (decoding), fp32 products go
through a matrix-vector kernel whose rounding depends on the address of the weight modulo 16. A
plain load maps the file, so there `address % PAGE == file offset % PAGE`. Keeping that here makes
the results bit-identical, and it is what direct reads need anyway: whole pages land at page
addresses. Weights that are cast or converted are freshly allocated in a plain load, hence aligned
to 64 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from pipeload.system.pages import PAGE, ceil_page, floor_page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    import torch

    from pipeload.checkpoint.headers import TensorEntry

_ALIGN = 64
# Neighbours this close are read in one go. Wider gaps would cost memory that the plan, which weighs
# weights one by one and grants each a page for its borders, does not count.
_MAX_GAP_BYTES = PAGE
_MUCH_SMALLER = 0.75


class Repacking(Protocol):
    """Makes a weight of bytes that are stored otherwise, some of its rows at a time."""

    unpacks: ClassVar[bool]
    """Whether it makes numbers of bytes, one row by itself. Else it only changes their order."""

    @property
    def quick(self) -> bool:
        """Whether that takes less time than reading mostly does."""

    def steps(self, rows: int, row_bytes: int) -> Iterable[tuple[int, int]]:
        """Say which of so many rows to take at once, each of `row_bytes`: at most 4 MB stored."""

    def part(self, start: int, stop: int) -> tuple[range, Repacking]:
        """Say which stored rows the rows from `start` to `stop` come of, and how."""

    def fill(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out`, of [rows, width], with `stored`.

        That is of the same shape and dtype or, if it `unpacks`, bytes of [stored rows, bytes].
        """


class Slices(NamedTuple):
    """How the slices of a weight, along its first dimension, come of stored tensors one by one."""

    sources: tuple[tuple[int, ...], ...] = ()
    """Which of the weight's sources each is made of; none where it is of the same slice of each."""
    made: bool = True
    """Whether the conversion is to be run on these alone; else they lie one behind the other."""
    beside_bytes: int = 0
    """What that takes beside the stored tensors and the slice."""
    number: int = 0
    """How many there are, of as many rows each; 0: as many as the first dimension has."""
    unpacks: Callable[[TensorEntry], Repacking] | None = None
    """How matrices of a stored tensor are unpacked, which lie one below the other then; None: they
    are not."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter of the model and where its values come from."""

    name: str
    """Dotted parameter name in the model."""
    dtype: str
    """The dtype in the model, as a safetensors code."""
    shape: tuple[int, ...]
    nbytes: int
    """Bytes in the model's dtype."""
    sources: tuple[TensorEntry, ...]
    """Checkpoint tensors it is made of."""
    group: str | None = None
    """First weight made by the same conversion, None when there is only a read (and a cast)."""
    unpacking_bytes: int = 0
    """What its conversion takes beside stored tensors and itself; mostly 0, see `budget.cut`."""
    whole: str | None = None
    """The weight that this one is a range of rows of, None when it is a weight of its own."""
    first_row: int = 0
    """Number of its first row in the whole weight."""
    guarded: bool = False
    """Whether its module refuses to compute while it is evicted: integers have no NaN to show."""
    repacked: Repacking | None = None
    """For bytes put into another order, or unpacked, as they are read: how."""
    slices: Slices | None = None
    """How a conversion's result comes slice by slice along its first dimension; None: it does not.
    """

    @property
    def raw(self) -> bool:
        """Whether the file's bytes are the model's bytes."""
        return self.group is None and self.sources[0].dtype == self.dtype and self.repacked is None

    @property
    def rows_alone(self) -> bool:
        """Whether each row can be read by itself, wherever it is."""
        return self.raw or (self.repacked is not None and self.repacked.unpacks)

    def as_stored(self) -> Weight | None:
        """Give the bytes that it is quickly unpacked from; None for others, or hardly smaller."""
        repacked = self.repacked
        if repacked is None or not (repacked.unpacks and repacked.quick) or self.slices is not None:
            return None
        if self.read_bytes > _MUCH_SMALLER * self.nbytes:
            return None
        (source,) = self.sources
        shape = source.shape[0], source.nbytes // source.shape[0]
        return Weight(self.name, "U8", shape, source.nbytes, (replace(source, dtype="U8"),))

    @property
    def read_bytes(self) -> int:
        """Bytes read from disk for it alone."""
        return sum(source.nbytes for source in self.sources)

    @property
    def sliceable(self) -> bool:
        """Whether each slice along the first dimension can be read by itself."""
        plain = self.group is None and self.repacked is None
        return len(self.shape) > 1 and (plain or self.slices is not None)

    @property
    def slice_count(self) -> int:
        """How many slices one that is `sliceable` has."""
        return (self.slices and self.slices.number) or self.shape[0]

    @property
    def slice_unpacking(self) -> Callable[[TensorEntry], Repacking] | None:
        """How matrices of its slices are unpacked: see `Slices.unpacks`."""
        return None if self.slices is None else self.slices.unpacks

    def sources_of(self, index: int) -> tuple[TensorEntry, ...]:
        """Say what the slice `index` of one that is `sliceable` is made of."""
        if self.slices is None:
            return self.rows(index, index + 1).sources
        if not self.slices.sources:
            return tuple(_part(source, index, self.slice_count) for source in self.sources)
        return tuple(self.sources[source] for source in self.slices.sources[index])

    def slice_parts(self, index: int) -> Iterator[tuple[int, Weight]]:
        """List what the slice `index` of one that is unpacked by slices is made of.

        Matrices one below the other, each with the number of its first row in the slice.
        """
        unpacking = self.slice_unpacking
        assert unpacking is not None  # noqa: S101 - nobody asks otherwise
        width, first = self.shape[-1], 0
        item = self.nbytes // math.prod(self.shape)
        for source in self.sources_of(index):
            rows = math.prod(source.shape[:-1])
            part = replace(
                self,
                name=f"{self.name}[{index}]",
                shape=(rows, width),
                nbytes=rows * width * item,
                sources=(replace(source, shape=(rows, width)),),
                repacked=unpacking(source),
                slices=None,
            )
            yield first, part
            first += rows

    def repacked_parts(self) -> Iterator[tuple[int, Weight]]:
        """List what one that is repacked is read in: itself, or matrices with their first rows."""
        if self.slice_unpacking is None:
            yield 0, self
            return
        rows = math.prod(self.shape[:-1]) // self.slice_count
        for index in range(self.slice_count):
            for first, part in self.slice_parts(index):
                yield index * rows + first, part

    def rows(self, start: int, stop: int) -> Weight:
        """Make the range of rows from `start` to `stop` a weight that is read by itself."""
        (source,) = self.sources
        share = source.nbytes // self.shape[0]
        name, shape = f"[{start}:{stop}]", (stop - start, *self.shape[1:])
        stored, repacked = range(start, stop), self.repacked
        if repacked is not None:
            stored, repacked = repacked.part(start, stop)
        return replace(
            self,
            name=self.name + name,
            shape=shape,
            nbytes=self.nbytes // self.shape[0] * (stop - start),
            sources=(
                replace(
                    source,
                    name=source.name + name,
                    shape=(len(stored), *self.shape[1:]),
                    start=source.start + stored.start * share,
                    stop=source.start + stored.stop * share,
                ),
            ),
            whole=self.name,
            first_row=start,
            repacked=repacked,
        )


def _part(source: TensorEntry, index: int, count: int) -> TensorEntry:
    """One of so many slices along the first dimension, under the same name."""
    size, rows = source.nbytes // count, source.shape[0] // count
    start = source.start + index * size
    return replace(source, shape=(rows, *source.shape[1:]), start=start, stop=start + size)


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes of one file and its place in a region. Read as whole pages."""

    file: Path
    start: int
    stop: int
    offset: int
    """Place of byte `start` in the region; `offset % PAGE == start % PAGE`."""

    @property
    def pages(self) -> tuple[int, int, int]:
        """(first file byte, last file byte + 1, offset in the region), all on page borders."""
        first = floor_page(self.start)
        return first, ceil_page(self.stop), self.offset - (self.start - first)


@dataclass(frozen=True, slots=True)
class Cast:
    """A weight that is read piece by piece: its dtype or its order differs from the stored one."""

    weight: Weight
    offset: int


@dataclass(frozen=True, slots=True)
class Conversion:
    """Weights that the library's own operations make out of one or more stored tensors."""

    weights: tuple[Weight, ...]
    offsets: tuple[int, ...]
    sources: tuple[tuple[TensorEntry, int], ...]
    """Stored tensors and where their bytes lie in the region."""
    alone: bool = False
    """Whether it makes one slice of its weight, of the stored tensors for that: see `Slices`."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A set of weights laid out in one region of memory."""

    nbytes: int
    """Size of the region: whole pages."""
    extents: tuple[Extent, ...]
    raw: tuple[tuple[Weight, int], ...]
    """Weights that are the file's bytes, with their offsets."""
    casts: tuple[Cast, ...]
    conversions: tuple[Conversion, ...]

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All weights that lie in the region."""
        made = tuple(weight for conversion in self.conversions for weight in conversion.weights)
        return tuple(w for w, _ in self.raw) + tuple(cast.weight for cast in self.casts) + made

    @property
    def read_bytes(self) -> int:
        """Bytes that filling the region reads from disk, page borders included."""
        pages = sum(stop - start for start, stop, _ in (extent.pages for extent in self.extents))
        sources = [source for cast in self.casts for source in cast.weight.sources]
        return pages + sum(ceil_page(s.stop) - floor_page(s.start) for s in sources)


def lay_out(weights: Iterable[Weight]) -> Layout:
    """Place `weights` in one region: raw extents first, then cast and converted weights."""
    weights = list(weights)
    raw = [weight for weight in weights if weight.raw]
    groups: dict[str, list[Weight]] = {}
    for weight in weights:
        if weight.group is not None:
            groups.setdefault(weight.group, []).append(weight)
    stored = [weight.sources[0] for weight in raw]
    stored += [source for group in groups.values() for source in group[0].sources]
    extents, places, end = _place_extents(stored)
    casts = []
    for weight in weights:
        if weight.group is None and not weight.raw:
            end += -end % _ALIGN
            casts.append(Cast(weight, end))
            end += weight.nbytes
    conversions = []
    for group in groups.values():
        offsets = []
        for weight in group:
            end += -end % _ALIGN
            offsets.append(end)
            end += weight.nbytes
        sources = tuple((source, places[source.name]) for source in group[0].sources)
        conversions.append(Conversion(tuple(group), tuple(offsets), sources))
    return Layout(
        nbytes=ceil_page(end),
        extents=tuple(extents),
        raw=tuple((weight, places[weight.sources[0].name]) for weight in raw),
        casts=tuple(casts),
        conversions=tuple(conversions),
    )


def _place_extents(stored: Sequence[TensorEntry]) -> tuple[list[Extent], dict[str, int], int]:
    """Merge neighbouring byte ranges; returns the extents, each tensor's offset, and the end."""
    extents: list[Extent] = []
    places: dict[str, int] = {}
    end = 0
    run: list[TensorEntry] = []

    def close() -> None:
        nonlocal end
        if not run:
            return
        start, stop = run[0].start, max(entry.stop for entry in run)
        offset = end + start % PAGE
        extents.append(Extent(run[0].file, start, stop, offset))
        for entry in run:
            places[entry.name] = offset + entry.start - start
        end = ceil_page(offset + stop - start)
        run.clear()

    for entry in sorted(stored, key=lambda e: (str(e.file), e.start)):
        if run and (entry.file != run[-1].file or entry.start - run[-1].stop > _MAX_GAP_BYTES):
            close()
        run.append(entry)
    close()
    return extents, places, end
