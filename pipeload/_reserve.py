"""How much memory a forward pass needs beside the weights: cache, activations and logits.

An estimate from public configuration alone; it leads, measured memory decides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

# What a streaming process takes on between planning and its first generated tokens: thread stacks,
# tokenizer and sampling objects (20 to 27 MB), and the code pages of what runs, which come back
# after all of them were given back for the plan (30 to 40 MB, those that loading needs among them).
# Measured together, activations included: 37 to 58 MB.
_WARM_UP_BYTES = 54_000_000
# A memory control group also counts page tables and other kernel memory of the process.
_KERNEL_BYTES = 16_000_000
_PAGES_PER_TABLE = 512  # eight bytes of page table per 4 kB page
# Tensors as wide as the widest Linear that are alive at once in a block, measured on LLaMA shapes:
# gate, its activation, up, their product, and the copies that matrix products make of their input.
_LIVE_WIDE = 6.5
# The same for the residual stream: fp32 copies inside norms, queries, outputs.
_LIVE_HIDDEN = 12
# What the estimate above fell short of the measured peak at most, in 16 runs of two models.
_PASS_MARGIN = 1.1


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
    a_pass = cache_bytes(text, item, hint) + activation_bytes(model, text, item, hint)
    return process_bytes(limit) + int(a_pass * _PASS_MARGIN)


def process_bytes(limit: int) -> int:
    """What the process takes on beside weights and passes: warm-up and the kernel's own tables."""
    return _WARM_UP_BYTES + _KERNEL_BYTES + page_table_bytes(limit)


def page_table_bytes(limit: int) -> int:
    """Page tables of a process that holds `limit` bytes."""
    return limit // _PAGES_PER_TABLE


def limit_for(nbytes: int) -> int:
    """The smallest limit that leaves `nbytes` beside its own page tables."""
    return nbytes + (nbytes - 1) // (_PAGES_PER_TABLE - 1)


def activation_bytes(model: nn.Module, text: Any, item: int, hint: PassHint) -> int:
    """The larger of what a block holds and what the head gives: they are not alive together."""
    positions = hint.tokens * hint.batch
    hidden = _size(text, "hidden_size")
    block = positions * max(
        int(_LIVE_WIDE * _widest(model, text) * item), _LIVE_HIDDEN * hidden * 4
    )
    if getattr(text, "_attn_implementation", None) == "eager":  # it holds all scores, twice in fp32
        block += hint.batch * _size(text, "num_attention_heads") * hint.tokens**2 * (2 * item + 4)
    vocabulary = _size(text, "vocab_size")
    # The plain forward gives logits for every position; generate keeps fp32 copies of the last one.
    logits = positions * (vocabulary + 4 * hidden) * item
    return max(block, logits) + 3 * hint.batch * vocabulary * 4


def cache_bytes(text: Any, item: int, hint: PassHint) -> int:
    """Size of a dynamic key-value cache; one layer is counted twice, as it is copied to grow."""
    heads = _size(text, "num_attention_heads")
    kv_heads = _size(text, "num_key_value_heads") or heads
    head_dim = _size(text, "head_dim") or _size(text, "hidden_size") // max(1, heads)
    return (
        2
        * (_size(text, "num_hidden_layers") + 1)
        * kv_heads
        * head_dim
        * item
        * hint.tokens
        * hint.batch
    )


def _widest(model: nn.Module, text: Any) -> int:
    """Output features of the widest Linear, the head aside."""
    vocabulary = getattr(text, "vocab_size", None)
    widths = [
        m.out_features
        for m in model.modules()
        if isinstance(m, nn.Linear) and m.out_features != vocabulary
    ]
    return max(widths, default=4 * _size(text, "hidden_size"))


def _size(text: Any, name: str) -> int:
    """A size from the configuration, 0 when this architecture has none, or one per layer."""
    value = getattr(text, name, 0)
    return value if isinstance(value, int) else 0
