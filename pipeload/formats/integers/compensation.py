"""Rounds columns one by one, and lets those that are left make up for each error.

GPTQ after Frantar, Ashkboos, Hoefler and Alistarh, "GPTQ: Accurate Post-Training Quantization for
Generative Pre-trained Transformers", 2022, arXiv:2210.17323: the squared error of products over a
text is a quadratic form of the weights' errors, the sums of products of each two inputs; once a
column is rounded, the best change of those still to come follows from a Cholesky factor of the
inverse. Columns with the largest inputs go first, on scales that were found before ("act-order"
with "static groups"), so nothing is put in another order for whoever multiplies.

Sums of products of all columns with all would be gigabytes. Here inputs are taken in blocks of
neighbours, and a column makes up for those of its own block alone.

`compensation.c` and `_by_torch` do the same operations in the same order, so their bits are equal
(of finite weights: others are refused as they are read).
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from pipeload.formats.compiler import compile_library

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeload.formats.integers.search import Found

BLOCK: Final = 512
"""Columns that make up for each other; the kernel holds no more."""
_DAMPING: Final = 0.01  # of the mean of the diagonal, as in the paper
_TRIES: Final = 8
_SOURCE: Final = Path(__file__).with_name("compensation.c")
_ROWS: Final = 512  # at once: a block of so many, and their changes, stay in the cache


class Factor(NamedTuple):
    """Of one block."""

    order: torch.Tensor
    """int64 of [columns]: which column comes when."""
    upper: torch.Tensor
    """fp32 of [columns, columns] in that order: the upper Cholesky factor of the inverse."""


def blocks_of(columns: int) -> list[range]:
    """List the columns of each block; the last may have fewer."""
    return [range(at, min(at + BLOCK, columns)) for at in range(0, columns, BLOCK)]


def factor(products: torch.Tensor) -> Factor:
    """Find in which order a block is rounded, and how its columns make up for each other.

    Args:
        products: fp32 of [columns, columns]: sums, or means, of products of each two inputs.
    """
    diagonal = products.diagonal()
    order = diagonal.argsort(descending=True, stable=True)
    sorted_ = products[order][:, order]
    mean = float(diagonal.mean())
    damping = _DAMPING * mean if 0 < mean < float("inf") else 0.0
    whole = torch.eye(len(products))
    for _ in range(_TRIES if damping else 0):
        lower, failed = torch.linalg.cholesky_ex(sorted_ + damping * whole)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and bool(upper.isfinite().all()):
                return Factor(order, upper)
        damping *= 10
    return Factor(order, whole)  # no inputs came, or no numbers: each for itself


def compensate(weight: torch.Tensor, found: Found, factors: Sequence[Factor]) -> torch.Tensor:
    """Find codes on the scales and zeros of a search: int8 of [rows, columns].

    Each number is that of its row alone, whatever rows are beside it.

    Args:
        weight: of [rows, columns].
        found: of 4 bits.
        factors: of each of `blocks_of(columns)`.
    """
    library = compiled()
    if library is None:
        return _by_torch(weight, found, factors)
    rows, columns = weight.shape
    exact = weight.float().contiguous()
    made = torch.empty((rows, columns), dtype=torch.int8)
    scale, zero = found.scale.contiguous(), found.zero.contiguous()
    for block, one in zip(blocks_of(columns), factors, strict=True):
        lower = one.upper.t().contiguous()
        tensors = (exact, scale, zero, one.order, lower, made)
        library.compensate(
            *(tensor.data_ptr() for tensor in tensors),
            *(rows, columns, block.start, len(block), columns // scale.shape[1]),
        )
    return made


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """Compile the kernel; None without a compiler, on other processors, or if that goes wrong."""
    library = compile_library(_SOURCE)
    if library is not None:
        library.compensate.argtypes = [*[ctypes.c_void_p] * 6, *[ctypes.c_int64] * 5]
        library.compensate.restype = None
    return library


def _by_torch(weight: torch.Tensor, found: Found, factors: Sequence[Factor]) -> torch.Tensor:
    """As the kernel."""
    rows, columns = weight.shape
    group = columns // found.scale.shape[1]
    made = torch.empty((columns, rows), dtype=torch.int8)
    change = torch.empty(BLOCK * min(rows, _ROWS))
    for block, one in zip(blocks_of(columns), factors, strict=True):
        places = block.start + one.order
        groups = places // group
        for start in range(0, rows, _ROWS):
            some = slice(start, min(start + _ROWS, rows))
            values = weight[some, places].float().t().contiguous()
            scale, zero = (each[some, groups].t().contiguous() for each in found[1:])
            made[places, some] = _round(values, scale, zero, one.upper, change)
    return made.t().contiguous()


def _round(
    values: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    upper: torch.Tensor,
    change: torch.Tensor,
) -> torch.Tensor:
    """Codes of a block, all of [columns, rows] in its order; `values` and `change` are changed."""
    codes = torch.empty(values.shape, dtype=torch.int8)
    steps = torch.ones(()) / scale  # as the search: where nothing is made up for, its codes
    for at, value in enumerate(values):
        code = (value - zero[at]).mul_(steps[at]).clamp_(-8, 7).round_()
        codes[at] = code
        error = (value - code.mul_(scale[at]).add_(zero[at])).div_(upper[at, at])
        left = values[at + 1 :]
        # Not by one operation that may fuse both, at some places and not at others: same bits.
        product = change[: left.numel()].view(left.shape)
        left.sub_(torch.mul(upper[at, at + 1 :, None], error, out=product))
    return codes
