"""The numbers of a model that decide how much memory its passes take; no reference to it is kept.

Read once from public configuration and from the Linear modules' own sizes. Widths count elements
per position.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from pipeload.budget.kv_cache import private_parts
from pipeload.budget.kv_cache_sizes import heads_of, key_heads_of, layer_sizes, size_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from pipeload.budget.kv_cache import LayerSize

_PROJECTION = re.compile(r"\.(\d+)\.(?:\w+\.)*(q_proj|k_proj|v_proj)$")
_TOWERS = re.compile(r"vision|visual|image|audio|video")
# These are written out in Python, one temporary a step; the others are one kernel.
_STEPWISE_ACTIVATIONS = {"gelu_new", "gelu_fast", "gelu_python", "quick_gelu"}
_DECODER_NAMES = {
    "decoder_layers": "num_hidden_layers",
    "decoder_attention_heads": "num_attention_heads",
}


class Widths(NamedTuple):
    """Sizes that one pass is computed from."""

    item: int
    """Bytes of one element of an activation."""
    hidden: int
    """The residual stream."""
    query: int
    """All heads of the queries, of the widest layer."""
    heads: int
    key_heads: int
    """Heads of the keys; fewer than `heads` where several queries use one."""
    same_heads: bool
    """Whether keys and values are equally wide: else scores are written out."""
    unfolded: int
    """Keys and values of one cached position that latent attention makes of what it cached."""
    normed_queries: bool
    inner: int
    """All that a feed-forward layer holds at once, beside the residual stream."""
    experts: int
    """Experts that one position may be sent to; 0 without any."""
    vocabulary: int
    capped: bool
    """Whether logits are squeezed by a soft cap, which takes a second copy."""
    attention: str
    """How scores are computed: "eager", or by a kernel that never holds them."""
    use_cache: bool
    """What the configuration says where a call does not."""
    encoder_decoder: bool
    seen_by_encoder: int
    """The most positions of an encoder; 0 where it has no limit."""
    patch: int
    """Side of an image patch in pixels; 0 without a vision tower."""
    vision: int
    """All that a vision tower holds per patch."""
    layers: tuple[LayerSize, ...]


def read_widths(model: nn.Module, config: Any) -> Widths:
    """Everything needed of `model`, which may be on the meta device."""
    text = _decoder_of(config)
    item = max((p.element_size() for p in model.parameters() if p.is_floating_point()), default=4)
    found = _projections(model, encoder_decoder=bool(getattr(config, "is_encoder_decoder", False)))
    hidden = size_of(text, "hidden_size", "d_model")
    heads, head_dim = heads_of(text)
    layers = tuple(layer_sizes(text, found, item))
    latent = size_of(text, "kv_lora_rank")
    nope, rope = size_of(text, "qk_nope_head_dim"), size_of(text, "qk_rope_head_dim")
    query = heads * (nope + rope) if latent else heads * head_dim
    query = max([query, *(widths.get("q_proj", 0) for widths in found.values())])
    found_once = Widths(
        item=item,
        hidden=hidden,
        query=query,
        heads=heads,
        key_heads=heads if latent else key_heads_of(text, heads),
        same_heads=not size_of(text, "v_head_dim"),
        unfolded=heads * (2 * nope + rope + size_of(text, "v_head_dim")) if latent else 0,
        normed_queries=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        inner=_inner(model, text, hidden),
        experts=size_of(text, "num_local_experts", "num_experts", "n_routed_experts"),
        vocabulary=_logits(model, size_of(text, "vocab_size")),
        capped=getattr(text, "final_logit_softcapping", None) is not None,
        attention="",
        use_cache=True,
        encoder_decoder=bool(getattr(config, "is_encoder_decoder", False)),
        seen_by_encoder=size_of(config, "max_source_positions"),
        patch=size_of(getattr(config, "vision_config", None), "patch_size"),
        vision=_vision(getattr(config, "vision_config", None)),
        layers=layers,
    )
    return settings_of(text, found_once)


def layers_here(widths: Widths, away: Collection[int]) -> Iterator[LayerSize]:
    """What each layer caches where another rank has the cache of those that are `away`.

    One number stands there for the keys and the values of a position, and for no state any.
    """
    for index, size in enumerate(widths.layers):
        one = widths.item if size.key else 0
        yield size._replace(key=one, value=one, state=0) if index in away else size


def settings_of(decoder: Any, widths: Widths) -> Widths:
    """The same with what may be set at any time as `decoder`, a configuration, has it now."""
    attention = private_parts.attention_of(decoder)
    use_cache = getattr(decoder, "use_cache", True) is not False
    if (attention, use_cache) == (widths.attention, widths.use_cache):
        return widths
    return widths._replace(attention=attention, use_cache=use_cache)


def decoder_and_whole(config: Any) -> tuple[Any, ...]:
    """The configurations that a user may change: of what generates, and of all."""
    text = config.get_text_config(decoder=True)
    parts = [part for part in vars(config).values() if part is text]
    return (*parts, config)  # of a copy nobody knows


def _decoder_of(config: Any) -> Any:
    """The configuration of what generates.

    Of an encoder-decoder without parts the library makes a copy that has the decoder's numbers
    under the names that all models have; under their old names it shows the class's defaults.
    """
    text = config.get_text_config(decoder=True)
    if text is not config and type(text) is type(config):
        for old, new in _DECODER_NAMES.items():
            if size_of(text, old):
                setattr(text, old, size_of(text, new))
    return text


def _projections(model: nn.Module, *, encoder_decoder: bool) -> Mapping[int, dict[str, int]]:
    """Output features of q_proj, k_proj and v_proj of each layer, where they are so called."""
    found: dict[int, dict[str, int]] = defaultdict(dict)
    for name, module in model.named_modules():
        match = _PROJECTION.search(f".{name}")
        features = getattr(module, "out_features", None)
        if match is None or not isinstance(features, int) or _TOWERS.search(name):
            continue
        if "encoder_attn" in name or (encoder_decoder and "decoder" not in name):
            continue
        found[int(match[1])][match[2]] = features
    return found


def _inner(model: nn.Module, text: Any, hidden: int) -> int:
    """Elements that a feed-forward layer holds: gate, up and their product, or as the like."""
    vocabulary = size_of(text, "vocab_size")
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    linears = [m for m in linears if vocabulary not in (m.out_features, m.in_features)]
    out = max((m.out_features for m in linears), default=4 * hidden)
    into = max((m.in_features for m in linears), default=4 * hidden)
    # A fused gate and up is twice as wide as what leaves it.
    dense = max(3 * out if out < 2 * into else 4 * into, 3 * into)
    if (
        str(getattr(text, "hidden_act", getattr(text, "hidden_activation", "")))
        in (_STEPWISE_ACTIVATIONS)
        or str(getattr(text, "activation_function", "")) in _STEPWISE_ACTIVATIONS
    ):
        dense += 2 * max(out, into)
    chosen = size_of(text, "num_experts_per_tok", "num_experts_per_token", "moe_k")
    expert = size_of(text, "moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
    return max(dense, chosen * (2 * hidden + 4 * expert)) if chosen else dense


def _logits(model: Any, vocabulary: int) -> int:
    """Logits of one position; none where no module is wide enough to make them."""
    widest = max((size_of(module, "out_features") for module in model.modules()), default=0)
    return vocabulary if widest >= vocabulary else 0


def _vision(config: Any) -> int:
    """Elements per patch: residual stream and a feed-forward layer."""
    hidden = size_of(config, "hidden_size", "embed_dim")
    return 6 * hidden + 3 * (size_of(config, "intermediate_size") or 4 * hidden)
