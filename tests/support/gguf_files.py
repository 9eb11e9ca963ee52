"""GGUF files for tests: bytes by hand, which may be wrong, and whole models of random blocks."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10
ALIGNMENT = 32
# (number, values of a block, bytes of a block) of a few types.
PACKED_TYPES = {"F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q6_K": (14, 256, 210)}


class Tensor(NamedTuple):
    """A row of the table; what is None is right."""

    name: str
    shape: tuple[int, ...] = (2, 32)
    """As in torch: rows first."""
    kind: str = "F32"
    code: int | None = None
    offset: int | None = None


def text(value: str | bytes) -> bytes:
    """A string with its length."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    """A metadata key with its value."""
    return text(key) + struct.pack("<I", kind) + value


def strings(*values: str) -> bytes:
    """The value of an array of strings."""
    return struct.pack("<IQ", STRING, len(values)) + b"".join(map(text, values))


ARCHITECTURE = pair("general.architecture", STRING, text("llama"))


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor."""
    _, values, size = PACKED_TYPES[tensor.kind]
    count = 1
    for length in tensor.shape:
        count *= length
    return count // values * size


def pack(
    tensors: Sequence[Tensor] = (Tensor("a"),),
    pairs: Iterable[bytes] = (ARCHITECTURE,),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    cut: int = 0,
    behind: bytes = b"",
) -> bytes:
    """The bytes of a file; `cut` of them are missing at its end, `behind` stands after it."""
    pairs = list(pairs)
    rows, offset, end = [], 0, 0
    for tensor in tensors:
        code = PACKED_TYPES[tensor.kind][0] if tensor.code is None else tensor.code
        place = offset if tensor.offset is None else tensor.offset
        shape = b"".join(struct.pack("<Q", length) for length in reversed(tensor.shape))
        dimensions = struct.pack("<I", len(tensor.shape))
        rows.append(text(tensor.name) + dimensions + shape + struct.pack("<IQ", code, place))
        end = offset + nbytes(tensor)
        offset = end + -end % ALIGNMENT
    head = magic + struct.pack("<IQQ", version, *(counts or (len(rows), len(pairs))))
    header = head + b"".join(pairs) + b"".join(rows)
    header += bytes(-len(header) % ALIGNMENT)
    data = bytes(at % 251 for at in range(end))
    whole = header + data
    return whole[: len(whole) - cut] + behind
