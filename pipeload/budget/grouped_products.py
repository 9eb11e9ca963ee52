"""Whether a grouped product on this processor is a product for each group, to the last bit."""

from __future__ import annotations

import functools

import torch
from torch import nn

from pipeload_hooks import empty_grouped

_ROWS = (1, 3, 17, 130)
"""Rows of a group that are tried: kernels change with their number."""
_COLUMNS = 256
"""Of the output, at most: they are computed alike, and a whole matrix takes memory."""


@functools.lru_cache(maxsize=64)
def products_are_grouped(dtype: torch.dtype, rows: int, columns: int) -> bool:
    """Try matrices `[rows, columns]`, as they are and transposed.

    False also where torch refuses them.
    """
    return all(
        _same(dtype, inner, min(outer, _COLUMNS), transposed=transposed)
        for inner, outer, transposed in ((columns, rows, True), (rows, columns, False))
    )


def _same(dtype: torch.dtype, inner: int, outer: int, *, transposed: bool) -> bool:
    outer -= outer % (16 // dtype.itemsize) if outer >= _COLUMNS else 0
    generator = torch.Generator().manual_seed(0)
    shape = (2, outer, inner) if transposed else (2, inner, outer)
    with torch.inference_mode(False), torch.no_grad():
        weight = torch.randn(shape, generator=generator).to(dtype)
        weight = weight.transpose(-2, -1) if transposed else weight
        for rows in _ROWS:
            given = torch.randn((2 * rows, inner), generator=generator).to(dtype)
            stops = torch.tensor([rows, 2 * rows], dtype=torch.int32)
            try:
                whole = nn.functional.grouped_mm(given, weight, offs=stops)
            except RuntimeError:
                return False
            single = empty_grouped(given, outer)
            for group in range(2):
                part = slice(group * rows, (group + 1) * rows)
                torch.mm(given[part], weight[group], out=single[part])
            if not torch.equal(whole, single):
                return False
    return True
