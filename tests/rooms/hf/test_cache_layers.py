"""What layers of the library's own caches hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from pipeload.budget.kv_cache import (
    DYNAMIC,
    NO_ROWS,
    PACKED,
    SLIDING,
    STATIC,
    STATIC_SLIDING,
    LiveLayer,
)
from pipeload.hf.cache_layers import cache_bytes, kind_of, read_layer, room_of
from tests.support.models import tiny_config

WINDOW = 16
ROW = 3 * 16 * 2
"""Bytes of the keys of one position: 3 heads of 16 numbers in bf16."""


def keys(rows: int, batch: int = 1) -> torch.Tensor:
    return torch.zeros(batch, 3, rows, 16, dtype=torch.bfloat16)


def filled(layer: Any, rows: int, batch: int = 1) -> LiveLayer:
    layer.update(keys(rows, batch), keys(rows, batch))
    return read_layer(layer, 2)


def layers_of(cache: type[Any], family: str, **options: Any) -> list[Any]:
    layers: list[Any] = cache(config=tiny_config(family), **options).layers
    return layers


def test_dynamic() -> None:
    """All rows so far, for all sequences at once."""
    layer = layers_of(DynamicCache, "llama")[0]
    assert read_layer(layer, 2) == LiveLayer(DYNAMIC, 0, has_state=True)
    filled(layer, 5, batch=2)
    found = filled(layer, 1, batch=2)
    assert found == LiveLayer(
        DYNAMIC, 0, True, rows=6, key=2 * ROW, value=2 * ROW, storage=2 * 6 * 2 * ROW
    )


def test_sliding() -> None:
    """As many rows as the next pass finds; what is held may be more, as it is a view."""
    layer = layers_of(DynamicCache, "mistral")[0]
    assert kind_of(layer) == (SLIDING, WINDOW)
    found = filled(layer, 40)
    assert (found.rows, found.capacity) == (WINDOW - 1, WINDOW)
    assert found.storage >= 2 * (WINDOW - 1) * ROW
    assert kind_of(DynamicSlidingWindowLayer(sliding_window=9)) == (SLIDING, 9)


def test_static() -> None:
    """All memory from the first pass on, however many rows are seen."""
    layer = layers_of(StaticCache, "llama", max_cache_len=64)[0]
    assert read_layer(layer, 2) == LiveLayer(STATIC, 64, has_state=True)
    found = filled(layer, 7)
    assert (found.rows, found.key, found.storage) == (7, ROW, 2 * 64 * ROW)


def test_static_sliding() -> None:
    """No more rows than it has memory for."""
    layer = layers_of(StaticCache, "mistral", max_cache_len=64)[0]
    assert kind_of(layer) == (STATIC_SLIDING, WINDOW)
    assert filled(layer, 7).rows == 7
    assert filled(layer, 40).rows == WINDOW


@pytest.mark.parametrize(("bits", "share"), [(4, 4 / 8 / 2 + 2 / 64), (None, 0.5)])
def test_packed(bits: int | None, share: float) -> None:
    """Codes, with a scale and a zero for each group; or floats of eight bits."""
    more = {} if bits is None else {"nbits": bits, "q_group_size": 64}
    layer = SimpleNamespace(
        _quantized_keys=None,
        residual_length=128,
        is_initialized=True,
        keys=keys(5),
        values=keys(5),
        cumulative_length=133,
        **more,
    )
    found = read_layer(layer, 2)
    assert found == LiveLayer(PACKED, 128, True, rows=133, packed=share, residual=5)
    layer.keys = torch.empty(0)  # all of it is packed
    assert read_layer(layer, 2).residual == 0


def test_states() -> None:
    """Linear attention has no rows: its state is there, or comes with the next pass."""
    layer = LinearAttentionLayer()
    assert read_layer(layer, 2) == LiveLayer(NO_ROWS, 0, has_state=False)
    ready = layer.is_conv_states_initialized
    for index in [*ready] or [0]:
        ready[index] = True
    assert read_layer(layer, 2).has_state
    several = SimpleNamespace(is_conv_states_initialized={0: True, 1: False})
    assert read_layer(several, 2).has_state, "all of them come with the first"


def test_room() -> None:
    """How many positions a layer has memory for, and whether that is there."""
    layer = layers_of(StaticCache, "llama", max_cache_len=64)[0]
    assert room_of(layer) == (64, False)
    filled(layer, 7)
    assert room_of(layer) == (64, True)
    assert room_of(layers_of(DynamicCache, "llama")[0])[0] is None


def test_all_bytes() -> None:
    """Also of states, which lie in dicts; a storage that is shared counts once."""
    cache = DynamicCache(config=tiny_config("llama"))
    cache.update(keys(5), keys(5), 0)
    state = LinearAttentionLayer()
    state.update_conv_state(torch.ones(1, 8, 4))
    state.update_recurrent_state(torch.ones(1, 2, 8, 8))
    cache.layers.append(state)
    held = state.conv_states, state.recurrent_states
    sums = [sum(t.nbytes for t in each.values() if t is not None) for each in held]
    assert min(sums) > 0
    assert cache_bytes(cache) == 2 * 5 * ROW + sum(sums)
    shared = torch.ones(10)
    layers = [SimpleNamespace(keys=shared, more=[(shared[:3],)]), SimpleNamespace(keys=None)]
    assert cache_bytes(SimpleNamespace(layers=layers)) == 40
