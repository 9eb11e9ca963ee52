"""Where the rows of a Linear may be cut, and whether this host then computes the same bits.

[Note: what decides] A product is equal bit for bit as long as the library picks the same kernel,
with the same order of sums, for a range of rows as for the whole. Seen on x86 (AVX2 and AVX-512,
MKL and oneDNN): a thread's share of fewer than about 32 rows goes through other kernels, in fp32
and in bf16 alike, so the rest of a division never makes a range of its own. With one row of input,
fp32 depends on the address modulo 16 as well, and ranges that begin at multiples of 64 rows keep
it. None of this is promised by anybody: the check decides, on the host, for the number of threads.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch.nn import functional

ROW_STEP = 64
"""Ranges begin at multiples of this many rows."""

_ALIGN = 64

# Rows of input: decoding, then both sides of the kernels' block sizes, and a short prompt.
_FEW = (1, 3)
_MANY = (17, 130)
# Memory: the test weight takes this much, its making 8 MB, the inputs and outputs little.
_WEIGHT_BYTES = 24 << 20
_BLOCK_ELEMENTS = 1 << 20
# Time: elements of the weight that few and many rows of input meet, for each thread.
_FEW_ELEMENTS = 2_000_000
_MANY_ELEMENTS = 750_000


class RowRange(NamedTuple):
    """Rows `start:stop` of a weight."""

    start: int
    stop: int


def row_ranges(total: int, rows: int) -> list[RowRange]:
    """Cut `total` rows into the fewest ranges of at most `rows`, as even as can be.

    Every range begins at a multiple of 64 and has 64 rows or more (if `total` has): the rest of
    the division by 64 is a part of the last one.

    Raises:
        ValueError: `rows` is no multiple of 64, or is less than 128.
    """
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
    smallest = min(stop - start for start, stop in row_ranges(total, rows))
    return rows_are_exact(
        dtype,
        inputs,
        smallest - smallest % ROW_STEP,
        total % ROW_STEP,
        bias,  # noqa: FBT003 - one key for the cache, however it is called
        torch.get_num_threads(),
    )


@lru_cache(maxsize=None)
def rows_are_exact(
    dtype: torch.dtype,
    inputs: int,
    rows: int,
    remainder: int,
    bias: bool,  # noqa: FBT001
    threads: int,
) -> bool:
    """Whether `F.linear` by ranges of `rows` equals the whole one on this host, bit for bit.

    Two or three ranges, the last with `remainder` rows more, are compared with the whole product
    of the same weight, for one to 130 rows of input, at an aligned address and at the worst that a
    file may give. The weight takes at most 24 MB, and less where its products would take long:
    larger ranges are stood for by ranges with fewer rows, which are the harder case, and where not
    two of 64 rows fit the answer is False.

    Args:
        dtype: Of weight, bias and input.
        inputs: Columns of the weight.
        rows: Of a range: the smallest that will be used; a multiple of 64.
        remainder: Rows that the last range has beyond a multiple of 64.
        bias: Whether one is added.
        threads: What `torch.get_num_threads()` says: kernels divide the rows among them.

    Raises:
        ValueError: `rows` is not a positive multiple of 64, or torch uses another number of
            threads.
    """
    if rows < ROW_STEP or rows % ROW_STEP:
        raise ValueError(f"rows={rows} is not a positive multiple of 64")
    if threads != torch.get_num_threads():
        raise ValueError(f"threads={threads}, but torch uses {torch.get_num_threads()}")
    fit = _WEIGHT_BYTES // (max(inputs, 1) * dtype.itemsize)
    smallest = 2 * ROW_STEP + remainder
    if inputs == 0 or fit < smallest:
        return False
    few = max(smallest, min(fit, _FEW_ELEMENTS * threads // inputs))
    many = max(smallest, min(fit, _MANY_ELEMENTS * threads // inputs))
    with torch.inference_mode():
        for offset in (0, dtype.itemsize):
            case = _Case.make(dtype, inputs, max(few, many), offset, bias=bias)
            for counts, total in ((_FEW, few), (_MANY, many)):
                sizes = _sizes(total, rows, remainder)
                if not all(case.is_exact(count, sizes) for count in counts):
                    return False
    return True


def _sizes(fit: int, rows: int, remainder: int) -> list[int]:
    """Two or three ranges, of `rows` rows or as many as make at most `fit` rows in all."""
    steps = (fit - remainder) // ROW_STEP
    count = 3 if steps >= 3 else 2
    size = min(rows, steps // count * ROW_STEP)
    return [size] * (count - 1) + [size + remainder]


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

    def is_exact(self, count: int, sizes: list[int]) -> bool:
        """Whether ranges of `sizes` rows make the whole product of the first `count` inputs."""
        given, rows = self.given[:count], sum(sizes)
        weight, bias = self.weight[:rows], None if self.bias is None else self.bias[:rows]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        parts = [
            functional.linear(given, part, part_bias)
            for part, part_bias in zip(weight.split(sizes), biases, strict=True)
        ]
        return torch.equal(torch.cat(parts, dim=-1), functional.linear(given, weight, bias))


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
