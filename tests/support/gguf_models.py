"""Tiny models in GGUF files, as llama.cpp would have them, written with the package gguf.

Values that the package can make blocks of are those of a random model; for others blocks are made
up, of random bits and scales that keep values small.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig
from transformers import modeling_gguf_pytorch_utils as library
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from pipeload.checkpoint.gguf import BLOCKS, open_gguf
from pipeload.hf.gguf import OF_MIXTRAL, SIZES_OF_EXPERTS
from pipeload.hf.gguf_reader import names_once
from tests.support.models import random_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

NAME = "model.gguf"
QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Types that the package makes blocks of."""
MADE_UP = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""Types of which it only reads them, and where in a block their scales are."""
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
_MIXTURE: dict[str, Any] = {
    "moe_intermediate_size": 256,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
_NORMS_OF_ONE = ("gemma2", "gemma3", "nemotron")
"""Those whose norms' weights are stored with one more."""
# Architecture: (model type, what it has besides or instead of these sizes).
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 64, "tie_word_embeddings": False}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    # The library reads no head dimension for this one: its own is 128.
    "qwen3": ("qwen3", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}),
    # Nor a padding token for this one: its own is number 32000.
    "phi3": ("phi3", {"tie_word_embeddings": False, "vocab_size": 32064, "num_hidden_layers": 2}),
    "falcon": (
        "falcon",
        {"num_kv_heads": 1, "multi_query": True, "parallel_attn": True, "alibi": False},
    ),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "tie_word_embeddings": False}),
    "starcoder2": ("starcoder2", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True, "head_dim": 64}),
    "gemma3": ("gemma3_text", {"tie_word_embeddings": True, "head_dim": 64}),
    "nemotron": ("nemotron", {"tie_word_embeddings": False}),
    "qwen2moe": ("qwen2_moe", _MIXTURE | {"shared_expert_intermediate_size": 512}),
    "qwen3moe": ("qwen3_moe", _MIXTURE | {"head_dim": 64}),
}
MIXTRAL: dict[str, Any] = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},  # as all files here say
}
"""What a file of LLaMA's architecture has that is Mixtral's, which plain transformers drops."""


