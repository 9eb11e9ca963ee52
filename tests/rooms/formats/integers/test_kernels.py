"""Our kernels for int4: the bits of torch's operations, or of none in whatever company."""

from __future__ import annotations

import copy
import ctypes
import threading
from typing import TYPE_CHECKING

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeload.errors import UnsupportedModelError
from pipeload.formats.integers import product, unpack
from pipeload.formats.integers.linear import Int4Linear, Int8Linear
from pipeload.formats.integers.order import BY_ROWS, ORDERS, STORED, kernel_order, pack, reorder
from pipeload.formats.integers.rounding import from_int4, to_int4, to_int8
from pipeload.formats.integers.unpack import int4_block
from pipeload.formats.integers.wide_product import most_by_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeload.formats.integers.packed_linear import PackedLinear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = 576  # no multiple of 128
FEW = 16
"""Rows of input that every kernel is taken for."""

needs_kernel = pytest.mark.skipif(product.compiled() is None, reason="no compiler, or no AVX2")


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    gap = got.detach().double() - wanted.detach().double()
    return float(gap.norm() / wanted.detach().double().norm())


def int4(rows: int, group: int, dtype: torch.dtype, columns: int = COLUMNS) -> Int4Linear:
    made = Int4Linear(
        columns, rows, bias=True, group_size=group, order=BY_ROWS, dtype=dtype, path="some"
    )
    values, made.scales_and_zeros.data = to_int4(random(rows, columns, dtype=dtype), group, "rtn")
    made.weight.data, made.bias.data = pack(values, BY_ROWS), random(rows, dtype=dtype)
    return made


