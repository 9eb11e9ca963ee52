"""Unpacks codes that lie in words of 32 bits, the lowest bits first."""

from __future__ import annotations

import torch


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


def codes_down(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes that lie in words along the first dimension: [n * 32 / bits, rows] of [n, rows]."""
    stored = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    each = 8 // bits
    codes = torch.empty((words.shape[0], 4 * each, words.shape[1]), dtype=torch.uint8)
    for byte in range(4):
        here = stored[..., byte]
        if each == 1:
            codes[:, byte] = here
        else:
            torch.bitwise_and(here, 0xF, out=codes[:, 2 * byte])
            torch.bitwise_right_shift(here, 4, out=codes[:, 2 * byte + 1])
    return codes.flatten(0, 1)
