"""Private parts of transformers: what the layers of its key-value caches hold.

Seen in 5.24.0, tried on 5.17.0 as well. Layers are known by their attributes, so that subclasses of
users' count, too. `budget` counts with what is read here, once this was imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, DynamicLayer

from pipeload.budget.kv_cache import (
    DYNAMIC,
    NO_ROWS,
    PACKED,
    SLIDING,
    STATIC,
    STATIC_SLIDING,
    LiveLayer,
    private_parts,
)
from pipeload.hf import marks
from pipeload.hf.growing_cache import GrowingLayer

if TYPE_CHECKING:
    from collections.abc import Iterable

_BY_LENGTH = {"longrope", "dynamic"}
"""Ways of rotating whose factors depend on how long the text is."""


def read_layer(layer: Any, item: int) -> LiveLayer:
    """Read what a layer of a live cache holds. Cheap: it is done at each step.

    `item` is the bytes of an element of the model.
    """
    kind, capacity = kind_of(layer)
    live = LiveLayer(kind, capacity, has_state=_has_state(layer))
    if kind == PACKED:
        live = live._replace(packed=_packed_share(layer, item))
    if kind == NO_ROWS or not getattr(layer, "is_initialized", False):
        return live
    if kind == PACKED:
        loose = layer.keys.shape[-2] if layer.keys.dim() == 4 else 0
        return live._replace(rows=layer.cumulative_length, residual=loose)
    keys, values = layer.keys, layer.values
    live = live._replace(
        storage=keys.untyped_storage().nbytes() + values.untyped_storage().nbytes()
    )
    rows = keys.shape[-2] if keys.dim() > 1 else 0
    if not rows:
        return live
    key, value = (t.shape[0] * t.shape[1] * t.shape[-1] * t.element_size() for t in (keys, values))
    if kind in (STATIC, STATIC_SLIDING):
        seen = getattr(layer, "cumulative_length_int", None)
        rows = min(capacity, int(layer.cumulative_length if seen is None else seen))
    return live._replace(rows=rows, key=key, value=value, room=getattr(layer, "room", 0))


def kind_of(layer: Any) -> tuple[str, int]:
    """Tell the kind and the capacity of one layer."""
    sliding = bool(getattr(layer, "is_sliding", False))
    if hasattr(layer, "_quantized_keys"):
        return PACKED, int(getattr(layer, "residual_length", 0))
    if (capacity := getattr(layer, "max_cache_len", None)) is not None:
        return (STATIC_SLIDING if sliding else STATIC), int(capacity)
    if not hasattr(layer, "keys") or not hasattr(layer, "lazy_initialization"):
        return NO_ROWS, 0
    return (SLIDING, int(layer.sliding_window)) if sliding else (DYNAMIC, 0)


def _has_state(layer: Any) -> bool:
    """Whether the states of linear attention are there already, or there are none to come."""
    ready = getattr(layer, "is_conv_states_initialized", None)
    return ready is None or any(ready.values())


def _packed_share(layer: Any, item: int) -> float:
    """Stored bytes per byte of a key: its code, and a scale and a zero for each group of them."""
    bits = getattr(layer, "nbits", None)
    if bits is None:  # eight-bit floats, one scale for all
        return 1 / item
    return float(bits / 8 / item + 2 / layer.q_group_size)


def room_of(layer: Any) -> tuple[int | None, bool | None]:
    """Tell how many positions a layer has memory for, and whether that is there."""
    return getattr(layer, "max_cache_len", None), getattr(layer, "is_initialized", None)


private_parts.kind_of, private_parts.read, private_parts.room_of = kind_of, read_layer, room_of
private_parts.attention_of, private_parts.settings_of = marks.attention_of, marks.settings_of
private_parts.forget_hooks = marks.forget_hooks


def _is_plain(layer: Any) -> bool:
    """Whether a layer holds the keys and values of all positions, and nothing else."""
    return type(layer) in (DynamicLayer, GrowingLayer)


def cut_back(cache: Any, tokens: int) -> bool:
    """Take the last `tokens` out of a cache; False where that would not leave it as it was before.

    A window that has moved on, or a state that has seen a token, does not go back.
    """
    if not tokens:
        return True
    layers = getattr(cache, "layers", None)
    if not layers or not all(map(_is_plain, layers)):
        return False
    cache.crop(-tokens)
    return True


def cache_bytes(cache: Any) -> int:
    """What the tensors of a cache hold, that were cut out of larger ones with all of these."""
    found: dict[int, int] = {}
    todo: list[Any] = [vars(layer) for layer in cache.layers]
    while todo:
        one = todo.pop()
        if isinstance(one, torch.Tensor):  # parts of one storage are counted once
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, (dict, list, tuple)):  # states are kept by their number
            todo += one.values() if isinstance(one, dict) else one
    return sum(found.values())


def rotates_by_length(config: Any) -> bool:
    """Whether keys are others in a longer text, as those are rotated by other factors."""
    text = config.get_text_config()
    todo = [getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):  # each kind of layer may have its own
            if {one.get("rope_type"), one.get("type")} & _BY_LENGTH:
                return True
            todo += one.values()
    return False


def keeps_pairs(config: Any) -> bool:
    """Whether the library's own cache for such a model is of keys and values alone, of all tokens.

    A model that is made with a cache of another class is known when that is there.
    """
    layers = DynamicCache(config=config).layers
    return all(map(_is_plain, layers))


def keys_and_values(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Those of each layer; None of a cache that is more than these, or has moved on from some."""
    layers = getattr(cache, "layers", None)
    if not layers or not all(map(_is_plain, layers)):
        return None
    if not all(layer.is_initialized for layer in layers):
        return None
    return [(layer.keys, layer.values) for layer in layers]


def made_cache(layers: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """A cache with these keys and values, each `[1, heads, tokens, width]`; takes one by one."""
    cache = DynamicCache()
    for number, (keys, values) in enumerate(layers):
        cache.update(keys, values, number)
    return cache
