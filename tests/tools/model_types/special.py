"""Numbers that no rule gives: what the configurations of a few model types want of their own.

Tests alone may know types by name. An entry holds wherever its type stands, also inside another
type's configuration.
"""

from __future__ import annotations

from typing import Any

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LOOPED = ["sliding_attention", "mlp", "full_attention", "mlp", "sliding_attention", "mlp"]
_SERIES = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 2,
    "feature_size": 7,
}
_SMALL_SAM2 = {
    "prompt_encoder_config.image_size": 64,
    "vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
}
_SMALL_TIMM = {"architecture": "test_efficientnet", "model_args": {}}
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
    "autoformer": {**_SERIES, "label_length": 4},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"num_hidden_layers": 3},
    "blt_local_decoder": {"hidden_size_global": 64},
    "blt_local_encoder": {"hidden_size_global": 64},
    "chameleon": {
        "vocabulary_map": {"<image>": 300, **_IMAGE_WORDS},
        "image_token_id": 300,
        "vq_config.num_embeddings": 64,
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {**_ROPE, "mrope_section": [4, 2, 2]}}
    },
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "deepseek_ocr2_sam_vision_model": {"downsample_channels": [64, 64]},
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_experts_per_tok": 2,
        "n_routed_experts": 8,
    },
    "deimv2": {"decoder_in_channels": [64] * 3},
    "doge": {"is_moe": True, "num_experts": 64, "num_experts_per_tok": 4},
    "donut-swin": {"num_heads": [2, 2, 2, 2], "window_size": 2},
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
    "gemma3n_vision": _SMALL_TIMM,
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[1, 0], [2, 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "hrm_text": {"num_hidden_layers": 24, "num_layers_per_stack": 3},
    "hunyuan_vl_text": {"head_dim": 16, "rope_parameters.mrope_section": [2, 2, 2, 2]},
    "informer": _SERIES,
    "instructblipvideo": {"video_token_index": 300},
    "janus_vqgan": {"num_patches": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "llama4_vision_model": {
        "intermediate_size": 256,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "vision_output_dim": 64,
    },
    "lw_detr": {"projector_scale_factors": [1.0], "num_feature_levels": 1},
    "mask2former": {"backbone_config.num_heads": [2, 4, 4, 4]},
    "molmo2_adapter": {"vision_feature_layer": [2, 1]},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "oneformer": {"backbone_config.num_heads": [2, 4, 4, 4]},
    "perceiver": {"d_latents": 64, "num_self_attends_per_block": 2, "d_model": 64},
    "perception_lm": {
        "vision_config.architecture": "test_vit",
        "vision_config.model_args": {"embed_dim": 64},
    },
    "phi4_multimodal_audio": {"nemo_conv_channels": 64},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "pp_doclayout_v2": {"decoder_in_channels": [64] * 3},
    "pp_doclayout_v3": {"decoder_in_channels": [64] * 3, "x4_feat_dim": 128},
    "pp_doclayout_v4": {"decoder_in_channels": [64] * 3},
    "qwen2_5_omni": {"thinker_config.vision_start_token_id": 302},
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
    "rt_detr": {"decoder_in_channels": [64] * 3},
    "rt_detr_v2": {"decoder_in_channels": [64] * 3},
    "sam": {"prompt_encoder_config.image_embedding_size": 4},
    "edgetam_video": _SMALL_SAM2,
    "sam2": _SMALL_SAM2,
    "sam2_video": _SMALL_SAM2,
    "sam2_hiera_det_model": {"hidden_size": 96, "global_attention_blocks": [4]},
    "sam_hq": {
        "prompt_encoder_config.image_embedding_size": 4,
        "mask_decoder_config.vit_dim": 64,
        "vision_config.num_pos_feats": 32,
    },
    "sapiens2": {"num_key_value_heads_per_layer": [4, 4, 2]},
    "seggpt": {"image_size": [128, 64]},
    "step3p5": {"sliding_window": 8},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "time_series_transformer": _SERIES,
    "unlimited_ocr_sam_vision_model": {"downsample_channels": [64, 64]},
    "timm_wrapper": _SMALL_TIMM,
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
    "zoedepth": {"bottleneck_features": 64},
}
"""By type, dots leading into what is inside it."""


def settle(model_type: str, numbers: dict[str, Any]) -> None:
    """Put a type's `SETTINGS` into its configuration's dictionary, after those of types inside."""
    for value in numbers.values():
        if isinstance(value, dict) and isinstance(value.get("model_type"), str):
            settle(value["model_type"], value)
    for name, value in SETTINGS.get(model_type, {}).items():
        *outer, last = name.split(".")
        place = numbers
        for part in outer:
            inner = place.get(part) or {}
            place[part], place = inner, inner
        place[last] = value
