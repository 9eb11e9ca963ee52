"""AWQ's integers in the packing "gemm"; AutoRound's in the same.

    qweight  int32 [columns, rows / 8]: a word has one column's codes of 8 rows, interleaved
    qzeros   int32 [groups, rows / 8], interleaved likewise: codes that stand for 0
    scales   [groups, rows]

Layout checked against what gptqmodel 7.7 reads. AMD's Quark writes the same, says how words are
packed, and stores values from -8 to 7 where it is symmetric: as amd-quark 0.13 packs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

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
PLACES: Final = {"reorder": (0, 4, 1, 5, 2, 6, 3, 7), "order": tuple(range(_EACH))}
"""Which code of a word is that of its first row, of its second, and so on, by Quark's words."""


class Packing(NamedTuple):
    """How a checkpoint is packed."""

    places: tuple[int, ...] = PLACES["reorder"]
    signed: bool = False
    """Whether codes and zeros are values from -8 to 7."""
    names: tuple[str, str, str] = ("qweight", "scales", "qzeros")
    """Of the words, of the scales and of the zeros."""


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
        how = self._packing(config)
        return [coded(stem, stored, how) for stem in stems(stored, "qweight")]

    def _packing(self, config: Mapping[str, Any]) -> Packing:
        """How it is packed: `pack_method` is Quark's. Raises UnsupportedModelError: unknown."""
        order = config.get("pack_method")
        if order is None:
            return Packing()
        if order not in PLACES:
            raise not_taken_over(self.method, f"its pack_method {order!r} is unknown")
        return Packing(PLACES[order], signed=not config.get("zero_point", True))


def coded(stem: str, stored: Mapping[str, TensorEntry], how: Packing | None = None) -> CodedWeight:
    """One weight.

    Args:
        stem: what names of its tensors begin with, dot and all.
        stored: tensors of the checkpoint by name.
        how: it is packed, if not as AWQ's own programs do.

    Raises:
        CheckpointError: tensors do not fit each other.
    """
    how = how or Packing()
    of_words, of_scales, of_zeros = (f"{stem}{name}" for name in how.names)
    words = part(stored, of_words, (None, None), torch.int32)
    columns, rows = words.shape[0], words.shape[1] * _EACH
    scales = part(stored, of_scales, (None, rows), *FLOATS)
    groups = scales.shape[0]
    name = f"{stem}weight"
    group_columns(name, columns, groups)
    zeros = part(stored, of_zeros, (groups, rows // _EACH), torch.int32)
    parts = {"words": words, "scales": scales, "zeros": zeros}
    return CodedWeight(name, (rows, columns), _BITS, groups, parts, partial(_decode, how))


def _decode(how: Packing, tensors: Mapping[str, torch.Tensor]) -> Codes:
    words = tensors["words"]
    zero = in_order(tensors["zeros"], how)
    grid = ZeroCodes(tensors["scales"].float(), zero.float(), MIDDLE[_BITS])

    def rows(start: int, stop: int) -> torch.Tensor:
        return in_order(words[:, start // _EACH : -(-stop // _EACH)], how).t()

    return Codes(rows, grid, stored=Words(Lay.ACROSS, words, _BITS, how.places, how.signed))


def in_order(words: torch.Tensor, how: Packing) -> torch.Tensor:
    """Codes of [..., n] of words of [..., n / 8]."""
    codes = codes_of(words, _BITS)
    codes = codes.view(*codes.shape[:-1], -1, _EACH)[..., how.places].flatten(-2)
    return codes ^ MIDDLE[_BITS] if how.signed else codes
