"""Formulas for what a decoder's layer holds at once while it attends. All figures in bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeload.budget.kv_cache import PACKED, STATIC

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeload.budget.kv_cache import CachedLayers
    from pipeload.budget.model_sizes import Widths
    from pipeload.budget.pass_shape import Extras, PassShape

_FP32 = 4  # bytes


def rotated(w: Widths) -> int:
    """Queries, keys and values of one position while the queries are normed and rotated."""
    key = max((layer.key + layer.value for layer in w.layers), default=0)
    return max(4 * w.query * w.item + key, w.query * (w.item + 2 * _FP32) * w.normed_queries)


def attention(layer: CachedLayers, mask: int, shape: PassShape, w: Widths, *, fused: bool) -> int:
    """What one layer's attention takes: its update, repeated heads, and scores."""
    wide = layer.attended(shape.tokens)
    copied = layer.copied(shape.tokens)
    # Keys as wide as the queries; of a single head they are only viewed as many.
    repeated = shape.batch * wide * w.query * w.item * (w.key_heads < w.heads)
    held = 2 * repeated * (w.key_heads > 1)
    copied += shape.batch * wide * w.unfolded * w.item
    held += shape.batch * wide * w.unfolded * w.item
    scores = shape.batch * w.heads * shape.tokens * wide
    if w.attention == "eager":
        # In half precision the softmax makes an fp32 copy, and gives fp32.
        softmax = scores * (w.item + 2 * _FP32 if w.item < _FP32 else 2 * w.item)
        return max(copied, held + softmax, repeated + scores * w.item)
    if not fused:  # in fp32, and written out
        return max(copied, held + scores * 10)
    if mask and shape.tokens > 1:  # the kernel wants it in the queries' type, and no shared heads
        return max(copied, held + mask * w.item) + (layer.kind == PACKED) * copied
    return copied


def mask_elements(layer: CachedLayers, shape: PassShape, extras: Extras, w: Widths) -> int:
    """Elements of the mask that is written out for a layer; 0 where the kernel needs none."""
    wide = layer.attended(shape.tokens)
    plain = not extras.padded and (layer.rows == 0 or shape.tokens == 1)
    if layer.kind != STATIC and layer.capacity and layer.kind != PACKED:
        plain = plain and wide < layer.capacity
    if plain and w.attention != "eager":
        return 0
    return shape.batch * shape.tokens * wide


def recorded(w: Widths, layers: Sequence[CachedLayers], shape: PassShape, extras: Extras) -> int:
    """What a call has the library keep of every layer."""
    nbytes = 0
    if extras.hidden_states:
        nbytes += extras.hidden_states * shape.tokens * shape.batch * w.hidden * w.item
    if extras.attentions:
        nbytes += sum(
            layer.alike * layer.attended(shape.tokens) * shape.tokens for layer in layers
        ) * (shape.batch * w.heads * w.item)
    return nbytes
