"""Our kernel for int8: the bits of a definition in torch's operations, in whatever company."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeload.errors import UnsupportedModelError
from pipeload.formats.integers import byte_product
from pipeload.formats.integers.linear import Int8Linear
from pipeload.formats.integers.rounding import to_int8
from pipeload.formats.integers.wide_product import most_by_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUP, LANES = byte_product.GROUP, 16

needs_kernel = pytest.mark.skipif(byte_product.compiled() is None, reason="no compiler, or no AVX2")


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def codes(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    gap = got.detach().double() - wanted.detach().double()
    return float(gap.norm() / wanted.detach().double().norm())


def defined(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What the kernel computes, operation by operation.

    In each group of 128 columns integers are added up exactly, in 16 lanes: two columns side by
    side share one. Lanes are floats from group to group; then halves of them are added up.
    """
    count, columns = rows.shape
    lanes = torch.zeros(count, len(weight), LANES)
    for start in range(0, columns, GROUP):
        some = rows[:, start : start + GROUP].float()
        largest = some.abs().amax(1, keepdim=True)
        by = torch.full_like(largest, 32767) / largest
        rounded = (some * by).round().where(largest >= 1e-33, 0).to(torch.int64)
        width = rounded.shape[1] + -rounded.shape[1] % (2 * LANES)
        pad = (0, width - rounded.shape[1])
        one = torch.nn.functional.pad(rounded, pad)[:, None]
        other = torch.nn.functional.pad(weight[:, start : start + GROUP].to(torch.int64), pad)
        sums = (one * other).view(count, len(weight), -1, LANES, 2).sum((2, 4))
        step = (largest / 32767).where(largest >= 1e-33, 0)
        lanes = lanes + sums.float() * step[:, :, None]
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return (lanes[..., 0] * scale.float()).to(rows.dtype)


def int8(rows: int, dtype: torch.dtype, columns: int = 144) -> Int8Linear:
    made = Int8Linear(columns, rows, bias=False, dtype=dtype, path="some")
    made.weight.data, made.scale.data = to_int8(random(rows, columns, dtype=dtype))
    return made


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_kernel
@pytest.mark.parametrize("vnni", [True, False])
@pytest.mark.parametrize("columns", [16, 48, 128, 144, 176, 416])
def test_the_bits_of_its_definition(columns: int, vnni: bool) -> None:
    """For 1 to 17 rows of input, any number of rows of weight, last groups and half steps."""
    for out in (1, 3, 4, 7, 65):
        for dtype in DTYPES:
            weight, scale = codes(out, columns), random(out, dtype=dtype)
            x = random(17, columns, dtype=dtype)
            wanted = defined(x, weight, scale)
            for count in range(1, 18):
                got = byte_product.multiply(x[:count], weight, scale, vnni=vnni)
                assert torch.equal(got, wanted[:count]), (out, count)


@needs_kernel
def test_scales_of_other_dtypes() -> None:
    """Experts keep theirs as they are stored."""
    x, weight = random(3, 144, dtype=torch.bfloat16), codes(9, 144)
    for dtype in DTYPES:
        scale = random(9, dtype=dtype)
        assert torch.equal(byte_product.multiply(x, weight, scale), defined(x, weight, scale))


@needs_kernel
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("vnni", [True, False])
def test_company_changes_no_bit(vnni: bool) -> None:
    """Rows cut anywhere, at any address, by one, two and three threads."""
    columns, out = 1040, 131
    weight, scale = codes(out, columns), random(out, dtype=torch.bfloat16)
    x = random(5, columns, dtype=torch.bfloat16)
    wanted = defined(x, weight, scale)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert torch.equal(byte_product.multiply(x, weight, scale, vnni=vnni), wanted)
    moved = torch.empty(weight.numel() + 3, dtype=torch.int8)[3:].view(out, columns).copy_(weight)
    for cut in range(1, out):
        parts = [
            byte_product.multiply(x, moved[some], scale[some], vnni=vnni)
            for some in (slice(0, cut), slice(cut, out))
        ]
        assert torch.equal(torch.cat(parts, 1), wanted), cut


@needs_kernel
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("columns", [16, 144, 1056, 2192])
def test_many_rows_have_the_bits_of_one(columns: int) -> None:
    """However many, where they are multiplied in another way, and more than are rounded at once."""
    out = 39  # the last ones are no four
    weight, scale = codes(out, columns), random(out, dtype=torch.bfloat16)
    x = random(byte_product.AT_ONCE + 5, columns, dtype=torch.bfloat16)
    alone = torch.cat([byte_product.multiply(row, weight, scale) for row in x.split(1)])
    for count in [*range(1, 70), len(x)]:
        torch.set_num_threads(1 + count % 3)
        made = byte_product.multiply(x[:count], weight, scale, vnni=False)
        assert torch.equal(made, alone[:count]), count


