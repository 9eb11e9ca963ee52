"""Products of many rows with an integer weight: made into floats, a block at a time.

The kernels for integers take each row of input by itself. They are the fastest for the few of
decoding; a prompt is faster as a product of floats, making those included. Blocks bound what that
takes: never a whole weight.

[Note: how many rows are many] AMD EPYC with AVX512-BF16, two threads, torch 2.13, in ms for a
weight of 11008 x 4096, kernel / floats in blocks of 256. Other work ran beside it: compare the two
figures of a pair, not pairs. A weight of 4096 x 4096 crosses at the same rows.

    rows                              32         64        128        192        256
    int8 in bf16                   113 / 72   191 / 83   372 / 138  378 / 140  369 / 120
    int4 in bf16                    86 / 222  138 / 245  276 / 173  318 / 169  271 / 227
    int8, as if AVX2 were all       80 / 86   176 / 260  337 / 266  510 / 436  915 / 608
    int4, the same                  89 / 209  167 / 242  381 / 503  494 / 641  879 / 903

For fp32 and fp16 there are no such kernels but plain loops (int8 fp32: 22 ms for one row, 149 for
eight; floats 17 and 26), so from two rows on floats are faster.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MOST_BY_KERNEL = {8: 48, 4: 192}
"""Rows of bf16, by the bits of the weight."""
_OUT_ROWS = 256  # of a weight at once: whole tiles of int4
_ROWS = 256  # of input at once, where they are cast
_BF16 = ("avx512_bf16", "amx_bf16", "bf16")


class WeightBlock(NamedTuple):
    """Some rows of a weight as floats, transposed."""

    values: torch.Tensor
    """[in, rows]."""
    scale: torch.Tensor | None
    """[rows]: what products are to be multiplied by."""


class Sizes(NamedTuple):
    """What the needs of a product depend on."""

    out_features: int
    in_features: int
    bits: int
    dtype: torch.dtype
    """Of the input."""
    reordered: bool = False
    """Whether columns of the input are put into another order first."""

    def of(self, rows: int) -> int:
        """Bytes that a product of so many rows of input holds beside its tensors."""
        copied = rows * self.in_features * self.dtype.itemsize if self.reordered else 0
        return copied + temporary_bytes(rows, self)


def most_by_kernel(bits: int, dtype: torch.dtype) -> int:
    """Rows of input up to which the kernel is taken: see [Note: how many rows are many]."""
    return _MOST_BY_KERNEL[bits] if dtype == torch.bfloat16 else 1


def multiply(
    rows: torch.Tensor, out_features: int, block: Callable[[int, int, torch.dtype], WeightBlock]
) -> torch.Tensor:
    """[n, out] of `rows`, [n, in].

    What is added up in which order depends on the sizes and the processor alone, so the bits do.

    Args:
        rows: contiguous, at an address that is a multiple of 64.
        out_features: rows of the weight.
        block: makes its rows from the first number to before the second, as that dtype.
    """
    dtype = product_dtype(rows.dtype)
    made = torch.empty((len(rows), out_features), dtype=rows.dtype)
    parts = rows.split(len(rows) if dtype == rows.dtype else _ROWS)
    for start in range(0, out_features, _OUT_ROWS):
        stop = min(start + _OUT_ROWS, out_features)
        _multiply(parts, block(start, stop, dtype), made[:, start:stop])
    return made


def _multiply(parts: Sequence[torch.Tensor], block: WeightBlock, out: torch.Tensor) -> None:
    """Multiply by one block. A function of its own, so that nothing of it outlives it."""
    for part, into in zip(parts, out.split(len(parts[0])), strict=True):
        product = part.to(block.values.dtype) @ block.values
        into.copy_(product if block.scale is None else product.mul_(block.scale))
        del product


def temporary_bytes(rows: int, weight: Sizes) -> int:
    """The most that a product of so many rows of input holds beside those and what it returns."""
    if rows <= most_by_kernel(weight.bits, weight.dtype):
        return 0
    dtype = product_dtype(weight.dtype)
    count = min(weight.out_features, _OUT_ROWS)
    part = rows if dtype == weight.dtype else min(rows, _ROWS)
    # The library may put both factors into an order of its own.
    items = (2 * count + part * (dtype != weight.dtype)) * weight.in_features + part * count
    nbytes: float = items * dtype.itemsize
    if weight.bits == 4:  # integers, exact floats, scales and zeros of groups of 32
        exact = torch.float32.itemsize * (dtype != torch.float32)
        nbytes += count * weight.in_features * (1.5 + exact)
    return int(nbytes)


@functools.cache
def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """What to multiply in: bf16 only where the processor does, fp32 is several times as fast."""
    known = torch.cpu.get_capabilities()
    native = dtype == torch.bfloat16 and any(known.get(name) for name in _BF16)
    return dtype if native else torch.float32
