"""Safetensors headers, checked and made into immutable entries. Reads no weights.

Nothing that a file claims is believed before it was compared with the file itself, and no memory
is taken on its word: of a file, only the header is read.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeGuard

from pipeload.checkpoint.folder_and_index import check_folder
from pipeload.checkpoint.untrusted_json import (
    MAX_JSON_BYTES,
    is_text_map,
    malformed,
    parse_json,
    reading,
    show,
)
from pipeload.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "ITEM_BITS",
    "Checkpoint",
    "TensorEntry",
    "check_folder",
    "open_checkpoint",
    "read_header",
    "stamps_of",
]

# Every dtype code of safetensors 0.8. Bits, because F4 and F6 items are smaller than a byte.
_CODES_BY_BITS: Final = {
    4: ("F4",),
    6: ("F6_E2M3", "F6_E3M2"),
    8: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"),
    16: ("U16", "I16", "F16", "BF16"),
    32: ("U32", "I32", "F32"),
    64: ("U64", "I64", "F64", "C64"),
}
ITEM_BITS: Final[Mapping[str, int]] = MappingProxyType(
    {code: bits for bits, codes in _CODES_BY_BITS.items() for code in codes}
)

_PREFIX_BYTES: Final = 8  # the header's length, little-endian, opens the file
_SIZE_BITS: Final = 64  # of any length or offset

# What else is found under a .safetensors name, by its first bytes.
_MISTAKEN_FOR: Final = {
    b"version ": "It is a Git LFS pointer: run `git lfs pull` to get the weights.",
    b"PK\x03\x04": "It is a zip archive, as torch.save writes: pickled weights need converting.",
    b"GGUF": "It is a GGUF file: pass it as gguf_file=.",
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor's bytes are, and what they mean."""

    name: str
    file: Path
    dtype: str
    """Safetensors code, such as "BF16"; a key of `ITEM_BITS`."""
    shape: tuple[int, ...]
    """In items. (An F4 tensor in torch packs two in one element: half the last length.)"""
    start: int
    """Position of the first byte in the file, not in its data section."""
    stop: int
    """Position after the last byte."""
    stamp: tuple[int, int] | None = field(default=None, compare=False)
    """The file's size and time of change (ns) when its header was read, if it was."""

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in the file."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of one model, from one file or many."""

    files: tuple[Path, ...]
    entries: Mapping[str, TensorEntry]
    """By tensor name; read-only."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors together, headers not counted."""
        return sum(entry.nbytes for entry in self.entries.values())


def stamps_of(entries: Iterable[TensorEntry]) -> dict[Path, tuple[int, int]]:
    """Tell what the files were when their headers were read, as `FileSet` asks."""
    return {entry.file: entry.stamp for entry in entries if entry.stamp is not None}


def open_checkpoint(
    files: Sequence[str | os.PathLike[str]], weight_map: Mapping[str, str] | None = None
) -> Checkpoint:
    """Read the headers of all files and check that they agree with each other and the index.

    Args:
        files: The safetensors files. One that is given twice is read once.
        weight_map: Tensor name to shard name, from the index. It need not list every tensor.

    Raises:
        CheckpointError: A file is malformed, two files have one tensor, or the index is wrong.
        ReadError: The system could not read a file.
    """
    paths = tuple(dict.fromkeys(Path(file) for file in files))
    if not paths:
        raise CheckpointError("No checkpoint file was given. Pass at least one safetensors file.")
    entries: dict[str, TensorEntry] = {}
    for path in paths:
        for name, entry in read_header(path).items():
            first = entries.setdefault(name, entry)
            if first is not entry:
                raise CheckpointError(
                    f"Tensor {show(name)} is in two files, {str(first.file)!r} and "
                    f"{str(path)!r}. Pass the files of one checkpoint only."
                )
    if weight_map is not None:
        _check_weight_map(weight_map, paths, entries)
    return Checkpoint(paths, MappingProxyType(entries))


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read one safetensors file's header, and check it against the format and the file's size.

    Raises:
        CheckpointError: The file is missing, malformed, truncated, or not safetensors.
        ReadError: The system could not read the file.
    """
    header, stamp = _read_header_bytes(path)
    table = parse_json(path, header, strict=True)
    if not isinstance(table, dict):
        raise malformed(path, f"its header is {show(table)}, not a JSON object")
    metadata = table.pop("__metadata__", None)
    if metadata is not None and not is_text_map(metadata):
        raise malformed(path, f"__metadata__ must map strings to strings, got {show(metadata)}")
    data_start = _PREFIX_BYTES + len(header)
    entries = [_make_entry(path, name, fields, data_start, stamp) for name, fields in table.items()]
    _check_coverage(path, entries, data_start, stamp[0])
    return {entry.name: entry for entry in entries}


def _read_header_bytes(path: Path) -> tuple[bytes, tuple[int, int]]:
    """Return the header's JSON, and the size and time of change of the file."""
    with reading(path):
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait forever
            raise malformed(path, "it is not a regular file", "Check the path.")
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            prefix = file.read(_PREFIX_BYTES)
            length = int.from_bytes(prefix, "little")
            _check_length(path, prefix, length, status.st_size)
            header = file.read(length)
    if len(header) < length:
        raise malformed(path, f"it is truncated: got {len(header)} of {length} header bytes")
    return header, (status.st_size, status.st_mtime_ns)


