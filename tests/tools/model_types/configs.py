"""Tiny configurations of any model type of the library, from its defaults and the names of sizes.

No model type is named here. A configuration's numbers are told apart by how they are called, as the
library calls alike what is alike; where the first recipe gives a model that cannot be built or run,
the caller tries the next.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.tools.model_types.special import MADE_WITH, settle

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    _Rules = tuple[tuple[re.Pattern[str], re.Pattern[str], Callable[["_Around", int], int]], ...]

VOCABULARY = 320
LAYERS = 3
_MOST_LAYERS = 6
_POSITIONS = 128
_WINDOW = 8
_HEADS = 4
_MOST_PARAMETERS = 120_000_000

RECIPES = ("names", "sections", "filled", "stages", "wide", "eighth", "layers", "defaults")
"""How sizes are chosen, most wanted first."""
_FILLING = {"filled", "stages"}

_IDS = re.compile(r"(token_id|token_index|_id|_token_idx)$")
_VOCABULARY = re.compile(r"(^|_)vocab(_size)?(_per_layer_input)?$|^num_speakers_vocab_size$")
_DEPTH = re.compile(
    r"^(num_)?((\w+_)?(hidden_)?layers|layer|blocks|depth)$|^n_(layers?|blocks)$|_depth$|^layers$"
)
_NOT_DEPTH = re.compile(
    r"^(vision_feature_layer|feature_layer|num_upsampling_layers|num_conv_pos|conv|max_depth|"
    r"min_depth|num_kv_shared_layers|max_window_layers|num_feat_extract_layers)"
)
_KEY_HEADS = re.compile(r"(key_value|kv).*heads$|^num_key_value_heads$|kv_n_heads")
_HEAD_COUNT = re.compile(r"(^|_)(heads?|n_heads?|num_heads)$")
_WIDTH = re.compile(
    r"(^|_)(hidden_size|d_model|embed_dim|embed_size|n_embd|hidden_dim|dim|width|embedding_size|"
    r"embedding_dim|output_size|emb_dim|embeds_hidden_size|projection_size|hidden_channels|"
    r"hidden|d_inner|channels)$|_dim$|_hidden_size$|^d_\w*model$"
)
_NOT_WIDTH = re.compile(
    r"(^|_)(num_channels|in_channels|audio_channels|kernel_dim|input_channels|conv_kernel_dim|"
    r"max_state_dim|latent_channels|input_dim|mel_dim|feature_projection_input_dim|"
    r"input_feat_per_channel|out_channels|patch_dim)$"
)
_INNER = re.compile(r"intermediate|ffn|mlp_dim|d_ff$|inner|feedforward|linear_units|dff$|dim_ff")
_EXPERTS = re.compile(r"^(moe_)?(num_|n_)?(routed_|local_)?experts$|^moe_num_experts$")
_EVERY = re.compile(
    r"layer_(period|interval|frequency|freq)$|every_n_layers$|_interval$|_sparse_step$"
)
_POSITION = re.compile(
    r"(max_position_embeddings|n_positions|max_source_positions|max_target_positions|n_ctx|"
    r"max_seq_len|position_embeddings|model_max_length|max_speech_positions|max_text_positions)$"
)
_HEAD_SIZE = re.compile(r"(head_dim|d_kv|head_size|dim_head|d_head|headdim)$")
_IMAGE = re.compile(r"^(image|img)_size$")
_DEPTHS = re.compile(r"^(depths|n_?blocks|num_?layers|layer_depths)$|blocks_per_stage")
_LAYER_NUMBERS = re.compile(r"index|idx|indices|idxs|layers|hook_ids")
_NEVER = re.compile(r"(?!)")
_FIXED = {
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "o_lora_rank": 16,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "index_topk": 4,
    "n_group": 2,
    "num_expert_group": 2,
    "num_experts_per_token": 2,
    "topk_group": 1,
    "rotary_dim": 8,
    "attention_head_dim": 32,
    "upsample_groups": 64,
    "attention_window": 16,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "sliding_window": _WINDOW,
    "attention_chunk_size": 16,
    "codebook_size": 64,
    "num_queries": 8,
    "num_query_tokens": 8,
    "num_latents": 8,
    "max_window_layers": 1,
    "first_k_dense_replace": 1,
    "num_kv_shared_layers": 0,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}

_FILLED = {
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
    "n_group": 2,
    "topk_group": 1,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "image_token_id": 300,
    "image_token_index": 300,
    "video_token_id": 301,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
}
"""For what a type's configuration leaves open and its model needs."""


def tiny_config(model_type: str, recipe: str) -> PreTrainedConfig:
    """The type's default configuration, shrunk by one of `RECIPES`."""
    config: PreTrainedConfig = CONFIG_MAPPING[model_type](**MADE_WITH.get(model_type, {}))
    if recipe != "defaults":
        _Shrinker(recipe).shrink(config)
    # As it comes back from a file: what is derived is derived from the small numbers.
    numbers = config.to_dict()
    if recipe != "defaults":
        _forget_stages(numbers, number=recipe == "stages")
    settle(model_type, numbers)
    made: PreTrainedConfig = type(config).from_dict(numbers)
    return made


