"""What goes into a pass: whether it is the same on all ranks, and what a cache makes of it."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch

from pipeload.budget.kv_cache import is_cache, self_and_cross
from pipeload.budget.pass_shape import cache_of
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


def cache_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The cache that a block is given, under whatever name; None without one."""
    cache = cache_of(args, kwargs)
    return next(filter(is_cache, kwargs.values()), None) if cache is None else cache


def positions_in(cache: Any) -> list[int]:
    """How many positions each layer of a cache has seen; 0 where it does not count them."""
    return [
        int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else 0
        for layer in _layers_of(cache)
    ]


def growth(cache: Any, before: Sequence[int], given: Mapping[str, Any]) -> list[list[int]]:
    """Which layers have seen more positions than `before`: their number, sequences and how many.

    A block need not write to the layer of its own number, nor all that it was given, nor at all.
    """
    hidden = first_tensor(given)
    layers, found = _layers_of(cache), []
    for number, seen in enumerate(positions_in(cache)):
        more = seen - (before[number] if number < len(before) else 0)
        if more > 0:
            found.append([number, _sequences(layers[number], hidden), more])
    return found


def _sequences(layer: Any, hidden: torch.Tensor | None) -> int:
    """How many a layer of a cache has, by its keys: of [sequences, heads, positions, width].

    They are empty where they are kept as integers, of which some tell the size of all.
    """
    packed = getattr(layer, "_quantized_keys", None)
    kept = [getattr(layer, "keys", None), *(packed if isinstance(packed, tuple) else [packed])]
    for one in kept:
        told = one.get("shape") if isinstance(one, dict) else getattr(one, "shape", None)
        if told is not None and len(told) > 2:
            return int(told[0])
    if hidden is None:
        return 1
    return int(hidden.shape[-3 if hidden.dim() > 2 else 0])  # several streams come before it


def pass_through(cache: Any, grown: Iterable[Sequence[int]], given: Mapping[str, Any]) -> None:
    """Let a cache know of positions in layers which it holds nothing of: what `growth` told.

    One number stands for the keys and values of a position. By the cache's own methods, so windows,
    masks and positions are what they would be.
    """
    own, _ = self_and_cross(cache)
    hidden = first_tensor(given)
    for layer, batch, positions in grown:
        one = torch.zeros((batch, 1, positions, 1), dtype=getattr(hidden, "dtype", None))
        own.update(one, one, layer)


def _layers_of(cache: Any) -> Sequence[Any]:
    own, _ = self_and_cross(cache)
    found: Sequence[Any] = getattr(own, "layers", ())
    return found
