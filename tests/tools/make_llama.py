#!/usr/bin/env python3
"""Make a random LLaMA-shaped checkpoint of any size, one block at a time.

    python tests/tools/make_llama.py --preset 7b /tmp/llama-7b

Tensors go straight into safetensors shards, so memory use does not grow with the
model. Every tensor is random and unlike every other. A folder that is already
there with the same shape is left alone; a run that is cut off leaves nothing
under the final name. The generation config names no end token: a timed
generation never stops early.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BLOCK_BYTES = 8 << 20  # what is generated and written at once
STAMP = "made_by_make_llama.json"


class Bits(NamedTuple):
    """How random bits become numbers: keep some, set others.

    A weight keeps its sign, its fraction and the last bit of its exponent; the
    other bits say 2**-7, so it is 0.008 to 0.031 in size (0.02 in the mean square).
    A norm keeps the low bits of its fraction: it is 1 to 1.125.
    """

    safetensors: str
    torch: str
    unsigned: type[np.unsignedinteger]
    weight: tuple[int, int]  # (keep, set)
    norm: tuple[int, int]


DTYPES = {
    "bf16": Bits("BF16", "bfloat16", np.uint16, (0x80FF, 0x3C00), (0x000F, 0x3F80)),
    "fp16": Bits("F16", "float16", np.uint16, (0x87FF, 0x2000), (0x007F, 0x3C00)),
    "fp32": Bits(
        "F32", "float32", np.uint32, (0x80FF_FFFF, 0x3C00_0000), (0x000F_FFFF, 0x3F80_0000)
    ),
}


@dataclass(frozen=True)
class LlamaShape:
    """What decides the bytes of the checkpoint."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int = 32000
    dtype: str = "bf16"
    shard_bytes: int = 2_000_000_000
    seed: int = 0
    headers_only: bool = False
    """Real headers, but a hole in the file where the data would be (all zeros)."""


PRESETS = {
    "1.1b": LlamaShape(2048, 5632, 22, 32, 4),
    "7b": LlamaShape(4096, 11008, 32, 32, 32),
    "70b-headers": LlamaShape(8192, 28672, 80, 64, 8, shard_bytes=5_000_000_000, headers_only=True),
}


class Tensor(NamedTuple):
    """One tensor to be written; `number` makes its random stream its own."""

    number: int
    name: str
    shape: tuple[int, ...]
    nbytes: int


class Shape(Protocol):
    """How a random checkpoint is written. A dataclass."""

    @property
    def dtype(self) -> str:
        """A key of `DTYPES`."""

    @property
    def shard_bytes(self) -> int:
        """The most that one file holds."""

    @property
    def seed(self) -> int:
        """Of the random numbers."""

    @property
    def headers_only(self) -> bool:
        """Whether files have holes where their data would be."""


Names = Iterable[tuple[str, tuple[int, ...]]]
"""Name and shape of every tensor, in the order in which a forward pass uses them."""


def make_llama(shape: LlamaShape, target: Path) -> Path:
    """Make the checkpoint folder at `target` and return it."""
    return make_checkpoint(shape, _names(shape), _config(shape), target)


def make_checkpoint(shape: Any, names: Names, config: dict[str, Any], target: Path) -> Path:
    """Make a folder of random tensors at `target` and return it; `shape` is a `Shape`."""
    stamp = target / STAMP
    if stamp.exists() and json.loads(stamp.read_text()) == asdict(shape):
        return target
    if target.exists() and any(target.iterdir()) and not stamp.exists():
        raise FileExistsError(f"{target} holds something else; name another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        partial.chmod(0o755)
        _write_checkpoint(shape, names, config, partial)
        _write_json(partial / STAMP, asdict(shape))
        if target.exists():
            shutil.rmtree(target)
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _write_checkpoint(shape: Shape, names: Names, config: dict[str, Any], folder: Path) -> None:
    shards = list(_shards(shape, names))
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        if len(shards) == 1:
            file = "model.safetensors"
        _write_shard(shape, tensors, folder / file)
        weight_map.update(dict.fromkeys((tensor.name for tensor in tensors), file))
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensors in shards for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "pad_token_id": 0})


