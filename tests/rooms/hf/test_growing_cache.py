"""Layers of a cache that grow in place hold what the library's hold, whatever is done to them."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, DynamicLayer, EncoderDecoderCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

from pipeload.budget.kv_cache import CacheReader, LayerSize, with_room
from pipeload.budget.pass_trial import _bare_cache
from pipeload.hf import growing_cache
from pipeload.hf.cache_layers import cut_back, keys_and_values
from pipeload.hf.growing_cache import GrowingLayer, let_grow
from tests.support.models import tiny_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HEADS, WIDTH = 2, 16
TRIED = growing_cache.has_same_bits


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    """As `generate` computes."""
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", autouse=True)
def _grows() -> Iterator[None]:
    """Also where it would change bits: nothing here is multiplied, but where it says so."""
    with mock.patch.object(growing_cache, "has_same_bits", return_value=True):
        yield


def numbers(rows: int, batch: int = 1, *, seed: int = 0, dtype: Any = torch.bfloat16) -> Any:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(batch, HEADS, rows, WIDTH, generator=made).to(dtype)


def new_layer(kind: Any) -> Any:
    return kind()


def growing() -> Any:
    cache = DynamicCache(config=tiny_config("llama"))
    let_grow(cache)
    return cache


def add(cache: Any, rows: int, batch: int = 1, *, seed: int = 0) -> None:
    for number in range(len(cache.layers)):
        one = numbers(rows, batch, seed=2 * seed + number)
        cache.update(one, -one, number)


def add_to_both(one: Any, other: Any, rows: int, seed: int) -> None:
    batch = 1 if not one.get_seq_length() else one.layers[0].keys.shape[0]
    add(one, rows, batch, seed=seed)
    add(other, rows, batch, seed=seed)


def crop(cache: Any, by: int) -> None:
    if cache.get_seq_length():
        cache.crop(-(by % cache.get_seq_length()))


def choose(cache: Any, by: int) -> None:
    if cache.get_seq_length():
        batch = cache.layers[0].keys.shape[0]
        cache.batch_select_indices(torch.tensor([by % batch]))


def reorder(cache: Any, by: int) -> None:
    if cache.get_seq_length():
        batch = cache.layers[0].keys.shape[0]
        cache.reorder_cache((torch.arange(batch) + by) % batch)


OPERATIONS: dict[str, Callable[[Any, int], Any]] = {
    "crop": crop,
    "reorder": reorder,
    "choose": choose,
    "repeat": lambda cache, by: cache.batch_repeat_interleave(1 + by % 2),
    "reset": lambda cache, _by: cache.reset(),
}
STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "add", "copy", *OPERATIONS]), st.integers(1, 200)),
    max_size=12,
)


@given(steps=STEPS)
def test_whatever_is_done(steps: list[tuple[str, int]]) -> None:
    """What was shown before stays as it was, and copies are independent of each other."""
    plain: Any = DynamicCache(config=tiny_config("llama"))
    mine = growing()
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    left: list[tuple[Any, Any]] = []
    for seed, (what, by) in enumerate(steps):
        if what == "add":
            add_to_both(plain, mine, by, seed)
        elif what == "copy":
            left.append((plain, mine))
            plain, mine = copy.deepcopy(plain), copy.copy(mine)
            mine.layers = [copy.copy(layer) for layer in mine.layers]
            let_grow(mine)
        else:
            OPERATIONS[what](plain, by)
            OPERATIONS[what](mine, by)
        if mine.layers[0].is_initialized:
            shown = mine.layers[0].keys
            seen.append((shown, shown.clone()))
    for seed, (one, other) in enumerate([*left, (plain, mine)]):
        add_to_both(one, other, 1, seed)
        for theirs, ours in zip(one.layers, other.layers, strict=True):
            assert torch.equal(theirs.keys, ours.keys)
            assert torch.equal(theirs.values, ours.values)
    assert all(torch.equal(shown, then) for shown, then in seen)


def test_most_tokens_are_no_copy() -> None:
    """Of a thousand tokens behind a prompt, one in sixteen to thirty moves the cache."""
    cache, moves, last = growing(), 0, 0
    add(cache, 1000)
    for _ in range(1000):
        add(cache, 1)
        moves += cache.layers[0].keys.data_ptr() != last
        last = cache.layers[0].keys.data_ptr()
    assert cache.get_seq_length() == 2000
    assert moves <= 1000 / 15


@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("prompt", [1, 40, 63, 64, 100, 500])
def test_memory_is_as_planned(prompt: int, tokens: int) -> None:
    """Of a fresh cache, and token by token, as passes look at it."""
    row = HEADS * WIDTH * 2
    reader = CacheReader([LayerSize("dynamic", 0, row, row)] * len(growing().layers), 2)
    cache = growing()
    (expected,) = reader.read(cache, 1)
    for rows in [prompt] + [tokens] * 40:
        (found,) = reader.read(cache, 1)
        assert found == expected
        expected = found.after(rows)
        growth = found.growth(rows)
        before = sum(layer_bytes(layer) for layer in cache.layers)
        add(cache, rows)
        assert sum(layer_bytes(layer) for layer in cache.layers) - before == growth
    assert layer_bytes(cache.layers[0]) == with_room(cache.get_seq_length()) * 2 * row or (
        cache.layers[0].room >= cache.get_seq_length()
    )


def layer_bytes(layer: Any) -> int:
    if not layer.is_initialized:
        return 0
    return sum(t.untyped_storage().nbytes() for t in (layer.keys, layer.values))


def test_what_is_kept_of_it_is_the_librarys() -> None:
    """A file of a cache is read where there is no pipeload, and has nothing that was not filled."""
    cache = growing()
    add(cache, 100)
    add(cache, 1)
    loaded = pickle.loads(pickle.dumps(cache))
    for made in (loaded, copy.deepcopy(cache), copy.copy(cache)):
        made.layers = [copy.copy(layer) for layer in made.layers]
        made_layers: Any = made.layers
        for layer, before in zip(made_layers, cache.layers, strict=True):
            assert type(layer).__name__ == "DynamicLayer"
            assert torch.equal(layer.keys, before.keys)
    file = io.BytesIO()
    torch.save(cache, file)
    assert b"pipeload" not in file.getvalue()


@pytest.mark.parametrize("heads", [1, 2])
def test_a_file_has_what_is_filled(heads: int) -> None:
    """Also of one head, whose keys lie in one piece."""
    layer = new_layer(GrowingLayer)
    one = torch.ones(1, heads, 200, WIDTH)
    layer.update(one, one)
    assert layer.keys.untyped_storage().nbytes() > layer.keys.numel() * 4
    assert len(pickle.dumps(layer)) < 2 * layer.keys.numel() * 4 + 4096 * (1 + heads) // 2


def test_old_positions_go_before_there_are_two_of_both() -> None:
    """While the values are copied, keys are there once."""
    layer = new_layer(GrowingLayer)
    layer.update(numbers(640), numbers(640))
    old = weakref.ref(layer.keys._base)
    there: list[bool] = []

    class Watched(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            there.append(old() is not None)
            return func(*args, **(kwargs or {}))

    with Watched():
        layer.update(numbers(20), numbers(20))
    assert there[0]
    assert not there[-1]


def test_a_trial_of_it_takes_nothing() -> None:
    """What is copied for a trial without values has none."""
    cache = growing()
    add(cache, 200)
    copied = _bare_cache(cache)
    assert all(layer.keys.is_meta and layer.values.is_meta for layer in copied.layers)
    assert [layer.keys.shape for layer in copied.layers] == [numbers(200).shape] * len(cache.layers)


def test_what_backward_needs_is_not_written_to() -> None:
    """Where gradients are recorded, positions are joined in a new tensor."""
    layer = new_layer(GrowingLayer)
    layer.update(numbers(640), numbers(640))
    kept = layer.keys
    with torch.enable_grad():
        layer.update(numbers(1), numbers(1))
    assert layer.keys.data_ptr() != kept.data_ptr()
    assert kept._version == layer.keys._version == 0 or layer.keys._base is None


def test_others_are_left_alone() -> None:
    """Layers of other kinds, tuples of tensors, and what is no cache."""
    static = StaticCache(config=tiny_config("llama"), max_cache_len=8)
    own = DynamicCache(config=tiny_config("llama"))
    pair = EncoderDecoderCache(own, DynamicCache(config=tiny_config("llama")))
    for cache in (None, ((1, 2),), SimpleNamespace(layers="none"), static, pair):
        let_grow(cache)
    assert not any(isinstance(layer, GrowingLayer) for layer in static.layers)
    assert all(type(layer) is GrowingLayer for layer in own.layers)
    assert not any(isinstance(layer, GrowingLayer) for layer in pair.cross_attention_cache.layers)
    assert cut_back(own, 0)
    assert keys_and_values(own) is None  # nothing is there yet


def test_other_tensors_are_joined_as_the_library_does() -> None:
    """Of another dtype, of three dimensions."""
    for old, new in (
        (numbers(100), numbers(1, dtype=torch.float32)),
        (numbers(100)[0], numbers(1)[0]),
    ):
        plain, mine = new_layer(DynamicLayer), new_layer(GrowingLayer)
        for layer in (plain, mine):
            layer.update(old, old)
            layer.update(new, new)
        assert torch.equal(plain.keys, mine.keys)
        assert plain.keys.dtype == mine.keys.dtype
        assert plain.keys.requires_grad == mine.keys.requires_grad
        assert not mine.room


def test_a_cache_of_inference_mode() -> None:
    """Its tensors cannot be written outside of it."""
    mine = new_layer(GrowingLayer)
    with torch.inference_mode():
        mine.update(numbers(200), numbers(200))
    mine.update(numbers(1, seed=1), numbers(1, seed=2))
    with torch.inference_mode():
        mine.update(numbers(1, seed=3), numbers(1, seed=4))
    rows = [numbers(200), numbers(1, seed=1), numbers(1, seed=3)]
    assert torch.equal(mine.keys, torch.cat(rows, dim=-2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("forward", [sdpa_attention_forward, eager_attention_forward])
@pytest.mark.parametrize("sizes", [(8, 1, 64), (3, 3, 64), (2, 4, 8)])
def test_attention_has_the_same_bits(
    forward: Callable[..., Any],
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After each number of positions of a range, for one query and for some: where it is tried."""
    monkeypatch.setattr(growing_cache, "has_same_bits", TRIED)
    heads, groups, width = sizes
    module = SimpleNamespace(num_key_value_groups=groups, is_causal=True, training=False)
    made = torch.Generator().manual_seed(0)
    rows = 280
    keys, values = (torch.randn(1, heads, rows, width, generator=made).to(dtype) for _ in range(2))
    queries = torch.randn(1, 3, heads * groups, width, generator=made).to(dtype).transpose(1, 2)
    layer = new_layer(GrowingLayer)
    layer.update(keys[:, :, :64], values[:, :, :64])
    for length in range(65, rows):
        layer.update(keys[:, :, length - 1 : length], values[:, :, length - 1 : length])
        joined = [t[:, :, :length].contiguous() for t in (keys, values)]
        for asked in (queries[:, :, :1], queries):
            given = (None,) if asked.shape[2] == 1 else (_causal(3, length, dtype),)
            for mask in given:
                call = [
                    forward(module, asked, *pair, mask, scaling=width**-0.5, dropout=0.0)[0]
                    for pair in (joined, (layer.keys, layer.values))
                ]
                assert torch.equal(*call), (length, asked.shape)


def test_a_library_that_looks_at_how_keys_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """With other bits for heads that lie apart, positions are joined as the library does."""
    sound = torch.matmul

    def matmul(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return sound(one, other) + (other.stride(1) != other.shape[-1] * other.shape[-2])

    assert isinstance(TRIED(torch.float32, (24, 40), 1), bool)
    monkeypatch.setattr(torch, "matmul", matmul)
    assert not TRIED(torch.float32, (24, 56), 1)
    monkeypatch.setattr(growing_cache, "has_same_bits", lambda *_: False)
    layer = new_layer(GrowingLayer)
    layer.update(numbers(200), numbers(200))
    assert layer.keys.is_contiguous()
    assert not layer.room


def _causal(tokens: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.zeros(1, 1, tokens, length, dtype=dtype)
    for row in range(tokens):
        mask[..., row, length - tokens + row + 1 :] = torch.finfo(dtype).min
    return mask
