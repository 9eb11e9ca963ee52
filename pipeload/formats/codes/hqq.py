"""Integers of HQQ, as its package and transformers 4 have saved them: groups along rows (axis 1).

    W_q    uint8 [rows * groups / 2, group] of 4 bits: a group in each line; those of the first
           half of all groups in the upper bits. So with a fourth or an eighth of all for 2 bits or
           1, and with a tenth for 3 bits, in int32 and filled up; of 8 bits [rows * groups, group]
    scale  [rows * groups, 1]
    zero   [rows * groups, 1]: no whole number

How a weight is packed stands beside it, in tensors of one number or of letters. Those alone are
believed: settings may differ from weight to weight. Layouts checked against hqq 0.2.8.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from pipeload.checkpoint.file_reads import FileSet
from pipeload.checkpoint.headers import stamps_of
from pipeload.checkpoint.hung_reads import resolve_timeout
from pipeload.errors import CheckpointError
from pipeload.formats.codes.coded_weight import (
    FLOATS,
    MIDDLE,
    CodedWeight,
    Codes,
    Offsets,
    held_in,
    moved_up,
    not_taken_over,
    part,
    stems,
)
from pipeload.weights.read_tensor import read_whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeload.checkpoint.headers import TensorEntry

_PACKINGS: Final = {
    "8bit_u8": (8, 1),
    "4bit_u8": (4, 2),
    "3bit_32": (3, 10),
    "2bit_u8": (2, 4),
    "1bit_u8": (1, 8),
}
"""Bits of a code, and how many lie in a word, by the name of how codes are packed."""
_NUMBERS: Final = {"axis": 1, "view_as_float": 0, "quant_scale": 0, "quant_zero": 0}
"""What is said of a weight, and has to be: else its scales or its words are something else."""
_BESIDE: Final = (
    *("nbits", "group_size", "unpack_view_dtype", "compute_dtype", "offload_meta"),
    *("encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero"),
)
"""What else is said, and follows from the rest or changes no number."""


class Hqq:
    """A `CodesFormat`."""

    method = "hqq"
    title = "HQQ"

    def find(
        self, _config: Mapping[str, Any], stored: Mapping[str, TensorEntry]
    ) -> list[CodedWeight]:
        """Find quantised weights. Raises what `CodesFormat.find` does, and ReadError."""
        return [self._coded(stem, stored) for stem in stems(stored, "W_q")]

    def _coded(self, stem: str, stored: Mapping[str, TensorEntry]) -> CodedWeight:
        name = f"{stem}weight"
        said = {
            key: part(stored, f"{stem}{key}", (), torch.uint8) for key in _NUMBERS if key != "axis"
        }
        said["axis"] = part(stored, f"{stem}axis", (), torch.int32)
        said["shape"] = part(stored, f"{stem}shape", (2,), torch.int64)
        said["packing"] = part(stored, f"{stem}packing", (None,), torch.uint8)
        found = _read(said)
        for key, wanted in _NUMBERS.items():
            if (value := int(found[key])) != wanted:
                raise not_taken_over(self.method, f"{name!r} has {key} {value}, not {wanted}")
        packing = bytes(found["packing"].tolist()).decode(errors="replace")
        if packing not in _PACKINGS:
            raise not_taken_over(self.method, f"{name!r} is packed as {packing!r}")
        bits, each = _PACKINGS[packing]
        rows, columns = found["shape"].tolist()
        dtype = torch.int32 if each > 8 else torch.uint8
        words = part(stored, f"{stem}W_q", (None, None), dtype)
        count, group = words.shape
        lines = rows * columns // group if min(rows, columns, group) > 0 else 0
        if columns % max(group, 1) or -(-lines // each) != count or not lines:
            raise CheckpointError(
                f"{name!r} is said to be of [{rows}, {columns}], and its codes are {count * each} "
                f"groups of {group}. Download the checkpoint again."
            )
        parts = {
            "words": words,
            "scale": part(stored, f"{stem}scale", (lines, 1), *FLOATS),
            "zero": part(stored, f"{stem}zero", (lines, 1), *FLOATS),
            **said,
            **{key: stored[f"{stem}{key}"] for key in _BESIDE if f"{stem}{key}" in stored},
        }
        shape, groups = (rows, columns), columns // group
        decode = partial(_decode, shape, bits, each)
        return CodedWeight(name, shape, held_in(bits), groups, parts, decode)


def _read(entries: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
    """Read what is said of one weight: some bytes."""
    files = list(dict.fromkeys(entry.file for entry in entries.values()))
    stamps = stamps_of(entries.values())
    opened = FileSet(files, "buffered", resolve_timeout("auto"), stamps)
    return {key: read_whole(entry, opened) for key, entry in entries.items()}


def _decode(
    shape: tuple[int, int], bits: int, each: int, tensors: Mapping[str, torch.Tensor]
) -> Codes:
    words, (rows, columns) = tensors["words"], shape
    groups, count, up = columns // words.shape[1], len(words), moved_up(bits)
    scale, zero = (tensors[name].float().view(rows, groups).t() for name in ("scale", "zero"))

    def some(start: int, stop: int) -> torch.Tensor:
        first, last = start * groups, stop * groups
        found = []
        for place in range(first // count, -(-last // count)):
            begin = place * count
            lines = words[max(first - begin, 0) : last - begin] >> bits * (each - 1 - place)
            found.append((lines & (1 << bits) - 1).to(torch.uint8))
        return torch.cat(found).add_(up).view(-1, columns)

    return Codes(some, Offsets(scale, -zero * scale, MIDDLE[held_in(bits)], up))
