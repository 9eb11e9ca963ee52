"""What a safetensors file begins with, for those who write the tensors themselves, piece by piece.

The library's own writer wants all of them in memory first.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

_ALIGN = 64


class Tensor(NamedTuple):
    """A tensor that a file is to hold."""

    name: str
    dtype: str
    """A safetensors code."""
    shape: tuple[int, ...]
    nbytes: int


def is_odd(nbytes: int) -> bool:
    """Tell whether what follows that many bytes would not lie as plain tensors do.

    Those of such sizes go last: what is before them begins at a multiple of 64 bytes.
    """
    return nbytes % _ALIGN != 0


def make_header(tensors: Iterable[Tensor]) -> bytes:
    """Make the header of a file with these tensors, in this order."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        table[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end := end + tensor.nbytes],
        }
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % _ALIGN)
    return len(header).to_bytes(8, "little") + header
