"""What goes into a block: whether it is the same on all ranks, and what a cache makes of it."""

from __future__ import annotations

import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from pipeload.budget.kv_cache import self_and_cross
from pipeload.ring.trees import write_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def first_tensor(given: Mapping[str, Any]) -> torch.Tensor | None:
    """What the block goes on from, of its arguments by name."""
    return next((value for value in given.values() if isinstance(value, torch.Tensor)), None)


def checksum(tensor: torch.Tensor | None, *, whole: bool) -> int:
    """Of its bytes; of its sizes alone where the processors differ."""
    if tensor is None:
        return 0
    sizes = zlib.crc32(repr((tuple(tensor.shape), tensor.dtype)).encode())
    if not whole:
        return sizes
    data = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
    write_bytes([tensor], data)
    return zlib.crc32(data.numpy().data, sizes)


def pass_through(cache: Any, given: Mapping[str, Any], layers: Sequence[int]) -> None:
    """Let a cache know that positions went through layers which it holds nothing of.

    One number stands for the keys and values of a position. By the cache's own methods, so windows,
    masks and positions are what they would be; layers of linear attention count no positions.
    """
    if cache is None or isinstance(cache, (tuple, list)):
        return
    own, _ = self_and_cross(cache)
    hidden = first_tensor(given)
    held: Any = getattr(own, "layers", None)
    if held is None or hidden is None or hidden.dim() < 3:
        return
    for layer in layers:
        if layer < len(held) and not hasattr(held[layer], "keys"):
            continue
        one = hidden.new_zeros((hidden.shape[0], 1, hidden.shape[1], 1))
        with suppress(NotImplementedError):  # one that keeps nothing says so
            own.update(one, one, layer)
