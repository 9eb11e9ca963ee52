"""GGUF headers, checked and made into entries as those of safetensors are. Reads no weights.

A file is a head of four numbers, metadata, a table of tensors, and their bytes, each tensor at a
multiple of an alignment. A row of a tensor is a number of whole blocks: some values with what they
share. Nothing that a file claims is believed before it was compared with the file itself.

[Note: split files] Large models come as NAME-00001-of-00003.gguf and so on, each a file of its own
with a part of the tensors. The first has the metadata and names all; so it is the one to be named.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from pipeload.checkpoint.gguf_fields import (
    Cursor,
    StringArray,
    Value,
    read_metadata,
    read_strings,
)
from pipeload.checkpoint.headers import Checkpoint, TensorEntry
from pipeload.checkpoint.untrusted_json import is_file, malformed, reading, show
from pipeload.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = [
    "BLOCKS",
    "Block",
    "GgufCheckpoint",
    "StringArray",
    "Value",
    "open_gguf",
    "read_gguf",
    "read_strings",
]

MAGIC: Final = b"GGUF"
SUFFIX: Final = ".gguf"
_VERSIONS: Final = (2, 3)
_ALIGNMENT: Final = 32  # where the metadata does not say
_MAX_ALIGNMENT: Final = 1 << 20
_MAX_DIMENSIONS: Final = 4
_MIN_TENSOR_BYTES: Final = 8 + 4 + 4 + 8
_MAX_FILES: Final = 99_999  # five digits in a name
_MAX_LISTED: Final = 10


class Block(NamedTuple):
    """What a row of a tensor is a whole number of."""

    values: int
    nbytes: int


_TYPES: Final[Mapping[int, tuple[str, Block]]] = {
    0: ("F32", Block(1, 4)),
    1: ("F16", Block(1, 2)),
    2: ("Q4_0", Block(32, 18)),
    3: ("Q4_1", Block(32, 20)),
    6: ("Q5_0", Block(32, 22)),
    7: ("Q5_1", Block(32, 24)),
    8: ("Q8_0", Block(32, 34)),
    9: ("Q8_1", Block(32, 40)),
    10: ("Q2_K", Block(256, 84)),
    11: ("Q3_K", Block(256, 110)),
    12: ("Q4_K", Block(256, 144)),
    13: ("Q5_K", Block(256, 176)),
    14: ("Q6_K", Block(256, 210)),
    15: ("Q8_K", Block(256, 292)),
    16: ("IQ2_XXS", Block(256, 66)),
    17: ("IQ2_XS", Block(256, 74)),
    18: ("IQ3_XXS", Block(256, 98)),
    19: ("IQ1_S", Block(256, 50)),
    20: ("IQ4_NL", Block(32, 18)),
    21: ("IQ3_S", Block(256, 110)),
    22: ("IQ2_S", Block(256, 82)),
    23: ("IQ4_XS", Block(256, 136)),
    24: ("I8", Block(1, 1)),
    25: ("I16", Block(1, 2)),
    26: ("I32", Block(1, 4)),
    27: ("I64", Block(1, 8)),
    28: ("F64", Block(1, 8)),
    29: ("IQ1_M", Block(256, 56)),
    30: ("BF16", Block(1, 2)),
    34: ("TQ1_0", Block(256, 54)),
    35: ("TQ2_0", Block(256, 66)),
    39: ("MXFP4", Block(32, 17)),
}
"""By the number in the file. Those that are missing were taken out of the format again."""
BLOCKS: Final[Mapping[str, Block]] = MappingProxyType(dict(_TYPES.values()))
"""By the name of the type, which an entry has for its dtype."""


@dataclass(frozen=True, slots=True)
class GgufCheckpoint:
    """The tensors of one model, under the names that GGUF has for them, and what is said of it."""

    checkpoint: Checkpoint
    metadata: Mapping[str, Value]
    """Of the first file; read-only."""

    @property
    def architecture(self) -> str:
        """What kind of model it is, in words of GGUF."""
        return str(self.metadata["general.architecture"])


def open_gguf(path: Path) -> GgufCheckpoint:
    """Read the header of a GGUF file and, if it is split, of all its parts.

    Raises:
        CheckpointError: a file is missing, malformed, truncated or not GGUF; it has no tensors or
            does not say what model it is; it is not the first part; parts are not of one model.
        ReadError: the system could not read a file.
    """
    metadata, entries = read_gguf(path)
    files, parts = [path], [entries]
    count = _split_count(path, metadata)
    if count > 1:
        for number, other in enumerate(_others(path, count), start=1):
            said, more = read_gguf(other)
            _check_part(other, said, number, count)
            files.append(other)
            parts.append(more)
    if not isinstance(metadata.get("general.architecture"), str):
        raise malformed(path, "its metadata has no general.architecture, so no model is known")
    together = _join(files, parts)
    _check_total(path, metadata, together)
    checkpoint = Checkpoint(tuple(files), MappingProxyType(together))
    return GgufCheckpoint(checkpoint, MappingProxyType(metadata))


def read_gguf(path: Path) -> tuple[dict[str, Value], dict[str, TensorEntry]]:
    """Read one file's metadata and table of tensors.

    Returns:
        Values by key, and entries by GGUF's name. An entry's dtype is a key of `BLOCKS`; its shape
        is in values, the last dimension that of a row.

    Raises:
        CheckpointError: the file is missing, malformed, truncated, or not GGUF.
        ReadError: the system could not read the file.
    """
    with reading(path):
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait forever
            raise malformed(path, "it is not a regular file", "Check the path.")
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            stamp = status.st_size, status.st_mtime_ns
            cursor = Cursor(path, file, status.st_size)
            tensors, pairs = _read_head(cursor)
            metadata = read_metadata(cursor, pairs)
            alignment = _alignment(cursor, metadata)
            cursor.check_room(tensors, _MIN_TENSOR_BYTES, "tensors")
            rows = [_read_row(cursor) for _ in range(tensors)]
    start = cursor.place + -cursor.place % alignment
    entries = [
        TensorEntry(row.name, path, row.type, row.shape, first, first + row.nbytes, stamp)
        for row in rows
        for first in (start + row.offset,)
    ]
    _check_coverage(path, entries, start, alignment, status.st_size)
    named = {entry.name: entry for entry in entries}
    if len(named) < len(entries):
        names = [entry.name for entry in entries]
        twice = next(name for name in names if names.count(name) > 1)
        raise malformed(path, f"tensor {show(twice)} stands twice in its table")
    return metadata, named


def _read_head(cursor: Cursor) -> tuple[int, int]:
    """How many tensors there are, and how many metadata keys."""
    magic = cursor.take(min(4, cursor.left), "its first bytes")
    if magic != MAGIC:
        raise cursor.wrong(
            f"it begins with {show(magic)}, not with 'GGUF'", "Name a GGUF file, or download it."
        )
    version = cursor.number("its version")
    if version not in _VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
            raise cursor.wrong("it is big-endian", "Take the file for little-endian machines.")
        wanted = " or ".join(map(str, _VERSIONS))
        raise cursor.wrong(
            f"it is of version {version}, wanted {wanted}", "Take a file of a newer conversion."
        )
    return cursor.length("its number of tensors"), cursor.length("its number of metadata keys")


def _alignment(cursor: Cursor, metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment", _ALIGNMENT)
    if type(value) is not int or not 8 <= value <= _MAX_ALIGNMENT or value & (value - 1):
        raise cursor.wrong(
            f"its general.alignment is {show(value)}, wanted a power of two from 8 to "
            f"{_MAX_ALIGNMENT}"
        )
    return value


class _Row(NamedTuple):
    """A row of the table of tensors."""

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    """From where the tensors' bytes begin."""


