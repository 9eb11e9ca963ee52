"""Columns that make up for each other's errors: what the paper says, on any cut of the rows."""

from __future__ import annotations

import pytest
import torch

from pipeload.formats.integers import compensation
from pipeload.formats.integers.compensation import BLOCK, blocks_of, compensate, factor
from pipeload.formats.integers.rounding import from_int4, to_int4, weigh_columns
from pipeload.formats.integers.search import search

ROWS, COLUMNS, GROUP = 600, 640, 64


def made_up() -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, and inputs that go together, as those of models do, and are not of one size."""
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn((ROWS, COLUMNS), generator=generator).bfloat16()
    few, many = (torch.randn((n, COLUMNS), generator=generator) for n in (40, 2000))
    inputs = torch.randn((2000, 40), generator=generator) @ few + many
    return weight, inputs * (torch.rand(COLUMNS, generator=generator) + 0.2)


WEIGHT, INPUTS = made_up()
PRODUCTS = [
    INPUTS[:, b.start : b.stop].t() @ INPUTS[:, b.start : b.stop] for b in blocks_of(COLUMNS)
]
FACTORS = [factor(one) for one in PRODUCTS]
WEIGHTS = weigh_columns(INPUTS.square().mean(0))


def test_products_are_closer() -> None:
    """Those of the text, by a lot; scales and zeros are those of the search."""
    plain = to_int4(WEIGHT, GROUP, column_weights=WEIGHTS)
    made = to_int4(WEIGHT, GROUP, column_weights=WEIGHTS, factors=FACTORS)
    assert torch.equal(made.scales_and_zeros, plain.scales_and_zeros)
    before, after = (
        (INPUTS @ (from_int4(*one) - WEIGHT.float()).t()).square().sum() for one in (plain, made)
    )
    assert after < 0.6 * before


def test_what_the_paper_says() -> None:
    """The same codes by the whole inverse, from which what is rounded is taken out each time."""
    found = search(WEIGHT[:8], WEIGHTS, GROUP, 4)
    made = compensate(WEIGHT[:8], found, FACTORS)
    block, one = blocks_of(COLUMNS)[1], FACTORS[1]
    some = PRODUCTS[1].double()
    inverse = (some + 0.01 * some.diagonal().mean() * torch.eye(len(block))).inverse()
    values = WEIGHT[:8, block.start :].double()
    for column in one.order.tolist():
        place = (block.start + column) // GROUP
        scale, zero = found.scale[:, place].double(), found.zero[:, place].double()
        code = ((values[:, column] - zero) / scale).round().clamp(-8, 7)
        assert torch.equal(code, made[:, block.start + column].double())
        error = (values[:, column] - code * scale - zero) / inverse[column, column]
        values -= error[:, None] * inverse[column]
        taken = inverse[:, column : column + 1] @ inverse[column : column + 1]
        inverse = inverse - taken / inverse[column, column]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_is_torch_bit_for_bit(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is awkward: outliers, a row of zeros, and one whose groups are of one value."""
    if compensation.compiled() is None:
        pytest.skip("no compiler, or no AVX2")
    weight = WEIGHT.to(dtype)
    weight[:, ::50] *= 8
    weight[0], weight[1, : COLUMNS // 2] = 0, 1.5
    found = search(weight, WEIGHTS, GROUP, 4)
    made = compensate(weight, found, FACTORS)
    monkeypatch.setattr(compensation, "compiled", lambda: None)
    assert torch.equal(made, compensate(weight, found, FACTORS))
    assert not torch.equal(made, found.codes)


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 33])
@pytest.mark.parametrize("columns", [32, 480, 544, 1152])
def test_the_kernel_at_awkward_sizes(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than a strip, than a tile, or than a block; a scale of 0."""
    if compensation.compiled() is None:
        pytest.skip("no compiler, or no AVX2")
    generator = torch.Generator().manual_seed(rows + columns)
    inputs = torch.randn((300, columns), generator=generator)
    blocks = (inputs[:, b.start : b.stop] for b in blocks_of(columns))
    factors = [factor(one.t() @ one) for one in blocks]
    weight = torch.randn((rows, columns), generator=generator)
    weight[:, :32] = 0
    found = search(weight, torch.ones(columns), 32, 4)
    made = compensate(weight, found, factors)
    monkeypatch.setattr(compensation, "compiled", lambda: None)
    assert torch.equal(made, compensate(weight, found, factors))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("stop", [1, 64, 513])
def test_rows_beside_change_nothing(
    stop: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: how much memory there is decides how many rows are rounded at once."""
    if not compiled:
        monkeypatch.setattr(compensation, "compiled", lambda: None)
    found = search(WEIGHT, WEIGHTS, GROUP, 4)
    whole = compensate(WEIGHT, found, FACTORS)
    few = search(WEIGHT[:stop], WEIGHTS, GROUP, 4)
    assert torch.equal(compensate(WEIGHT[:stop], few, FACTORS), whole[:stop])


@pytest.mark.parametrize("products", [torch.zeros(64, 64), torch.full((64, 64), torch.nan)])
def test_inputs_that_tell_nothing(products: torch.Tensor) -> None:
    """No input ever came, or none was a number: each column is for itself."""
    found = search(WEIGHT[:, :64], torch.ones(64), GROUP, 4)
    assert torch.equal(compensate(WEIGHT[:, :64], found, [factor(products)]), found.codes)


def test_inputs_that_are_alike() -> None:
    """Two columns that are one, and a dead one, have no inverse without damping."""
    products = PRODUCTS[0].clone()
    products[1], products[:, 1] = products[0].clone(), products[:, 0].clone()
    products[1, 1] = products[0, 0]
    products[5], products[:, 5] = 0, 0
    one = factor(products)
    assert bool(one.upper.isfinite().all())
    assert len(one.upper) == BLOCK
    assert not torch.equal(one.upper, torch.eye(BLOCK))
