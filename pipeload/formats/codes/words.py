"""Unpacks codes that lie in words of 32 bits, the lowest bits first."""

from __future__ import annotations

from typing import Final

import torch

_PLANES: Final = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}
"""Of how many bits of each code a plane is, the lowest first, by the bits of a code."""


def codes_of(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes that lie in words along the last dimension.

    uint8 of [..., n * 32 / bits] of int32 [..., n].
    """
    stored = words.contiguous().view(torch.uint8)  # little-endian, as all that torch runs on
    if bits == 8:
        return stored
    if bits != 4:  # eight of them lie in as many bytes as one has bits
        parts = stored.unflatten(-1, (-1, bits)).long()
        parts <<= torch.arange(0, 8 * bits, 8)
        each: torch.Tensor = parts.sum(-1, keepdim=True)
        del parts
        each = each >> torch.arange(0, 8 * bits, bits)
        each &= (1 << bits) - 1
        return each.to(torch.uint8).flatten(-2)
    codes = torch.empty((*stored.shape, 2), dtype=torch.uint8)
    torch.bitwise_and(stored, 0xF, out=codes[..., 0])
    torch.bitwise_right_shift(stored, 4, out=codes[..., 1])
    return codes.flatten(-2)


def codes_of_planes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of which no word has a part: first the low bits of 32, then what is above.

    uint8 of [..., n * 32 / bits] of int32 [..., n].
    """
    if bits not in _PLANES:
        return codes_of(words, bits)
    blocks, place = words.unflatten(-1, (-1, bits)), 0
    made = torch.zeros((*blocks.shape[:-1], 32), dtype=torch.uint8)
    for width in _PLANES[bits]:
        made |= codes_of(blocks[..., place : place + width], width) << place
        place += width
    return made.flatten(-2)
