"""Floats of GGUF's blocks: the package's own, to the bit, whoever makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pipeload.checkpoint.gguf import BLOCKS
from pipeload.formats.gguf import kernel
from pipeload.formats.gguf.blocks import Blocks
from tests.support.gguf_models import MADE_UP

if TYPE_CHECKING:
    from collections.abc import Callable

    Unpack = Callable[..., None]

gguf: Any = pytest.importorskip("gguf")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BITS = {4: torch.int32, 2: torch.int16}
SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)} | MADE_UP
ROWS, COLUMNS = 24, 1024


@pytest.fixture(params=["kernel", "package"])
def unpack(request: pytest.FixtureRequest) -> Unpack:
    """Both ways; the kernel is skipped where none can be made."""
    if request.param == "package":
        return kernel.unpack_by_package
    if kernel.compiled() is None:
        pytest.skip("no compiler, or no AVX2")
    return kernel.unpack


def stored(kind: str, scales: Any = None, *, rows: int = ROWS, seed: int = 0) -> torch.Tensor:
    """Rows of random blocks; any bits are valid beside `scales`, random ones if None."""
    random = np.random.default_rng(seed)
    values, nbytes = BLOCKS[kind]
    blocks = random.integers(0, 256, (rows * COLUMNS // values, nbytes), dtype=np.uint8)
    for at in SCALES[kind]:
        some = random.standard_normal(len(blocks)) if scales is None else scales
        halves = np.resize(np.asarray(some, np.float16), len(blocks))
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return torch.from_numpy(blocks.reshape(rows, -1))


def wanted(raw: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """What a plain load makes of it."""
    number = gguf.GGMLQuantizationType[kind]
    with np.errstate(invalid="ignore", over="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(raw.numpy(), number)).to(dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    kind = BITS[one.dtype.itemsize]
    return torch.equal(one.view(kind), other.view(kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", kernel.COMPILED)
def test_bits(kind: str, dtype: torch.dtype, unpack: Unpack) -> None:
    """Of every type, in every dtype, with scales large and small."""
    for scales in (None, [1e-3, -2e-3, 6e-8, 0.0, -0.0, 3.0]):
        raw = stored(kind, scales)
        out = torch.empty((ROWS, COLUMNS), dtype=dtype)
        unpack(raw, kind, out)
        assert same_bits(out, wanted(raw, kind, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", kernel.COMPILED)
def test_scales_that_are_no_numbers(kind: str, dtype: torch.dtype, unpack: Unpack) -> None:
    """Infinite where plain's are, and no number where plain has none: never a number instead."""
    all_ones = np.array([0x7FFF, 0xFFFF, 0x7E00, 0x7C00, 0xFC00], np.uint16).view(np.float16)
    raw = stored(kind, all_ones)
    out = torch.empty((ROWS, COLUMNS), dtype=dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        unpack(raw, kind, out)
    expected = wanted(raw, kind, dtype)
    assert expected.isnan().any()
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_rows_in_another_order(kind: str, unpack: Unpack) -> None:
    """Are those rows, each whole."""
    raw = stored(kind)
    order = torch.randperm(ROWS)[:7].tolist()
    out = torch.empty((7, COLUMNS), dtype=torch.bfloat16)
    unpack(raw, kind, out, order)
    assert same_bits(out, wanted(raw, kind, torch.bfloat16)[order])


@pytest.mark.parametrize("kind", kernel.FLOATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_floats(kind: str, dtype: torch.dtype) -> None:
    """Are cast by way of fp32, as a plain load does; in any order."""
    values = torch.randn(6, 33).to(kernel.FLOATS[kind])
    raw = values.view(torch.uint8)
    for order in (None, [3, 1, 5]):
        picked = values if order is None else values[order]
        out = torch.empty(picked.shape, dtype=dtype)
        kernel.unpack(raw, kind, out, order)
        assert same_bits(out, picked.float().to(dtype))


def test_blocks_anywhere_in_memory() -> None:
    """Where a file has them: at any address."""
    raw = stored("Q6_K")
    for shift in (1, 2, 3):
        moved = torch.empty(raw.numel() + 3, dtype=torch.uint8)[shift : shift + raw.numel()]
        moved.copy_(raw.view(-1))
        out = torch.empty((ROWS, COLUMNS))
        kernel.unpack(moved.view(raw.shape), "Q6_K", out)
        assert same_bits(out, wanted(raw, "Q6_K", torch.float32))


def test_which_types_can_be_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the kernel's with or without it; of others those that the package knows."""
    packages = {"IQ4_XS", "TQ1_0", "IQ1_M", *kernel.COMPILED}
    for compiled in (kernel.compiled, lambda: None):
        monkeypatch.setattr(kernel, "compiled", compiled)
        kernel.can_unpack.cache_clear()
        assert all(map(kernel.can_unpack, [*packages, "F16", "BF16", "F32"]))
        assert not any(map(kernel.can_unpack, ["I32", "F64", "Q8_1", "Q8_K"]))
    kernel.can_unpack.cache_clear()


def interleaved(rows: int, head: int) -> torch.Tensor:
    """Which stored row each is, where llama.cpp has the halves of a head in turns."""
    return torch.arange(rows).view(-1, head // 2, 2).transpose(1, 2).reshape(-1)


@pytest.mark.parametrize("head", [0, 8, 6])
@pytest.mark.parametrize(("start", "stop"), [(0, 24), (0, 5), (3, 24), (7, 9), (10, 21), (4, 4)])
def test_parts_of_a_weight(head: int, start: int, stop: int) -> None:
    """Rows are made of the stored rows that are asked for, part of a part as well."""
    kind = "Q4_0"
    raw = stored(kind)
    order = tuple(interleaved(head, head).tolist()) if head else ()
    places = interleaved(ROWS, head) if head else torch.arange(ROWS)
    whole = wanted(raw, kind, torch.float32)[places]
    rows, part = Blocks(kind, raw.shape[1], order).part(start, stop)
    assert not head or len(rows) % head == 0
    for first, last in [(0, stop - start), (1, stop - start), (0, (stop - start) // 2)]:
        if last <= first:
            continue
        inner, how = part.part(first, last)
        out = torch.empty((last - first, COLUMNS))
        how.fill(raw[rows.start + inner.start : rows.start + inner.stop], out)
        assert torch.equal(out, whole[start + first : start + last])


@pytest.mark.parametrize(("head", "skipped"), [(0, 0), (128, 0), (128, 64), (96, 32)])
def test_steps(head: int, skipped: int) -> None:
    """All rows, none twice; no more than 4 MB stored at once, of the widest rows there are."""
    for columns in (32, 4096, 16384):
        row_bytes = columns // 32 * 34
        blocks = Blocks("Q8_0", row_bytes, tuple(range(head)), skipped)
        steps = [*blocks.steps(1000, 4 * columns)]
        assert [row for step in steps for row in range(*step)] == [*range(1000)]
        for start, stop in steps:
            rows, _ = blocks.part(start, stop)
            assert len(rows) * row_bytes <= 4 << 20


def test_all_of_a_small_weight_at_once() -> None:
    """Where it is less than a step."""
    assert [*Blocks("Q4_0", 18, (), 0).steps(100, 128)] == [(0, 100)]
