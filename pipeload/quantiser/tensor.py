"""Quantises or copies one stored tensor, in pieces of rows: the bytes that a shard is made of."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from pipeload.budget.limit_errors import making_too_large
from pipeload.checkpoint.writer import Tensor
from pipeload.errors import CheckpointError
from pipeload.formats.integers.linear import Int4Linear, Int8Linear
from pipeload.formats.integers.order import BLOCK_ROWS, pack
from pipeload.quantiser.resumable_shards import Step
from pipeload.system.memory import parse_limit, rss_bytes
from pipeload.weights.arena import DTYPES
from pipeload.weights.read_tensor import PIECE_BYTES, read_pieces
from pipeload.weights.row_cuts import RowRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pipeload.checkpoint.file_reads import FileSet
    from pipeload.checkpoint.headers import TensorEntry
    from pipeload.formats.integers.rounding import Rounding


ROUNDED_BYTES_PER_ITEM = 40
"""What quantising holds, fp32 temporaries and all."""
_MOST_ITEMS = 4 << 20
_SPARE_BYTES = 32 << 20


class Reading(NamedTuple):
    """From where weights are read, and how much of one."""

    files: FileSet
    items: int
    """At once."""


def items_at_once(
    memory_limit: int | str | None, columns: int, item_bytes: int, *, held: int, what: str, of: str
) -> int:
    """How many numbers to work on at once.

    Args:
        memory_limit: what the process may hold; None takes what is quick.
        columns: of the widest weight, of which some rows are the least.
        item_bytes: that each takes, temporaries and all.
        held: bytes of the largest weight's tensors that are there meanwhile.
        what: is done, as in "quantising".
        of: what needs it, in words.

    Raises:
        MemoryLimitError: the limit is too small; says the smallest that works.
    """
    if memory_limit is None:
        return _MOST_ITEMS
    limit, free_from = parse_limit(memory_limit), rss_bytes() + _SPARE_BYTES + PIECE_BYTES + held
    least = free_from + BLOCK_ROWS * columns * item_bytes
    if limit < least:
        raise making_too_large(limit, least, what, of)
    return min(_MOST_ITEMS, (limit - free_from) // item_bytes)


class Integers(NamedTuple):
    """How one weight is quantised."""

    rounding: Rounding
    bits: int
    group: int
    order: str
    prepare: Callable[[], Rounding] | None = None
    """Makes what rounds in the end, with what is in memory meanwhile alone."""

    def ready(self) -> Integers:
        """The same, prepared."""
        return self if self.prepare is None else self._replace(rounding=self.prepare())


def copied(entry: TensorEntry, files: FileSet) -> Step:
    """A tensor as it is."""
    tensor = Tensor(entry.name, entry.dtype, entry.shape, entry.nbytes)
    return Step((tensor,), partial(read_pieces, entry, files))


def quantised(
    entry: TensorEntry, how: Integers, parts: Sequence[RowRange], reading: Reading
) -> Step:
    """A weight of [rows, columns] as integers, and what goes with it; one after the other part."""

    def rows(start: int, stop: int) -> Iterator[torch.Tensor]:
        return read_weight(rows_of(entry, start, stop), reading)

    return integers(entry.name, entry.shape[1], entry.dtype, how, parts=parts, rows=rows)


def integers(
    name: str,
    columns: int,
    dtype: str,
    how: Integers,
    *,
    parts: Sequence[RowRange],
    rows: Callable[[int, int], Iterator[torch.Tensor]],
) -> Step:
    """The same of rows that come from anywhere.

    Args:
        name: of the weight.
        columns: of it.
        dtype: of scales and zeros, its code.
        how: integers are made of rows.
        parts: that it is stored in.
        rows: those from one to before another, some at a time: multiples of 64, and then the rest.
    """
    tensors = [
        tensor
        for (start, stop), stem in zip(parts, part_stems(name, len(parts)), strict=True)
        for tensor in made(stem, (stop - start, columns), how.bits, how.group, dtype)
    ]
    return Step(tuple(tensors), partial(_integer_pieces, how, parts, rows))


def part_stems(name: str, count: int) -> list[str]:
    """What names of the tensors of each part of the weight `name` begin with."""
    stem = name.removesuffix("weight")
    return [stem] if count == 1 else [f"{stem}parts.{i}." for i in range(count)]


def rows_of(entry: TensorEntry, start: int, stop: int) -> TensorEntry:
    """Some rows of a stored weight."""
    rows, columns = entry.shape
    size = entry.nbytes // rows
    first, last = entry.start + start * size, entry.start + stop * size
    return replace(entry, shape=(stop - start, columns), start=first, stop=last)


def made(
    stem: str, shape: tuple[int, int], bits: int, group: int, dtype: str
) -> tuple[Tensor, Tensor]:
    """A weight of integers of [rows, columns], and its statistics of that dtype (its code).

    `stem`: what their names begin with, dot and all.
    """
    rows, columns = shape
    item = DTYPES[dtype].itemsize
    if bits == 8:
        weight = Tensor(f"{stem}weight", "I8", shape, rows * columns)
        return weight, Tensor(f"{stem}{Int8Linear.statistics}", dtype, (rows,), rows * item)
    weight = Tensor(f"{stem}weight", "U8", (rows, columns // 2), rows * columns // 2)
    sizes = (columns // group, rows, 2)
    nbytes = sizes[0] * rows * 2 * item
    return weight, Tensor(f"{stem}{Int4Linear.statistics}", dtype, sizes, nbytes)


def _integer_pieces(
    how: Integers,
    parts: Sequence[RowRange],
    rows: Callable[[int, int], Iterator[torch.Tensor]],
) -> Iterator[memoryview]:
    how = how.ready()
    for start, stop in parts:
        extras: list[torch.Tensor] = []
        yield from codes_of(rows(start, stop), how, extras)
        yield statistics_of(extras, how)


def codes_of(
    rows: Iterable[torch.Tensor], how: Integers, extras: list[torch.Tensor]
) -> Iterator[memoryview]:
    """Rows of a weight as integers; what goes with them is put into `extras`."""
    for weight in rows:
        values, extra = how.rounding(weight)
        extras.append(extra)
        yield bytes_of(values if how.bits == 8 else pack(values, how.order))


def statistics_of(extras: Sequence[torch.Tensor], how: Integers) -> memoryview:
    """What goes with all the integers of a weight."""
    return bytes_of(torch.cat([*extras], 0 if how.bits == 8 else 1))


def read_weight(entry: TensorEntry, reading: Reading) -> Iterator[torch.Tensor]:
    """A weight's rows, about so many items at once, in memory that the next ones overwrite.

    Multiples of 64 rows, and then the rest.

    Raises:
        CheckpointError: a value is not finite.
        ReadError: as `read_pieces`.
    """
    _, columns = entry.shape
    step = _block_rows(columns, reading)
    dtype = DTYPES[entry.dtype]
    for piece in read_pieces(entry, reading.files, step * columns * dtype.itemsize):
        weight = torch.frombuffer(piece, dtype=dtype).view(-1, columns)
        check_finite(weight, entry)
        yield weight


def row_blocks(first: int, last: int, columns: int, reading: Reading) -> Iterator[RowRange]:
    """Ranges of rows, about so many items each: whole tiles, then what is left."""
    step = _block_rows(columns, reading)
    for start in range(first, last, step):
        yield RowRange(start, min(start + step, last))


def _block_rows(columns: int, reading: Reading) -> int:
    return max(BLOCK_ROWS, reading.items // columns // BLOCK_ROWS * BLOCK_ROWS)


def check_finite(values: torch.Tensor, entry: TensorEntry) -> None:
    """Refuse a stored tensor some of whose values are no numbers.

    Raises:
        CheckpointError: they are not.
    """
    if not bool(values.isfinite().all()):
        raise CheckpointError(
            f"tensor {entry.name!r} in {str(entry.file)!r} holds values that are not finite, and "
            "no integer stands for those. Download the checkpoint again, or stream it as it is."
        )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """What a tensor holds, in order."""
    view: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return view
