"""Models of random weights in the shapes that are measured, made once in a folder."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import transformers

from tests.tools.make_llama import PRESETS, LlamaShape, make_checkpoint, make_llama
from tests.tools.make_moe import PRESETS as MOE_PRESETS
from tests.tools.make_moe import make_moe

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class LibraryShape:
    """A model of the library's by its class; what `make_checkpoint` asks for."""

    config: str
    """A class of transformers, as "BertConfig"."""
    model: str
    settings: dict[str, int] = field(default_factory=dict)
    dtype: str = "fp32"
    shard_bytes: int = 4_000_000_000
    seed: int = 0
    headers_only: bool = False


_LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
LIBRARY = {
    "bert-base": LibraryShape("BertConfig", "BertModel"),
    "bert-large": LibraryShape("BertConfig", "BertModel", _LARGE),
    "vit-base": LibraryShape("ViTConfig", "ViTModel"),
    "vit-large": LibraryShape("ViTConfig", "ViTModel", _LARGE),
    "gpt2": LibraryShape("GPT2Config", "GPT2LMHeadModel"),
    "gpt-j": LibraryShape("GPTJConfig", "GPTJForCausalLM", dtype="fp16"),
}
LLAMA = {
    "llama-small": LlamaShape(1024, 2816, 24, 16, 4),
    "llama-1.1b": PRESETS["1.1b"],
    "llama-7b-8": replace(PRESETS["7b"], layers=8),
    "llama-7b": PRESETS["7b"],
}
_MOE = replace(MOE_PRESETS["qwen3-30b"], vocab=32000)
MOE = {f"moe-30b-{layers}": replace(_MOE, layers=layers) for layers in (2, 6)}


def make(name: str, folder: Path) -> Path:
    """The folder of that model below `folder`; "-int4" after a name: int4 by 64 of it."""
    target = folder / name
    if name.endswith("-int4"):
        if not (target / "config.json").exists():
            source = make(name.removesuffix("-int4"), folder)
            way = ("--method", "int4", "--zero-points", "rtn", "--quiet")
            command = ("-m", "pipeload", "quantize", str(source), str(target), *way)
            subprocess.run([sys.executable, *command], check=True)
        return target
    if name in LLAMA:
        return make_llama(LLAMA[name], target)
    if name in MOE:
        return make_moe(MOE[name], target)
    shape = LIBRARY[name]
    config = getattr(transformers, shape.config)(**shape.settings)
    with torch.device("meta"):
        model = getattr(transformers, shape.model)(config)
    told: dict[str, Any] = config.to_dict() | {"architectures": [shape.model]}
    told["torch_dtype"] = {"fp32": "float32", "fp16": "float16"}[shape.dtype]
    names = [(name, tuple(one.shape)) for name, one in model.named_parameters()]
    return make_checkpoint(shape, names, told, target)
