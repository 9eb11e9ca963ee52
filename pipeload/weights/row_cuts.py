"""Where the rows of a Linear may be cut, and whether this host then computes the same bits.

[Note: what decides] A product is equal bit for bit as long as the library picks the same kernel,
with the same order of sums, for a range of rows as for the whole. What it picks depends on the
rows of the range and of the whole, on how many threads share them, on the rows of input, and on
addresses modulo 64. Seen on x86, two threads: with 4 to 15 rows of input, MKL's fp32 kernels for
AVX-512 take weights whose rows are a multiple of 256 otherwise than all others; with 16 to 56 rows
large weights otherwise than small ones; those for AVX2 any range otherwise than the whole. With
one row of bf16, shares of fewer than 64 rows go through other kernels. With AMX, so do ranges from
17 rows of input on. None of this is promised by anybody, so nothing is concluded from one size to
another: what is relied on was tried, with this very weight's size, ranges and place, and with this
very number of rows of input (see [Note: a weight of zeros] in whole_shape.py).
"""

from __future__ import annotations

import math
import random
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from pipeload.weights.arena import DTYPES
from pipeload.weights.trial_thread import tried_apart
from pipeload.weights.whole_shape import KERNEL_ALIGN, WholeShape

if TYPE_CHECKING:
    from pipeload.weights.layout import Weight

ROW_STEP = 64
"""Ranges begin at multiples of this many rows."""
WIDE_STEP = 256
# Tried when a model is planned, as many as there is time for: decoding, drafts and small batches,
# prompts. Others are tried when they come. In half precision oneDNN keeps about 0.5 MB of kernels
# for every number of rows and every size of range that it has ever seen: there are fewer trials.
_LIKELY = (1, 8, 17, 130)
_LIKELY_IN_HALF = (1, 17)
_MOST_MULTIPLICATIONS = 1_500_000_000  # some hundredths of a second
_SINGLE = 4  # bytes of an element
_REMEMBERED = 4096  # answers
# Rows of input in all, one after the other where there are fewer: where shares of threads meet, one
# row of the weight is summed otherwise, and one time in seven it rounds to the same.
_LEAST_INPUTS = 4
_CLUSTER = 4  # rows with values lie in pages that they share


class RowRange(NamedTuple):
    """Rows `start:stop` of a weight."""

    start: int
    stop: int


class Cut(NamedTuple):
    """A weight and how it is cut: all of it that kernels may look at."""

    dtype: torch.dtype
    """Of weight, bias and input as they are multiplied."""
    inputs: int
    """Columns of the weight."""
    ranges: tuple[RowRange, ...]
    """One behind the other."""
    offset: int = 0
    """Where the weight begins in memory, modulo 64."""
    bias: bool = False
    requires_grad: bool = True
    """Of the weight: matmul picks its kernel by it, even under no_grad."""
    weight_rows: int = 0
    """How many rows the weight has, where the ranges are not all of it."""

    @property
    def total(self) -> int:
        """How many rows the weight has."""
        return self.weight_rows or self.ranges[-1].stop

    @property
    def within(self) -> RowRange:
        """The rows of all ranges together."""
        return RowRange(self.ranges[0].start, self.ranges[-1].stop)

    def ranges_of(self, rows: int, step: int) -> tuple[RowRange, ...]:
        """Its rows in ranges of at most `rows`, as `row_ranges` cuts them."""
        first, stop = self.within
        count = stop - first
        rows = max(_least_rows(count, step), rows - rows % step)
        return tuple(RowRange(first + a, first + b) for a, b in row_ranges(count, rows, step))


class Given(NamedTuple):
    """The input of a product: all of it that kernels may look at, but for its type."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Where it begins in memory, modulo 64."""
    threads: int
    precision: str
    """Of fp32 products, as the user chose it."""

    @classmethod
    def of(cls, given: torch.Tensor) -> Given:
        """Describe `given`, with the settings of now."""
        return cls(
            given.shape,
            given.stride(),
            given.data_ptr() % KERNEL_ALIGN,
            torch.get_num_threads(),
            _precision(),
        )

    @classmethod
    def rows(cls, count: int, inputs: int) -> Given:
        """Describe `count` rows of their own, with the settings of now."""
        return cls.of(torch.empty(count, inputs, device="meta"))


