"""Numbers and inputs that no rule gives: what a few model types want besides what others have.

Tests alone may know types by name. An entry holds wherever its type stands, also inside another
type's configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LOOPED = ["sliding_attention", "mlp", "full_attention", "mlp", "sliding_attention", "mlp"]
_SOUND_STAGES = {
    "num_filters": 4,
    "depths": [1, 1, 1],
    "downsampling_ratios": [2, 5],
}
_LETTERS = "ABCDEFGHIJ"
_IMAGE_WORDS = {
    "IMGIMG" + "".join(_LETTERS[int(digit)] for digit in str(code)) + "Z": 100 + code
    for code in range(64)
}

MADE_WITH: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
        }
    },
}
"""For configurations that cannot be made without."""

SETTINGS: dict[str, dict[str, Any]] = {
    "apertus1p5": {"image_token_offset": 100, "audio_token_offset": 164},
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {
        "vocabulary_map": {"<image>": 300, **_IMAGE_WORDS},
        "image_token_id": 300,
        "vq_config.num_embeddings": 64,
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {**_ROPE, "mrope_section": [4, 2, 2]}}
    },
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_experts_per_tok": 2,
        "n_routed_experts": 8,
    },
    "blt": {"num_hidden_layers": 3},
    "blt_local_decoder": {"hidden_size_global": 64},
    "blt_local_encoder": {"hidden_size_global": 64},
    "dory": {
        "num_hidden_layers": 6,
        "layer_types": _LOOPED,
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "conv_output_size": 1024},
    "emu3": {"vocabulary_map": {"<image>": 300}, "image_token_id": 300},
    "ernie4_5_vl_moe_text": {"rope_parameters.mrope_section": [2, 2, 4]},
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[1, 0], [2, 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "hrm_text": {"num_hidden_layers": 24, "num_layers_per_stack": 3},
    "hunyuan_vl_text": {"head_dim": 16, "rope_parameters.mrope_section": [2, 2, 2, 2]},
    "instructblipvideo": {"video_token_index": 300},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "molmo2_adapter": {"vision_feature_layer": [2, 1]},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "qwen2_5_omni": {"enable_audio_output": False},
    "qwen3_omni_moe": {
        "enable_audio_output": False,
        "talker_config.spatial_merge_size": 2,
        "thinker_config.vision_start_token_id": 302,
    },
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 48},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "step3p5": {"sliding_window": 8},
    "vibevoice_acoustic_tokenizer": {**_SOUND_STAGES, "hidden_size": 64},
    "vibevoice_acoustic_tokenizer_decoder": {**_SOUND_STAGES, "hidden_size": 64},
    "vibevoice_acoustic_tokenizer_encoder": {**_SOUND_STAGES, "hidden_size": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "hybrid_layer_ids": [1, 3],
        "n_mamba_heads": 8,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_headdim": 16,
    },
}
"""By type, dots leading into what is inside it."""

TOKENS = 11


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def _ids(*shape: int, most: int = 60) -> torch.Tensor:
    return torch.randint(3, most, shape or (1, TOKENS))


def _picture(config: Any, *before: int) -> torch.Tensor:
    size = config.image_size
    return _noise(*before, 3, size, size)


def _codes(model: Any) -> dict[str, Any]:
    return {"input_ids": _ids(model.config.num_codebooks, TOKENS)}


def _text_to_codes(model: Any) -> dict[str, Any]:
    codes = _ids(model.config.decoder.num_codebooks, 5)
    return {"input_ids": _ids(), "decoder_input_ids": codes}


def _idefics(model: Any) -> dict[str, Any]:
    return {
        "input_ids": _ids(),
        "pixel_values": _picture(model.config.vision_config, 1, 1),
        "image_attention_mask": torch.ones(1, TOKENS, 1, dtype=torch.long),
    }


def _kosmos2(model: Any) -> dict[str, Any]:
    ids = _ids(1, TOKENS + model.config.latent_query_num)
    inside = torch.arange(ids.shape[1])[None]
    return {
        "pixel_values": _picture(model.config.vision_config, 1),
        "input_ids": ids,
        "image_embeds_position_mask": (inside > 2) & (inside <= 2 + model.config.latent_query_num),
    }


def _instructblipvideo(model: Any) -> dict[str, Any]:
    token, frames = model.config.video_token_index, 4
    ids = torch.cat([torch.full((1, frames * model.config.num_query_tokens), token), _ids()], 1)
    return {
        "pixel_values": _picture(model.config.vision_config, 1, frames),
        "qformer_input_ids": _ids(),
        "input_ids": ids,
    }


def _pi0(model: Any) -> dict[str, Any]:
    config = model.config
    vision = config.vlm_config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    ids = torch.cat([torch.full((1, patches), config.vlm_config.image_token_id), _ids()], 1)
    return {
        "state": _noise(1, config.max_state_dim),
        "noise": _noise(1, config.chunk_size, config.max_action_dim),
        "timestep": torch.tensor([0.5]),
        "input_ids": ids,
        "pixel_values": _picture(vision, 1, 1),
        "pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool),
        "attention_mask": torch.ones_like(ids),
    }


def _voxtral_realtime(model: Any) -> dict[str, Any]:
    bins = model.config.audio_config.num_mel_bins
    return {"input_ids": _ids(), "input_features": _noise(1, bins, 8 * TOKENS)}


def _rag(model: Any) -> dict[str, Any]:
    documents = model.config.n_docs
    return {
        "context_input_ids": _ids(documents, TOKENS),
        "context_attention_mask": torch.ones(documents, TOKENS, dtype=torch.long),
        "doc_scores": _noise(1, documents),
        "decoder_input_ids": _ids(1, 5),
    }


def _with_shared_keys(model: Any) -> dict[str, Any]:
    text = model.config.get_text_config()
    shape = (1, text.num_key_value_heads, TOKENS, text.head_dim)
    return {
        "inputs_embeds": _noise(1, 1, model.pre_projection.in_features),
        "shared_kv_states": {
            kind: (_noise(*shape), _noise(*shape)) for kind in dict.fromkeys(text.layer_types)
        },
        "position_ids": torch.tensor([[TOKENS - 1]]),
    }


def _talker(model: Any) -> dict[str, Any]:
    width = model.config.embedding_size
    return {
        "inputs_embeds": _noise(1, TOKENS, width),
        "input_text_ids": _ids(),
        "thinker_reply_part": _noise(1, 4, width),
        "attention_mask": torch.ones(1, TOKENS, dtype=torch.long),
    }


def _spoken_text(_: Any) -> dict[str, Any]:
    return {"input_ids": _ids(), "return_audio": False, "thinker_max_new_tokens": 4}


INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "gemma4_assistant": _with_shared_keys,
    "gemma4_unified_assistant": _with_shared_keys,
    "idefics": _idefics,
    "instructblipvideo": _instructblipvideo,
    "kosmos-2": _kosmos2,
    "kyutai_speech_to_text": lambda m: {"input_ids": _ids(1, TOKENS, m.config.num_codebooks + 1)},
    "musicgen": _text_to_codes,
    "musicgen_decoder": _codes,
    "musicgen_melody": _text_to_codes,
    "musicgen_melody_decoder": _codes,
    "pi0": _pi0,
    "qwen2_5_omni": _spoken_text,
    "qwen2_5_omni_talker": _talker,
    "qwen3_omni_moe": _spoken_text,
    "qwen3_omni_moe_talker_code_predictor": lambda m: {
        "inputs_embeds": _noise(1, 4, m.config.hidden_size)
    },
    "rag": _rag,
    "voxtral_realtime": _voxtral_realtime,
    "voxtral_realtime_text": lambda m: {
        "input_ids": _ids(),
        "t_cond": _noise(1, 1, m.config.hidden_size),
    },
}
"""By type, what a model of it is given."""


def settle(model_type: str, numbers: dict[str, Any]) -> None:
    """Put a type's `SETTINGS` into its configuration's dictionary, and into those inside."""
    for name, value in SETTINGS.get(model_type, {}).items():
        *outer, last = name.split(".")
        place = numbers
        for part in outer:
            inner = place.get(part) or {}
            place[part], place = inner, inner
        place[last] = value
    for value in numbers.values():
        if isinstance(value, dict) and isinstance(value.get("model_type"), str):
            settle(value["model_type"], value)


def special_inputs(model: Any) -> list[dict[str, Any]]:
    """What `INPUTS` has for the model's type."""
    make = INPUTS.get(getattr(model.config, "model_type", ""))
    return [make(model)] if make else []
