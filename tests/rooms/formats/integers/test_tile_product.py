"""Products by AMX: near the exact ones, and the same bits in whatever company."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from pipeload.formats.integers import tile_product
from pipeload.formats.integers.linear import Int4Linear, Int8Linear
from pipeload.formats.integers.order import BY_ROWS, pack
from pipeload.formats.integers.rounding import from_int4
from pipeload.formats.integers.wide_product import most_by_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MANY = 1100
"""Rows of input that are multiplied in parts."""

needs_tiles = pytest.mark.skipif(
    not tile_product.takes(torch.bfloat16, 32), reason="no AMX, or no compiler that knows it"
)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def weight_of(
    out: int, columns: int, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes and statistics, of int8 where `group` is 0, and what they stand for: [out, in]."""
    draw = torch.Generator().manual_seed(out)
    if not group:
        codes = torch.randint(-127, 128, (out, columns), generator=draw, dtype=torch.int8)
        scale = random(out, dtype=dtype)
        return codes, scale, codes.double() * scale.double()[:, None]
    codes = torch.randint(0, 16, (out, columns), generator=draw, dtype=torch.uint8)
    both = random(columns // group, out, 2, dtype=dtype)
    return pack(codes, BY_ROWS), both, from_int4(codes, both).bfloat16().double()


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_tiles
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [0, 32, 64, 128])
def test_products_are_rounded_once(group: int, dtype: torch.dtype) -> None:
    """Of the exact inputs with the weight in bf16: as near as bf16 can be."""
    for out, columns in ((16, 128), (304, 4224), (130 - 2 * bool(group), 2176)):
        codes, statistics, weight = weight_of(out, columns, group, dtype)
        x = random(40, columns)
        exact = x.double() @ weight.T
        got = tile_product.multiply(x, codes, statistics)
        nearest = exact.bfloat16()
        assert (got.dtype, got.shape) == (torch.bfloat16, exact.shape)
        assert (got.double() - exact).norm() < 1.01 * (nearest.double() - exact).norm()


@needs_tiles
@pytest.mark.parametrize("group", [0, 64])
def test_company_changes_no_bit(group: int) -> None:
    """Rows of input by themselves, rows of the weight by themselves, any number of threads."""
    out, columns = 4400, 2112
    codes, statistics, _ = weight_of(out, columns, group, torch.bfloat16)
    x = random(MANY, columns)
    whole = tile_product.multiply(x, codes, statistics)
    for count in (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 512, 513):
        for number in (1, 2, 3, 40):
            torch.set_num_threads(number)
            some = tile_product.multiply(x[:count], codes, statistics)
            assert torch.equal(some, whole[:count]), (count, number)
    torch.set_num_threads(2)
    for start, stop in ((0, 16), (16, 160), (160, 4400)):
        told = statistics[:, start:stop].contiguous() if group else statistics[start:stop]
        some = tile_product.multiply(x[:20], codes[start:stop], told)
        assert torch.equal(some, whole[:20, start:stop])


@needs_tiles
def test_any_number_of_rows_of_int8() -> None:
    """Also fewer than a tile has, beside memory that is nobody's."""
    codes, scale, _ = weight_of(71, 96, 0, torch.float32)
    x = random(18, 96)
    whole = tile_product.multiply(x, codes, scale)
    for out in range(1, 71):
        made = tile_product.multiply(x, codes[:out], scale[:out])
        assert torch.equal(made, whole[:, :out]), out


@needs_tiles
def test_what_is_no_number_stays_in_its_row() -> None:
    """Tiles overlap, and the last ones come twice."""
    codes, scale, _ = weight_of(32, 96, 0, torch.float32)
    x = random(21, 96)
    wanted = tile_product.multiply(x, codes, scale)
    x[18, 5] = torch.nan
    made = tile_product.multiply(x, codes, scale)
    assert made[18].isnan().all()
    others = [row for row in range(21) if row != 18]
    assert torch.equal(made[others], wanted[others])


@needs_tiles
def test_the_librarys_tiles_stay() -> None:
    """It may have set them for its next product."""
    codes, scale, _ = weight_of(64, 1024, 0, torch.float32)
    one, other = random(48, 1024), random(1024, 1056)
    wanted = one @ other
    for count in (3, 20, 48):
        tile_product.multiply(one[:count], codes, scale)
        assert torch.equal(one @ other, wanted)


@needs_tiles
@pytest.mark.parametrize("bits", [8, 4])
def test_a_linear_takes_it(bits: int) -> None:
    """For more rows than its kernel for few, of bf16 alone; int4 by torch's kernel has no tiles."""
    group = 64 if bits == 4 else 0
    codes, statistics, _ = weight_of(80, 192, group, torch.bfloat16)
    packed: Int4Linear | Int8Linear
    if bits == 4:
        packed = Int4Linear(192, 80, bias=False, group_size=64, order=BY_ROWS, dtype=torch.bfloat16)
        packed.scales_and_zeros.data = statistics
    else:
        packed = Int8Linear(192, 80, bias=False, dtype=torch.bfloat16)
        packed.scale.data = statistics
    packed.weight.data = codes
    most = most_by_kernel(bits, torch.bfloat16, rounded=True, tiled=True)
    x = random(most + 1, 192)
    by_tiles = tile_product.multiply(x, codes, statistics)
    assert torch.equal(packed(x), by_tiles)
    assert not torch.equal(packed(x[:most]), by_tiles[:most])
    assert packed.sizes.of(most + 1) == tile_product.temporary_bytes(most + 1, 80, 192)
    assert not packed.double().sizes.tiled
    packed.bfloat16()
    packed.exact_inputs = True
    packed.settle()
    assert packed.sizes.tiled == (bits == 8)


@pytest.mark.parametrize("rows", [3, 40, 2000])
@pytest.mark.parametrize("number", [1, 2, 64])
def test_what_the_kernel_is_given(rows: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for each thread, at a multiple of 64, of which no byte is not counted."""
    given: list[int] = []
    kernel = SimpleNamespace(product=lambda *numbers: given.extend(numbers))
    monkeypatch.setattr(tile_product, "compiled", lambda: kernel)
    monkeypatch.setattr(torch, "get_num_threads", lambda: number)
    codes, both, _ = weight_of(4096, 4096, 64, torch.bfloat16)
    made = tile_product.multiply(random(rows, 4096), codes, both)
    assert made.shape == (rows, 4096)
    memory, (count, out, columns, group, block, own, threads) = given[3], given[5:12]
    assert memory % 64 == own % 64 == 0
    assert (count, out, columns, group, threads) == (rows, 4096, 4096, 64, number)
    assert own == block * (2 * 2048 + 4 * min(512, -(-rows // 32) * 32))
    assert block == {1: 128, 2: 128, 64: 32}[number]
    assert tile_product.temporary_bytes(rows, out, columns) == threads * own + 64


def test_where_there_are_no_tiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other dtypes, odd columns, torch told not to use AVX-512, nothing to compile with."""
    assert not tile_product.takes(torch.float32, 64)
    assert not tile_product.takes(torch.bfloat16, 48)
    tile_product._is_there.cache_clear()
    tile_product.compiled.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
            assert not tile_product.takes(torch.bfloat16, 64)
        tile_product._is_there.cache_clear()
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
        monkeypatch.setattr("pipeload.formats.compiler.compiler", lambda: None)
        with caplog.at_level("INFO", "pipeload"):
            assert not tile_product.takes(torch.bfloat16, 64)
        assert "many rows are multiplied with int8 and int4 weights as floats" in caplog.text
    finally:
        tile_product._is_there.cache_clear()
        tile_product.compiled.cache_clear()
