"""AQLM: a weight is a sum of entries of codebooks, times one scale for some rows.

    codes      int8 or int16 [rows / height, columns / width, books]: which entries, unsigned
    codebooks  [books, entries, height, width]
    scales     [rows / height, 1, 1, 1]

No kernel of ours takes that: it becomes floats. Checked against what aqlm 1.1.7 makes of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pipeload.errors import CheckpointError
from pipeload.formats.codes.coded_weight import (
    FLOATS,
    CodedWeight,
    Codes,
    Numbers,
    part,
    stems,
)
from pipeload.formats.integers.order import BLOCK_ROWS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeload.checkpoint.headers import TensorEntry


class Aqlm:
    """A `CodesFormat`."""

    method = "aqlm"
    title = "AQLM"

    def find(
        self, _config: Mapping[str, Any], stored: Mapping[str, TensorEntry]
    ) -> list[CodedWeight]:
        """Find quantised weights. Raises what `CodesFormat.find` does."""
        return [_coded(stem, stored) for stem in stems(stored, "codes")]


@dataclass(frozen=True)
class Codebooks(Numbers):
    """Sums of entries."""

    books: torch.Tensor
    """[books, entries, height, width]."""
    scale: torch.Tensor
    """fp32 of [rows / height, 1, 1, 1]."""

    def numbers(self, codes: torch.Tensor, first: int) -> torch.Tensor:
        """Make fp32 of codes of [rows / height, columns / width, books]; see `Numbers`."""
        count, across, _ = codes.shape
        _, entries, height, width = self.books.shape
        made = torch.zeros((count, across, height, width), dtype=torch.float32)
        for number, book in enumerate(self.books):
            made += book[codes[..., number].long() & entries - 1]
        made *= self.scale[first // height :][:count]
        return made.swapaxes(1, 2).reshape(count * height, across * width)


def _coded(stem: str, stored: Mapping[str, TensorEntry]) -> CodedWeight:
    name, every = f"{stem}weight", (None, None, None)
    codes = part(stored, f"{stem}codes", every, torch.int8, torch.int16)
    down, across, count = codes.shape
    books = part(stored, f"{stem}codebooks", (count, *every), *FLOATS)
    _, entries, height, width = books.shape
    most = 1 << 8 * (codes.nbytes // max(down * across * count, 1))
    if entries < 1 or entries & entries - 1 or entries > most or BLOCK_ROWS % max(height, 1):
        raise CheckpointError(
            f"the codebooks of {name!r} are {list(books.shape)}, wanted a power of 2 of entries, "
            f"at most {most}, of rows that divide {BLOCK_ROWS}. Use the float checkpoint."
        )
    scale = part(stored, f"{stem}scales", (down, 1, 1, 1), *FLOATS)
    parts = {"codes": codes, "codebooks": books, "scale": scale}
    return CodedWeight(name, (down * height, across * width), 0, 1, parts, partial(_decode, height))


def _decode(height: int, tensors: Mapping[str, torch.Tensor]) -> Codes:
    codes = tensors["codes"]

    def rows(start: int, stop: int) -> torch.Tensor:
        return codes[start // height : stop // height]

    return Codes(rows, Codebooks(tensors["codebooks"], tensors["scale"].float()))
