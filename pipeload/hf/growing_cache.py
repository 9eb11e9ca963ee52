"""Layers of the library's dynamic cache that take new positions without a copy of all others.

The library joins the keys of a layer, and its values, with the new ones at each token: a copy of
all that the cache holds. Of a 7B model with 4096 positions in bf16 that is 2.1 GB for each token,
and takes as long as its attention. Here a tensor has room for some positions more, as `with_room`
says, and is shown up to where it is filled. Heads lie further apart then. Whether attention still
has the same bits is tried here, for each dtype and width: a library may look at how a tensor lies.

[Note: who else looks] A position that was shown to anybody is never written again: what comes next
is added behind all that was ever filled, and only while the layer still has the very tensors that
it was given last. After beams were put in order, or the cache was cut back, it is copied once, as
the library does. A copy of a layer, or what a file keeps of it, is one of the library's own.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional
from transformers import DynamicLayer

from pipeload.budget.kv_cache import self_and_cross, with_room
from pipeload.weights.trial_thread import tried_apart

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


_DIMENSIONS = 4
_HEADS = 3
_LENGTHS, _QUERIES = (65, 130, 257, 520), (1, 2, 17, 33)
"""Of what is tried."""


class _Buffer:
    """The positions of a layer: keys or values, `[batch, heads, positions, width]`."""

    def __init__(self, old: Tensor | None, new: Tensor) -> None:
        batch, heads, more, width = new.shape
        filled = 0 if old is None or not old.numel() else old.shape[-2]
        self._tensor = new.new_empty(batch, heads, with_room(filled + more), width)
        self._filled = filled
        if old is not None and filled:
            self._tensor[:, :, :filled] = old
        self.shown = self.add(new)

    @property
    def room(self) -> int:
        """Positions that it has memory for."""
        return self._tensor.shape[-2]

    def takes(self, shown: Tensor | None, new: Tensor) -> bool:
        """Whether `new` can come behind what the layer has, which is `shown`."""
        mine = self._tensor
        return (
            type(new) is torch.Tensor
            and new.device == mine.device
            and shown is self.shown
            and self._filled + new.shape[-2] <= self.room
            and new.shape[:2] == mine.shape[:2]
            and new.shape[-1] == mine.shape[-1]
            and new.dtype == mine.dtype
            and not torch.is_grad_enabled()  # what it writes to may be kept for backward
            and (not mine.is_inference() or torch.is_inference_mode_enabled())
        )

    def add(self, new: Tensor) -> Tensor:
        """All positions, `new` being the last of them."""
        end = self._filled + new.shape[-2]
        self._tensor[:, :, self._filled : end] = new
        self._filled = end
        self.shown = self._tensor[:, :, :end]
        return self.shown


class _Pair(NamedTuple):
    keys: _Buffer
    values: _Buffer


class GrowingLayer(DynamicLayer):
    """Takes the place of a `DynamicLayer` of a cache, see `let_grow`."""

    _pair: _Pair | None = None

    @property
    def room(self) -> int:
        """Positions that there is memory for: no more than it has where the next one is a copy."""
        pair = self._pair
        if pair is None or pair.keys.shown is not self.keys:
            return 0
        return pair.keys.room

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add positions, `[batch, heads, new positions, width]`; returns all there are."""
        pair = self._pair
        if (
            pair is not None
            and pair.keys.takes(self.keys, key_states)
            and pair.values.takes(self.values, value_states)
        ):
            found = pair.keys.add(key_states), pair.values.add(value_states)
            self.keys, self.values = found
            return found
        self._pair = pair = None  # or there would be two of keys and values both
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if torch.compiler.is_compiling() or not (
            _pays(self.keys, key_states)
            and _pays(self.values, value_states)
            and has_same_bits(
                key_states.dtype,
                (key_states.shape[-1], value_states.shape[-1]),
                torch.get_num_threads(),
            )
        ):
            return super().update(key_states, value_states, *args, **kwargs)
        keys = _Buffer(self.keys, key_states)
        self.keys = keys.shown  # the old ones go before there are two of the values
        values = _Buffer(self.values, value_states)
        self.values = values.shown
        self._pair = _Pair(keys, values)
        return keys.shown, values.shown

    def reset(self) -> None:
        """Forget all positions."""
        self._pair = None
        super().reset()

    def __reduce__(self) -> tuple[Any, ...]:
        """As one of the library's own, and without the room that is not filled."""
        return DynamicLayer.__new__, (DynamicLayer,), self._state(_without_room)

    def __deepcopy__(self, memo: dict[int, Any]) -> DynamicLayer:
        """One of the library's own; a tensor is copied once, or however it is copied here."""
        made = DynamicLayer.__new__(DynamicLayer)
        memo[id(self)] = made
        vars(made).update(self._state(lambda value: copy.deepcopy(value, memo)))
        return made

    def _state(self, take: Callable[[Any], Any]) -> dict[str, Any]:
        return {name: take(value) for name, value in vars(self).items() if name != "_pair"}


def _without_room(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return value
    whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
    return value if whole else value.clone(memory_format=torch.contiguous_format)


def _pays(old: Tensor | None, new: Tensor) -> bool:
    """Whether there would be room to add to, and no more to it than a copy of numbers."""
    if old is None or type(new) is not torch.Tensor or new.dim() != _DIMENSIONS:
        return False
    if new.device.type != "cpu" or torch.is_grad_enabled():
        return False
    rows = new.shape[-2]
    if old.numel():  # else it says nothing of what is to come
        if old.dtype != new.dtype or old.device != new.device or old.dim() != _DIMENSIONS:
            return False
        if old.shape[:2] != new.shape[:2] or old.shape[-1] != new.shape[-1]:
            return False
        rows += old.shape[-2]
    return with_room(rows) > rows


@functools.lru_cache(maxsize=64)
def has_same_bits(dtype: torch.dtype, widths: tuple[int, int], threads: int) -> bool:
    """Whether products with keys and values of such `widths` do not depend on what lies between."""
    return tried_apart(threads, _try, dtype, widths)


def _try(dtype: torch.dtype, widths: tuple[int, int]) -> bool:
    made = torch.Generator().manual_seed(0)

    def drawn(rows: int, width: int) -> Tensor:
        return torch.randn(1, _HEADS, rows, width, generator=made, device="cpu").to(dtype)

    with torch.no_grad():
        for length in _LENGTHS:
            joined = [drawn(length, width) for width in widths]
            apart = [_Buffer(None, tensor).shown for tensor in joined]
            for rows in _QUERIES:
                asked, shares = drawn(rows, widths[0]), drawn(rows, length)
                mask = shares if rows > 1 else None
                one, other = (
                    (
                        torch.matmul(asked, keys.transpose(2, 3)),
                        torch.matmul(shares, values),
                        functional.scaled_dot_product_attention(asked, keys, values, mask),
                    )
                    for keys, values in (joined, apart)
                )
                if not all(map(torch.equal, one, other)):
                    return False
    return True


def let_grow(cache: Any) -> None:
    """Have the library's dynamic layers of a cache, or of its decoder's part, grow in place."""
    layers = getattr(self_and_cross(cache)[0], "layers", None)
    for layer in layers if isinstance(layers, list) else ():
        if type(layer) is DynamicLayer:
            layer.__class__ = GrowingLayer
