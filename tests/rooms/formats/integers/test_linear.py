"""int8 and int4 Linears against float ones: rounding, orders of processors, products, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pipeload.errors import UnsupportedModelError
from pipeload.formats.integers import unpack as unpack_module
from pipeload.formats.integers import wide_product
from pipeload.formats.integers.linear import Int4Linear, Int8Linear
from pipeload.formats.integers.order import (
    ORDERS,
    STORED,
    Reordered,
    kernel_order,
    pack,
    reorder,
    unpack,
    unpack_transposed,
)
from pipeload.formats.integers.rounding import GROUPS, ZERO_POINTS, from_int4, to_int4, to_int8
from pipeload.formats.integers.wide_product import product_dtype, temporary_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeload.formats.integers.packed_linear import PackedLinear

ROOT = Path(__file__).resolve().parents[4]
ROWS, COLUMNS = 208, 384  # three whole tiles of 64 rows and a last one of 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def int8_linear(linear: nn.Linear) -> Int8Linear:
    weight, bias = linear.weight.detach(), linear.bias is not None
    made = Int8Linear(linear.in_features, linear.out_features, bias=bias, dtype=weight.dtype)
    made.weight.data, made.scale.data = to_int8(weight)
    if bias:
        made.bias.data = linear.bias.detach()
    return made


def int4_linear(linear: nn.Linear, group: int, order: str | None = None) -> Int4Linear:
    weight, bias = linear.weight.detach(), linear.bias is not None
    order = order or kernel_order()
    sizes = linear.in_features, linear.out_features
    made = Int4Linear(*sizes, bias=bias, group_size=group, order=order, dtype=weight.dtype)
    values, made.scales_and_zeros.data = to_int4(weight, group)
    made.weight.data = pack(values, order)
    if bias:
        made.bias.data = linear.bias.detach()
    return made


# -- rounding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_within_half_a_step(dtype: torch.dtype) -> None:
    """Of its row; the largest value of a row keeps its sign, and no row is scaled by another."""
    weight = random(ROWS, COLUMNS, dtype=dtype) * torch.logspace(-3, 2, ROWS)[:, None].to(dtype)
    values, scale = to_int8(weight)
    assert (values.dtype, scale.dtype, scale.shape) == (torch.int8, dtype, (ROWS,))
    steps = weight.float() / scale.float()[:, None] - values
    assert steps.abs().max() <= 0.5 + 127 * torch.finfo(dtype).eps
    assert int(values.min()) >= -127


@pytest.mark.parametrize("zero_points", ZERO_POINTS)
@pytest.mark.parametrize("group", GROUPS)
def test_int4_error(group: int, zero_points: str) -> None:
    """Of random weights: what 16 evenly spread values can do, less for smaller groups."""
    weight = random(ROWS, COLUMNS, dtype=torch.bfloat16)
    made = to_int4(weight, group, zero_points)
    assert set(made.values.flatten().tolist()) == {*range(16)}
    assert made.scales_and_zeros.shape == (COLUMNS // group, ROWS, 2)
    assert relative(from_int4(*made), weight) < {32: 0.08, 64: 0.092, 128: 0.102}[group]


def test_moved_zeros_are_closer() -> None:
    """By the sum that they are to make small, in every group, and with an outlier in each."""
    weight = random(ROWS, COLUMNS)
    weight[:, ::64] *= 8
    sums = []
    for zero_points in ("rtn", "hqq"):
        error = (from_int4(*to_int4(weight, 64, zero_points)) - weight).abs()
        sums.append((error**0.7).view(ROWS, -1, 64).sum(-1))
    plain, moved = sums
    assert (moved <= plain * 1.0001).all()
    assert moved.mean() < 0.99 * plain.mean()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros(dtype: torch.dtype) -> None:
    """Stay zeros, and nothing is divided by zero."""
    weight = random(64, 64, dtype=dtype)
    weight[3] = 0
    values, scale = to_int8(weight)
    assert not values[3].any()
    assert bool(scale.isfinite().all())
    for zero_points in ZERO_POINTS:
        made = from_int4(*to_int4(weight, 32, zero_points))
        assert not made[3].any()
        assert bool(made.isfinite().all())


def test_small_fp16_weights() -> None:
    """Their scales are below what fp16 holds in full, and still tell them apart."""
    weight = random(64, 64, dtype=torch.float16) * 1e-3
    values, scale = to_int8(weight)
    assert relative(values * scale.float()[:, None], weight) < 0.02


# -- orders ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [16, 48, 64, 96, 112, 208])
@pytest.mark.parametrize("source", STORED)
def test_orders_are_exchangeable(source: str, rows: int) -> None:
    """Whole tiles and last ones, from each into each."""
    values = torch.randint(0, 16, (rows, 64), dtype=torch.uint8)
    packed = pack(values, source)
    assert torch.equal(unpack(packed, source), values)
    assert torch.equal(unpack_transposed(packed, source), values.T)
    for target in STORED:
        made = torch.empty_like(packed)
        reorder(packed, made, source, target)
        assert torch.equal(made, pack(values, target))


def test_pieces_are_the_whole() -> None:
    """As bytes are read: piece after piece."""
    values = torch.randint(0, 16, (ROWS, 64), dtype=torch.uint8)
    stored, wanted = pack(values, "halves-32"), pack(values, "halves-64")
    made = torch.empty_like(stored)
    repack = Reordered("halves-32", "halves-64")
    for start in range(0, ROWS, 64):
        piece = slice(start, start + 64)
        repack.fill(stored[piece], made[piece])
    assert torch.equal(made, wanted)
    assert repack.rows(COLUMNS // 2) % 64 == 0


IN_A_CHILD = """
import torch
from pipeload.formats.integers.order import kernel_order, pack
values = torch.randint(0, 16, (208, 64), dtype=torch.uint8)
packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.int(), 1)
assert torch.equal(packed, pack(values, kernel_order()))
print(torch.backends.cpu.get_cpu_capability(), kernel_order())
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["avx512", "avx2", "default"])
def test_the_order_depends_on_the_processor(capability: str) -> None:
    """Each kind's own is recognised, here and as if this were a lesser one."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_CHILD],
        env=os.environ
        | {"ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": f"{ROOT}:{ROOT / 'hooks'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = dict([done.stdout.split()])
    known = {"AVX512": "halves-64", "AVX2": "halves-32"}
    assert all(order in ORDERS for order in found.values())
    assert all(known.get(kind, order) == order for kind, order in found.items())


# -- products --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_products(bits: int, dtype: torch.dtype, bias: bool) -> None:
    """What a float Linear makes of the dequantised weight, for vectors, rows and batches."""
    linear = nn.Linear(COLUMNS, ROWS, bias=bias, dtype=dtype)
    packed: PackedLinear = int8_linear(linear) if bits == 8 else int4_linear(linear, 64)
    weight = packed.dequantised()
    for shape in ((COLUMNS,), (1, COLUMNS), (7, COLUMNS), (2, 5, COLUMNS)):
        x = random(*shape, dtype=dtype)
        with torch.no_grad():
            got = packed(x)
            wanted = nn.functional.linear(x.float(), weight, linear.bias.float() if bias else None)
        assert (got.dtype, got.shape) == (dtype, wanted.shape)
        bound = max(16 * torch.finfo(dtype).eps, 5e-5 * packed.rounds_inputs)
        assert relative(got, wanted) < bound
    strided = random(6, 2 * COLUMNS, dtype=dtype)[:, ::2]
    with torch.no_grad():
        assert torch.equal(packed(strided), packed(strided.contiguous()))


MANY = 300
"""Rows of input that no kernel for integers is taken for."""


@pytest.fixture(params=["here", "no bf16", "no compiler"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What multiplies floats is as it is here, and as where bf16 is slow, or torch unpacks."""
    product_dtype.cache_clear()
    if request.param == "no bf16":
        monkeypatch.setattr("torch.cpu.get_capabilities", dict)
    if request.param == "no compiler":
        for module in (unpack_module, wide_product):
            monkeypatch.setattr(module, "compiled", lambda: None)
    yield
    product_dtype.cache_clear()


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_products_of_many_rows(bits: int, dtype: torch.dtype) -> None:
    """As floats: as near to the exact ones as those of few; in blocks that end in a tile, too."""
    for rows in (ROWS, 256, 2 * 256 + ROWS):
        linear = nn.Linear(COLUMNS, rows, dtype=dtype)
        packed: Any = int8_linear(linear) if bits == 8 else int4_linear(linear, 32)
        packed.exact_inputs = True
        packed.settle()
        x = random(MANY, COLUMNS, dtype=dtype)
        with torch.no_grad():
            got = packed(x)
            wanted = x.double() @ packed.dequantised().double().T + linear.bias.detach().double()
        assert (got.dtype, got.shape) == (dtype, wanted.shape)
        assert relative(got, wanted) < 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("bits", [8, 4])