def _config(shape: LlamaShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": DTYPES[shape.dtype].torch,
    }


def _names(shape: LlamaShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor's name and shape, in the order in which a forward pass uses them."""
    hidden, intermediate = shape.hidden, shape.intermediate
    kv_rows = hidden // shape.heads * shape.kv_heads
    yield "model.embed_tokens.weight", (shape.vocab, hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "self_attn.q_proj.weight", (hidden, hidden)
        yield prefix + "self_attn.k_proj.weight", (kv_rows, hidden)
        yield prefix + "self_attn.v_proj.weight", (kv_rows, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, hidden)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield prefix + "mlp.gate_proj.weight", (intermediate, hidden)
        yield prefix + "mlp.up_proj.weight", (intermediate, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, intermediate)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (shape.vocab, hidden)


def _shards(shape: Shape, names: Names) -> Iterator[list[Tensor]]:
    itemsize = np.dtype(DTYPES[shape.dtype].unsigned).itemsize
    shard: list[Tensor] = []
    held = 0
    for number, (name, sizes) in enumerate(names):
        nbytes = int(np.prod(sizes, dtype=np.int64)) * itemsize
        if shard and held + nbytes > shape.shard_bytes:
            yield shard
            shard, held = [], 0
        shard.append(Tensor(number, name, sizes, nbytes))
        held += nbytes
    yield shard


def _write_shard(shape: Shape, tensors: Sequence[Tensor], path: Path) -> None:
    with path.open("wb") as file:
        header = _header(tensors, DTYPES[shape.dtype].safetensors)
        file.write(header)
        if shape.headers_only:
            file.truncate(len(header) + sum(tensor.nbytes for tensor in tensors))
            return
        for tensor in tensors:
            for block in _random_blocks(shape, tensor):
                file.write(block.data)


def _header(tensors: Sequence[Tensor], dtype: str) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        stop = start + tensor.nbytes
        entries[tensor.name] = {
            "dtype": dtype,
            "shape": tensor.shape,
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data are aligned to 8 bytes, as the library does it
    return len(text).to_bytes(8, "little") + text


def _random_blocks(
    shape: Shape, tensor: Tensor
) -> Iterator[np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]]]:
    bits = DTYPES[shape.dtype]
    keep, fixed = bits.norm if len(tensor.shape) == 1 else bits.weight
    raw = np.random.SFC64(np.random.SeedSequence([shape.seed, tensor.number]))
    for start in range(0, tensor.nbytes, BLOCK_BYTES):
        nbytes = min(BLOCK_BYTES, tensor.nbytes - start)
        block = raw.random_raw(-(-nbytes // 8)).view(bits.unsigned)
        block = block[: nbytes // block.itemsize]
        block &= bits.unsigned(keep)
        block |= bits.unsigned(fixed)
        yield block


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _size(text: str) -> int:
    for unit, factor in {"KB": 10**3, "MB": 10**6, "GB": 10**9}.items():
        if text.upper().endswith(unit):
            return int(float(text[: -len(unit)]) * factor)
    return int(text)


def _parse(arguments: Sequence[str] | None) -> tuple[LlamaShape, Path]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path, metavar="TARGET")
    parser.add_argument("--preset", choices=PRESETS, default="1.1b", help="default: %(default)s")
    for option in ("hidden", "intermediate", "layers", "heads", "kv-heads", "vocab", "seed"):
        parser.add_argument(f"--{option}", type=int, help="instead of the preset's")
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--shard-size", type=_size, dest="shard_bytes", help="such as 500MB")
    options = vars(parser.parse_args(arguments))
    target, preset = options.pop("target"), PRESETS[options.pop("preset")]
    return replace(preset, **{k: v for k, v in options.items() if v is not None}), target


def main(arguments: Sequence[str] | None = None) -> int:
    shape, target = _parse(arguments)
    make_llama(shape, target)
    sys.stdout.write(f"{target}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
