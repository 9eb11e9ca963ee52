"""Searched scales and zeros: what they make small, and that the kernel and torch agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pipeload.formats.integers import search as searching
from pipeload.formats.integers.rounding import from_int4, to_int4, to_int8, weigh_columns
from pipeload.formats.integers.search import Found, search

if TYPE_CHECKING:
    from collections.abc import Iterator

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = {  # rows, columns, group, bits
    "by 64": (208, 384, 64, 4),
    "by 32, rows left over": (50, 384, 32, 4),
    "by 128": (16, 512, 128, 4),
    "int8": (40, 576, 576, 8),
    "int8, few columns": (3, 64, 64, 8),
}


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine that has none."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(searching, "compiled", lambda: None)
        yield


def awkward(rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight with outliers, rows of zeros, of one value, and of two; and what columns weigh."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(rows, columns, generator=generator)
    weight[:, ::50] *= 8
    for row, value in enumerate((0.0, 1.5, -3e-5)):
        weight[row % rows] = value
    weight[min(3, rows - 1), columns // 2 :] = 2
    return weight.to(dtype), weigh_columns(torch.rand(columns, generator=generator) ** 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_is_torch_bit_for_bit(
    shape: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """Codes, scales and zeros do not depend on whether there is a compiler."""
    if searching.compiled() is None:
        pytest.skip("no compiler, or no AVX2")
    rows, columns, group, bits = SHAPES[shape]
    weight, weights = awkward(rows, columns, dtype)
    made = search(weight, weights, group, bits)
    request.getfixturevalue("without_compiler")
    assert searching.compiled() is None
    wanted = search(weight, weights, group, bits)
    for name, got, expected in zip(Found._fields, made, wanted, strict=True):
        assert torch.equal(got, expected), name
    for stored in made[1:]:
        assert torch.equal(stored.to(dtype).float(), stored)


@pytest.mark.usefixtures("without_compiler")
def test_torch_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows at a time come to the same."""
    weight, weights = awkward(48, 128, torch.bfloat16)
    whole = search(weight, weights, 32, 4)
    monkeypatch.setattr(searching, "_CHUNK_ITEMS", 1)
    assert all(map(torch.equal, search(weight, weights, 32, 4), whole))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_and_rows_change_nothing(threads: int) -> None:
    """A row's bits are its own, whoever computes it and whatever is beside it."""
    weight, weights = awkward(256, 128, torch.bfloat16)
    before = torch.get_num_threads()
    whole = search(weight, weights, 64, 4)
    try:
        torch.set_num_threads(threads)
        for start, stop in ((0, 256), (64, 128), (8, 9)):
            part = search(weight[start:stop], weights, 64, 4)
            for got, expected in zip(part, whole, strict=True):
                assert torch.equal(got, expected[start:stop])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_no_group_is_worse_than_rounded(group: int) -> None:
    """By the weighed error; all of them are much better where what weighs is among outliers."""
    weight, weights = awkward(64, 384, torch.bfloat16)

    def errors(zero_points: str, weighed: torch.Tensor | None) -> torch.Tensor:
        made = from_int4(*to_int4(weight, group, zero_points, weighed))
        return ((made - weight.float()) ** 2 * weights).view(64, -1, group).sum(-1)

    rounded, alike, weighed = (
        errors("rtn", None),
        errors("search", None),
        errors("search", weights),
    )
    assert (weighed <= rounded * 1.0001).all()
    assert weighed.sum() < 0.8 * alike.sum()
    assert alike.sum() < rounded.sum()


def test_int8_rows_are_closer() -> None:
    """Scales of int8 rows are searched as well, if it is known what columns weigh."""
    weight, weights = awkward(64, 384, torch.bfloat16)

    def errors(weighed: torch.Tensor | None) -> torch.Tensor:
        values, scale = to_int8(weight, weighed)
        assert int(values.min()) >= -127
        return ((values * scale.float()[:, None] - weight.float()) ** 2 * weights).sum(-1)

    rounded, weighed = errors(None), errors(weights)
    assert (weighed <= rounded * 1.0001).all()
    assert weighed.sum() < 0.95 * rounded.sum()


def test_no_column_weighs_nothing() -> None:
    """What one text leaves at rest, another may use; a Linear that never ran weighs all alike."""
    weights = weigh_columns(torch.tensor([0.0, 1.0, 2.0, 5.0]))
    assert weights.tolist() == [pytest.approx(0.01), 0.5, 1.0, 2.5]
    for nothing in (torch.zeros(4), torch.tensor([1.0, torch.inf, 0.0, 2.0])):
        assert torch.equal(weigh_columns(nothing), torch.ones(4))