@needs_kernel
def test_inputs_that_are_hard_to_round() -> None:
    """Zeros, the smallest and the largest numbers; what is none makes none, in its row alone."""
    packed = int8(16, torch.float32, columns=272)
    given = packed.weight.data, packed.scale.data
    x = random(6, 272)
    x[0] = 0
    x[1, 128:256] = 1e-42
    x[2, :128] *= 1e30
    x[3, 5] = torch.nan
    x[4, 260] = torch.inf
    for vnni in (True, False):
        made = byte_product.multiply(x, *given, vnni=vnni)
        assert torch.equal(made[[0, 1, 2, 5]], defined(x[[0, 1, 2, 5]], *given))
        assert not made[0].any()
        assert not made[3:5].isfinite().any()
    assert byte_product.multiply(x.bfloat16(), *given)[3].isnan().all()


@needs_kernel
def test_sums_do_not_overflow() -> None:
    """The largest integers of all, in every column."""
    x, weight = torch.ones(2, 4096), torch.full((5, 4096), -127, dtype=torch.int8)
    made = byte_product.multiply(x, weight, torch.ones(5))
    assert error(made, torch.full((2, 5), -127.0 * 4096)) < 1e-6


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_takes_it(dtype: torch.dtype) -> None:
    """For few rows of any dtype; its error is far below that of torch's in bf16."""
    packed = int8(80, dtype)
    most = min(64, most_by_kernel(8, dtype, rounded=True))
    x = random(most + 1, 144, dtype=dtype)
    weight = packed.weight.data, packed.scale.data
    assert torch.equal(packed(x[:most]), byte_product.multiply(x[:most], *weight))
    exact = x.double() @ packed.dequantised().double().T
    assert error(packed(x), exact) < max(5e-5, 16 * torch.finfo(dtype).eps)
    assert packed(x[:3].double()).dtype == torch.float64
    assert error(packed(x[:3].double()), exact[:3]) < 1e-5
    packed.double()
    assert packed(x[:3]).dtype == dtype
    assert error(packed(x[:3]), exact[:3]) < max(5e-5, 16 * torch.finfo(dtype).eps)


@needs_kernel
def test_memory_of_rounded_inputs() -> None:
    """What is counted is what is allocated."""
    codes_of_row, scales = 2 * (144 + 16), 4 * 2
    assert int8(80, torch.bfloat16).sizes.of(12) == 12 * (codes_of_row + scales)


def test_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, or where inputs are to stay exact, it is torch's."""
    x = random(3, 144, dtype=torch.bfloat16)
    packed = int8(80, torch.bfloat16)
    wanted = torch._weight_int8pack_mm(x, packed.weight.data, packed.scale.data)
    exact = copy.deepcopy(packed)
    exact.exact_inputs = True
    exact.settle()
    assert torch.equal(exact(x), wanted)
    assert exact.sizes.of(3) == 0
    monkeypatch.setattr(byte_product, "compiled", lambda: None)
    packed.settle()
    assert torch.equal(packed(x), wanted)
    assert most_by_kernel(8, torch.bfloat16, rounded=True) == 0


def test_nothing_to_compile_with(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said what multiplies instead."""
    monkeypatch.setattr("pipeload.formats.compiler.compiler", lambda: None)
    with caplog.at_level("INFO", "pipeload"):
        assert byte_product.compiled.__wrapped__() is None
    assert "int8 weights are multiplied by torch's kernel" in caplog.text


def test_a_pickle_of_earlier_versions() -> None:
    """It knew no exact inputs, and computes as any other."""
    packed, x = int8(80, torch.bfloat16), random(3, 144, dtype=torch.bfloat16)
    del packed.__dict__["exact_inputs"]
    assert torch.equal(pickle.loads(pickle.dumps(packed))(x), int8(80, torch.bfloat16)(x))


@pytest.mark.parametrize("count", [3, 300])
def test_tensors_without_memory(count: int) -> None:
    """They tell shapes, where an address would end the process; two devices are refused."""
    packed = int8(80, torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = packed(torch.randn(count, 144, dtype=torch.bfloat16))
    assert (made.shape, made.dtype) == ((count, 80), torch.bfloat16)
    x = torch.empty(count, 144, dtype=torch.bfloat16, device="meta")
    with pytest.raises(UnsupportedModelError, match="on 'meta', its int8 weight on 'cpu'"):
        packed(x)
    assert packed.to("meta")(x).shape == (count, 80)


# What dynamo says of addresses, once in a process.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_torch_compile() -> None:
    """It goes around the kernel: few rows and many, the same bits."""
    torch._dynamo.reset()
    packed = int8(80, torch.bfloat16)
    compiled = torch.compile(packed, backend="eager")
    for count in (1, 3, 64):
        x = random(count, 144, dtype=torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(compiled(x), packed(x))