def int8(rows: int, dtype: torch.dtype) -> Int8Linear:
    made = Int8Linear(COLUMNS, rows, bias=True, dtype=dtype)
    made.weight.data, made.scale.data = to_int8(random(rows, COLUMNS, dtype=dtype))
    made.bias.data = random(rows, dtype=dtype)
    return made


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# -- floats ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", STORED)
def test_unpacked_by_either(
    order: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled kernel makes the bits of torch's operations, of some rows too."""
    if unpack.compiled() is None:
        pytest.skip("no compiler, or no AVX2")
    for rows, group in ((16, 32), (48, 64), (208, 128), (272, 64)):
        codes = torch.randint(0, 16, (rows + 64, 3 * group), dtype=torch.uint8)
        some = pack(codes, order)[64:]
        statistics = random(3, rows + 64, 2, dtype=dtype)[:, 64:]
        exact = from_int4(codes[64:], statistics).T
        for kind in (torch.float32, torch.bfloat16):
            memory = torch.full((3 * group * rows,), torch.nan, dtype=kind)
            made = int4_block(some, statistics, order, memory).clone()
            with monkeypatch.context() as patch:
                patch.setattr(unpack, "compiled", lambda: None)
                wanted = int4_block(some, statistics, order, memory)
            assert torch.equal(made, wanted)
            assert error(made, exact) < torch.finfo(kind).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int8", "int4", "int4 by rows"])
def test_few_and_many_rows(kind: str, dtype: torch.dtype) -> None:
    """And none; contiguous or not, in inference mode or not. To int16 costs little."""
    packed: PackedLinear = int8(80, dtype) if kind == "int8" else int4(80, 64, dtype)
    if isinstance(packed, Int4Linear):
        packed.exact_inputs = kind == "int4"
        packed.settle()
        assert packed.order == packed.computed_order
    weight = packed.dequantised().double()
    rounded = packed.rounds_inputs
    most = min(64, most_by_kernel(packed.bits, dtype, rounded=rounded))
    for count in sorted({0, 1, 2, 3, 5, FEW, most, most + 1, 63, 130}):
        x = random(count, 2 * COLUMNS, dtype=dtype)[:, ::2]
        with torch.inference_mode():
            got = packed(x)
        with torch.no_grad():
            assert torch.equal(packed(x.contiguous()), got)
        wanted = x.double() @ weight.T + packed.bias.detach().double()
        assert (got.dtype, got.shape) == (dtype, (count, 80))
        assert not count or error(got, wanted) < max(16 * torch.finfo(dtype).eps, 5e-5 * rounded)


# -- rounded inputs --------------------------------------------------------------------------------


def rounded(rows: torch.Tensor, group: int) -> torch.Tensor:
    """What is multiplied: the nearest of 65535 values, a group at a time."""
    groups = rows.float().unflatten(-1, (-1, group))
    largest = groups.abs().amax(-1, keepdim=True)
    codes = (groups * (32767 / largest)).round().where(largest > 1e-33, 0)
    made: torch.Tensor = (codes.double() * (largest / 32767).double()).flatten(-2)
    return made


@needs_kernel
@pytest.mark.parametrize("statistics", DTYPES)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_rounded_products(group: int, statistics: torch.dtype) -> None:
    """Those of rounded inputs, but for last bits, for odd numbers of rows and half blocks, too."""
    for columns in {group, 3 * group, 2 * group + 128}:
        for out in (4, 7, 16, 129):
            codes = torch.randint(0, 16, (out, columns), dtype=torch.uint8)
            both = random(columns // group, out, 2, dtype=statistics)
            for dtype in DTYPES:
                x = random(3, columns, dtype=dtype)
                got = product.multiply(x, pack(codes, BY_ROWS), both)
                weight = from_int4(codes, both).double().T
                assert got.dtype == dtype
                # An input between two integers may go either way, by how torch divides here.
                bound = max(5e-6, 4 * torch.finfo(dtype).eps)
                assert error(got, rounded(x, group) @ weight) < bound
                assert error(got, x.double() @ weight) < max(bound, 5e-5)


@needs_kernel
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_company_changes_no_bit(dtype: torch.dtype) -> None:
    """Whatever rows of input or of the weight are computed beside it, and by how many threads."""
    packed = int4(656, 64, dtype)
    weight, both = packed.weight.data, packed.scales_and_zeros.data
    x = random(130, COLUMNS, dtype=dtype)
    torch.set_num_threads(1)
    alone = torch.cat([product.multiply(row, weight, both) for row in x.split(1)])
    for count in (1, 2):
        torch.set_num_threads(count)
        assert torch.equal(product.multiply(x, weight, both), alone)
        for size in (3, 17, 64):
            parts = [product.multiply(some, weight, both) for some in x.split(size)]
            assert torch.equal(torch.cat(parts), alone)
        for cut in (4, 64, 333):
            ranges = (slice(0, cut), slice(cut, 656))
            parts = [product.multiply(x, weight[r], both[:, r].contiguous()) for r in ranges]
            assert torch.equal(torch.cat(parts, 1), alone)


@needs_kernel
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("columns", "group"), [(96, 32), (1120, 32), (1088, 64), (2176, 128)])
def test_many_rows_have_the_bits_of_one(columns: int, group: int) -> None:
    """However many, where they are multiplied in another way, and more than are rounded at once."""
    made = torch.Generator().manual_seed(0)
    weight = torch.randint(256, (39, columns // 2), generator=made, dtype=torch.uint8)
    both = torch.randn(columns // group, 39, 2, generator=made).bfloat16()
    x = random(product.AT_ONCE + 5, columns, dtype=torch.bfloat16)
    alone = torch.cat([product.multiply(row, weight, both) for row in x.split(1)])
    for count in [*range(1, 70), len(x)]:
        torch.set_num_threads(1 + count % 3)
        assert torch.equal(product.multiply(x[:count], weight, both, vnni=False), alone[:count])


@needs_kernel
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("few", [True, False])
def test_as_many_threads_as_torch(few: bool) -> None:
    """Also where a thread of Python has computed nothing before."""
    packed, x = int4(656, 64, torch.bfloat16), random(3, COLUMNS, dtype=torch.bfloat16)
    weight, both = packed.weight.data, packed.scales_and_zeros.data
    memory = torch.empty(656 * COLUMNS)
    used: list[int] = []

    def compute() -> None:
        if few:
            product.multiply(x, weight, both)
        else:
            int4_block(weight, both, BY_ROWS, memory)
        used.append(ctypes.CDLL(None).omp_get_max_threads())

    for threads in (1, 2):
        torch.set_num_threads(threads)
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    assert used == [1, 2]


@needs_kernel
@pytest.mark.parametrize("group", [32, 64, 128])
def test_processors_agree(group: int) -> None:
    """What has VNNI, and what has AVX2 alone."""
    if not torch.cpu.get_capabilities().get("avx512_vnni"):
        pytest.skip("no VNNI")
    for columns in (group, 2 * group, 3 * group, 640):
        packed = int4(21, group, torch.bfloat16, columns=columns)
        x, given = random(17, columns), (packed.weight.data, packed.scales_and_zeros.data)
        alone = product.multiply(x[:1], *given)
        for count in range(1, 18):
            made = product.multiply(x[:count], *given)
            assert torch.equal(product.multiply(x[:count], *given, vnni=False), made)
            assert torch.equal(made[:1], alone)


@needs_kernel
def test_inputs_that_are_hard_to_round() -> None:
    """Zeros, the smallest and the largest numbers; what is none makes none, in its row alone."""
    packed = int4(16, 32, torch.float32, columns=96)
    weight, both = packed.weight.data, packed.scales_and_zeros.data
    x = random(6, 96)
    x[0] = 0
    x[1, 32:64] = 1e-42
    x[2, :32] *= 1e30
    x[3, 5] = torch.nan
    x[4, 50] = torch.inf
    made = product.multiply(x, weight, both)
    assert not made[0].any()
    assert error(made[1:3], rounded(x[1:3], 32) @ packed.dequantised().double().T) < 1e-5
    assert not made[3:5].isfinite().any()
    assert made[5].isfinite().all()
    assert product.multiply(x.bfloat16(), weight, both)[3].isnan().all()


def test_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, or where inputs are to stay exact, a weight goes into the order of torch's."""
    x = random(3, COLUMNS, dtype=torch.bfloat16)
    exact = int4(80, 64, torch.bfloat16)
    exact.exact_inputs = True
    exact.settle()
    assert exact.order == kernel_order()
    uncompiled = int4(80, 64, torch.bfloat16)
    monkeypatch.setattr(product, "compiled", lambda: None)
    uncompiled.settle()
    assert torch.equal(uncompiled(x), exact(x))
    assert error(exact(x), x.double() @ exact.dequantised().double().T + exact.bias) < 0.02


def test_nothing_to_compile_with(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said why weights are put into another order."""
    monkeypatch.setattr("pipeload.formats.compiler.compiler", lambda: None)
    with caplog.at_level("INFO", "pipeload"):
        assert product.compiled.__wrapped__() is None
    assert "there is no C compiler" in caplog.text


# What dynamo says of addresses, once in a process.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.parametrize("exact", [True, False])
def test_torch_compile(exact: bool) -> None:
    """It goes around the kernels: few rows and many, the same bits."""
    torch._dynamo.reset()
    packed = int4(80, 64, torch.bfloat16)
    packed.exact_inputs = exact
    packed.settle()
    compiled = torch.compile(packed, backend="eager")
    for count in (1, 3, 64):
        x = random(count, COLUMNS, dtype=torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(compiled(x), packed(x))


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_of_rounded_inputs(dtype: torch.dtype) -> None:
    """What is counted is what is allocated."""
    packed = int4(80, 32, dtype)
    padded = COLUMNS + 64  # to pairs of blocks
    codes, scales, sums = 2 * padded, 4 * padded // 32, 4 * padded // 32
    rows = min(FEW, most_by_kernel(4, dtype, rounded=True, tiled=packed.sizes.tiled))
    assert packed.sizes.of(rows) == rows * (codes + scales + sums)


# -- what the kernels are not made for -------------------------------------------------------------


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("count", [3, 300])
def test_tensors_without_memory(exact: bool, count: int) -> None:
    """They tell shapes, where an address would end the process; two devices are refused."""
    packed = int4(80, 64, torch.bfloat16)
    packed.exact_inputs = exact
    packed.settle()
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = packed(torch.randn(count, COLUMNS, dtype=torch.bfloat16))
    assert (made.shape, made.dtype) == ((count, 80), torch.bfloat16)
    x = torch.empty(count, COLUMNS, dtype=torch.bfloat16, device="meta")
    with pytest.raises(UnsupportedModelError, match="on 'meta', its int4 weight on 'cpu'"):
        packed(x)
    packed.to("meta")
    assert packed(x).shape == (count, 80)
    with pytest.raises(UnsupportedModelError, match="on 'cpu', its int4 weight on 'meta'"):
        packed(torch.zeros(count, COLUMNS))


def test_double() -> None:
    """Few rows as well as many, and scales."""
    packed = int4(80, 64, torch.float32)
    x = random(130, COLUMNS).double()
    wanted = x @ packed.dequantised().double().T + packed.bias.detach()
    for _ in range(2):
        for count in (3, 130):
            assert packed(x[:count]).dtype == torch.float64
            assert error(packed(x[:count]), wanted[:count]) < 1e-5
        packed.double()
    single = packed.product(x[:3].float())
    assert single.dtype == torch.float32
    assert error(single + packed.bias, wanted[:3]) < 1e-5


def test_pickled_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an order that nothing here reads, a weight is made floats: neither garbage nor an end."""
    x = random(3, COLUMNS, dtype=torch.bfloat16)
    packed = int4(80, 64, torch.bfloat16)
    wanted = x.double() @ packed.dequantised().double().T + packed.bias
    with monkeypatch.context() as patch:
        patch.setattr(product, "compiled", lambda: None)
        assert error(packed(x), wanted) < 0.02
    for order in ORDERS:
        other = copy.deepcopy(packed)
        reorder(packed.weight.data, other.weight.data, packed.order, order)
        other.order = order
        assert error(other(x), wanted) < 0.02


@pytest.mark.parametrize("assign", [True, False])
def test_state_dict_of_another_order(assign: bool) -> None:
    """It says its order, and is loaded into that of the module."""
    packed, exact = int4(80, 64, torch.bfloat16), int4(80, 64, torch.bfloat16)
    exact.exact_inputs = True
    exact.settle()
    for source, target in ((packed, exact), (exact, packed), (packed, packed)):
        loaded = copy.deepcopy(target)
        loaded.weight.data.zero_()
        state = torch.nn.Sequential(source).state_dict()
        torch.nn.Sequential(loaded).load_state_dict(state, assign=assign)
        assert loaded.order == target.order
        assert torch.equal(loaded.weight, target.weight)
