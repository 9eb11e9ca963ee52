"""Tiny checkpoints in formats that others quantise to, made without their packages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.support.models import save_random

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from transformers import PreTrainedConfig

    Change = Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]]

_BLOCK = 16
# Sizes that are multiples of 32, which is what MXFP4 scales.
_SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def rewrite(folder: Path, quantisation: Mapping[str, Any], change: Change | None = None) -> Path:
    """Give a checkpoint of one file other tensors for those that `change` wants to replace."""
    file = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        tensors |= (change and change(name, tensor)) or {name: tensor}
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(quantisation)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def fp8(folder: Path, config: str | PreTrainedConfig = "llama") -> Path:
    """A LLaMA in FP8 with a scale for each block of 16 by 16."""
    quantisation = {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]}
    return rewrite(save_random(config, folder, "bf16", seed=3), quantisation, _to_fp8)


def fp8_experts(folder: Path) -> Path:
    """A mixture of experts in FP8, which lie one by one in the file."""
    return fp8(folder, _mixture())


def _mixture() -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.for_model(
        "qwen3_moe",
        **_SIZES,
        head_dim=16,
        intermediate_size=160,
        moe_intermediate_size=48,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return config


def mxfp8(folder: Path) -> Path:
    """A LLaMA in FP8 with an exponent for every 16 neighbours."""

    def change(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if not _is_projection(name):
            return {}
        groups = tensor.float().unflatten(1, (-1, _BLOCK))
        exponents = torch.ceil(torch.log2(groups.abs().amax(-1) / 448))
        values = (groups / exponents.exp2()[..., None]).flatten(1).to(torch.float8_e4m3fn)
        return {name: values, f"{name}_scale_inv": (exponents + 127).to(torch.uint8)}

    quantisation = {"quant_method": "mxfp8", "weight_block_size": [1, _BLOCK]}
    return rewrite(save_random("llama", folder, "bf16", seed=3), quantisation, change)


def mxfp4(folder: Path) -> Path:
    """A gpt-oss whose experts are blocks of MXFP4."""
    config = AutoConfig.for_model(
        "gpt_oss",
        **_SIZES,
        head_dim=16,
        intermediate_size=160,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    generator = torch.Generator().manual_seed(5)

    def change(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {}
        experts, inputs, outputs = tensor.shape
        scales = torch.randint(119, 124, (experts, outputs, inputs // 32), generator=generator)
        blocks = torch.randint(256, (*scales.shape, 16), generator=generator)
        both = {"blocks": blocks, "scales": scales}
        return {f"{name}_{key}": value.to(torch.uint8) for key, value in both.items()}

    quantisation = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return rewrite(save_random(config, folder, "bf16", seed=3), quantisation, change)


def metal(folder: Path) -> Path:
    """A LLaMA in four bits, eight to an unsigned integer, with a scale and a bias for 16."""

    def change(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if not _is_projection(name):
            return {}
        groups = tensor.float().unflatten(1, (-1, _BLOCK))
        low, high = groups.amin(-1), groups.amax(-1)
        scales = (high - low) / 15
        codes = ((groups - low[..., None]) / scales[..., None]).round().flatten(1).long()
        shifts = torch.arange(0, 32, 4)
        packed = (codes.unflatten(1, (-1, 8)) << shifts).sum(-1)
        path = name.removesuffix("weight")
        small = {"scales": scales, "qbiases": low}
        made = {path + key: value.to(torch.bfloat16) for key, value in small.items()}
        return made | {name: packed.to(torch.uint32)}

    quantisation = {"quant_method": "metal", "bits": 4, "group_size": _BLOCK}
    return rewrite(save_random("llama", folder, "bf16", seed=3), quantisation, change)


def gemma(folder: Path, **settings: Any) -> Path:
    """A LLaMA of 4 bits, 2 in one projection of each block and 8 in another, inputs rounded."""
    generator = torch.Generator().manual_seed(5)
    bits = {"up_proj": 2, "down_proj": 8}

    def change(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        embedding = "embed_tokens" in name
        if not _is_projection(name) and not embedding:
            return {}
        path, (rows, columns) = name.removesuffix("weight"), tensor.shape
        each = next((n for part, n in bits.items() if part in name), 4)
        codes = torch.randint(1 << each, (rows, columns), generator=generator)
        packed = (codes.unflatten(1, (-1, 8 // each)) << torch.arange(0, 8, each)).sum(-1)
        packed = packed.to(torch.uint8)
        scale = tensor.float().abs().amax(1, keepdim=True) / (1 << each - 1)
        if embedding:
            return {f"{path}embedding_quantized": packed, f"{path}embedding_scale": scale}
        step = torch.tensor(0.0 if "o_proj" in name else 0.05)  # 0: it was not measured
        return {
            name: packed.view(torch.int8) if each == 8 else packed,
            f"{path}weight_scale": scale,
            f"{path}input_activation_scale": step,
            f"{path}output_activation_scale": step.clone(),
        }

    quantisation = {
        "quant_method": "gemma",
        "num_bits": 4,
        "quantize_embeddings": True,
        "module_quant_configs": {part: {"num_bits": n} for part, n in bits.items()},
        "modules_to_not_convert": ["lm_head"],
    }
    # Large enough that as few bits are not kept in memory.
    config = AutoConfig.for_model("llama", **_SIZES | {"hidden_size": 384}, intermediate_size=512)
    return rewrite(save_random(config, folder, "bf16", seed=3), quantisation | settings, change)


def bitnet(folder: Path, **settings: Any) -> Path:
    """A LLaMA of three values, four to a byte, each from another quarter of the rows."""
    generator = torch.Generator().manual_seed(5)

    def change(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if not _is_projection(name):
            return {}
        rows, columns = tensor.shape
        codes = torch.randint(3, (4, rows // 4, columns), generator=generator)
        packed = (codes << torch.arange(0, 8, 2)[:, None, None]).sum(0)
        scale = 0.1 + torch.rand(1, generator=generator)
        return {name: packed.to(torch.uint8), f"{name}_scale": scale.to(torch.bfloat16)}

    kind = {"linear_class": "autobitlinear", "quantization_mode": "offline"} | settings
    quantisation = {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"], **kind}
    return rewrite(save_random("llama", folder, "bf16", seed=3), quantisation, change)


def compressed_experts(folder: Path) -> Path:
    """A mixture of experts in FP8 with a scale for each row, by the same package."""

    def change(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if not _is_projection(name):
            return {}
        scale = tensor.float().abs().amax(1, keepdim=True) / 448
        codes = (tensor.float() / scale).to(torch.float8_e4m3fn)
        return {name: codes, f"{name}_scale": scale.to(torch.bfloat16)}

    folder = save_random(_mixture(), folder, "bf16", seed=3)
    return rewrite(folder, _compressed("float", "float-quantized"), change)


def compressed_integers(folder: Path) -> Path:
    """A mixture of experts in int8, of which transformers 5.24 cannot make floats."""
    return compressed_tensors(folder, _mixture())


def compressed_tensors(folder: Path, config: str | PreTrainedConfig = "llama") -> Path:
    """A LLaMA in int8 with a scale for each row, as the package compressed-tensors stores it."""

    def change(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if not _is_projection(name):
            return {}
        scale = tensor.float().abs().amax(1, keepdim=True) / 127
        codes = (tensor.float() / scale).round().to(torch.int8)
        return {name: codes, f"{name}_scale": scale.to(torch.bfloat16)}

    folder = save_random(config, folder, "bf16", seed=3)
    return rewrite(folder, _compressed("int", "int-quantized"), change)


def _compressed(numbers: str, stored: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": numbers, "strategy": "channel", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "format": stored},
        },
    }


def _is_projection(name: str) -> bool:
    return "layers" in name and name.endswith("proj.weight")


def _to_fp8(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
    if not _is_projection(name):
        return {}
    rows, columns = tensor.shape
    blocks = tensor.float().view(rows // _BLOCK, _BLOCK, columns // _BLOCK, _BLOCK)
    scales = blocks.abs().amax((1, 3)) / 448
    values = (blocks / scales[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
    return {name: values, f"{name}_scale_inv": scales}