def _check_length(path: Path, prefix: bytes, length: int, file_bytes: int) -> None:
    for start, advice in _MISTAKEN_FOR.items():
        if prefix.startswith(start):
            raise malformed(path, "it is not a safetensors file", advice)
    if len(prefix) < _PREFIX_BYTES:
        raise malformed(path, f"it is truncated: got {file_bytes} bytes, wanted at least 8")
    if length > MAX_JSON_BYTES:
        wanted = f"{MAX_JSON_BYTES} is the most the format allows"
        raise malformed(path, f"it claims a header of {length} bytes, {wanted}")
    if length > file_bytes - _PREFIX_BYTES:
        wanted = f"wanted {_PREFIX_BYTES + length} for the header alone"
        raise malformed(path, f"it is truncated: got {file_bytes} bytes, {wanted}")


def _make_entry(
    path: Path, name: str, fields: object, data_start: int, stamp: tuple[int, int]
) -> TensorEntry:
    def wrong(what: str) -> CheckpointError:
        return malformed(path, f"tensor {show(name)} {what}")

    if not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
        raise wrong("has a name that is not valid Unicode")
    if not isinstance(fields, dict):
        raise wrong(f"must be described by a JSON object, got {show(fields)}")
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise wrong(f"has dtype {show(dtype)}, wanted one of {', '.join(ITEM_BITS)}")
    if not _are_sizes(shape):
        raise wrong(f"has shape {show(shape)}, wanted a list of integers from 0 to 2**64 - 1")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong(f"has data_offsets {show(offsets)}, wanted [start, stop] with start <= stop")
    start, stop = offsets
    bits = _count_bits(dtype, shape, limit=8 * (stop - start))
    if bits != 8 * (stop - start):
        needs = f"{bits} bits" if bits % 8 else f"{bits // 8} bytes"
        sizes = f"needs {needs} or more, its data_offsets {offsets} span {stop - start} bytes"
        raise wrong(f"with dtype {dtype} and shape {show(shape)} {sizes}")
    return TensorEntry(
        name, path, dtype, tuple(shape), data_start + start, data_start + stop, stamp
    )


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        type(size) is int and size >= 0 and size.bit_length() <= _SIZE_BITS for size in value
    )


def _count_bits(dtype: str, shape: Sequence[int], *, limit: int) -> int:
    """Multiply the shape out, but stop above `limit`: a made-up shape would take minutes."""
    bits = 0 if 0 in shape else ITEM_BITS[dtype]
    for length in shape:
        bits *= length
        if bits > limit:
            break
    return bits


def _check_coverage(
    path: Path, entries: Sequence[TensorEntry], data_start: int, file_bytes: int
) -> None:
    """Check that the tensors fill the file from header to end, without overlaps or holes."""
    end = data_start
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        tensor = f"tensor {show(entry.name)} at bytes {entry.start} to {entry.stop}"
        if entry.start != end:
            fault = "overlaps what is" if entry.start < end else "leaves a hole after what is"
            raise malformed(path, f"{tensor} {fault} before it, which ends at {end}")
        if entry.stop > file_bytes:
            wanted = max(entry.stop for entry in entries)
            got = f"it is truncated: got {file_bytes} bytes, wanted {wanted}"
            raise malformed(path, f"{got}, and {tensor} is the first that is not whole")
        end = entry.stop
    if file_bytes > end:
        raise malformed(path, f"it has {file_bytes} bytes, but its last tensor ends at {end}")


def _check_weight_map(
    weight_map: Mapping[str, str], paths: Sequence[Path], entries: Mapping[str, TensorEntry]
) -> None:
    homes = {shard: _find_shard(shard, paths) for shard in set(weight_map.values())}
    for name, shard in weight_map.items():
        entry = entries.get(name)
        if entry is None or entry.file != homes[shard]:
            found = f"it is in {str(entry.file)!r}" if entry else "it is in none of the files"
            raise CheckpointError(
                f"The index says that tensor {show(name)} is in shard {show(shard)}, but {found}. "
                "Index and shards are not of one checkpoint: download them all again."
            )


def _find_shard(shard: str, paths: Sequence[Path]) -> Path | None:
    """Return the file that the index means: the least deep whose path ends in the shard's name."""
    tail = PurePosixPath(shard).parts
    found = [path for path in paths if tail and path.parts[-len(tail) :] == tail]
    return min(found, key=lambda path: len(path.parts), default=None)


def lacking(source: str, names: Sequence[str]) -> CheckpointError:
    """The error for weights of a model that its checkpoint does not have."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return CheckpointError(
        f"{source!r} lacks {names[0]!r}{more}, and numbers would be made up for what is missing. "
        "Download the checkpoint again, or compare its config.json with its weights."
    )
