"""Where rows are cut, and that the check says yes only where the bits are the same."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from pipeload.engine.row_products import by_zeros
from pipeload.weights.row_cuts import (
    Cut,
    Given,
    RowRange,
    best_cut,
    can_cut_rows,
    ranges_are_exact,
    row_ranges,
)
from pipeload.weights.whole_shape import WholeShape
from tests.tools import rows_sweep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Install = Callable[[Callable[[int, int], bool]], None]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
_original = functional.linear


def cut_of(inputs: int, total: int, rows: int, *, step: int = 64, **more: Any) -> Cut:
    """Ranges of `rows`, fp32."""
    return Cut(torch.float32, inputs, row_ranges(total, rows, step), **more)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Have products be summed in another order where `odd(rows of input, rows of weight)`."""

    def install(odd: Callable[[int, int], bool]) -> None:
        def linear(given: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
            if odd(given[..., 0].numel(), len(weight)):
                given, weight = given.flip(-1), weight.flip(-1)
            return _original(given, weight, bias)

        ranges_are_exact.cache_clear()
        monkeypatch.setattr(functional, "linear", linear)

    yield install
    ranges_are_exact.cache_clear()


@given(st.integers(1, 300_000), st.sampled_from([64, 256]), st.integers(2, 200))
def test_ranges(total: int, step: int, steps: int) -> None:
    """They cover all rows in order, none is too large, none too small, and they are even."""
    ranges = row_ranges(total, step * steps, step)
    assert ranges[0].start == 0
    assert ranges[-1].stop == total
    assert all(one.stop == two.start for one, two in itertools.pairwise(ranges))
    assert all(start % step == 0 for start, _ in ranges)
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) <= step * steps
    assert min(sizes) >= min(step, total)
    assert max(sizes) - min(sizes) < 2 * step
    assert len(ranges) == -(-total // (step * steps))


def test_ranges_of_one_wide_step() -> None:
    """Where it divides all; else the last would be too large."""
    assert row_ranges(1024, 256, 256) == tuple(RowRange(n, n + 256) for n in range(0, 1024, 256))
    with pytest.raises(ValueError, match="at least 512"):
        row_ranges(1000, 256, 256)


@pytest.mark.parametrize(("total", "rows"), [(100, 64), (100, 130), (100, 0), (0, 128), (-1, 128)])
def test_ranges_that_are_none(total: int, rows: int) -> None:
    """Sizes that could not be kept are refused."""
    with pytest.raises(ValueError, match=r"rows=|total="):
        row_ranges(total, rows)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_every_number_of_rows(threads: int) -> None:
    """In every dtype, with this processor's kernels: ranges or the whole's shape, none differs."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for what, *_, differ in rows_sweep.sweep(range(1, 40), ((160, 768, 192), (100, 1411, 512))):
            assert not differ, what
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_with_kernels_of_another_maker() -> None:
    """MKL's own, for processors of Intel's: there ranges differ, and the check knows it."""
    program = (
        "import torch; from tests.tools import rows_sweep as s; told = s.as_intel(); "
        "torch.set_num_threads(2); "
        "print(told, *(found[1:] for found in s.sweep(range(1, 18), ((576, 1536, 384),))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="."
    )
    assert ", 0)" in done.stdout
    assert not any(f", {n})" in done.stdout for n in range(1, 18))


def test_many_rows_stand_for_few(kernels: Any) -> None:
    """4 to 15 rows of input go another way where rows are no multiple of 256: seen with MKL."""
    kernels(lambda count, rows: 4 <= count < 16 and rows % 256 != 0)
    whole = Cut(torch.float32, 500, (RowRange(0, 2048),))
    cut = best_cut(whole, 500, 500, anyhow=False)
    assert cut is not None
    assert {(stop - start) % 256 for start, stop in cut.ranges} == {0}
    assert not can_cut_rows(cut_of(500, 2048, 384))
    # The other way round.
    other = best_cut(Cut(torch.float32, 500, (RowRange(0, 2000),)), 500, 500, anyhow=False)
    assert other is None or all((stop - start) % 256 for start, stop in other.ranges)


def test_few_rows_of_input_are_tried_with_several_values(kernels: Any) -> None:
    """Sums in another order often round to the same: here all but the third time."""
    times = itertools.count(1)
    kernels(lambda count, rows: count == 1 and rows == 2048 and next(times) == 3)
    assert not ranges_are_exact(cut_of(500, 2048, 512), Given.rows(1, 500))
    times = itertools.count(1)
    kernels(lambda count, rows: count == 4 and rows == 2048 and next(times) > 1)
    assert ranges_are_exact(cut_of(500, 2048, 512), Given.rows(4, 500))


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("place", [-3, 2])
def test_where_shares_of_threads_meet(
    monkeypatch: pytest.MonkeyPatch, threads: int, place: int
) -> None:
    """One row of a large weight may be summed otherwise there: it is among those that are tried."""
    total, odd = 40_000, 40_000 // threads + place

    def linear(given: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        made = _original(given, weight, bias)
        if len(weight) == total:
            made[..., odd] += 1
        return made

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    ranges_are_exact.cache_clear()
    monkeypatch.setattr(functional, "linear", linear)
    try:
        cut = cut_of(600, total, 3520)
        assert not ranges_are_exact(cut, Given.rows(1, 600))
    finally:
        torch.set_num_threads(before)
        ranges_are_exact.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_the_whole_is_not_stood_in_for(kernels: Any, dtype: torch.dtype, *, bias: bool) -> None:
    """Kernels that take large weights otherwise than small ones: the check has the large one."""
    kernels(lambda count, rows: rows >= 11008 and 16 <= count <= 48)
    cut = Cut(dtype, 500, row_ranges(11008, 512), bias=bias)
    assert ranges_are_exact(cut, Given.rows(1, 500))
    assert not ranges_are_exact(cut, Given.rows(17, 500))
    assert not can_cut_rows(cut)


def test_each_number_of_rows_is_a_question_of_its_own(kernels: Any) -> None:
    """What is known of some says nothing of others."""
    kernels(lambda count, rows: count == 23 and rows < 1024)
    cut = cut_of(500, 1024, 256)
    for count in range(20, 26):
        assert ranges_are_exact(cut, Given.rows(count, 500)) == (count != 23)


def test_the_last_range_is_checked_with_its_remainder(kernels: Any) -> None:
    """A library for which only the odd size is different is found out as well."""
    kernels(lambda _count, rows: rows == 512 + 7)
    assert not can_cut_rows(cut_of(100, 4 * 512 + 7, 576))
    assert can_cut_rows(cut_of(100, 4 * 512 + 8, 576))


def test_as_many_as_can_be(kernels: Any) -> None:
    """Where nothing is exact for all, what is for most; if it is asked for."""
    kernels(lambda count, rows: rows < 2048 and (count > 16 or (count > 3 and rows % 256 != 0)))
    whole = Cut(torch.float32, 500, (RowRange(0, 2048),))
    assert best_cut(whole, 500, 500, anyhow=False) is None
    cut = best_cut(whole, 500, 500, anyhow=True)
    assert cut is not None
    assert {(stop - start) % 256 for start, stop in cut.ranges} == {0}


def test_the_number_of_threads_is_part_of_the_question() -> None:
    """An answer is kept, and not given for another number of threads than torch uses."""
    cut, given = cut_of(64, 512, 256), Given.rows(1, 64)
    ranges_are_exact(cut, given)
    hits = ranges_are_exact.cache_info().hits
    ranges_are_exact(cut, given)
    assert ranges_are_exact.cache_info().hits == hits + 1
    with pytest.raises(ValueError, match="threads="):
        ranges_are_exact(cut, given._replace(threads=given.threads + 1))


def test_precision_is_part_of_the_question() -> None:
    """Also where it was set in the newer way, of which the older one does not want to know."""
    settings: Any = torch.backends.mkldnn
    settings, usual = settings.matmul, Given.rows(1, 64)
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        assert Given.rows(1, 64) != usual
    finally:
        settings.fp32_precision = before
    assert Given.rows(1, 64) == usual


def test_what_cannot_be_tried() -> None:
    """No columns, no rows of input: the answer is no."""
    assert not ranges_are_exact(cut_of(0, 512, 256), Given.rows(1, 0))
    assert not ranges_are_exact(cut_of(64, 512, 256), Given.rows(0, 64))


def test_an_input_that_lies_otherwise(kernels: Any) -> None:
    """The last tokens of several sequences: it is tried as it lies, in every mode."""
    seen: list[torch.Tensor] = []
    cut = cut_of(96, 512, 256)
    given = torch.randn(3, 7, 96)[:, -1:]
    kernels(lambda *_: False)
    inner = functional.linear

    def linear(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(x)
        return inner(x, *rest)

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(functional, "linear", linear)
        ranges_are_exact(cut, Given.of(given))
    assert {(x.shape, x.stride(), x.data_ptr() % 64) for x in seen} == {
        (given.shape, given.stride(), given.data_ptr() % 64)
    }


@pytest.mark.parametrize("offset", [0, 4, 60])
@pytest.mark.parametrize("bias", [False, True])
def test_products_by_zeros(kernels: Any, offset: int, *, bias: bool) -> None:
    """Whatever the kernels do with sizes: the whole's bits, of ranges larger than the window."""
    kernels(lambda count, rows: (count + rows) % 2 == 1)
    cut = cut_of(3000, 1411, 576, offset=offset, bias=bias)
    weight, x = torch.randn(1411, 3000), torch.randn(2, 3, 3000)
    added = torch.randn(1411) if bias else None
    with torch.no_grad():
        wanted = functional.linear(x, weight, added)
        multiply = by_zeros(cut, x, added)
        parts = [multiply(start, weight[start:stop]) for start, stop in cut.ranges]
    assert torch.equal(torch.cat(parts, dim=-1), wanted)


@pytest.mark.slow
@pytest.mark.skipif(not WholeShape.is_free(), reason="zeros take memory here")
def test_what_it_takes() -> None:
    """A few megabytes for a weight of a gigabyte."""
    program = """
import torch
from pipeload.system.memory import peak_rss_bytes
from pipeload.weights.row_cuts import Cut, Given, ranges_are_exact, row_ranges
small, large = (Cut(torch.float32, 4096, row_ranges(n, 512)) for n in (1024, 65536))
ranges_are_exact(small, Given.rows(1, 4096))
before = peak_rss_bytes()
ranges_are_exact(large, Given.rows(1, 4096))
print(peak_rss_bytes() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 16e6
