#!/usr/bin/env python3
"""Whole checkpoints that AMD's Quark makes, against what it says itself their numbers are.

    pip install --no-deps amd-quark scipy onnx ml_dtypes onnxslim onnxscript onnx_ir joblib \
        zstandard plotly narwhals ninja evaluate pandas pytz
    python -m tests.tools.quark_checkpoints FOLDER

It is no dependency of anything here. A random LLaMA is quantised in each way and saved by its own
exporter, and plain transformers loads it with its modules. The weights that those make of what is
stored have to be the very numbers that are decoded here, and a streamed model in fp32 has to have
their logits. Where a kernel takes the integers, `pipeload convert` has to hold them, and compute
what is streamed. Status 1 if any of it is otherwise. It prints the digests that
tests/rooms/formats/codes/test_quark.py holds, too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import pipeload
from pipeload.formats.codes.registry import codes_format
from tests.rooms.formats.codes.test_quark import HALVES, ORIGINAL, known
from tests.support.packers import SIZES, digest, entries_of
from tests.tools.original_checkpoints import check

NEAR: Final = 1e-5
"""Products in fp32 are summed in another order."""
_GROUP: Final = {"ch_axis": 1, "group_size": 32}
_ROWS: Final = {"ch_axis": 0}
_ALL: Final = {"observer_method": "min_max", "is_dynamic": False}
# The name of a specification of Quark's, what it is given, and whether our kernels take it.
WAYS: Final[dict[str, tuple[str, dict[str, Any], str, bool]]] = {
    "int4 by groups": ("Int4PerGroupSpec", {**_GROUP, "symmetric": True}, "reorder", True),
    "int4, zeros": ("Int4PerGroupSpec", {**_GROUP, "symmetric": False}, "order", True),
    "uint4 by groups": ("Uint4PerGroupSpec", {**_GROUP, "symmetric": False}, "reorder", True),
    "uint4 in order": ("Uint4PerGroupSpec", {**_GROUP, "symmetric": False}, "order", True),
    "int4 by rows": ("Int4PerChannelSpec", {**_ROWS, "symmetric": False}, "reorder", True),
    "int4 by rows in order": ("Int4PerChannelSpec", {**_ROWS, "symmetric": True}, "order", True),
    "int8 by rows": ("Int8PerChannelSpec", {**_ROWS, "symmetric": True}, "reorder", True),
    "int8 for all": ("Int8PerTensorSpec", {**_ALL, "symmetric": True}, "reorder", True),
    "int8 by groups": ("Int8PerGroupSpec", {**_GROUP, "symmetric": True}, "reorder", False),
    "uint8 by rows": ("Uint8PerChannelSpec", {**_ROWS, "symmetric": False}, "reorder", False),
    "fp8 for all": ("FP8E4M3PerTensorSpec", _ALL, "reorder", False),
    "fp8 by rows": ("FP8E4M3PerChannelSpec", {**_ROWS, "is_dynamic": False}, "reorder", False),
    "fp8 of e5m2": ("FP8E5M2PerTensorSpec", _ALL, "reorder", False),
    "fp4": (
        "FP4PerGroupSpec",
        {"ch_axis": -1, "group_size": 32, "is_dynamic": False},
        "reorder",
        False,
    ),
    "mxfp4": ("OCP_MXFP4Spec", {"ch_axis": -1, "is_dynamic": False}, "reorder", False),
}


def save(folder: Path, spec: str, given: dict[str, Any], order: str) -> None:
    """Save a model that Quark has quantised."""
    from quark.torch import ModelQuantizer, export_safetensors
    from quark.torch.quantization.config import config as quark

    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model("llama", **SIZES)).to(torch.bfloat16)
    weight = getattr(quark, spec)(**given).to_quantization_spec()
    of_all = quark.QLayerConfig(weight=weight)
    quantizer = ModelQuantizer(quark.QConfig(global_quant_config=of_all, exclude=["lm_head"]))
    made = quantizer.freeze(quantizer.quantize_model(model, [torch.arange(8)[None]]))
    export_safetensors(
        model=made,
        output_dir=str(folder),
        custom_mode="quark",
        weight_format="real_quantized",
        pack_method=order,
    )


def decodes_alike(folder: Path, numbers: dict[str, torch.Tensor]) -> bool:
    """Whether all of these numbers are decoded, and no others."""
    told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings, tensors = told["quantization_config"], load_file(folder / "model.safetensors")
    form = codes_format(settings)
    assert form is not None
    found = form.find(settings, entries_of(tensors))
    same = {weight.name for weight in found} == {f"{path}.weight" for path in numbers}
    for weight in found:
        codes = weight.decode({key: tensors[entry.name] for key, entry in weight.parts.items()})
        made = codes.grid.numbers(codes.rows(0, weight.shape[0]), 0)
        same &= torch.equal(made, numbers[weight.name.removesuffix(".weight")])
    return same


def is_right(folder: Path, *, taken: bool) -> bool:
    """Whether it is what Quark says it is, decoded, streamed and converted."""
    auto: Any = AutoModelForCausalLM
    plain = auto.from_pretrained(folder, dtype=torch.float32).eval()
    numbers = {
        path: module._get_qweight(module.weight)
        for path, module in plain.named_modules()
        if hasattr(module, "weight_quantizer")
    }
    decoded = decodes_alike(folder, numbers)
    streamed = pipeload.from_pretrained(
        folder, dtype=torch.float32, memory_limit="4GB", exact_inputs=taken
    )
    ids = torch.arange(3, 20)[None]
    worst = float((streamed(ids).logits - plain(ids).logits).abs().max())
    print(f"{folder.name}: decoded alike: {decoded}; largest difference of logits {worst:.1e}")
    return decoded and worst <= NEAR and (not taken or check(folder, numbers, taken=True))


def print_digests() -> None:
    """Print what Quark packs of known codes and floats."""
    from quark.torch.utils.pack import create_pack_method

    for dtype, scheme, order in ORIGINAL:
        packed, by_groups = known(dtype, scheme), scheme == "per_group"
        less = 0 if dtype.startswith("u") else 1 << int(dtype[-1]) - 1
        packer = create_pack_method(scheme, dtype)
        zero = packed.zero.t() if by_groups else packed.zero[0]
        made = (packer.pack(each.int() - less, order == "reorder") for each in (packed.codes, zero))
        print(dtype, scheme, order, *(digest(each) for each in made))
    floats = torch.tensor(HALVES)[torch.arange(64 * 64).view(64, 64) * 7 % 16]
    print("fp4", digest(create_pack_method("per_group", "fp4").pack(floats, reorder=False)))


def main() -> int:
    """Check everything, in the folder that is named."""
    torch.set_grad_enabled(False)
    base, right = Path(sys.argv[1]), True
    for name, (spec, given, order, taken) in WAYS.items():
        save(base / name, spec, given, order)
        right &= is_right(base / name, taken=taken)
    print_digests()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
