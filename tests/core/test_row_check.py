"""Where rows are cut, and that the check says yes only where the bits are the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from pipeload._row_check import can_cut_rows, row_ranges, rows_are_exact

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@given(st.integers(1, 300_000), st.integers(2, 200).map(lambda steps: 64 * steps))
def test_ranges(total: int, rows: int) -> None:
    """They cover all rows in order, none is too large, none too small, and they are even."""
    ranges = row_ranges(total, rows)
    assert ranges[0].start == 0
    assert ranges[-1].stop == total
    assert all(one.stop == two.start for one, two in itertools.pairwise(ranges))
    assert all(start % 64 == 0 for start, _ in ranges)
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) <= rows
    assert min(sizes) >= min(64, total)
    assert max(sizes) - min(sizes) < 128
    assert len(ranges) == -(-total // rows)


@pytest.mark.parametrize(("total", "rows"), [(100, 64), (100, 130), (100, 0), (0, 128), (-1, 128)])
def test_ranges_that_are_none(total: int, rows: int) -> None:
    """Sizes that could not be kept are refused."""
    with pytest.raises(ValueError, match=r"rows=|total="):
        row_ranges(total, rows)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "total", "rows"), [(320, 1411, 512), (768, 640, 128)])
def test_yes_is_true(
    dtype: torch.dtype, inputs: int, total: int, rows: int, *, threads: int
) -> None:
    """Where the check says yes, other data and other numbers of inputs give the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        if not can_cut_rows(dtype, inputs, total, rows, bias=True):
            pytest.skip("this host computes ranges of rows differently")
        weight, bias = torch.randn(total, inputs).to(dtype), torch.randn(total).to(dtype)
        for count in (1, 2, 3, 6, 20, 64):
            given = torch.randn(count, inputs).to(dtype)
            parts = [
                functional.linear(given, weight[start:stop], bias[start:stop])
                for start, stop in row_ranges(total, rows)
            ]
            assert torch.equal(torch.cat(parts, dim=-1), functional.linear(given, weight, bias))
    finally:
        torch.set_num_threads(before)


def test_a_product_that_depends_on_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that takes another order of sums for fewer rows is found out, in any dtype."""
    original = functional.linear
    few = 200  # rows of weight

    def linear(given: torch.Tensor, weight: torch.Tensor, bias: object) -> torch.Tensor:
        if len(weight) < few:
            given, weight = given.flip(-1), weight.flip(-1)
        return original(given, weight, bias)  # type: ignore[arg-type]

    monkeypatch.setattr(functional, "linear", linear)
    check, threads = rows_are_exact.__wrapped__, torch.get_num_threads()
    for dtype in DTYPES:
        assert not check(dtype, 500, 192, 0, bias=False, threads=threads)
        assert not check(dtype, 500, 192, 7, bias=True, threads=threads)
    few = 0
    assert check(torch.float32, 500, 1024, 0, bias=False, threads=threads)


def test_the_last_range_is_checked_with_its_remainder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library for which only the odd size is different is found out as well."""
    original = functional.linear

    def linear(given: torch.Tensor, weight: torch.Tensor, bias: object) -> torch.Tensor:
        product = original(given, weight, bias)  # type: ignore[arg-type]
        return product if len(weight) != 512 + 7 else product + 1

    monkeypatch.setattr(functional, "linear", linear)
    check, threads = rows_are_exact.__wrapped__, torch.get_num_threads()
    assert not check(torch.float32, 64, 512, 7, bias=False, threads=threads)
    assert check(torch.float32, 64, 512, 8, bias=False, threads=threads)


def test_the_number_of_threads_is_part_of_the_question() -> None:
    """An answer is kept, and not given for another number of threads than torch uses."""
    threads = torch.get_num_threads()
    rows_are_exact(torch.float32, 64, 256, 0, bias=False, threads=threads)
    hits = rows_are_exact.cache_info().hits
    rows_are_exact(torch.float32, 64, 256, 0, bias=False, threads=threads)
    assert rows_are_exact.cache_info().hits == hits + 1
    with pytest.raises(ValueError, match="threads="):
        rows_are_exact(torch.float32, 64, 256, 0, bias=False, threads=threads + 1)
    for rows, remainder in ((100, 0), (0, 5), (64, 64)):
        with pytest.raises(ValueError, match="whole steps"):
            rows_are_exact(torch.float32, 64, rows, remainder, bias=False, threads=threads)


def test_one_range_is_the_whole() -> None:
    """Nothing is cut, so nothing is tried."""
    assert can_cut_rows(torch.float32, 10**9, 50, 128, bias=True)


@pytest.mark.parametrize("inputs", [0, 100_000])
def test_what_cannot_be_tried(inputs: int) -> None:
    """No inputs, or so many that the test data would not fit: the answer is no."""
    threads = torch.get_num_threads()
    assert not rows_are_exact(torch.float32, inputs, 64, 63, bias=False, threads=threads)


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensors that are made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.sizes.add(made.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inputs", [1, 64, 5000, 30_000])
def test_the_test_data_is_bounded(inputs: int, dtype: torch.dtype) -> None:
    """Whatever the number of inputs: the weight, and the largest two tensors beside it."""
    with Largest() as largest:
        rows_are_exact.__wrapped__(dtype, inputs, 64, 5, bias=True, threads=torch.get_num_threads())
    weight, *others = sorted(largest.sizes, reverse=True)
    assert weight <= (24 << 20) + 128
    assert sum(others[:2]) <= 24 << 20
