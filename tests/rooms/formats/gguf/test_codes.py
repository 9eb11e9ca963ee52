"""Integers of GGUF's blocks: the codes of the file, which stand for what the package makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pipeload.checkpoint.gguf import BLOCKS
from pipeload.formats.gguf.codes import AS_INT4, GROUP, int4_of
from pipeload.formats.integers.rounding import from_int4

gguf: Any = pytest.importorskip("gguf")
ROWS, COLUMNS = 16, 512
SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2)}


def stored(kind: str) -> torch.Tensor:
    """Rows of random blocks with scales of both signs."""
    random = np.random.default_rng(4)
    values, nbytes = BLOCKS[kind]
    blocks = random.integers(0, 256, (ROWS * COLUMNS // values, nbytes), dtype=np.uint8)
    for at in SCALES[kind]:
        some = random.standard_normal(len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = some.view(np.uint8).reshape(-1, 2)
    return torch.from_numpy(blocks.reshape(ROWS, -1))


@pytest.mark.parametrize("kind", AS_INT4)
def test_numbers(kind: str) -> None:
    """In fp32 the package's, to what two orders of a sum differ by; without a sum, to the bit."""
    raw = stored(kind)
    number = gguf.GGMLQuantizationType[kind]
    wanted = torch.from_numpy(gguf.quants.dequantize(raw.numpy(), number))
    made = int4_of(raw, kind, torch.float32)
    assert made.values.shape == (ROWS, COLUMNS)
    assert made.scales_and_zeros.shape == (COLUMNS // GROUP, ROWS, 2)
    assert int(made.values.max()) == 15
    tolerance = 0 if kind == "Q4_0" else 1e-5 * float(wanted.abs().max())
    torch.testing.assert_close(from_int4(*made), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", AS_INT4)
def test_codes(kind: str) -> None:
    """What numbers are least and largest in a group has the least and the largest code of it."""
    raw = stored(kind)
    number = gguf.GGMLQuantizationType[kind]
    floats = torch.from_numpy(gguf.quants.dequantize(raw.numpy(), number))
    made = int4_of(raw, kind, torch.bfloat16)  # codes do not depend on how scales are rounded
    codes = made.values.view(ROWS, -1, GROUP).int()
    scale = int4_of(raw, kind, torch.float32).scales_and_zeros[..., 0].t()[..., None]
    numbers = floats.view(ROWS, -1, GROUP)
    steps = ((numbers - numbers[..., :1]) / torch.where(scale == 0, 1, scale)).round().int()
    known = (scale != 0).expand_as(codes)
    assert bool(known.any())
    assert torch.equal(steps[known], (codes - codes[..., :1])[known])