def config_for(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """What a class takes of a configuration: itself, or the part of it that is the class's own."""
    wanted: Any = getattr(cls, "config_class", None)
    if not isinstance(wanted, type) or isinstance(config, wanted):
        return config
    for value in vars(config).values():
        if isinstance(value, wanted) and isinstance(value, PreTrainedConfig):
            return value
    return config


def _forget_stages(numbers: dict[str, Any], *, number: bool) -> None:
    """Drop which stages a backbone gives, and their names: they follow from its depth.

    With `number`, it gives as many as it did, the last ones where there are fewer in all.
    """
    wanted = numbers.get("out_indices") or numbers.get("_out_indices")
    for name in ("out_features", "out_indices", "stage_names", "_out_features", "_out_indices"):
        numbers.pop(name, None)
    if number and wanted:
        depths = numbers.get("depths")
        stages = len(depths) if isinstance(depths, (list, tuple)) else _layer_count(numbers)
        fits = max(wanted) <= stages
        numbers["out_indices"] = list(wanted) if fits else list(range(stages + 1))[-len(wanted) :]
    for value in numbers.values():
        if isinstance(value, dict):
            _forget_stages(value, number=number)


def is_small(cls: type[PreTrainedModel], config: PreTrainedConfig) -> bool:
    """Whether a model of it is small enough to be made; found out without making it."""
    with torch.device("meta"):
        model = cls(copy.deepcopy(config))
    return sum(p.numel() for p in model.parameters()) <= _MOST_PARAMETERS


@dataclass(frozen=True)
class _Around:
    """What a number of a configuration stands among."""

    numbers: dict[str, Any]
    recipe: str
    width: int
    """Of the residual stream; 0 where widths are not chosen."""
    kept: list[int] | None
    """Layers that stay, where they differ."""

    @property
    def layers(self) -> int:
        return len(self.kept) if self.kept else LAYERS

    def depth(self, value: int) -> int:
        same = self.kept and value == _layer_count(self.numbers)
        return self.layers if same else min(value, LAYERS)

    def key_heads(self, value: int) -> int:
        counts = (n for n in self.numbers if _HEAD_COUNT.search(n) and not _KEY_HEADS.search(n))
        alike = any(self.numbers[name] == value for name in counts)
        return min(value, _HEADS if alike else 2)

    def head_size(self, value: int) -> int:
        turned = value == self.numbers.get("qk_rope_head_dim")
        return min(value, _FIXED["qk_rope_head_dim"] if turned else self.width // _HEADS)

    def image(self, value: int) -> int:
        patch = self.numbers.get("patch_size")
        patch = patch if isinstance(patch, int) else 16
        return min(value, max(4 * patch, 56 // patch * patch))


# In turn, until a name matches the first and not the second. All recipes have these:
_COUNTS: _Rules = (
    (_VOCABULARY, _NEVER, lambda _, value: min(value, VOCABULARY)),
    (_DEPTH, _NOT_DEPTH, _Around.depth),
    (_EXPERTS, _NEVER, lambda _, value: min(value, 8)),
    (_EVERY, _NEVER, lambda _, value: min(value, 2)),
    (re.compile("layer_offset$"), _NEVER, lambda _, value: min(value, 1)),
    (_POSITION, re.compile("max_2d"), lambda _, value: min(value, _POSITIONS)),
    (_IMAGE, _NEVER, _Around.image),
)
# Those that choose widths have these as well:
_WIDTHS: _Rules = (
    (_KEY_HEADS, _NEVER, _Around.key_heads),
    (_HEAD_COUNT, _NEVER, lambda _, value: min(value, _HEADS)),
    (_HEAD_SIZE, _NEVER, _Around.head_size),
    (_INNER, _NEVER, lambda around, value: min(value, around.width * 3 // 2)),
    (_WIDTH, _NOT_WIDTH, lambda around, value: min(value, around.width)),
)


class _Shrinker:
    """Changes a configuration and those inside it, ids alike everywhere."""

    def __init__(self, recipe: str) -> None:
        self._recipe = recipe
        self._width = {"wide": 128, "eighth": 0, "layers": 0}.get(recipe, 64)
        self._ids: dict[int, int] = {}

    def shrink(self, config: Any) -> None:
        """In place."""
        numbers = dict(vars(config))
        own = config.to_dict().get("per_layer_config") or {}
        if own:
            config.per_layer_config = None  # it is checked against the number of layers
        own = {int(layer): changes for layer, changes in own.items()}
        around = _Around(numbers, self._recipe, self._width, _kept_layers(numbers, own))
        for name, value in numbers.items():
            if isinstance(value, PreTrainedConfig):
                self.shrink(value)
            elif not name.startswith("_") and name not in {"id2label", "label2id"}:
                made = self._made(name, value, around)
                if made != value:
                    setattr(config, name, made)
        if self._recipe in _FILLING and "pad_token_id" not in numbers:
            config.pad_token_id = 0
        if own:
            layers = enumerate(around.kept or range(LAYERS))
            config.per_layer_config = {
                new: {name: self._made(name, value, around) for name, value in own[old].items()}
                for new, old in layers
                if old in own
            }

    def _made(self, name: str, value: Any, around: _Around) -> Any:
        """What takes a value's place; itself if nothing does."""
        if isinstance(value, int) and not isinstance(value, bool):
            return self._number(name, value, around)
        if isinstance(value, (list, tuple)) and value:
            return self._list(name, value, around)
        if name == "rope_parameters" and isinstance(value, dict) and around.width:
            return _rope(value, around)
        if value is None and self._recipe in _FILLING:
            return _FILLED.get(name)
        return value

    def _number(self, name: str, value: int, around: _Around) -> int:
        if _IDS.search(name):
            return self._id(value)
        if around.width and name in _FIXED:
            return min(value, _FIXED[name])
        rules = (*_COUNTS, *_WIDTHS) if around.width else _COUNTS
        for wanted, unwanted, made in rules:
            if wanted.search(name) and not unwanted.search(name):
                return made(around, value)
        return _eighth(name, value) if self._recipe == "eighth" else value

    def _id(self, value: int) -> int:
        """Another one for an id beyond the vocabulary: the same for the same."""
        if value < VOCABULARY:
            return value
        return self._ids.setdefault(value, VOCABULARY - 1 - len(self._ids) % (VOCABULARY // 2))

    def _list(self, name: str, value: Any, around: _Around) -> Any:
        for item in value:
            if isinstance(item, PreTrainedConfig):
                self.shrink(item)
        count, kept = _layer_count(around.numbers), around.kept
        made = list(value)
        if kept and len(value) == count:
            made = [value[index] for index in kept]
            if name == "attention_window":
                made = [self._number(name, item, around) for item in made]
        elif any(not isinstance(item, int) or isinstance(item, bool) for item in value):
            pass
        elif _IDS.search(name) or _IMAGE.search(name) or name == "attention_window":
            made = [self._number(name, item, around) for item in value]
        elif _DEPTHS.search(name):
            made = [min(item, 2) for item in value]
        elif _LAYER_NUMBERS.search(name) and count:
            inside = sorted({min(item, around.layers - 1) for item in value})
            made = inside
        elif around.width and name == "conv_dim":
            made = [32] * len(value)
        return type(value)(made)


def _rope(value: dict[str, Any], around: _Around) -> dict[str, Any]:
    """Sections of a head that turn each by another position: together half a head."""
    made = copy.deepcopy(value)
    old, new = around.numbers.get("head_dim") or _head_width(around.numbers), around.width // _HEADS
    turned = around.numbers.get("qk_rope_head_dim")
    if turned:  # of a head, only that part is turned
        old, new = turned, min(turned, _FIXED["qk_rope_head_dim"])
    for part in (made, *(inner for inner in made.values() if isinstance(inner, dict))):
        section = part.get("mrope_section")
        if around.recipe == "sections" and not section:
            # The library's code has its own where there are none.
            half = int(new // 2 * part.get("partial_rotary_factor", 1))
            part["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
        elif section and old:
            half = new * sum(section) // old
            first = [max(1, item * half // sum(section)) for item in section[:-1]]
            part["mrope_section"] = [*first, half - sum(first)]
    return made


def _first(numbers: dict[str, Any], *names: str) -> Any:
    return next((numbers[name] for name in names if numbers.get(name)), None)


def _head_width(numbers: dict[str, Any]) -> int:
    heads = _first(numbers, "num_attention_heads", "num_heads")
    hidden = _first(numbers, "hidden_size", "d_model", "embed_dim")
    return hidden // heads if isinstance(heads, int) and isinstance(hidden, int) else 0


def _layer_count(numbers: dict[str, Any]) -> int:
    count = _first(numbers, "num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
    return count if isinstance(count, int) else 0


def _kept_layers(numbers: dict[str, Any], own: dict[int, Any]) -> list[int] | None:
    """Which layers stay where their kinds are listed: one of each kind, in their order."""
    count = _layer_count(numbers)
    lists = [v for v in numbers.values() if isinstance(v, (list, tuple)) and len(v) == count > 0]
    if own:
        lists.append([own.get(index) for index in range(count)])
    if not lists:
        return None
    kinds = [repr([entry[index] for entry in lists]) for index in range(count)]
    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    kept = sorted(first.values())[:_MOST_LAYERS]
    others = (index for index in range(count) if index not in kept)
    while len(kept) < min(LAYERS, count):
        kept.append(next(others))
    return sorted(kept)


def _eighth(name: str, value: int) -> int:
    wide = _WIDTH.search(name) or _INNER.search(name) or _HEAD_SIZE.search(name)
    if wide and not _NOT_WIDTH.search(name) and value >= 64 and value % 8 == 0:
        return value // 8
    return value
