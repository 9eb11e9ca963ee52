"""Integers of GGUF's blocks of 4 bits, as our int4 has them: code for code, scales rounded once.

What else there is has more bits than 4, fewer, or values that are not evenly spread: no kernel of
ours takes those as they are. Layouts as `ggml-common.h` of llama.cpp has them, checked against what
the package gguf makes of the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from pipeload.checkpoint.gguf import BLOCKS
from pipeload.formats.integers.rounding import Int4

if TYPE_CHECKING:
    from collections.abc import Callable

GROUP: Final = 32
"""Neighbours in a row that share a scale, in all of these types."""


class _Lines(NamedTuple):
    """A group of values is code * scale + start."""

    codes: torch.Tensor
    """uint8 of [blocks, groups, 32]."""
    scale: torch.Tensor
    """fp32 of [blocks, groups]."""
    start: torch.Tensor


def int4_of(stored: torch.Tensor, kind: str, dtype: torch.dtype) -> Int4:
    """Make int4 in groups of 32 of stored rows.

    Args:
        stored: uint8 of [rows, bytes of a row].
        kind: their type, a key of `AS_INT4`.
        dtype: of scales and zeros.
    """
    rows = len(stored)
    codes, scale, start = AS_INT4[kind](stored.view(-1, BLOCKS[kind].nbytes))
    both = torch.stack((scale, start + 8 * scale), -1).view(rows, -1, 2).transpose(0, 1)
    return Int4(codes.view(rows, -1), both.to(dtype).contiguous())


def _q4_0(blocks: torch.Tensor) -> _Lines:
    scale = _halves(blocks[:, :2])
    return _Lines(_nibbles(blocks[:, None, 2:]), scale, -8 * scale)


def _q4_1(blocks: torch.Tensor) -> _Lines:
    return _Lines(_nibbles(blocks[:, None, 4:]), _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _q4_k(blocks: torch.Tensor) -> _Lines:
    """Eight groups: of scales and least values of 6 bits four have their top two apart."""
    scale, least = _halves(blocks[:, :2]), _halves(blocks[:, 2:4])
    packed = blocks[:, 4:16].view(-1, 3, 4)
    first, second, mixed = packed.unbind(1)
    scales = torch.cat((first & 63, (mixed & 15) | (first >> 6 << 4)), 1)
    leasts = torch.cat((second & 63, (mixed >> 4) | (second >> 6 << 4)), 1)
    codes = _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32)
    return _Lines(codes, scale * scales, -(least * leasts))


def _halves(stored: torch.Tensor) -> torch.Tensor:
    """fp32 of [blocks, 1] of two bytes in each."""
    return stored.contiguous().view(torch.float16).float()


def _nibbles(stored: torch.Tensor) -> torch.Tensor:
    """Lower halves of some bytes, then their upper ones: [..., 2 n] of [..., n]."""
    return torch.cat((stored & 15, stored >> 4), -1)


AS_INT4: Final[dict[str, Callable[[torch.Tensor], _Lines]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
}
"""Types whose codes are taken over."""