def _read_row(cursor: Cursor) -> _Row:
    name = cursor.name("a tensor's name")
    said = f"tensor {show(name)}"
    dimensions = cursor.number(f"the dimensions of {said}")
    if dimensions > _MAX_DIMENSIONS:
        raise cursor.wrong(f"{said} has {dimensions} dimensions, wanted at most {_MAX_DIMENSIONS}")
    shape = [cursor.length(f"the shape of {said}") for _ in range(dimensions)]
    if 0 in shape:
        raise cursor.wrong(f"{said} has a length of 0, wanted at least 1")
    code = cursor.number(f"the type of {said}")
    offset = cursor.length(f"the offset of {said}")
    if code not in _TYPES:
        raise cursor.wrong(
            f"{said} is of type {code}, which this version does not know",
            "Take a file of another type, such as Q4_K_M or Q8_0.",
        )
    kind, block = _TYPES[code]
    width = shape[0] if shape else 1
    if width % block.values:
        raise cursor.wrong(
            f"{said} has rows of {width} values, and {kind} has blocks of {block.values}"
        )
    # Four lengths of 64 bits at most: the product is a small number to Python.
    count = 1
    for length in shape:
        count *= length
    return _Row(name, kind, tuple(reversed(shape)), count // block.values * block.nbytes, offset)


def _check_coverage(
    path: Path, entries: Sequence[TensorEntry], start: int, alignment: int, file_bytes: int
) -> None:
    """Check that the tensors follow each other, each at the next multiple of the alignment.

    Behind the last one may stand what the format does not speak of: some tools append to files.
    """
    end = start
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        tensor = f"tensor {show(entry.name)} at bytes {entry.start} to {entry.stop}"
        wanted = end + -end % alignment
        if entry.start != wanted:
            fault = "overlaps what is" if entry.start < end else "is not right behind what is"
            raise malformed(path, f"{tensor} {fault} before it: it should begin at {wanted}")
        if entry.stop > file_bytes:
            last = max(entry.stop for entry in entries)
            got = f"it is truncated: got {file_bytes} bytes, wanted {last}"
            raise malformed(path, f"{got}, and {tensor} is the first that is not whole")
        end = entry.stop


def _split_count(path: Path, metadata: Mapping[str, Value]) -> int:
    """Into how many files a model is split. Refuses all but the first of them."""
    number, count = metadata.get("split.no", 0), metadata.get("split.count", 1)
    if type(number) is not int or type(count) is not int or not 0 <= number < max(1, count):
        raise malformed(path, f"it says that it is part {show(number)} of {show(count)}")
    if count > _MAX_FILES:
        raise malformed(path, f"it says that it is one of {count} files")
    if number > 0:
        raise malformed(
            path,
            f"it is part {number + 1} of {count}",
            f"Name the first part, which ends in -00001-of-{count:05d}{SUFFIX}.",
        )
    return count


def _others(path: Path, count: int) -> list[Path]:
    """The other files of a split one, by the names that they must have."""
    ending = f"-00001-of-{count:05d}{SUFFIX}"
    if not path.name.endswith(ending):
        raise malformed(
            path,
            f"it is the first of {count} files, and its name does not end in {ending!r}",
            "Give the files the names that they had: the others are found by them.",
        )
    stem = re.sub(re.escape(ending) + "$", "", path.name)
    names = [f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(2, count + 1)]
    missing = [name for name in names if not is_file(path.with_name(name))]
    if missing:
        more = f" and {len(missing) - _MAX_LISTED} more" if len(missing) > _MAX_LISTED else ""
        listed = ", ".join(show(name) for name in missing[:_MAX_LISTED])
        raise malformed(
            path,
            f"{len(missing)} of the {count} files of this model are missing: {listed}{more}",
            "Download them into the same folder.",
        )
    return [path.with_name(name) for name in names]


def _check_part(path: Path, metadata: Mapping[str, Value], number: int, count: int) -> None:
    found = metadata.get("split.no"), metadata.get("split.count")
    if found != (number, count):
        got = f"part {show(found[0])} of {show(found[1])}, counted from 0"
        raise malformed(path, f"it says that it is {got}, and its name {number} of {count}")


def _join(files: Sequence[Path], parts: Sequence[dict[str, TensorEntry]]) -> dict[str, TensorEntry]:
    together: dict[str, TensorEntry] = {}
    for path, part in zip(files, parts, strict=True):
        for name, entry in part.items():
            first = together.setdefault(name, entry)
            if first is not entry:
                raise CheckpointError(
                    f"Tensor {show(name)} is in two files, {str(first.file)!r} and {str(path)!r}: "
                    "they are not parts of one model. Download them all again."
                )
    return together


def _check_total(
    path: Path, metadata: Mapping[str, Value], together: Mapping[str, TensorEntry]
) -> None:
    if not together:
        raise malformed(
            path, "it has no tensors, a vocabulary at most", "Name the file of the model itself."
        )
    wanted = metadata.get("split.tensors.count", len(together))
    if wanted != len(together):
        raise malformed(
            path, f"its files have {len(together)} tensors together, and it says {show(wanted)}"
        )
