"""What a live key-value cache holds, and what it will hold after one more pass.

How the library's layers are read says `hf.cache_layers`, once that is imported. Everything is in
bytes; a row is one position of all sequences.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

DYNAMIC = "dynamic"
"""Grows by a copy, unless it has room: the old and the new tensor live at once."""
SLIDING = "sliding"
"""Dynamic, but only the last `capacity - 1` positions are kept for the next pass."""
STATIC = "static"
"""Allocated once for `capacity` positions."""
STATIC_SLIDING = "static sliding"
PACKED = "packed"
"""Quantised, with up to `capacity` newest positions as they came."""
NO_ROWS = "no rows"
"""A linear-attention state, or nothing at all."""

_POSITIONS_A_SPARE = 64


def with_room(rows: int) -> int:
    """Rows that a dynamic layer takes memory for when it holds `rows`: see `hf.growing_cache`.

    A copy of a long cache is made once in as many tokens as there are spare rows, and less of the
    model's weights has to go for these than reading takes that long.
    """
    return rows + rows // _POSITIONS_A_SPARE


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
    room: int = 0
    """Of a dynamic layer: rows that its tensors can be filled with; 0 where they are full."""

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
        room = self.room
        if self.kind == DYNAMIC and rows > room:
            room = with_room(rows) if with_room(rows) > rows else 0
        return self._replace(rows=rows, storage=self.storage_after(tokens), state=0, room=room)

    def storage_after(self, tokens: int) -> int:
        """Bytes that one layer will hold."""
        match self.kind:
            case "dynamic" if self.rows + tokens <= self.room:
                return self.storage
            case "dynamic":
                return with_room(self.rows + tokens) * self.row
            case "sliding":  # it keeps a view of all it was given
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
            case "dynamic" | "sliding" if self.rows and self.rows + tokens > self.room:
                return self.rows * max(self.key, self.value)
            case "static sliding" if self.rows:
                return self.attended(tokens) * self.row
            case "packed" if self.rows:  # unpacked, joined, and made contiguous to be packed anew
                return (2 * self.rows + tokens) * self.row
            case _:
                return tokens * self.row


class LiveLayer(NamedTuple):
    """What one layer of a live cache holds."""

    kind: str
    capacity: int
    has_state: bool
    """Whether a state of linear attention is there already, or none is to come."""
    rows: int = 0
    key: int = 0
    """Bytes of the keys of one row, where there are rows and they are not packed."""
    value: int = 0
    storage: int = 0
    """Bytes of its tensors; 0 of what is packed."""
    room: int = 0
    """Rows that its tensors can be filled with, where it holds less than that."""
    packed: float = 0.0
    residual: int = 0


class PrivateParts:
    """How what the library keeps to itself is read: layers of live caches, settings of models.

    There is one, `private_parts`. What it has is put there by whoever knows: `hf.cache_layers`.
    """

    kind_of: Callable[[Any], tuple[str, int]]
    """Of a layer: its kind and capacity."""
    read: Callable[[Any, int], LiveLayer]
    """What a layer holds; the second argument is the bytes of an element of the model."""
    room_of: Callable[[Any], Hashable]
    """Of a layer: how many positions it has memory for, and whether that is there."""
    attention_of: Callable[[Any], str]
    """The attention that a configuration chose: "sdpa", "eager" or another."""
    settings_of: Callable[[Any], Hashable]
    """What may be set in a configuration at any time and changes what a pass takes."""
    forget_hooks: Callable[[Any], object]
    """Have a copied module get hooks of the library's own anew."""


private_parts = PrivateParts()


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
            kind = private_parts.kind_of(layer)
            groups.setdefault((type(layer), kind, self._size(index)), []).append(index)
        self._known = (weakref.ref(cache), len(layers), list(groups.values()))
        return self._known[2]

    def _size(self, index: int) -> LayerSize:
        return self._sizes[index] if index < len(self._sizes) else LayerSize(NO_ROWS, 0, 0, 0)

    def _layer(self, layers: Sequence[Any], index: int, batch: int) -> CachedLayers:
        live, size = private_parts.read(layers[index], self._item), self._size(index)
        found = _empty(size, live.kind, 1, batch)._replace(
            capacity=live.capacity,
            state=0 if live.has_state else size.state * batch,
            packed=live.packed,
            storage=live.storage,
        )
        if not live.rows:
            return found
        found = found._replace(rows=live.rows, residual=live.residual)
        if live.kind == PACKED:
            return found._replace(storage=found.storage_after(0))
        return found._replace(key=live.key, value=live.value, room=live.room)


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


def is_cache(value: Any) -> bool:
    """Whether a positional argument is one of the library's caches."""
    return hasattr(value, "get_seq_length")


def _empty(size: LayerSize, kind: str, count: int, batch: int) -> CachedLayers:
    return CachedLayers(
        kind, count, 0, size.window, size.key * batch, size.value * batch, 0, size.state * batch
    )


def _legacy(layer: Sequence[Any]) -> CachedLayers:
    keys, values = layer[0], layer[1]
    rows = max(1, keys.shape[-2])
    key, value = (t.numel() // rows * t.element_size() for t in (keys, values))
    return CachedLayers(DYNAMIC, 1, keys.shape[-2], 0, key, value, keys.shape[-2] * (key + value))