def made_up_blocks(
    rows: int, columns: int, kind: str, random: np.random.Generator
) -> NDArray[np.uint8]:
    """uint8 of [rows, bytes of a row]: any bits are valid beside finite scales."""
    values, nbytes = BLOCKS[kind]
    blocks = random.integers(0, 256, (rows * columns // values, nbytes), dtype=np.uint8)
    for start in MADE_UP[kind]:
        scales = (random.standard_normal(len(blocks)) * 5e-5).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def save_gguf(
    folder: Path,
    architecture: str = "llama",
    kinds: Sequence[str] = ("Q4_0", "Q8_0"),
    *,
    name: str = NAME,
    files: int = 1,
    vectors: str = "F32",
    extra: dict[str, Any] | None = None,
    without: Sequence[str] = (),
    **config: Any,
) -> Path:
    """Save a random model, and return the path of its (first) file.

    Args:
        folder: where to.
        architecture: a key of `ARCHITECTURES`.
        kinds: types of its matrices, in turns.
        name: of the file; of one of several it gets a number.
        files: how many, about.
        vectors: the type of its vectors, as llama.cpp never has it.
        extra: tensors (arrays) and metadata (numbers, text) beside.
        without: names of tensors that are left out.
        **config: other options of its configuration.
    """
    gguf: Any = pytest.importorskip("gguf")
    model = _random(architecture, config)
    made = model.config
    tensors = {
        theirs: value
        for theirs, value in _tensors(model, architecture).items()
        if theirs not in without
    }
    split = math.ceil(len(tensors) / files) if files > 1 else 0
    writer = gguf.GGUFWriter(str(folder / name), architecture, split_max_tensors=split)
    writer.add_file_type(2)
    writer.add_vocab_size(made.vocab_size)
    letters = [*"t0123456789"]  # that the others can be merged from
    others = [f"t{number}" for number in range(made.vocab_size - len(letters))]
    writer.add_token_list(letters + others)
    _add_config(writer, architecture, made)
    for key, value in (extra or {}).items():
        if isinstance(value, np.ndarray):
            tensors[key] = value
        else:
            add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
            add[list] = writer.add_array
            add.get(type(value), writer.add_float32)(key, value)
    random, turn = np.random.default_rng(9), 0
    for theirs, value in tensors.items():
        kind = vectors if value.ndim < 2 else kinds[turn % len(kinds)]
        floats = kind == "F32" or value.dtype != np.float32
        if floats or value.shape[-1] % BLOCKS[kind].values:
            writer.add_tensor(theirs, value)
            continue
        turn += value.ndim > 1
        number = gguf.GGMLQuantizationType[kind]
        if kind in MADE_UP:
            columns = value.shape[-1]
            blocks = made_up_blocks(value.size // columns, columns, kind, random)
            blocks = blocks.reshape(*value.shape[:-1], -1)
        else:
            blocks = gguf.quants.quantize(value, number)
        writer.add_tensor(theirs, blocks, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(folder.glob(name.replace(".gguf", "*.gguf")))


def save_mixtral_of_file(folder: Path, kind: str) -> Path:
    """Save as safetensors what `save_gguf(folder, "llama", (kind,), **MIXTRAL)` is a file of."""
    gguf: Any = pytest.importorskip("gguf")
    model, number = _random("llama", MIXTRAL), gguf.GGMLQuantizationType[kind]
    for weight in model.parameters():
        if weight.ndim > 1:
            blocks = gguf.quants.quantize(weight.detach().numpy(), number)
            weight.data = torch.from_numpy(gguf.quants.dequantize(blocks, number))
    model.save_pretrained(folder)
    return folder


def _random(architecture: str, config: dict[str, Any]) -> Any:
    model_type, own = ARCHITECTURES[architecture]
    model_type = "mixtral" if "num_local_experts" in config else model_type
    made = AutoConfig.for_model(model_type, **(SIZES | own | config))
    return random_model(made, torch.float32, seed=5)


def load_plain_gguf(path: Path, **options: Any) -> Any:
    """The model as plain transformers make it, but that tables of names are made once.

    Which reads no sizes of experts, so they are told.
    """
    from pipeload.entry.prepare_process import call_vector_functions

    call_vector_functions()
    opened = open_gguf(path)
    for key, ours in SIZES_OF_EXPERTS.items():
        if (size := opened.metadata.get(f"{opened.architecture}.{key}")) is not None:
            options[ours] = size
    auto = transformers.AutoModelForCausalLM
    with names_once():
        return auto.from_pretrained(path.parent, gguf_file=path.name, **options)


def _tensors(model: Any, architecture: str) -> dict[str, NDArray[Any]]:
    """A model's tensors under GGUF's names, as llama.cpp has them."""
    kind: Any = library.TENSOR_PROCESSORS.get(architecture, library.TensorProcessor)
    named: dict[str, Any] = {}
    if model.config.model_type == "mixtral":
        kind, named = library.Qwen2MoeTensorProcessor, {"model_type": "llama"}
    names = library.get_gguf_hf_weights_map(model, kind(config=model.config.to_dict()), **named)
    tied = "lm_head.weight" if model.config.tie_word_embeddings else None
    state = model.state_dict()
    found: dict[str, NDArray[Any]] = {}
    for theirs, ours in names.items():
        if ours == tied:
            continue
        value = state[ours].numpy()
        for word, heads in (("attn_q", "num_attention_heads"), ("attn_k", "num_key_value_heads")):
            if architecture == "llama" and f".{word}." in theirs:
                shape = getattr(model.config, heads), 2, -1, *value.shape[1:]
                value = value.reshape(shape).swapaxes(1, 2).reshape(value.shape)
        if theirs.endswith("_exps"):
            halves = np.split(value, 2, axis=1) if "down" not in theirs else [value]
            found[f"{theirs}.weight"] = np.ascontiguousarray(halves["up" in theirs])
            continue
        if architecture in _NORMS_OF_ONE and theirs.endswith("norm.weight"):
            value = value + 1
        if "ffn_gate_inp_shexp" in theirs:
            value = value.squeeze()
        found[theirs] = np.ascontiguousarray(value)
    return found


def _add_config(writer: Any, architecture: str, config: Any) -> None:
    """What the library will make its configuration of."""
    known = config.to_dict() | {"rope_theta": 10000.0}
    known["num_experts"] = getattr(config, "num_experts", None)
    mapping: dict[str, Any] = GGUF_CONFIG_MAPPING
    more = SIZES_OF_EXPERTS if architecture.endswith("moe") else OF_MIXTRAL
    for key, ours in (mapping[architecture.replace("moe", "_moe")] | more).items():
        value = known.get(ours) if ours not in (None, "vocab_size") else None
        if isinstance(value, int):
            writer.add_uint32(f"{architecture}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
