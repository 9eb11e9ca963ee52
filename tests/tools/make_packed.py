#!/usr/bin/env python3
"""A random LLaMA of any size in 4 or 8 bits, as other programs store it, for `pipeload convert`.

    python tests/tools/make_packed.py FOLDER --kind gptq --layers 32

The sizes are those of a 7B model. Words are random, so every code and every zero occurs. One shard
a layer; a process of some 300 MB makes it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.packers import HQQ_PACKINGS, WAYS

if TYPE_CHECKING:
    from collections.abc import Mapping

GROUP = 128
KINDS = {
    "gptq": "gptq, asymmetric",
    "gptq-desc-act": "gptq, desc_act",
    "awq": "awq",
    "compressed-tensors": "compressed-tensors, asymmetric",
    "mlx": "mlx",
    "auto-round": "auto-round",
    "w8a16": "compressed-tensors, int8",
    "hqq": "hqq",
    "torchao": "torchao, int8",
    "quark": "quark",
}


def random_words(*shape: int) -> torch.Tensor:
    """Any 32 bits."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def random_bytes(*shape: int) -> torch.Tensor:
    """Any 8 bits."""
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def one_byte_each(kind: str, stem: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """What is stored of a weight of 8 bits with one scale a row."""
    scale = ((torch.rand(rows, 1) + 0.5) / 5000).half()
    if kind == "w8a16":
        return {f"{stem}weight": random_bytes(rows, columns), f"{stem}weight_scale": scale}
    return {
        f"{stem}_weight_qdata": random_bytes(rows, columns),
        f"{stem}_weight_scale": scale,
        f"{stem}_weight_zero_point": torch.zeros((rows, 1), dtype=torch.int8),
    }


def tensors_of(kind: str, stem: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """What is stored of one weight."""
    if kind in {"w8a16", "torchao"}:
        return one_byte_each(kind, stem, rows, columns)
    groups = columns // GROUP
    scale = ((torch.rand(groups, rows) + 0.5) / 500).half()
    if kind == "mlx":
        return {
            f"{stem}weight": random_words(rows, columns // 8).view(torch.uint32),
            f"{stem}scales": scale.t().contiguous(),
            f"{stem}biases": (-8 * scale.t()).contiguous(),
        }
    if kind == "compressed-tensors":
        return {
            f"{stem}weight_packed": random_words(rows, columns // 8),
            f"{stem}weight_scale": scale.t().contiguous(),
            f"{stem}weight_zero_point": random_words(rows // 8, groups),
            f"{stem}weight_shape": torch.tensor([rows, columns]),
        }
    if kind == "hqq":
        lines, flags = rows * groups, ("view_as_float", "quant_scale", "quant_zero")
        return {
            f"{stem}W_q": random_bytes(lines // 2, GROUP).view(torch.uint8),
            f"{stem}scale": scale.t().reshape(-1, 1),
            f"{stem}zero": torch.randint(0, 16, (lines, 1)).half(),
            f"{stem}shape": torch.tensor([rows, columns]),
            f"{stem}axis": torch.tensor(1, dtype=torch.int32),
            f"{stem}packing": torch.tensor([*HQQ_PACKINGS[4].encode()], dtype=torch.uint8),
            **{f"{stem}{flag}": torch.tensor(0, dtype=torch.uint8) for flag in flags},
        }
    if kind == "quark":
        return {
            f"{stem}weight": random_words(columns, rows // 8),
            f"{stem}weight_scale": scale,
            f"{stem}weight_zero_point": random_words(groups, rows // 8),
        }
    zeros = {f"{stem}qzeros": random_words(groups, rows // 8), f"{stem}scales": scale}
    if kind == "awq":
        zeros[f"{stem}qweight"] = random_words(columns, rows // 8)
    else:
        group_of = torch.arange(columns, dtype=torch.int32) // GROUP
        shuffled = kind == "gptq-desc-act"
        zeros[f"{stem}g_idx"] = group_of[torch.randperm(columns)] if shuffled else group_of
        zeros[f"{stem}qweight"] = random_words(columns // 8, rows)
    return zeros


def shapes_of(config: LlamaConfig) -> Mapping[str, tuple[int, int]]:
    """Rows and columns of a layer's Linears."""
    hidden, wide = config.hidden_size, config.intermediate_size
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="gptq")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=11008)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=32000)
    given = parser.parse_args()
    config = LlamaConfig(
        hidden_size=given.hidden,
        intermediate_size=given.intermediate,
        num_hidden_layers=given.layers,
        num_attention_heads=given.heads,
        vocab_size=given.vocabulary,
    )
    given.folder.mkdir(parents=True)
    torch.manual_seed(0)
    table = torch.randn(given.vocabulary, given.hidden).mul_(0.02).half()
    rest = {"model.embed_tokens.weight": table, "lm_head.weight": table.clone()}
    rest["model.norm.weight"] = torch.ones(given.hidden).half()
    names = [list(rest)]
    for number in range(given.layers):
        stem = f"model.layers.{number}."
        norms = ("input_layernorm", "post_attention_layernorm")
        layer = {f"{stem}{norm}.weight": torch.ones(given.hidden).half() for norm in norms}
        for name, shape in shapes_of(config).items():
            layer |= tensors_of(given.kind, f"{stem}{name}.", *shape)
        save_file(layer, given.folder / f"model-{number + 1:05d}.safetensors", {"format": "pt"})
        names.append(list(layer))
    save_file(rest, given.folder / "model-00000.safetensors", {"format": "pt"})
    homes = {
        name: f"model-{number:05d}.safetensors"
        for number, shard in enumerate(names)
        for name in shard
    }
    index = json.dumps({"metadata": {}, "weight_map": homes})
    (given.folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    settings = WAYS[KINDS[given.kind]].settings
    name = "quantization_config" if "quant_method" in settings else "quantization"
    told = config.to_dict() | {name: settings | {"group_size": GROUP}, "dtype": "float16"}
    told["architectures"] = ["LlamaForCausalLM"]
    (given.folder / "config.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main()
