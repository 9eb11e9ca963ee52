"""What a few model types are given that the names in their forward do not tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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


def _text_of_a_speaker(model: Any) -> dict[str, Any]:
    model.speaker_map = {"Chelsie": {"bos_token": 1}}
    return {"input_ids": _ids(), "generation_mode": "text", "thinker_max_new_tokens": 4}


def _spoken_text(_: Any) -> dict[str, Any]:
    return {"input_ids": _ids(), "return_audio": False, "thinker_max_new_tokens": 4}


def _series(model: Any) -> dict[str, Any]:
    config = model.config
    past = config.context_length + max(config.lags_sequence)
    features = config.num_time_features
    return {
        "past_values": _noise(1, past),
        "past_time_features": _noise(1, past, features),
        "past_observed_mask": torch.ones(1, past),
        "future_values": _noise(1, config.prediction_length),
        "future_time_features": _noise(1, config.prediction_length, features),
    }


def _decisions(model: Any) -> dict[str, Any]:
    config, steps = model.config, 5
    return {
        "states": _noise(1, steps, config.state_dim),
        "actions": _noise(1, steps, config.act_dim),
        "rewards": _noise(1, steps, 1),
        "returns_to_go": _noise(1, steps, 1),
        "timesteps": torch.arange(steps)[None],
        "attention_mask": torch.ones(1, steps, dtype=torch.long),
    }


def _pooled_patches(_: Any) -> dict[str, Any]:
    side = 6
    places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side)), -1)
    return {
        "pixel_values": _noise(1, side * side, 768),
        "pixel_position_ids": places.reshape(1, side * side, 2),
    }


def _tiles(model: Any) -> dict[str, Any]:
    tiles = model.config.max_num_tiles
    return {
        "pixel_values": _picture(model.config, 1, 1, tiles),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(1, 1, tiles, dtype=torch.long),
    }


def _heard(frames: int, **more: Any) -> Callable[[Any], dict[str, Any]]:
    """Frames in a row without a batch, as some encoders of sound want them."""
    return lambda model: {
        "input_features": _noise(model.config.num_mel_bins, frames),
        "feature_lens": torch.tensor([frames]),
        **more,
    }


def _masked_sound(frames: int) -> Callable[[Any], dict[str, Any]]:
    return lambda model: {
        "input_features": _noise(1, model.config.num_mel_bins, frames),
        "input_features_mask": torch.ones(1, frames, dtype=torch.long),
    }


def _patch_rows(model: Any) -> dict[str, Any]:
    side = model.config.patch_size
    return {
        "pixel_values": _noise(1, 3, side, 16 * side),
        "target_sizes": torch.tensor([[4, 4]]),
    }


def _levels(model: Any) -> dict[str, Any]:
    width = model.config.hidden_size
    return {
        "vision_features": [_noise(1, width, 4, 4)],
        "text_features": _noise(1, 5, width),
        "vision_pos_embeds": [_noise(1, width, 4, 4)],
        "text_mask": torch.ones(1, 5, dtype=torch.bool),
    }


def _pixels(*shape: int, name: str = "pixel_values") -> Callable[[Any], dict[str, Any]]:
    return lambda _: {name: _noise(*shape)}


INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "sam2_video": _pixels(1, 3, 64, 64),
    "sam2": _pixels(1, 3, 64, 64),
    "edgetam_video": _pixels(1, 3, 64, 64),
    "audioflamingo3_encoder": _masked_sound(256),
    "autoformer": _series,
    "blip_2_qformer": lambda m: {
        "query_embeds": _noise(1, 8, m.config.hidden_size),
        "encoder_hidden_states": _noise(1, 5, m.config.encoder_hidden_size),
    },
    "blt_local_decoder": lambda m: {
        "inputs_embeds": _noise(1, TOKENS, m.config.hidden_size),
        "patch_embeds": _noise(1, TOKENS, m.config.hidden_size_global),
    },
    "blt_local_encoder": lambda m: {
        "input_ids": _ids(),
        "inputs_embeds": _noise(1, TOKENS, m.config.hidden_size),
        "num_patches": 4,
        "patch_ids": torch.arange(TOKENS)[None] // 3,
    },
    "decision_transformer": _decisions,
    "deepseek_ocr2_encoder": lambda m: {
        "inputs_embeds": _noise(1, 32, m.config.hidden_size),
        "num_patches": 16,
    },
    "dia_decoder": lambda m: {
        "input_ids": _ids(1, TOKENS, m.config.num_channels),
        "encoder_hidden_states": _noise(1, 5, m.config.cross_hidden_size),
    },
    "florence_vision": _pixels(1, 3, 64, 64, name="hidden_states"),
    "gemma4_assistant": _with_shared_keys,
    "gemma4_audio": lambda _: {
        "input_features": _noise(1, 96, 128),
        "attention_mask": torch.ones(1, 96, dtype=torch.bool),
    },
    "gemma4_unified_assistant": _with_shared_keys,
    "gemma4_vision": _pooled_patches,
    "idefics": _idefics,
    "informer": _series,
    "inkling_audio": lambda m: {"audio_input_ids": _ids(1, TOKENS, m.config.n_mel_bins)},
    "instructblipvideo": _instructblipvideo,
    "kosmos-2": _kosmos2,
    "kyutai_speech_to_text": lambda m: {"input_ids": _ids(1, TOKENS, m.config.num_codebooks + 1)},
    "lxmert": lambda m: {
        "input_ids": _ids(),
        "visual_feats": _noise(1, 5, m.config.visual_feat_dim),
        "visual_pos": _noise(1, 5, m.config.visual_pos_dim),
    },
    "mgp-str": lambda m: {"pixel_values": _noise(1, 3, *m.config.image_size)},
    "minicpm_ocr_vision": _patch_rows,
    "minicpmv4_6_vision": _patch_rows,
    "minicpmv4_7_vision": _patch_rows,
    "mllama_vision_model": _tiles,
    "moshi_depth": lambda m: {
        "input_ids": _ids(1, m.config.num_codebooks - 1),
        "last_hidden_state": _noise(1, 1, m.config.input_size),
    },
    "muse_spark_audio": lambda _: {"input_values": _noise(1, 3840)},
    "musicgen": _text_to_codes,
    "musicgen_decoder": _codes,
    "musicgen_melody": _text_to_codes,
    "musicgen_melody_decoder": _codes,
    "patchtst": lambda m: {
        "past_values": _noise(1, m.config.context_length, m.config.num_input_channels)
    },
    "perceiver": lambda m: {"inputs": _ids(1, m.config.max_position_embeddings)},
    "phi4_multimodal_audio": lambda m: {
        "hidden_states": _noise(1, 64, m.config.input_size),
        "mask": torch.ones(1, 64, dtype=torch.bool),
    },
    "pi0": _pi0,
    "qwen2_5_omni": _text_of_a_speaker,
    "qwen2_5_omni_audio_encoder": _heard(200, aftercnn_lens=torch.tensor([100])),
    "qwen2_5_omni_talker": _talker,
    "qwen3_asr_encoder": _masked_sound(200),
    "qwen3_omni_moe": _spoken_text,
    "qwen3_omni_moe_audio_encoder": _heard(200),
    "qwen3_omni_moe_talker_code_predictor": lambda m: {
        "inputs_embeds": _noise(1, 4, m.config.hidden_size)
    },
    "qwen3_omni_moe_talker_text": lambda m: {
        "inputs_embeds": _noise(1, TOKENS, m.config.hidden_size)
    },
    "rag": _rag,
    "sam3_detr_encoder": _levels,
    "sam3_lite_text_detr_encoder": _levels,
    "seggpt": lambda _: dict.fromkeys(
        ("pixel_values", "prompt_pixel_values", "prompt_masks"), _noise(1, 3, 64, 64)
    ),
    "speech-encoder-decoder": lambda _: {
        "input_values": _noise(1, 4000),
        "decoder_input_ids": _ids(1, 5),
    },
    "t5gemma2_decoder": lambda m: {
        "input_ids": _ids(),
        "encoder_hidden_states": _noise(1, 5, m.config.hidden_size),
    },
    "time_series_transformer": _series,
    "unlimited_ocr_vision_encoder": lambda m: {
        "patch_embeds": _noise(1, m.config.hidden_size, 4, 4)
    },
    "video_llama_3_vision": lambda m: {
        "pixel_values": _noise(16, 3 * m.config.patch_size**2),
        "grid_thw": torch.tensor([[1, 4, 4]]),
        "merge_sizes": torch.tensor([2]),
    },
    "voxtral_realtime": _voxtral_realtime,
    "voxtral_realtime_text": lambda m: {
        "input_ids": _ids(),
        "t_cond": _noise(1, 1, m.config.hidden_size),
    },
}
"""By type, what a model of it is given."""


def save_beside(model: Any, folder: Path) -> None:
    """Write what a few models read beside their weights: the speakers that they know."""
    speakers = getattr(model, "speaker_map", None)
    if isinstance(speakers, dict):
        torch.save(speakers, folder / "spk_dict.pt")


def special_inputs(model: Any) -> list[dict[str, Any]]:
    """What `INPUTS` has for the model's type."""
    make = INPUTS.get(getattr(model.config, "model_type", ""))
    return [make(model)] if make else []
