"""What each layer of a decoder caches, by its configuration: of a position, and of a sequence.

Layers with a window cache no more positions than that; those of linear attention and of Mamba have
a state of one size, however long the sequence is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeload.budget.kv_cache import DYNAMIC, NO_ROWS, SLIDING, LayerSize

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_STATE_LAYERS = {"linear_attention", "conv", "mamba"}


def layer_sizes(text: Any, found: Mapping[int, dict[str, int]], item: int) -> Iterator[LayerSize]:
    """What each layer caches.

    Args:
        text: the configuration of what generates.
        found: output features of projections that are not as wide as it says, by layer.
        item: bytes of one element.
    """
    count = size_of(text, "num_decoder_layers", "decoder_layers", "num_hidden_layers")
    state = _state_bytes(text, item)
    # A configuration of no such layers has no such list either, and raises when asked.
    listed = count and size_of(text, "num_hidden_layers") == count
    each = (listed and getattr(text, "per_layer_config", None)) or [text] * count
    for index, (kind, own) in enumerate(zip(_kinds(text, each), each, strict=False)):
        window = size_of(own, "attention_chunk_size" if kind == "chunked" else "sliding_window")
        sliding = kind in ("sliding", "chunked", "hybrid_sliding") and window > 0
        key, value = _row(own, found.get(index, {}))
        if kind == "none":
            yield LayerSize(NO_ROWS, 0, 0, 0)
        elif kind == "state":
            yield LayerSize(NO_ROWS, 0, 0, 0, state)
        else:
            yield LayerSize(
                SLIDING if sliding else DYNAMIC,
                window if sliding else 0,
                key * item,
                value * item,
                state if kind.startswith("hybrid") else 0,
            )


def _row(text: Any, projections: Mapping[str, int]) -> tuple[int, int]:
    """Elements of the keys and of the values that a layer caches of one position."""
    if rank := size_of(text, "kv_lora_rank"):  # latent attention: what both are made of
        return rank, size_of(text, "qk_rope_head_dim")
    heads, head_dim = heads_of(text)
    both = key_heads_of(text, heads) * head_dim
    return projections.get("k_proj", both), projections.get("v_proj", both)


def heads_of(text: Any) -> tuple[int, int]:
    """Heads of the queries, and the size of one."""
    heads = max(1, size_of(text, "decoder_attention_heads", "num_attention_heads"))
    return heads, size_of(text, "head_dim", "d_kv") or size_of(text, "hidden_size") // heads


def key_heads_of(text: Any, heads: int) -> int:
    """Heads of the keys, of `heads` of the queries."""
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        return 1
    return size_of(text, "num_key_value_heads", "num_kv_heads") or heads


def _kinds(text: Any, each: Sequence[Any]) -> list[str]:
    """One of full, sliding, chunked, state, hybrid, hybrid_sliding, none for each layer."""
    types = getattr(text, "layer_types", None)
    if types is None:
        windows = {"sliding": "sliding_window", "chunked": "attention_chunk_size"}
        return [
            next((kind for kind, name in windows.items() if size_of(own, name)), "full")
            for own in each
        ]
    names = {"sliding_attention": "sliding", "chunked_attention": "chunked", "moe": "none"}
    names |= {"mlp": "none", "hybrid": "hybrid", "hybrid_sliding": "hybrid_sliding"}
    names |= dict.fromkeys(_STATE_LAYERS, "state")
    kinds = [names.get(kind, "full") for kind in types]
    sharing = getattr(text, "kv_sharing_modes", None)
    if sharing is not None:
        kinds = [
            "none" if mode == "reuse" else kind for kind, mode in zip(kinds, sharing, strict=False)
        ]
    return kinds


def _state_bytes(text: Any, item: int) -> int:
    """State of a linear-attention layer for one sequence: gated delta, short convolution, mamba."""
    if values := size_of(text, "linear_num_value_heads"):
        keys = size_of(text, "linear_num_key_heads") * size_of(text, "linear_key_head_dim")
        width = values * size_of(text, "linear_value_head_dim")
        convolution = (2 * keys + width) * size_of(text, "linear_conv_kernel_dim") * item
        return convolution + width * size_of(text, "linear_key_head_dim") * 4  # its rule is fp32
    if kernel := size_of(text, "conv_L_cache"):
        return size_of(text, "hidden_size") * kernel * item
    inner = size_of(text, "mamba_d_ssm") or (
        size_of(text, "mamba_expand", "expand") * size_of(text, "hidden_size")
    )
    depth = size_of(text, "mamba_d_state", "state_size", "ssm_state_size")
    kernel = size_of(text, "mamba_d_conv", "conv_kernel")
    groups = size_of(text, "mamba_n_groups", "n_groups")
    return (inner + 2 * groups * depth) * kernel * item + inner * depth * 4 if depth else 0


def size_of(config: Any, *names: str) -> int:
    """The first of these sizes that this architecture has; 0 where it has none, or a list."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # one per layer, and this is the configuration of all
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0
