"""Where the rows of a Linear may be cut, and whether this host then computes the same bits.

[Note: what decides] A product is equal bit for bit as long as the library picks the same kernel,
with the same order of sums, for a range of rows as for the whole. Seen on x86 (AVX2 and AVX-512,
MKL and oneDNN): what matters is a thread's share of the rows. Shares of fewer than 32 rows (fp32)
or 64 rows (bf16, one row of input) may go through other kernels; so may products of at most 4096
multiplications in bf16. Hence the rest of a division never makes a range of its own. With one row
of input, fp32 depends on the address modulo 16 as well, and ranges that begin at multiples of 64
rows keep it. None of this is promised by anybody: the check decides, on the host, for the number
of threads.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import NamedTuple

import torch
from torch.nn import functional

ROW_STEP = 64
"""Ranges begin at multiples of this many rows."""

_ALIGN = 64

# Rows of input: decoding and drafts, then prompts. Not more: in bf16 oneDNN keeps about 0.5 MB of
# kernels for every number of rows and every size of range that it has ever seen.
_FEW = (1, 3)
_MANY = (17, 130)
# Memory: the test weight takes this much, its making 8 MB, inputs and outputs less than that.
_WEIGHT_BYTES = 24 << 20
_MOST_ROWS = 16_384
_BLOCK_ELEMENTS = 1 << 20
# Time: elements of the weight that few and many rows of input meet, for each thread.
_FEW_ELEMENTS = 2_000_000
_MANY_ELEMENTS = 750_000
# Ranges that give each thread two steps of rows or more are computed like any larger ones.
_ENOUGH_STEPS = 2


class RowRange(NamedTuple):
    """Rows `start:stop` of a weight."""

    start: int
    stop: int


def row_ranges(total: int, rows: int) -> list[RowRange]:
    """Cut `total` rows into the fewest ranges of at most `rows`, as even as can be.

    Every range begins at a multiple of 64 and has 64 rows or more (if `total` has): the rest of
    the division by 64 is a part of the last one.

    Raises:
        ValueError: `rows` is no multiple of 64 or is less than 128, or `total` is not positive.
    """
    if total < 1:
        raise ValueError(f"total={total} must be positive")
    if rows < 2 * ROW_STEP or rows % ROW_STEP:
        raise ValueError(f"rows={rows} must be a multiple of 64 and at least 128")
    count = -(-total // rows)
    steps, more = divmod(total // ROW_STEP, count)
    sizes = [ROW_STEP * (steps + (number < more)) for number in range(count)]
    sizes[-1] += total % ROW_STEP
    starts = [sum(sizes[:number]) for number in range(count)]
    return [RowRange(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def can_cut_rows(dtype: torch.dtype, inputs: int, total: int, rows: int, *, bias: bool) -> bool:
    """Whether a `[total, inputs]` weight cut by `row_ranges(total, rows)` gives the same bits.

    Asked for the number of threads that torch uses now. An answer is kept for the process.
    """
    ranges = row_ranges(total, rows)
    if len(ranges) == 1:
        return True
    threads = torch.get_num_threads()
    # The last is one of the smallest. Their size is not always the hardest case.
    smallest, remainder = divmod(ranges[-1].stop - ranges[-1].start, ROW_STEP)
    largest = (ranges[0].stop - ranges[0].start) // ROW_STEP
    cases = {min(steps, _ENOUGH_STEPS * threads) for steps in (smallest, largest)}
    return all(
        rows_are_exact(dtype, inputs, steps * ROW_STEP, remainder, bias=bias, threads=threads)
        for steps in sorted(cases)
    )


@cache
def rows_are_exact(
    dtype: torch.dtype,
    inputs: int,
    rows: int,
    remainder: int,
    *,
    bias: bool,
    threads: int,
) -> bool:
    """Whether `F.linear` by ranges of `rows` equals the whole one on this host, bit for bit.

    The first, a middle and the last range of a weight, the last with `remainder` rows more, are
    compared with the product of all of it: for one to five rows of input at an aligned address and
    at the worst that a file may give, for up to 130 at the latter. The weight takes at most 24 MB.
    A larger range is stood for by as many rows as fit; where that gives a thread fewer than 64 of
    them, the answer is False.

    Args:
        dtype: Of weight, bias and input.
        inputs: Columns of the weight.
        rows: Of a range; a multiple of 64.
        remainder: Rows that the last range has beyond that, fewer than 64.
        bias: Whether one is added.
        threads: What `torch.get_num_threads()` says: kernels divide the rows among them.

    Raises:
        ValueError: `rows` is not a positive multiple of 64, `remainder` is not less than 64, or
            torch uses another number of threads.
    """
    if rows < ROW_STEP or rows % ROW_STEP or not 0 <= remainder < ROW_STEP:
        raise ValueError(f"rows={rows} and remainder={remainder} are not whole steps and a rest")
    if threads != torch.get_num_threads():
        raise ValueError(f"threads={threads}, but torch uses {torch.get_num_threads()}")
    # Not here: torch's threads would then be this thread's for good, and a child that is forked
    # from it, has them not, and computes, would wait for them for ever.
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as apart:
        check = partial(_check_rows, dtype, inputs, rows, remainder, bias=bias, threads=threads)
        return apart.submit(check).result()


def _check_rows(
    dtype: torch.dtype, inputs: int, rows: int, remainder: int, *, bias: bool, threads: int
) -> bool:
    share = ROW_STEP * threads
    fit = min(_MOST_ROWS, _WEIGHT_BYTES // (max(inputs, 1) * dtype.itemsize))
    most = ((fit - remainder) // ROW_STEP - 1) * ROW_STEP  # the whole has a step more at least
    if inputs == 0 or most < share:
        return False
    plans = []
    for counts, largest, elements in (
        (_FEW, most, _FEW_ELEMENTS),
        (_MANY, share, _MANY_ELEMENTS),
    ):
        size = min(rows, largest)
        least = max(size, share) + ROW_STEP + remainder
        total = max(least, min(fit, elements * threads // inputs))
        plans.append(_Plan(counts, size, total - (total - remainder) % ROW_STEP))
    with torch.inference_mode():
        for offset, used in ((0, plans[:1]), (dtype.itemsize, plans)):
            case = _Case.make(dtype, inputs, max(plan.total for plan in used), offset, bias=bias)
            if not all(case.is_exact(plan, count) for plan in used for count in plan.counts):
                return False
    return True


class _Plan(NamedTuple):
    """What is compared."""

    counts: tuple[int, ...]
    """Numbers of input rows."""
    rows: int
    """Of a range."""
    total: int
    """Rows of the weight."""

    @property
    def ranges(self) -> list[RowRange]:
        """The first, a middle and the last one, which has what a division by 64 leaves, too."""
        last = self.total // ROW_STEP * ROW_STEP - self.rows
        middle = last // 2 // ROW_STEP * ROW_STEP
        return [
            RowRange(0, self.rows),
            RowRange(middle, middle + self.rows),
            RowRange(last, self.total),
        ]


class _Case(NamedTuple):
    """Test data, such that all terms of every product cancel and the result is rounding alone.

    With ordinary values a low precision hides most differences: sums in another order, rounded to
    8 bits, are nearly always the same.
    """

    given: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def make(cls, dtype: torch.dtype, inputs: int, rows: int, offset: int, *, bias: bool) -> _Case:
        """A weight `[rows, inputs]` that begins `offset` bytes after an aligned address."""
        random = torch.Generator().manual_seed(inputs)
        order = torch.randperm(inputs, generator=random)
        weight = _empty(rows, inputs, dtype, offset)
        _fill(weight, order, random, sign=-1)
        given = torch.empty(max(_MANY), inputs, dtype=dtype)
        _fill(given, order, random, sign=1)
        if not bias:
            return cls(given, weight, None)
        # Of all sizes, from far below the rounding errors to far above them.
        scale = torch.tensor([0.0, 1e-7, 1e-3, 1.0]).repeat(-(-rows // 4))[:rows]
        return cls(given, weight, (torch.randn(rows, generator=random) * scale).to(dtype))

    def is_exact(self, plan: _Plan, count: int) -> bool:
        """Whether every range equals its part of the whole, for the first `count` inputs."""
        given, weight = self.given[:count], self.weight[: plan.total]
        bias = None if self.bias is None else self.bias[: plan.total]
        whole = functional.linear(given, weight, bias)
        for start, stop in plan.ranges:
            part_bias = None if bias is None else bias[start:stop]
            part = functional.linear(given, weight[start:stop], part_bias)
            if not torch.equal(part, whole[:, start:stop]):
                return False
        return True


def _empty(rows: int, columns: int, dtype: torch.dtype, offset: int) -> torch.Tensor:
    nbytes = rows * columns * dtype.itemsize
    buffer = torch.empty(nbytes + 2 * _ALIGN, dtype=torch.uint8)
    start = -buffer.data_ptr() % _ALIGN + offset
    return buffer[start : start + nbytes].view(dtype).view(rows, columns)


def _fill(into: torch.Tensor, order: torch.Tensor, random: torch.Generator, *, sign: int) -> None:
    """Give every second column of `order` the values of another one, times `sign`."""
    half = len(order) // 2
    for block in into.split(max(1, _BLOCK_ELEMENTS // len(order))):
        values = torch.randn(len(block), half, generator=random).to(into.dtype)
        block[:, order[:half]] = values
        block[:, order[half : 2 * half]] = values * sign
        block[:, order[2 * half :]] = 1e-3
