#!/usr/bin/env python3
"""Make a random mixture of experts of a known model's shape, one layer at a time.

    python tests/tools/make_moe.py --preset qwen3-30b --layers 12 /tmp/qwen3-moe

As make_llama.py does it: tensors go straight into shards, every one is random and unlike every
other, and the generation config names no end token. Routers of random weights choose experts
evenly; tests/tools/routing_tape.py has them choose as a real model does.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.tools.make_llama import DTYPES, make_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class MoeShape:
    """What decides the bytes of the checkpoint."""

    kind: str
    hidden: int
    expert: int
    """Inner width of one expert."""
    experts: int
    routed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: str = "bf16"
    shard_bytes: int = 2_000_000_000
    seed: int = 0
    headers_only: bool = False


PRESETS = {
    "qwen3-30b": MoeShape("qwen3_moe", 2048, 768, 128, 8, 48, 32, 4, 128, 151936),
    "mixtral-8x7b": MoeShape("mixtral", 4096, 14336, 8, 2, 32, 32, 8, 128, 32000),
    "gpt-oss-20b": MoeShape("gpt_oss", 2880, 2880, 32, 4, 24, 64, 8, 64, 201088),
}


def config_of(shape: MoeShape) -> dict[str, Any]:
    """Everything in config.json."""
    own: dict[str, dict[str, Any]] = {
        "qwen3_moe": {
            "architectures": ["Qwen3MoeForCausalLM"],
            "moe_intermediate_size": shape.expert,
            "intermediate_size": 4 * shape.expert,
            "num_experts": shape.experts,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        },
        "mixtral": {
            "architectures": ["MixtralForCausalLM"],
            "intermediate_size": shape.expert,
            "num_local_experts": shape.experts,
        },
        "gpt_oss": {
            "architectures": ["GptOssForCausalLM"],
            "intermediate_size": shape.expert,
            "num_local_experts": shape.experts,
        },
    }
    return {
        "model_type": shape.kind,
        "hidden_size": shape.hidden,
        "num_experts_per_tok": shape.routed,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "dtype": DTYPES[shape.dtype].torch,
        **own[shape.kind],
    }


def tensors_of(shape: MoeShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, in the order of the model."""
    hidden, wide = shape.hidden, shape.heads * shape.head_dim
    narrow = shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab, hidden)
    for layer in range(shape.layers):
        start = f"model.layers.{layer}"
        for name, rows in (("q", wide), ("k", narrow), ("v", narrow)):
            yield f"{start}.self_attn.{name}_proj.weight", (rows, hidden)
            if shape.kind == "gpt_oss":
                yield f"{start}.self_attn.{name}_proj.bias", (rows,)
        yield f"{start}.self_attn.o_proj.weight", (hidden, wide)
        if shape.kind == "qwen3_moe":
            yield f"{start}.self_attn.q_norm.weight", (shape.head_dim,)
            yield f"{start}.self_attn.k_norm.weight", (shape.head_dim,)
        if shape.kind == "gpt_oss":
            yield f"{start}.self_attn.o_proj.bias", (hidden,)
            yield f"{start}.self_attn.sinks", (shape.heads,)
        yield from _experts(shape, start)
        yield f"{start}.input_layernorm.weight", (hidden,)
        yield f"{start}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (shape.vocab, hidden)


def _experts(shape: MoeShape, start: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, count = shape.hidden, shape.expert, shape.experts
    if shape.kind == "gpt_oss":
        yield f"{start}.mlp.router.weight", (count, hidden)
        yield f"{start}.mlp.router.bias", (count,)
        yield f"{start}.mlp.experts.gate_up_proj", (count, hidden, 2 * inner)
        yield f"{start}.mlp.experts.gate_up_proj_bias", (count, 2 * inner)
        yield f"{start}.mlp.experts.down_proj", (count, inner, hidden)
        yield f"{start}.mlp.experts.down_proj_bias", (count, hidden)
        return
    mixtral = shape.kind == "mixtral"
    path = f"{start}.block_sparse_moe" if mixtral else f"{start}.mlp"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    yield f"{path}.gate.weight", (count, hidden)
    for expert in range(count):
        yield f"{path}.experts.{expert}.{gate}.weight", (inner, hidden)
        yield f"{path}.experts.{expert}.{up}.weight", (inner, hidden)
        yield f"{path}.experts.{expert}.{down}.weight", (hidden, inner)


def make_moe(shape: MoeShape, target: Path) -> Path:
    """Make the checkpoint folder at `target` and return it."""
    return make_checkpoint(shape, tensors_of(shape), config_of(shape), target)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--preset", choices=PRESETS, required=True)
    arguments.add_argument("--layers", type=int, help="fewer than the preset has")
    arguments.add_argument("--vocab", type=int, help="fewer rows of embedding and head")
    arguments.add_argument("target", type=Path)
    given = arguments.parse_args()
    shape = PRESETS[given.preset]
    shape = replace(shape, layers=given.layers or shape.layers, vocab=given.vocab or shape.vocab)
    folder = make_moe(shape, given.target)
    nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(json.dumps({"folder": str(folder), "bytes": nbytes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
