"""Checkpoints for the tests: tiny random ones of many families, and one real one.

In the random ones every parameter differs from every other, norms and biases
too. With equal tensors, a test could not see that two had been swapped.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch

from pipeload.demo.model import make_smollm2
from pipeload.errors import PipeloadError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Six layers, so that a limit can hold some and stream the rest. Widths are no
# powers of two times each other, so that a wrong shape cannot pass for a right one.
_SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 176,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
_TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

# Family: (model type, what it has besides or instead of the sizes above).
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 16}),
    # Two kinds of layer in turns, and a head dimension of its own.
    "gemma3": ("gemma3_text", {"head_dim": 32, "sliding_window": 16, "sliding_window_pattern": 2}),
    # Fused qkv and gate-up projections.
    "phi3": ("phi3", {"tie_word_embeddings": False}),
    # Conv1D, whose weights lie transposed; biases everywhere; a fused qkv.
    "gpt2": ("gpt2", {"n_embd": 96, "n_layer": 6, "n_head": 6, "n_positions": 256}),
    # Biases, learned positions, no gate.
    "opt": ("opt", {"ffn_dim": 176, "word_embed_proj_dim": 96, "dropout": 0.0}),
}
FAMILIES = tuple(_FAMILIES)


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """A configuration of a few hundred kilobytes; `overrides` are its own options."""
    from transformers import AutoConfig

    model_type, own = _FAMILIES[family]
    sizes = {"vocab_size": 512} if family == "gpt2" else _SIZES
    config: PreTrainedConfig = AutoConfig.for_model(
        model_type, **(sizes | _TOKENS | own | overrides)
    )
    return config


def save_random(
    family_or_config: str | PreTrainedConfig,
    folder: Path,
    dtype: torch.dtype | str,
    *,
    seed: int,
    max_shard_size: int | str | None = None,
    data_start_mod16: int | None = None,
) -> Path:
    """Save a random model as a plain safetensors checkpoint.

    Args:
        family_or_config: One of `FAMILIES`, or the configuration of any causal LM.
        folder: Where to; made if it is not there.
        dtype: A torch dtype, or a key of `DTYPES`.
        seed: The same seed gives the same bytes.
        max_shard_size: Of `save_pretrained`; small values make many shards.
        data_start_mod16: Where the tensor data of each file begins, modulo 16.

    Returns:
        `folder`.
    """
    config = family_or_config
    if isinstance(config, str):
        config = tiny_config(config)
    model = random_model(config, DTYPES[dtype] if isinstance(dtype, str) else dtype, seed=seed)
    options: dict[str, Any] = {}
    if max_shard_size is not None:
        options["max_shard_size"] = max_shard_size
    model.save_pretrained(folder, **options)
    if data_start_mod16 is not None:
        for file in folder.glob("*.safetensors"):
            move_data_start(file, data_start_mod16)
    return folder


def random_model(config: PreTrainedConfig, dtype: torch.dtype, *, seed: int) -> PreTrainedModel:
    """A causal LM, or one with an encoder, of which every parameter is random."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model: PreTrainedModel = kind.from_config(config)
    randomize(model, seed=seed)
    # Cast last: a generator gives other numbers for other dtypes.
    torch.nn.Module.to(model, dtype)
    model.eval()
    return model


def load_plain(folder: Path, **options: Any) -> Any:
    """The model as plain transformers load it, with not one key missing or left over."""
    from transformers import AutoModelForCausalLM

    from pipeload.entry.prepare_process import call_vector_functions

    call_vector_functions()  # what is right is what a process gives that has called them before
    options = {"dtype": "auto", "output_loading_info": True} | options
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
    model, loading = loaded
    assert not any(loading.values()), loading
    return model


def randomize(module: torch.nn.Module, *, seed: int) -> None:
    """Make every parameter random and unlike every other, buffers left as they are.

    Matrices get a spread that keeps activations about as large as they came in;
    what began as all ones (a norm) or all zeros (a bias, Gemma's norms) stays
    near that value.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            first = parameter.flatten()[0].item()
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            elif bool((parameter == first).all()):
                parameter.copy_(first + 0.1 * noise)
            else:
                parameter.copy_(0.1 * noise)


def move_data_start(file: Path, mod16: int) -> None:
    """Pad a safetensors header so that the data begin at `mod16` modulo 16.

    The format allows a header to end in spaces.
    """
    partial = file.with_name(file.name + ".partial")
    with file.open("rb") as old, partial.open("wb") as new:
        header = old.read(int.from_bytes(old.read(8), "little")).rstrip(b" ")
        header += b" " * ((mod16 - 8 - len(header)) % 16)
        new.write(len(header).to_bytes(8, "little") + header)
        shutil.copyfileobj(old, new)
    partial.replace(file)


def data_start(file: Path) -> int:
    """The offset of the first tensor byte of a safetensors file."""
    with file.open("rb") as opened:
        return 8 + int.from_bytes(opened.read(8), "little")


def tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name: file name, of a checkpoint with or without an index."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return weight_map
    file = folder / "model.safetensors"
    header = file.read_bytes()[8 : data_start(file)]
    return dict.fromkeys((n for n in json.loads(header) if n != "__metadata__"), file.name)


def cache_folder() -> Path:
    """Where checkpoints that take long to make outlive a test run."""
    default = Path(__file__).resolve().parents[2] / ".cache"
    return Path(os.environ.get("PIPELOAD_TEST_CACHE") or default)


def smollm2(dtype: str) -> Path:
    """The folder of the real SmolLM2-135M-Instruct, `bf16` or `fp32`; skips without it."""
    folder = cache_folder() / f"smollm2-{dtype}"
    try:
        return make_smollm2(folder, dtype=dtype)
    except PipeloadError as error:
        skip_or_fail(f"no SmolLM2: {error}", required_by="PIPELOAD_REQUIRE_MODELS")


def skip_or_fail(reason: str, *, required_by: str) -> NoReturn:
    """Skip the test, or fail it where the environment variable says it must run."""
    if os.environ.get(required_by) == "1":
        pytest.fail(f"{reason} ({required_by}=1)")
    pytest.skip(reason)
