"""What goes into a pass: whether it is the same on all ranks, and what a cache makes of it."""

from __future__ import annotations

import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from pipeload.budget.kv_cache import self_and_cross
from pipeload.errors import UnsupportedOperationError
from pipeload.ring.trees import as_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_RECORDED = ("output_attentions", "output_router_logits")
_OUTSIDE = {"output_hidden_states"}


def first_tensor(given: Mapping[str, Any]) -> torch.Tensor | None:
    """What the block goes on from, of its arguments by name."""
    return next((value for value in given.values() if isinstance(value, torch.Tensor)), None)


def checksum(values: Iterable[Any], start: int = 0, *, whole: bool) -> int:
    """Of the tensors among them, further to `start`.

    Of their bytes; of their sizes alone where the processors differ (not `whole`) and they are no
    whole numbers: those of tokens, masks and positions are the same everywhere.
    """
    found = start
    for tensor in values:
        if not isinstance(tensor, torch.Tensor):
            continue
        found = zlib.crc32(repr((tuple(tensor.shape), tensor.dtype)).encode(), found)
        if whole or not (tensor.is_floating_point() or tensor.is_complex()):
            found = zlib.crc32(as_bytes(tensor).numpy().data, found)
    return found


def check_recorded(model: Any, given: Mapping[str, Any]) -> None:
    """Refuse a call that asks for what is made inside of blocks: that of others is nowhere here.

    `given`: its arguments by name.

    Raises:
        UnsupportedOperationError: it does, or the configuration does for all calls.
    """
    config = getattr(model, "config", None)
    inner = () if config is None else vars(config).values()
    configs = [config, *(value for value in inner if hasattr(value, "to_diff_dict"))]
    names = {*_RECORDED, *(name for name in given if name.startswith("output_"))} - _OUTSIDE
    for name in sorted(names):  # the first one is named: the same on all ranks
        asked = given.get(name)
        if asked or (asked is None and any(getattr(c, name, None) for c in configs)):
            raise UnsupportedOperationError(
                f"{name} is recorded inside of blocks, and other ranks run some of them. Pass "
                f"{name}=False, or load the model without ranks."
            )


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
        batch, tokens, _ = hidden.shape[-3:]  # in front of these, several streams of them
        one = hidden.new_zeros((batch, 1, tokens, 1))
        with suppress(NotImplementedError):  # one that keeps nothing says so
            own.update(one, one, layer)
