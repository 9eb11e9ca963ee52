#!/usr/bin/env python3
"""A GGUF file with random weights, of the shape of a LLaMA folder.

    python tests/tools/make_gguf.py LLAMA_FOLDER FILE.gguf [Q4_0|Q4_K|Q8_0]

As `llama-quantize` makes it: matrices and embedding in that, the output head in Q6_K, or in Q8_0
with the others. Values make no difference to its speed. Needs the package gguf.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter

if TYPE_CHECKING:
    from numpy.typing import NDArray

# (values, bytes) of a block, and where in it the scales are that random bytes would make wild.
_BLOCKS = {
    Kind.Q4_0: (32, 18, (0,)),
    Kind.Q4_K: (256, 144, (0, 2)),
    Kind.Q6_K: (256, 210, (208,)),
    Kind.Q8_0: (32, 34, (0,)),
}


def random_blocks(shape: tuple[int, int], kind: Kind, random: np.random.Generator) -> NDArray[Any]:
    """uint8 of [rows, bytes of a row]."""
    values, nbytes, scales = _BLOCKS[kind]
    rows, columns = shape
    blocks = np.frombuffer(random.bytes(rows * columns // values * nbytes), np.uint8)
    blocks = blocks.reshape(-1, nbytes).copy()
    small = np.frombuffer(np.float16(1e-3).tobytes(), np.uint8)
    for start in scales:
        blocks[:, start : start + 2] = small
    return blocks.reshape(rows, -1)


def add_words(writer: Any, vocabulary: int) -> None:
    """Have a word for each token: servers turn them into text."""
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(3, vocabulary))])
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types([2, 3, 3, *[1] * (vocabulary - 3)])


def make_gguf(folder: Path, target: Path, kind: Kind = Kind.Q4_0) -> None:
    """Write it, with matrices of that kind."""
    config = json.loads((folder / "config.json").read_text())
    hidden, inner, layers = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    heads, vocabulary = config["num_attention_heads"], config["vocab_size"]
    keys = config.get("num_key_value_heads") or heads
    writer: Any = GGUFWriter(str(target), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(keys)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(hidden // heads)
    add_words(writer, vocabulary)
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, int]] = {"token_embd": (vocabulary, hidden)}
    for layer in range(layers):
        narrow = (hidden // heads * keys, hidden)
        shapes |= {
            f"blk.{layer}.attn_q": (hidden, hidden),
            f"blk.{layer}.attn_k": narrow,
            f"blk.{layer}.attn_v": narrow,
            f"blk.{layer}.attn_output": (hidden, hidden),
            f"blk.{layer}.ffn_gate": (inner, hidden),
            f"blk.{layer}.ffn_up": (inner, hidden),
            f"blk.{layer}.ffn_down": (hidden, inner),
        }
    for name, shape in shapes.items():
        blocks = random_blocks(shape, kind, random)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)
    last = Kind.Q8_0 if kind == Kind.Q8_0 else Kind.Q6_K
    head = random_blocks((vocabulary, hidden), last, random)
    writer.add_tensor("output.weight", head, raw_dtype=last)
    norms = ["output_norm"]
    norms += [f"blk.{i}.{name}_norm" for i in range(layers) for name in ("attn", "ffn")]
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    make_gguf(Path(sys.argv[1]), Path(sys.argv[2]), *(Kind[name] for name in sys.argv[3:]))
