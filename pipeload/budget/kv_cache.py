"""What a live key-value cache holds, and what it will hold after one more pass.

Reads the layers of the library's caches by their attributes, without importing it; names as in
transformers 5.24. Everything is in bytes; a row is one position of all sequences.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

DYNAMIC = "dynamic"
"""Grows by a copy: the old and the new tensor live at once."""
SLIDING = "sliding"
"""Dynamic, but only the last `capacity - 1` positions are kept for the next pass."""
STATIC = "static"
"""Allocated once for `capacity` positions."""
STATIC_SLIDING = "static sliding"
PACKED = "packed"
"""Quantised, with up to `capacity` newest positions as they came."""
NO_ROWS = "no rows"
"""A linear-attention state, or nothing at all."""


class LayerSize(NamedTuple):
    """What one layer of the model puts in a cache, per sequence."""

    kind: str
    """Of the cache that the library makes by itself: DYNAMIC, SLIDING or NO_ROWS."""
    window: int
    """Positions that a sliding layer looks back, itself included; 0 without one."""
    key: int
    """Bytes of the keys of one position."""
    value: int
    """Bytes of the values of one position."""
    state: int = 0
    """Bytes of a state whose size does not depend on the positions."""


class CachedLayers(NamedTuple):
    """Layers of one cache that are alike: one stands for all of them."""

    kind: str
    alike: int
    rows: int
    """Rows that the next pass finds."""
    capacity: int
    key: int
    """Bytes of the keys of one row."""
    value: int
    storage: int
    """Bytes that one layer holds now."""
    state: int = 0
    """Bytes of a state that the next pass will make."""
    packed: float = 0.0
    """Of a quantised row: stored bytes per byte."""
    residual: int = 0
    """Of a quantised layer: rows that are not packed yet."""

    @property
    def row(self) -> int:
        """Bytes of one row."""
        return self.key + self.value

    def growth(self, tokens: int) -> int:
        """Bytes that all layers have gained after `tokens` more positions; negative when freed."""
        return self.alike * (self.storage_after(tokens) - self.storage + self.state)

    def after(self, tokens: int) -> CachedLayers:
        """The same layers once `tokens` positions more were cached."""
        if not tokens:
            return self
        rows = self.rows + tokens
        if self.kind == SLIDING:
            rows = min(rows, self.capacity - 1)
        elif self.kind in (STATIC, STATIC_SLIDING):
            rows = min(rows, self.capacity)
        return self._replace(rows=rows, storage=self.storage_after(tokens), state=0)

    def storage_after(self, tokens: int) -> int:
        """Bytes that one layer will hold."""
        match self.kind:
            case "dynamic" | "sliding":  # a sliding layer keeps a view of all it was given
                return (self.rows + tokens) * self.row
            case "static" | "static sliding":
                return self.capacity * self.row
            case "packed":
                rows, loose = self.rows + tokens, self.residual + tokens
                if not self.rows or loose >= self.capacity:
                    loose = 0
                return int((rows - loose) * self.row * self.packed) + loose * self.row
            case _:
                return 0

    def attended(self, tokens: int) -> int:
        """Positions that the queries of a pass see: the width of its mask."""
        match self.kind:
            case "static":
                return self.capacity
            case "static sliding" if self.rows >= self.capacity:
                return self.capacity - 1 + tokens
            case "static sliding":
                return max(self.capacity, self.rows + tokens)
            case "no rows":
                return 0
            case _:
                return self.rows + tokens

    def copied(self, tokens: int) -> int:
        """Bytes that live beside one layer while it is updated."""
        match self.kind:
            case "dynamic" | "sliding" if self.rows:
                return self.rows * max(self.key, self.value)
            case "static sliding" if self.rows:
                return self.attended(tokens) * self.row
            case "packed" if self.rows:  # unpacked, joined, and made contiguous to be packed anew
                return (2 * self.rows + tokens) * self.row
            case _:
                return tokens * self.row


class CacheReader:
    """Reads caches of one model. Looks at two layers of a kind; that must be cheap at each step."""

    def __init__(self, sizes: Sequence[LayerSize], item: int) -> None:
        self._sizes = tuple(sizes)
        self._item = item
        self._alike = [(size, self._sizes.count(size)) for size in dict.fromkeys(self._sizes)]
        self._known: tuple[weakref.ref[Any], int, list[list[int]]] | None = None

    def fresh(self, batch: int, *, sliding: bool = True) -> list[CachedLayers]:
        """The cache that the library makes for `batch` sequences when it is given none."""
        return [
            _empty(size, size.kind if sliding or size.kind == NO_ROWS else DYNAMIC, count, batch)
            for size, count in self._alike
        ]

    def read(self, cache: Any, batch: int) -> list[CachedLayers]:
        """The layers of a live cache, of the legacy tuple, or of the cache that None becomes."""
        if cache is None:
            return self.fresh(batch)
        if isinstance(cache, (tuple, list)):
            return [_legacy(layer) for layer in cache if layer is not None]
        layers = cache.layers
        if not layers:  # made without a configuration: each layer is dynamic, whatever its kind
            return self.fresh(batch, sliding=False)
        found: list[CachedLayers] = []
        for indices in self._groups(cache, layers):
            first, last = (self._layer(layers, index, batch) for index in (indices[0], indices[-1]))
            if first == last:
                found.append(first._replace(alike=len(indices)))
            else:
                found += [self._layer(layers, index, batch) for index in indices]
        return found

    def _groups(self, cache: Any, layers: Sequence[Any]) -> list[list[int]]:
        known = self._known
        if known is not None and known[0]() is cache and known[1] == len(layers):
            return known[2]
        groups: dict[Any, list[int]] = {}
        for index, layer in enumerate(layers):
            limits = (getattr(layer, "max_cache_len", 0), getattr(layer, "sliding_window", 0))
            groups.setdefault((type(layer), limits, self._size(index)), []).append(index)
        self._known = (weakref.ref(cache), len(layers), list(groups.values()))
        return self._known[2]

    def _size(self, index: int) -> LayerSize:
        return self._sizes[index] if index < len(self._sizes) else LayerSize(NO_ROWS, 0, 0, 0)

    def _layer(self, layers: Sequence[Any], index: int, batch: int) -> CachedLayers:
        layer, size = layers[index], self._size(index)
        kind, capacity = _kind_of(layer)
        empty = _empty(size, kind, 1, batch)._replace(
            capacity=capacity,
            state=0 if _has_state(layer) else size.state * batch,
            packed=_packed_share(layer, self._item) if kind == PACKED else 0.0,
        )
        if kind == NO_ROWS or not getattr(layer, "is_initialized", False):
            return empty
        if kind == PACKED:
            loose = layer.keys.shape[-2] if layer.keys.dim() == 4 else 0
            filled = empty._replace(rows=layer.cumulative_length, residual=loose)
            return filled._replace(storage=filled.storage_after(0))
        keys, values = layer.keys, layer.values
        storage = keys.untyped_storage().nbytes() + values.untyped_storage().nbytes()
        rows = keys.shape[-2] if keys.dim() > 1 else 0
        if not rows:
            return empty._replace(storage=storage)
        key, value = (
            t.shape[0] * t.shape[1] * t.shape[-1] * t.element_size() for t in (keys, values)
        )
        if kind in (STATIC, STATIC_SLIDING):
            seen = getattr(layer, "cumulative_length_int", None)
            rows = min(capacity, int(layer.cumulative_length if seen is None else seen))
        return empty._replace(rows=rows, key=key, value=value, storage=storage)


def seen_positions(cache: Any) -> int:
    """Positions of one sequence that a cache has seen; 0 where it does not count them."""
    if isinstance(cache, (tuple, list)):
        return int(cache[0][0].shape[-2]) if cache else 0
    try:
        return int(cache.get_seq_length())
    except ValueError:  # linear attention alone
        return 0


def self_and_cross(cache: Any) -> tuple[Any, Any]:
    """The two parts of an encoder-decoder cache; the second is None for any other."""
    own = getattr(cache, "self_attention_cache", None)
    return (cache, None) if own is None else (own, cache.cross_attention_cache)


def attention_of(config: Any) -> str:
    """The attention that a configuration chose: "sdpa", "eager" or another."""
    return str(getattr(config, "_attn_implementation", None) or "sdpa")


def is_cache(value: Any) -> bool:
    """Whether a positional argument is one of the library's caches."""
    return hasattr(value, "get_seq_length")


def _kind_of(layer: Any) -> tuple[str, int]:
    """Kind and capacity of one layer."""
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


def _empty(size: LayerSize, kind: str, count: int, batch: int) -> CachedLayers:
    return CachedLayers(
        kind, count, 0, size.window, size.key * batch, size.value * batch, 0, size.state * batch
    )


def _legacy(layer: Sequence[Any]) -> CachedLayers:
    keys, values = layer[0], layer[1]
    rows = max(1, keys.shape[-2])
    key, value = (t.numel() // rows * t.element_size() for t in (keys, values))
    return CachedLayers(DYNAMIC, 1, keys.shape[-2], 0, key, value, keys.shape[-2] * (key + value))
