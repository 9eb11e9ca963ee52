"""What a rank tells of a cache, and what others make of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, StaticCache

from pipeload.ring.block_inputs import cache_among, growth, pass_through, positions_in

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIG = LlamaConfig(
    num_hidden_layers=3, num_attention_heads=2, hidden_size=8, max_position_embeddings=32
)
WINDOWS = LlamaConfig(**CONFIG.to_diff_dict() | {"num_hidden_layers": 3, "sliding_window": 4})
CACHES: dict[str, Callable[[], Any]] = {
    "grows": DynamicCache,
    "of windows": lambda: DynamicCache(config=WINDOWS),
    "of fixed size": lambda: StaticCache(config=CONFIG, max_cache_len=32),
    "for an encoder": lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()),
}


@pytest.mark.parametrize("kind", CACHES)
def test_another_cache_grows_as_much(kind: str) -> None:
    """In whichever layer the block has written to, whatever it was called with."""
    here, there = CACHES[kind](), CACHES[kind]()
    given = {"hidden_states": torch.zeros(7, 2, 8)}  # positions come first
    for positions in (7, 1):
        before = positions_in(here)
        states = torch.randn(2, 2, positions, 4)
        getattr(here, "self_attention_cache", here).update(states, states, 1)
        told = growth(here, before, given)
        assert told == [[1, 2, positions]]
        pass_through(there, told, given)
        assert positions_in(there)[1] == positions_in(here)[1]
        assert growth(here, positions_in(here), given) == []
    layer = getattr(there, "self_attention_cache", there).layers[1]
    assert (layer.keys.shape[0], layer.keys.shape[1], layer.keys.shape[3]) == (2, 1, 1)


def test_a_cache_of_integers() -> None:
    """It has no keys that would tell how many sequences there are."""
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4), 0)
    layer: Any = cache.layers[0]
    layer.keys, layer.get_seq_length = torch.tensor([]), lambda: 3
    assert growth(cache, [], {"hidden_states": torch.zeros(2, 3, 8)}) == [[0, 2, 3]]
    streams = {"hidden_states": torch.zeros(4, 2, 3, 8)}
    assert growth(cache, [], streams) == [[0, 2, 3]]
    first = {"hidden_states": torch.zeros(3, 2, 8)}  # positions come first
    packed = torch.zeros(2, 1, 3, 4)
    for kept in (packed, (packed, torch.tensor(1.0)), (torch.zeros(6, 2), {"shape": packed.shape})):
        layer._quantized_keys = kept
        assert growth(cache, [], first) == [[0, 2, 3]]


def test_a_cache_whose_tensors_have_other_names() -> None:
    """How many sequences there are is told by what the block was called with, if at all."""
    cache: Any = SimpleNamespace(layers=[SimpleNamespace(get_seq_length=lambda: 3)])
    assert growth(cache, [], {"hidden_states": torch.zeros(2, 3, 8)}) == [[0, 2, 3]]
    assert growth(cache, [], {"ids": torch.zeros(6)}) == [[0, 6, 3]]
    assert growth(cache, [], {}) == [[0, 1, 3]]


def test_a_cache_under_another_name() -> None:
    """Blocks call it what they like; without one, nothing grows."""
    cache = DynamicCache()
    assert cache_among((), {"layer_state": cache}) is cache
    assert cache_among((), {"cache": cache, "other": DynamicCache()}) is cache
    assert cache_among((torch.zeros(1),), {"mask": None}) is None
    assert growth(None, positions_in(None), {}) == []
