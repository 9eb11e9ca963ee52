"""Whether the weights of a model in memory are those of its checkpoint, to the bit."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pipeload.system.mappings import mappings_of
from pipeload.weights.arena import DTYPES
from pipeload.weights.placement import make_scratch, read_rows, steps
from pipeload.weights.read_tensor import PIECE_BYTES, read_pieces, read_whole, run_named

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pipeload.checkpoint.file_reads import FileSet
    from pipeload.checkpoint.headers import TensorEntry
    from pipeload.weights.layout import Weight
    from pipeload.weights.placement import Convert

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def no_conversion(*_: object) -> Any:
    """Stand in for a conversion where all weights are stored as they are."""
    raise AssertionError("nothing is converted")


def differing(
    weights: Mapping[str, Weight],
    live: Mapping[str, torch.Tensor],
    convert: Convert,
    files: FileSet,
    mapped: Sequence[Path] = (),
) -> Iterator[str]:
    """Names of those `live` tensors that are not what `weights` reads from `files`, one by one.

    A tensor that still maps one of `mapped` is not read: see
    [Note: what tells that a mapped weight is unchanged].

    Raises:
        ReadError: a tensor could not be read, so nothing is known of it.
    """
    mappings = mappings_of(mapped)
    groups: dict[str, list[Weight]] = {}
    for name, weight in weights.items():
        tensor, source = live[name], weight.sources[0]
        if weight.group is not None:
            groups.setdefault(weight.group, []).append(weight)
        elif weight.slices is None and weight.shape != tuple(source.shape):
            yield name
        elif weight.repacked is not None and weight.repacked.unpacks:
            if not _unpacks_to(weight, tensor, files):
                yield name
        elif weight.raw and tensor.is_contiguous():
            address = tensor.data_ptr()
            shown = any(m.holds(address, source.file, source.start) for m in mappings)
            if not shown and not _equal(source, tensor, files):
                yield name
        elif not _equal(source, tensor, files):
            yield name
    for group in groups.values():
        yield from _differing_of_group(group, live, convert, files)


def _differing_of_group(
    group: Sequence[Weight], live: Mapping[str, torch.Tensor], convert: Convert, files: FileSet
) -> Iterator[str]:
    from pipeload.weights.layout import lay_out

    (conversion,) = lay_out(group).conversions
    stored = {entry.name: read_whole(entry, files) for entry, _ in conversion.sources}
    made = {w.name: torch.empty(w.shape, dtype=DTYPES[w.dtype]) for w in group}
    convert(conversion, stored, made)
    for weight in group:
        if not _same_bits(made[weight.name], live[weight.name]):
            yield weight.name


def _equal(source: TensorEntry, tensor: torch.Tensor, files: FileSet) -> bool:
    """Compare piece by piece: neither the file nor the tensor is held twice."""
    dtype = DTYPES[source.dtype]
    parts = tensor.detach().reshape(-1).split(PIECE_BYTES // dtype.itemsize)
    pieces = read_pieces(source, files)
    return all(
        _same_bits(torch.frombuffer(piece, dtype=dtype).to(part.dtype), part)
        for part, piece in zip(parts, pieces, strict=False)
    )


def _unpacks_to(weight: Weight, tensor: torch.Tensor, files: FileSet) -> bool:
    """Compare some rows after the other."""
    (scratch,) = make_scratch(1)
    live = tensor.detach()
    if live.dtype != DTYPES[weight.dtype] or live.shape != weight.shape:
        return False
    for first, part in weight.repacked_parts():
        below = live if part is weight else live.reshape(-1, part.shape[-1])
        for start, stop in steps(part):
            made = torch.empty((stop - start, *part.shape[1:]), dtype=live.dtype)
            read = partial(read_rows, part, range(start, stop), made, files)
            run_named(part.sources[0].name, read, scratch, files)
            if not _same_bits(made, below[first + start : first + stop]):
                return False
    return True


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether both have the same bits: NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = _BITS.get(one.dtype.itemsize)
    if bits is None:
        return torch.equal(one, other)
    return torch.equal(one.contiguous().view(bits), other.detach().contiguous().view(bits))
