"""AWQ's integers in the packing "gemm"; AutoRound's in the same.

    qweight  int32 [columns, rows / 8]: a word has one column's codes of 8 rows, interleaved
    qzeros   int32 [groups, rows / 8], interleaved likewise: codes that stand for 0
    scales   [groups, rows]

Layout checked against what gptqmodel 7.7 reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from pipeload.formats.codes.coded_weight import (
    FLOATS,
    MIDDLE,
    CodedWeight,
    Codes,
    Lay,
    Words,
    ZeroCodes,
    group_columns,
    not_taken_over,
    part,
    stems,
)
from pipeload.formats.codes.words import codes_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeload.checkpoint.headers import TensorEntry

BITS: Final = (4,)
(_BITS,) = BITS
_EACH = 32 // _BITS
_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which code of a word is that of its first row, of its second, and so on."""


class Awq:
    """A `CodesFormat`."""

    method = "awq"
    title = "AWQ"

    def find(
        self, config: Mapping[str, Any], stored: Mapping[str, TensorEntry]
    ) -> list[CodedWeight]:
        """Find the weights of quantised Linears. Raises what `CodesFormat.find` does."""
        version = str(config.get("version") or config.get("format") or "gemm").lower()
        if version != "gemm":
            raise not_taken_over(self.method, f"its version {version!r} is unknown")
        bits = config.get("bits", config.get("w_bit"))
        if bits != _BITS:
            raise not_taken_over(self.method, f"its codes have {bits!r} bits, not 4")
        return [coded(stem, stored) for stem in stems(stored, "qweight")]


def coded(stem: str, stored: Mapping[str, TensorEntry]) -> CodedWeight:
    """One weight; `stem`: what names of its tensors begin with, dot and all.

    Raises:
        CheckpointError: tensors do not fit each other.
    """
    words = part(stored, f"{stem}qweight", (None, None), torch.int32)
    columns, rows = words.shape[0], words.shape[1] * _EACH
    scales = part(stored, f"{stem}scales", (None, rows), *FLOATS)
    groups = scales.shape[0]
    name = f"{stem}weight"
    group_columns(name, columns, groups)
    zeros = part(stored, f"{stem}qzeros", (groups, rows // _EACH), torch.int32)
    parts = {"qweight": words, "scales": scales, "qzeros": zeros}
    return CodedWeight(name, (rows, columns), _BITS, groups, parts, _decode)


def _decode(tensors: Mapping[str, torch.Tensor]) -> Codes:
    words = tensors["qweight"]
    zero = _in_order(tensors["qzeros"])
    grid = ZeroCodes(tensors["scales"].float(), zero.float(), MIDDLE[_BITS])

    def rows(start: int, stop: int) -> torch.Tensor:
        return _in_order(words[:, start // _EACH : -(-stop // _EACH)]).t()

    return Codes(rows, grid, stored=Words(Lay.ACROSS, words, _BITS, _PLACES))


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """Codes of [..., rows] of words of [..., rows / 8]."""
    codes = codes_of(words, _BITS)
    return codes.view(*codes.shape[:-1], -1, _EACH)[..., _PLACES].flatten(-2)