def test_sums_beyond_fp16(bits: int) -> None:
    """Integers are larger than the weights they stand for: their sums must not overflow."""
    linear = nn.Linear(COLUMNS, 64, bias=False, dtype=torch.float16)
    linear.weight.data.fill_(0.125)
    linear.weight.data[:, ::2] = 0.25
    packed: PackedLinear = int8_linear(linear) if bits == 8 else int4_linear(linear, 64)
    x = torch.full((MANY, COLUMNS), 32.0, dtype=torch.float16)
    with torch.no_grad():
        assert relative(packed(x), linear(x)) < 0.01


class Held(TorchDispatchMode):
    """The most bytes that tensors made meanwhile have taken at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._seen: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            storage = made.untyped_storage()
            if storage.data_ptr() not in given:
                self._seen.append((StorageWeakRef(storage), storage.nbytes()))
        self._seen = [(ref, nbytes) for ref, nbytes in self._seen if not ref.expired()]
        self.most = max(self.most, sum(nbytes for _, nbytes in self._seen))
        return made


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_memory_of_many_rows(bits: int, dtype: torch.dtype) -> None:
    """What is counted is enough, and far less than the weight as floats."""
    linear = nn.Linear(COLUMNS, 16 * 256, bias=False, dtype=dtype)
    packed: PackedLinear = int8_linear(linear) if bits == 8 else int4_linear(linear, 64)
    x = random(MANY, COLUMNS, dtype=dtype)
    with torch.no_grad(), Held() as held:
        made = packed(x)
    counted = temporary_bytes(MANY, packed.sizes)
    taken = held.most - made.nbytes
    assert 0 < taken <= counted < linear.weight.numel() * 4
    assert counted < 3 * taken
    nothing = dtype == torch.bfloat16 and not packed.rounds_inputs
    assert (temporary_bytes(1, packed.sizes) == 0) == nothing


@pytest.mark.parametrize("columns", [16, 48, 80, 176])
def test_every_width_that_fits_int8(columns: int) -> None:
    """The kernel is wrong for others without any error; those do not fit."""
    packed = int8_linear(nn.Linear(columns, 17, bias=False, dtype=torch.bfloat16))
    x = random(3, columns, dtype=torch.bfloat16)
    assert relative(packed(x), x.float() @ packed.dequantised().T) < 0.01
    assert Int8Linear.fits(17, columns)
    assert not Int8Linear.fits(17, columns - 8)


def test_what_fits_int4() -> None:
    """Rows by sixteens, whole groups."""
    assert Int4Linear.fits(48, 192, 64)
    for shape in ((40, 192, 64), (48, 192, 128), (48, 192, 48), (48, 0, 64)):
        assert not Int4Linear.fits(*shape)


def test_another_processors_order_is_put_right() -> None:
    """A weight that came in another order computes as one that did not."""
    linear = nn.Linear(COLUMNS, ROWS, dtype=torch.bfloat16)
    own = int4_linear(linear, 32)
    x = random(3, COLUMNS, dtype=torch.bfloat16)
    for order in ORDERS:
        other = int4_linear(linear, 32, order)
        assert torch.equal(other.dequantised(), own.dequantised())
        other.settle()
        assert torch.equal(other(x), own(x))
        assert other.order == kernel_order()


def at_offset(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy that begins `offset` bytes after a page border."""
    room = torch.empty(tensor.nbytes + 8192, dtype=torch.uint8)
    start = -room.data_ptr() % 4096 + offset
    copy = room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_addresses_do_not_matter(bits: int, dtype: torch.dtype) -> None:
    """On some processors a kernel would end the process; equal bits everywhere."""
    linear = nn.Linear(COLUMNS, ROWS, dtype=dtype)
    packed: PackedLinear = int8_linear(linear) if bits == 8 else int4_linear(linear, 64)
    weight = packed.weight.data
    for count in (1, 19, MANY):
        x = random(count, COLUMNS, dtype=dtype)
        wanted = packed(x)
        for offset in (4, 8, 16, 32):
            packed.weight.data = at_offset(weight, offset)
            packed.settle()
            assert torch.equal(packed(at_offset(x, offset)), wanted)


@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_not_there_is_refused(bits: int) -> None:
    """Integers have no NaN: a placeholder must not read as zero."""
    linear = nn.Linear(COLUMNS, ROWS)
    packed: PackedLinear = int8_linear(linear) if bits == 8 else int4_linear(linear, 64)
    packed.path = "model.layers.3.up"
    packed.weight.data = torch.zeros((), dtype=packed.weight.dtype).expand(packed.weight.shape)
    with pytest.raises(UnsupportedModelError, match=rf"model\.layers\.3\.up.* int{bits} weight"):
        packed(random(2, COLUMNS))


@pytest.mark.parametrize("bits", [8, 4])
def test_gradients_of_inputs(bits: int) -> None:
    """So adapters beside it can be trained; the product has the same bits as without."""
    linear = nn.Linear(COLUMNS, ROWS)
    packed: PackedLinear = int8_linear(linear) if bits == 8 else int4_linear(linear, 64)
    x = random(3, COLUMNS).requires_grad_()
    made = packed(x)
    with torch.no_grad():
        assert torch.equal(made, packed(x))
    made.backward(torch.ones_like(made))
    assert x.grad is not None
    assert relative(x.grad, torch.ones(3, ROWS) @ packed.dequantised()) < 1e-5
