#!/usr/bin/env python3
"""The makers' own programs against ours: what they pack, and what they compute.

    pip install torch==2.13.0 transformers==5.24.0 compressed-tensors
    pip install --no-deps --no-build-isolation gptqmodel   # with BUILD_CUDA_EXT=0
    python tests/tools/original_packers.py

gptqmodel is no dependency of anything here; what it imports besides has to be there. One weight is
packed by gptqmodel as GPTQ and AWQ and by tests/support/packers.py: the same bytes, or it ends
with 1. Then Linears of several shapes are multiplied by its kernel of torch's core and by converted
ones, in bf16 and fp16, for 1 to 192 rows of input: the same bits. Prints the digests that
tests/rooms/formats/codes/test_codes.py holds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeload.formats.codes.coded_weight import Grid
from pipeload.formats.codes.gptq import Gptq
from pipeload.formats.integers.linear import Int4Linear
from pipeload.formats.integers.order import kernel_order, pack
from tests.support.packers import (
    Packed,
    Way,
    awq,
    digest,
    entries_of,
    gptq,
    gptq_v2,
    known_codes,
    random_codes,
)

_SHAPES = (
    (256, 512, 128, False),
    (512, 256, 64, True),
    (128, 384, 32, True),
    (256, 256, 64, False),
)
_ROWS = (1, 2, 3, 4, 7, 16, 17, 64, 100, 192)


def original(kind: str, packed: Packed) -> Any:
    """gptqmodel's module with that weight."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.nn_modules.qlinear.torch_aten_kernel import TorchAtenLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear

    rows, columns = packed.codes.shape
    linear = nn.Linear(columns, rows, bias=False)
    linear.weight.data = packed.numbers
    made = {"gptq": TorchLinear, "awq": AwqTorchLinear, "product": TorchAtenLinear}[kind](
        bits=4,
        group_size=columns // len(packed.scale),
        sym=False,
        desc_act=bool((packed.group_of.diff() < 0).any()),
        in_features=columns,
        out_features=rows,
        bias=False,
        register_buffers=True,
    )
    if kind == "awq":
        made.pack(linear, packed.scale.t(), packed.zero.t())
    else:
        zero = packed.zero.t().float()
        made.pack_original(linear, packed.scale.float().t(), zero, packed.group_of.int())
    return made


def packs_alike() -> bool:
    """Whether all packers make the same bytes."""
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    alike = True
    for name, pack_it in (("gptq", gptq), ("gptq_v2", gptq_v2), ("awq", awq)):
        packed = known_codes(shuffled=name == "gptq_v2")
        module = original(name.partition("_")[0], packed)
        if name == "gptq":
            convert_gptq_v2_to_v1_format_module(module, QuantizeConfig(bits=4, group_size=32))
        for key, ours in pack_it("", packed).items():
            theirs = getattr(module, key).to(ours.dtype)
            same = torch.equal(theirs, ours)
            print(f"{name} {key}: {digest(theirs)}, {'as ours' if same else 'OURS DIFFERS'}")
            alike &= same
    return alike


def multiplies_alike(rows: int, columns: int, group: int, *, shuffled: bool) -> bool:
    """Whether products are the same bits."""
    way = Way({}, gptq_v2, group=group, shuffled=shuffled)
    generator = torch.Generator().manual_seed(rows + group)
    packed = random_codes((rows, columns), way, generator, torch.float16)
    tensors = gptq_v2("", packed)
    config = {"bits": 4, "checkpoint_format": "gptq_v2"}
    (weight,) = Gptq().find(config, entries_of({f"w.{n}": t for n, t in tensors.items()}))
    parts = {key: tensors[entry.name[2:]] for key, entry in weight.parts.items()}
    codes = weight.decode(parts)
    alike = True
    for dtype in (torch.bfloat16, torch.float16):
        theirs = original("product", packed)
        theirs.validate_once()
        theirs.post_init()
        theirs.eval()
        reordered = codes.columns is not None
        ours = Int4Linear(
            columns,
            rows,
            bias=False,
            group_size=group,
            order=kernel_order(),
            reordered=reordered,
            dtype=dtype,
        )
        ours.weight.data = pack(codes.rows(0, rows), kernel_order())
        assert isinstance(codes.grid, Grid)
        ours.scales_and_zeros.data = codes.grid.scales_and_zeros(dtype)
        if ours.columns is not None and codes.columns is not None:
            ours.columns.data = codes.columns
        for count in _ROWS:
            given = torch.randn(count, columns, generator=generator).to(dtype)
            same = torch.equal(theirs(given), ours.by_kernel(ours.in_order(given)))
            alike &= same
            if not same:
                print(f"{rows} x {columns} by {group}, {dtype}, {count} rows: differs")
    return alike


def main() -> int:
    """Compare everything. Returns 1 if anything differs."""
    torch.set_grad_enabled(False)
    alike = packs_alike()
    for rows, columns, group, shuffled in _SHAPES:
        same = multiplies_alike(rows, columns, group, shuffled=shuffled)
        print(f"products of {rows} x {columns} by {group}: {'equal' if same else 'DIFFER'}")
        alike &= same
    return 0 if alike else 1


if __name__ == "__main__":
    sys.exit(main())
