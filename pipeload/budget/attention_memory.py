"""Formulas for what a decoder's layer holds at once while it attends. All figures in bytes."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

from pipeload.budget.kv_cache import PACKED, STATIC

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from pipeload.budget.kv_cache import CachedLayers
    from pipeload.budget.model_sizes import Widths
    from pipeload.budget.pass_shape import Extras, PassShape

_FP32 = 4  # bytes
_FEW_SCORES = 4 << 20
"""Up to so many, a layer's scores are left to the library: taking heads apart costs time."""
_BETWEEN = 20
"""Bytes that each score of one head takes until it is a probability, at most."""


class Scores(enum.Enum):
    """How many of the scores are in memory at once where attention is written out."""

    COPIED = enum.auto()
    """All, several times: the library's own functions."""
    ONCE = enum.auto()
    """All, and a few copies of those of one head."""
    OF_A_HEAD = enum.auto()
    """Those of one head, a few times."""


class AttentionInUse(Protocol):
    """How attention of one model computes where it is not a kernel."""

    def kept(self) -> Scores:
        """How many scores are there at once, as things stand."""

    def tried(self, copied: nn.Module, /) -> AbstractContextManager[None]:
        """Inside, a copy of the model without weights computes as the model itself."""


def few_scores(count: int) -> bool:
    """Whether so many scores of a layer are better left to the library."""
    return count <= _FEW_SCORES


def kept_scores(
    attention: AttentionInUse | None, shape: PassShape, extras: Extras, w: Widths
) -> Scores:
    """How many are there at once in a pass of `shape`."""
    if attention is None or shape.tokens == 1 or w.attention != "eager":
        return Scores.COPIED
    found = attention.kept()
    return Scores.ONCE if extras.attentions and found is Scores.OF_A_HEAD else found


def rotated(w: Widths) -> int:
    """Queries, keys and values of one position while the queries are normed and rotated."""
    key = max((layer.key + layer.value for layer in w.layers), default=0)
    return max(4 * w.query * w.item + key, w.query * (w.item + 2 * _FP32) * w.normed_queries)


def attention(
    layer: CachedLayers,
    mask: int,
    shape: PassShape,
    w: Widths,
    *,
    fused: bool,
    kept: Scores = Scores.COPIED,
) -> int:
    """What one layer's attention takes: its update, repeated heads, and scores, `kept` so."""
    wide = layer.attended(shape.tokens)
    copied = layer.copied(shape.tokens)
    # Keys as wide as the queries; of a single head they are only viewed as many.
    repeated = shape.batch * wide * w.query * w.item * (w.key_heads < w.heads)
    held = 2 * repeated * (w.key_heads > 1)
    copied += shape.batch * wide * w.unfolded * w.item
    held += shape.batch * wide * w.unfolded * w.item
    scores = shape.batch * w.heads * shape.tokens * wide
    if w.attention == "eager" and kept is not Scores.COPIED and not few_scores(scores):
        once = (scores + scores // wide) * w.item if kept is Scores.ONCE else 0
        output = shape.batch * shape.tokens * w.query * w.item
        return max(copied, held + output + once + shape.tokens * wide * _BETWEEN)
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


def towers(extras: Extras, w: Widths) -> int:
    """What a vision tower or an encoder takes: it runs before the first layer."""
    return (extras.patches * w.vision + extras.encoded * (4 * w.hidden + w.inner)) * w.item