def _precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set in the newer way, one for each library
        return str(torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined]


def whole_cut(weight: Weight, module: nn.Linear) -> Cut:
    """The product of a Linear with all of its rows at once."""
    total, columns = weight.shape
    offset = weight.sources[0].start % KERNEL_ALIGN if weight.raw else 0
    bias, requires_grad = module.bias is not None, module.weight.requires_grad
    ranges = (RowRange(0, total),)
    return Cut(DTYPES[weight.dtype], columns, ranges, offset, bias, requires_grad, total)


def row_ranges(total: int, rows: int, step: int = ROW_STEP) -> tuple[RowRange, ...]:
    """Cut `total` rows into the fewest ranges of at most `rows`, as even as can be.

    Every range begins at a multiple of `step` and has that many rows or more (if `total` has): the
    rest of the division by it is a part of the last one.

    Raises:
        ValueError: `rows` is no multiple of `step` or too small for that, or `total` not positive.
    """
    least = _least_rows(total, step)
    if total < 1:
        raise ValueError(f"total={total} must be positive")
    if rows < least or rows % step:
        raise ValueError(f"rows={rows} must be a multiple of {step} and at least {least}")
    count = -(-total // rows)
    steps, more = divmod(total // step, count)
    sizes = [step * (steps + (number < more)) for number in range(count)]
    sizes[-1] += total % step
    starts = [sum(sizes[:number]) for number in range(count)]
    return tuple(RowRange(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _least_rows(total: int, step: int) -> int:
    """One step where it divides all; else the last range takes the rest, and needs room for it."""
    return step if step > ROW_STEP and total % step == 0 else 2 * step


def best_cut(cut: Cut, rows: int, least: int, *, anyhow: bool) -> Cut | None:
    """`cut` with ranges of at most about `rows`; None if none gives the same bits often enough.

    Exact for all numbers of rows of input that are tried beforehand; with `anyhow` for as many as
    can be, which is exact in any case and slow for the rest (see engine/row_products.py). In half
    precision, ranges of at most `least` rows are tried for all others.
    """
    found: list[tuple[int, Cut]] = []
    for step in (ROW_STEP, WIDE_STEP):
        most = cut.ranges_of(rows, step)
        tried = cut.ranges_of(least if cut.dtype.itemsize < _SINGLE else rows, step)
        one = cut._replace(ranges=most)
        if len(most) == 1:
            continue
        exact = _exact_counts(cut._replace(ranges=tried))
        if exact == len(_counts(one)):
            return one
        found.append((exact, one))
    return max(found, key=lambda pair: pair[0])[1] if anyhow and found else None


def can_cut_rows(cut: Cut) -> bool:
    """Whether its ranges give the same bits, for all rows of input that are likely."""
    return _exact_counts(cut) == len(_counts(cut))


def _exact_counts(cut: Cut) -> int:
    """How many of the likely numbers of rows of input come before one that is not exact."""
    counts = _counts(cut)
    tried = (ranges_are_exact(cut, Given.rows(count, cut.inputs)) for count in counts)
    return next((n for n, exact in enumerate(tried) if not exact), len(counts))


def _counts(cut: Cut) -> list[int]:
    """Numbers of rows of input to try beforehand: one at least, and others while there is time."""
    left = _MOST_MULTIPLICATIONS
    counts: list[int] = []
    for count in _LIKELY if cut.dtype.itemsize >= _SINGLE else _LIKELY_IN_HALF:
        takes = 2 * count * cut.total * cut.inputs
        if takes <= left or not counts:
            left -= takes
            counts.append(count)
    return counts


@lru_cache(_REMEMBERED)
def ranges_are_exact(cut: Cut, given: Given) -> bool:
    """Whether `F.linear` by the ranges of `cut` equals the whole one on this host, bit for bit.

    Every range is multiplied and compared, in a few of its rows, with a product of the whole size;
    all else is zeros. Takes what the product itself takes, and `WholeShape` in memory.

    Raises:
        ValueError: torch uses another number of threads than `given` says.
    """
    if given.threads != torch.get_num_threads():
        raise ValueError(f"threads={given.threads}, but torch uses {torch.get_num_threads()}")
    if not cut.inputs or not all(given.shape):
        return False
    return tried_apart(given.threads, _try, cut, given)


def _try(cut: Cut, given: Given) -> bool:
    whole = WholeShape(cut.total, cut.inputs, cut.dtype, cut.offset)
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        values = _Values.of(cut)
        rows = _sampled(cut, whole.window_rows, given.threads)
        for block in rows.split(max(1, whole.window_rows // 8)):
            whole.weight[block] = values.rows(len(block), sign=-1)
        x, bias = _place(given, cut.dtype), values.bias(cut)
        count = math.prod(given.shape[:-1])
        for _ in range(-(-_LEAST_INPUTS // count)):
            x.copy_(values.rows(count, sign=1).view(given.shape))
            if not _equal(x, whole.weight, bias, cut, rows):
                return False
        return True


def _equal(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cut: Cut, rows: torch.Tensor
) -> bool:
    whole = functional.linear(x, nn.Parameter(weight, cut.requires_grad), bias)
    for start, stop in cut.ranges:
        part = nn.Parameter(weight[start:stop], cut.requires_grad)
        made = functional.linear(x, part, None if bias is None else bias[start:stop])
        here = rows[(rows >= start) & (rows < stop)]
        if not torch.equal(made[..., here - start], whole[..., here]):
            return False
    return True


def _sampled(cut: Cut, most: int, threads: int) -> torch.Tensor:
    """Rows to compare: first and last of every range, and as many others as may be.

    First of all those where threads' shares of the whole, and of ranges, meet.
    """
    chance = random.Random(cut.total)  # noqa: S311 - the same ones every time
    together = min(_CLUSTER, max(1, most // (2 * len(cut.ranges))))
    whole = RowRange(0, cut.total)
    begins = [row for start, stop in cut.ranges for row in (start, stop - together)]
    for one in (whole, *cut.ranges):
        meet = (
            one.start + share * (one.stop - one.start) // threads for share in range(1, threads)
        )
        begins += [row for middle in meet for row in (middle - together, middle)]
    del begins[max(2 * len(cut.ranges), most // together) :]
    more = max(0, (most // together - len(begins)) // len(cut.ranges))
    for start, stop in cut.ranges:
        last = max(start, stop - together)
        begins += [chance.randint(start, last) for _ in range(more)]
    reach = (range(max(0, row), min(row + together, cut.total)) for row in begins)
    return torch.tensor(sorted({row for rows in reach for row in rows}))


def _place(given: Given, dtype: torch.dtype) -> torch.Tensor:
    """Make memory for an input that lies as `given` does."""
    reach = 1 + sum((n - 1) * step for n, step in zip(given.shape, given.stride, strict=True))
    buffer = torch.empty(reach * dtype.itemsize + 2 * KERNEL_ALIGN, dtype=torch.uint8)
    start = -buffer.data_ptr() % KERNEL_ALIGN + given.offset // dtype.itemsize * dtype.itemsize
    flat = buffer[start : start + reach * dtype.itemsize].view(dtype)
    return flat.as_strided(given.shape, given.stride)


class _Values(NamedTuple):
    """Test data, such that all terms of every product cancel and the result is rounding alone.

    With ordinary values a low precision hides most differences: sums in another order, rounded to
    8 bits, are nearly always the same.
    """

    order: torch.Tensor
    random: torch.Generator
    dtype: torch.dtype

    @classmethod
    def of(cls, cut: Cut) -> _Values:
        random = torch.Generator().manual_seed(cut.inputs)
        return cls(torch.randperm(cut.inputs, generator=random), random, cut.dtype)

    def rows(self, count: int, *, sign: int) -> torch.Tensor:
        """Make rows in which every second column of `order` is another one, times `sign`."""
        half = len(self.order) // 2
        made = torch.empty(count, len(self.order), dtype=self.dtype)
        values = torch.randn(count, half, generator=self.random).to(self.dtype)
        made[:, self.order[:half]] = values
        made[:, self.order[half : 2 * half]] = values * sign
        made[:, self.order[2 * half :]] = 1e-3
        return made

    def bias(self, cut: Cut) -> torch.Tensor | None:
        """Make a bias of all sizes, from far below the rounding errors to far above them."""
        if not cut.bias:
            return None
        scale = torch.tensor([0.0, 1e-7, 1e-3, 1.0]).repeat(-(-cut.total // 4))[: cut.total]
        return (torch.randn(cut.total, generator=self.random) * scale).to(self.dtype)
