#!/usr/bin/env python3
"""Whole checkpoints that hqq and torchao make, converted, against what those say their numbers are.

    pip install --no-deps hqq termcolor torchao aqlm
    python -m tests.tools.original_checkpoints FOLDER

None is a dependency of anything here. A random LLaMA is quantised by each in several ways and
saved; `pipeload convert` of it in fp32 has to hold the very numbers, and what is streamed as it is
has to compute what the converted one in bf16 does. What cannot be taken over must be refused by
name. Status 1 if any of it is otherwise. It prints the digests that
tests/rooms/formats/codes/test_codes.py holds, too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, TorchAoConfig

import pipeload
from pipeload.errors import UnsupportedModelError
from tests.support.packers import HQQ_PACKINGS, SIZES, aqlm, digest, known_codes, sawtooth

HQQ: Final = {(4, 64, 1): True, (4, 128, 1): True, (4, 64, 0): False, (3, 64, 1): True}
"""Bits, group and axis, and whether they are taken over."""
NEAR: Final = 1e-6
"""An offset is rounded where a zero is not."""


def save_by_hqq(folder: Path, bits: int, group: int, axis: int) -> dict[str, torch.Tensor]:
    """Save a model; returns the numbers of its Linears by their paths."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    config = AutoConfig.for_model("llama", **SIZES)
    model: Any = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    numbers = {}
    for path, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and path != "lm_head":
            how = BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis)
            made = HQQLinear(module, how, compute_dtype=torch.float32, device="cpu", del_orig=False)
            numbers[path] = made.dequantize().float()
            model.set_submodule(path, made)
    folder.mkdir(parents=True)
    tensors = {name: one.contiguous().clone() for name, one in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": "hqq", "quant_config": {}, "skip_modules": ["lm_head"]}
    told = config.to_dict() | {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    told |= {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(told), encoding="utf-8")
    return numbers


def save_by_torchao(folder: Path, floats: Path, how: Any) -> dict[str, torch.Tensor]:
    """The same, by the library's own loading and saving."""
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(
        floats, dtype=torch.bfloat16, quantization_config=TorchAoConfig(how), device_map="cpu"
    )
    model.save_pretrained(folder)
    numbers = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and path != "lm_head":
            one: Any = module.weight
            scale, zero = (
                each.float().repeat_interleave(one.shape[1] // each.shape[1], 1)
                for each in (one.scale, one.zero_point)
            )
            numbers[path] = (one.qdata.float() - zero) * scale
    return numbers


def check(folder: Path, numbers: dict[str, torch.Tensor], *, taken: bool) -> bool:
    """Whether it is taken over as it should be."""
    try:
        exact: Any = pipeload.convert(folder, folder / "fp32", dtype="float32")
    except UnsupportedModelError as error:
        print(f"{folder.name}: refused: {str(error)[:100]}")
        return not taken
    model: Any = AutoModelForCausalLM.from_pretrained(exact)
    worst = max(
        float((model.get_submodule(path).dequantised() - wanted).abs().max())
        for path, wanted in numbers.items()
    )
    made = pipeload.convert(folder, folder / "bf16")
    plain: Any = AutoModelForCausalLM.from_pretrained(made, dtype="auto")
    streamed = pipeload.from_pretrained(folder, dtype=torch.bfloat16, memory_limit="4GB")
    ids = torch.arange(3, 20)[None]
    same = torch.equal(streamed(ids).logits, plain(ids).logits)
    print(f"{folder.name}: largest difference {worst:.1e}; streamed is converted: {same}")
    return taken and same and worst <= NEAR


def main() -> int:
    """Check everything, in the folder that is named."""
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    from aqlm.utils import _dequantize_weight
    from hqq.core.bitpack import BitPack
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )

    base, right = Path(sys.argv[1]), True
    four: Any = vars(torch)["int4"]  # its stubs do not know it
    for (bits, group, axis), taken in HQQ.items():
        folder = base / f"hqq, {bits} bits by {group}, axis {axis}"
        right &= check(folder, save_by_hqq(folder, bits, group, axis), taken=taken)
    floats = base / "floats"
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    model.to(torch.bfloat16).save_pretrained(floats)
    ways = {
        "int8": Int8WeightOnlyConfig(),
        "w8a8": Int8DynamicActivationInt8WeightConfig(),
        "int4 by 32": IntxWeightOnlyConfig(weight_dtype=four, granularity=PerGroup(32)),
    }
    for name, how in ways.items():
        folder = base / f"torchao, {name}"
        right &= check(folder, save_by_torchao(folder, floats, how), taken=True)
        if name != "w8a8":
            linear = torch.nn.Linear(64, 64, bias=False)
            linear.weight.data = sawtooth()
            quantize_(linear, how)
            found: Any = linear.weight
            print(f"{name}: codes of the sawtooth {digest(found.qdata)}")
    for bits, name in HQQ_PACKINGS.items():
        codes = known_codes().codes.reshape(-1, 32) & (1 << bits) - 1
        print(f"hqq: known codes of {bits} bits {digest(getattr(BitPack, f'pack_{name}')(codes))}")
    found, numbers = aqlm("", torch.empty(64, 64))
    codes = found["codes"].view(torch.uint8).long()
    theirs = _dequantize_weight(codes, found["codebooks"].float(), found["scales"].float())
    right &= torch.equal(theirs, numbers)
    print(f"aqlm: known numbers {digest(theirs)}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
