"""How much memory a forward pass needs beside the weights: cache, activations and logits.

An estimate from public configuration alone; it leads, measured memory decides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

# What a streaming process takes on between loading and its first generated token: code pages of the
# kernels that run, thread stacks, tokenizer and sampling objects. Measured: 13 to 20 MB.
_WARM_UP_BYTES = 24_000_000
# A memory control group also counts page tables and other kernel memory of the process.
_KERNEL_BYTES = 16_000_000
_KERNEL_SHARE = 1 / 512  # eight bytes of page table per 4 kB page
# Tensors of hidden size that are alive at once around one block: residual, normalised input in
# fp32 and back, query, output, and the block's result.
_LIVE_HIDDEN = 8
# Tensors of the widest Linear alive at once: gate, up and their product, and one scratch copy.
_LIVE_WIDE = 4


class PassHint(NamedTuple):
    """The largest pass that must fit."""

    tokens: int
    """Tokens in the cache of one sequence, prompt included."""
    batch: int
    """Sequences at once."""


def reserve_bytes(model: nn.Module, config: Any, hint: PassHint, limit: int) -> int:
    """Memory to keep free for a pass of the hint, in bytes."""
    text = config.get_text_config()
    item = max((p.element_size() for p in model.parameters() if p.is_floating_point()), default=4)
    positions = hint.tokens * hint.batch
    hidden = int(getattr(text, "hidden_size", 0) or 0)
    activations = positions * (_LIVE_HIDDEN * hidden * 4 + _LIVE_WIDE * _widest(model, text) * item)
    vocabulary = int(getattr(text, "vocab_size", 0) or 0)
    # The plain forward gives logits for every position; generate adds an fp32 copy of the last one.
    logits = positions * vocabulary * item + 2 * hint.batch * vocabulary * 4
    kernel = _KERNEL_BYTES + int(limit * _KERNEL_SHARE)
    return _WARM_UP_BYTES + kernel + cache_bytes(text, item, hint) + activations + logits


def cache_bytes(text: Any, item: int, hint: PassHint) -> int:
    """Size of a dynamic key-value cache; one layer is counted twice, as it is copied to grow."""
    layers = int(getattr(text, "num_hidden_layers", 0) or 0)
    heads = int(getattr(text, "num_attention_heads", 0) or 0)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    hidden = int(getattr(text, "hidden_size", 0) or 0)
    head_dim = int(getattr(text, "head_dim", None) or (hidden // heads if heads else 0))
    return 2 * (layers + 1) * kv_heads * head_dim * item * hint.tokens * hint.batch


def _widest(model: nn.Module, text: Any) -> int:
    """Output features of the widest Linear, the head aside."""
    vocabulary = getattr(text, "vocab_size", None)
    widths = [
        m.out_features
        for m in model.modules()
        if isinstance(m, nn.Linear) and m.out_features != vocabulary
    ]
    return max(widths, default=4 * int(getattr(text, "hidden_size", 0) or 0))
