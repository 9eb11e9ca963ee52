"""Makes the bytes of a shard out of coded weights: integers for our kernels, or floats."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from pipeload.checkpoint.writer import Tensor
from pipeload.formats.codes.coded_weight import statistics
from pipeload.formats.codes.repack import float_rows, packed_rows
from pipeload.quantiser.resumable_shards import Step
from pipeload.quantiser.tensor import bytes_of, copied, made, part_stems, row_blocks
from pipeload.weights.arena import DTYPE_CODES, DTYPES
from pipeload.weights.read_tensor import read_pieces, read_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeload.checkpoint.file_reads import FileSet
    from pipeload.checkpoint.headers import TensorEntry
    from pipeload.formats.codes.coded_weight import CodedWeight, Codes
    from pipeload.quantiser.tensor import Reading
    from pipeload.weights.row_cuts import RowRange

_CASTABLE = {"F16", "BF16"}


class Kernel(NamedTuple):
    """What integers are to become."""

    bits: int
    group: int
    order: str
    """Of int4 rows."""
    reordered: bool
    """Whether every weight says which input each of its columns takes."""
    dtype: torch.dtype
    """Of scales and zeros."""


def cast(entry: TensorEntry, files: FileSet, dtype: torch.dtype) -> Step:
    """A tensor, with halves of another kind made halves of this one."""
    code = DTYPE_CODES[dtype]
    if entry.dtype == code or entry.dtype not in _CASTABLE:
        return copied(entry, files)
    count = entry.nbytes // DTYPES[entry.dtype].itemsize
    tensor = Tensor(entry.name, code, entry.shape, count * dtype.itemsize)
    return Step((tensor,), partial(_cast_pieces, entry, files, dtype))


def _cast_pieces(entry: TensorEntry, files: FileSet, dtype: torch.dtype) -> Iterator[memoryview]:
    for piece in read_pieces(entry, files):
        yield bytes_of(torch.frombuffer(piece, dtype=DTYPES[entry.dtype]).to(dtype))


def as_floats(weight: CodedWeight, reading: Reading, dtype: torch.dtype) -> Step:
    """The numbers that the codes stand for, rounded once."""
    rows, columns = weight.shape
    nbytes = rows * columns * dtype.itemsize
    tensor = Tensor(weight.name, DTYPE_CODES[dtype], weight.shape, nbytes)
    return Step((tensor,), partial(_float_pieces, weight, reading, dtype))


def _float_pieces(
    weight: CodedWeight, reading: Reading, dtype: torch.dtype
) -> Iterator[memoryview]:
    codes = _decode(weight, reading.files)
    for start, stop in row_blocks(0, weight.shape[0], weight.shape[1], reading):
        yield bytes_of(float_rows(codes, start, stop).to(dtype))


def as_integers(
    weight: CodedWeight, kernel: Kernel, parts: Sequence[RowRange], reading: Reading
) -> Step:
    """The same codes in the order of our kernels; one after the other part."""
    columns = weight.shape[1]
    tensors: list[Tensor] = []
    for (start, stop), stem in zip(parts, part_stems(weight.name, len(parts)), strict=True):
        shape = (stop - start, columns)
        tensors += made(stem, shape, kernel.bits, kernel.group, DTYPE_CODES[kernel.dtype])
        if kernel.reordered:
            tensors.append(Tensor(f"{stem}columns", "I32", (columns,), 4 * columns))
    return Step(tuple(tensors), partial(_integer_pieces, weight, kernel, parts, reading))


def _integer_pieces(
    weight: CodedWeight, kernel: Kernel, parts: Sequence[RowRange], reading: Reading
) -> Iterator[memoryview]:
    codes = _decode(weight, reading.files)
    groups = weight.shape[1] // kernel.group if kernel.group else 0
    beside = statistics(weight, codes.grid, groups, kernel.dtype)
    for first, last in parts:
        for start, stop in row_blocks(first, last, weight.shape[1], reading):
            yield bytes_of(packed_rows(codes, kernel.bits, kernel.order, start, stop))
        yield bytes_of(beside[..., first:last, :].contiguous())
        if kernel.reordered:
            in_order = torch.arange(weight.shape[1], dtype=torch.int32)
            yield bytes_of(in_order if codes.columns is None else codes.columns)


def _decode(weight: CodedWeight, files: FileSet) -> Codes:
    return weight.decode({key: read_whole(entry, files) for key, entry in weight.parts.items()})
