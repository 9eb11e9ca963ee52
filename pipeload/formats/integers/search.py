"""Searches the scales and zeros that leave the least error: compiled, else with torch.

What is made small, for each group of a row, is the sum of the squared errors of its weights, each
times what its column weighs. Ranges of several shares of that of the values are tried: values are
rounded to the nearest code of each, scale and zero are fitted to the codes by least squares, and
once again to what is nearest then. All are tried as they are stored, in the dtype of the weights.
Rounding to nearest is the first, so nothing is worse by that sum.

That columns weigh what their inputs are in the mean square is what llama.cpp calls an importance
matrix; the fit is the common one of k-quants and of others, written anew.

`search.c` and `_Tiles` do the same operations in the same order, so their bits are equal: see
there what may not be changed. Both take tiles, which are groups of eight rows beside each other.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from pipeload.formats.compiler import compile_library

_SOURCE = Path(__file__).with_name("search.c")
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_LANES = 8
_RANGES = 14
_SHARES = torch.tensor([1.02 - 0.5 * i / _RANGES for i in range(_RANGES)])
_FITS_OF_A_RANGE = 3
_LEAST_SPREAD = 1e-5  # of codes, against their mean square: below, rounding of sums decides
_BLOCK = 16  # columns whose sums are added up first, where a whole row is one group
_CHUNK_ITEMS = 1 << 19  # of which torch's temporaries stay small


class Found(NamedTuple):
    """A weight as codes; a group of a row ~ codes * scale + zero."""

    codes: torch.Tensor
    """int8 of [rows, columns]."""
    scale: torch.Tensor
    """fp32 of [rows, groups], of values that the weight's dtype has."""
    zero: torch.Tensor
    """The same."""


class _Grid(NamedTuple):
    """Which codes there are."""

    least: int
    most: int
    symmetric: bool
    """Without a zero."""
    dtype: torch.dtype
    """That scales and zeros are stored in."""


def search(weight: torch.Tensor, column_weights: torch.Tensor, group: int, bits: int) -> Found:
    """Find codes, scales and zeros.

    Args:
        weight: of [rows, columns], in bf16, fp16 or fp32, finite.
        column_weights: fp32 of [columns], each above 0; around 1.
        group: neighbours in a row that share a scale; divides the columns. If it is all of them,
            columns are a multiple of 16.
        bits: 4, with zeros; 8, without.
    """
    rows, columns = weight.shape
    groups = columns // group
    tall = -rows % _LANES
    tiles = pad(weight, (0, 0, 0, tall)).float().view(-1, _LANES, groups, group)
    tiles = tiles.permute(0, 2, 3, 1).reshape(-1, group, _LANES).contiguous()
    half = 1 << bits - 1
    grid = _Grid(1 - half if bits == 8 else -half, half - 1, bits == 8, weight.dtype)
    block = group if group <= 128 else _BLOCK
    its = column_weights.float().contiguous().view(groups, group)
    library = compiled()
    if library is None:
        codes, fits = _by_torch(tiles, its, block, grid)
    else:
        codes, fits = _by_kernel(library, tiles, its, block, grid)
    codes = codes.view(-1, groups, group, _LANES).permute(0, 3, 1, 2).reshape(-1, columns)
    fits = fits.view(-1, groups, 2, _LANES).permute(2, 0, 3, 1).reshape(2, -1, groups)
    return Found(codes[:rows], fits[0, :rows], fits[1, :rows])


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """Compile the kernel; None without a compiler, on other processors, or if that goes wrong."""
    library = compile_library(_SOURCE)
    if library is not None:
        library.search.argtypes = [
            *[ctypes.c_void_p] * 5,
            *[ctypes.c_int64] * 5,
            *[ctypes.c_int] * 3,
            ctypes.c_float,
        ]
        library.search.restype = None
    return library


def _by_kernel(
    library: ctypes.CDLL,
    tiles: torch.Tensor,
    column_weights: torch.Tensor,
    block: int,
    grid: _Grid,
) -> tuple[torch.Tensor, torch.Tensor]:
    count, size, _ = tiles.shape
    codes = torch.empty(tiles.shape, dtype=torch.int8)
    fits = torch.empty((count, 2, _LANES))
    tensors = (tiles, column_weights, _SHARES, fits, codes)
    library.search(
        *(tensor.data_ptr() for tensor in tensors),
        *(count, len(column_weights), size, block, len(_SHARES)),
        *(grid.most, int(grid.symmetric), _KINDS[grid.dtype], torch.finfo(grid.dtype).tiny),
    )
    return codes, fits


def _by_torch(
    tiles: torch.Tensor, column_weights: torch.Tensor, block: int, grid: _Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the kernel: codes as int8 [count, size, 8], fits as fp32 [count, 2, 8]."""
    groups, size = column_weights.shape
    whole_rows = max(1, _CHUNK_ITEMS // (groups * size * _LANES)) * groups
    codes, fits = [], []
    for some in tiles.split(whole_rows):
        its = column_weights.repeat(len(some) // groups, 1).t()  # [size, count]
        values = some.permute(1, 0, 2).contiguous()  # [size, count, 8]
        made = _Tiles(values, its[..., None].contiguous(), block, grid)
        fit = made.search()
        codes.append(made.codes(fit).to(torch.int8).permute(1, 0, 2))
        fits.append(torch.stack((fit.scale, fit.zero), 1))
    return torch.cat(codes), torch.cat(fits)


class _Fit(NamedTuple):
    scale: torch.Tensor
    """[count, 8]."""
    zero: torch.Tensor


class _Sums(NamedTuple):
    """Over each group, of what its columns weigh times ..."""

    error: torch.Tensor
    """squared errors, [count, 8]"""
    code: torch.Tensor
    square: torch.Tensor
    """codes squared"""
    product: torch.Tensor
    """codes times values"""


class _Tiles:
    """Some tiles, and the search over them. Names and order are those of `search.c`."""

    def __init__(
        self, values: torch.Tensor, weights: torch.Tensor, block: int, grid: _Grid
    ) -> None:
        self._values, self._weights, self._block, self._grid = values, weights, block, grid
        sizes = values.abs() if grid.symmetric else values
        self._low, self._high = sizes.amin(0), sizes.amax(0)
        self._weight, self._value = self._sum(weights), self._sum(weights * values)

    def search(self) -> _Fit:
        best = self._nearest()
        least = self._measure(best).error
        for share in _SHARES:
            fit = self._over(share)
            for _ in range(_FITS_OF_A_RANGE):
                sums = self._measure(fit)
                better = sums.error < least
                least = torch.where(better, sums.error, least)
                best = _Fit(
                    torch.where(better, fit.scale, best.scale),
                    torch.where(better, fit.zero, best.zero),
                )
                fit = self._refit(fit, sums)
        return best

    def codes(self, fit: _Fit) -> torch.Tensor:
        """[size, count, 8], whole numbers."""
        steps = (self._values - fit.zero).mul_(torch.ones(()) / fit.scale)
        return steps.clamp_(self._grid.least, self._grid.most).round_()

    def _measure(self, fit: _Fit) -> _Sums:
        codes = self.codes(fit)
        gaps = (codes * fit.scale).add_(fit.zero).sub_(self._values)
        error = self._sum(gaps.mul_(gaps).mul_(self._weights))
        weighed = codes * self._weights
        code, product = self._sum(weighed), self._sum(weighed * self._values)
        return _Sums(error, code, self._sum(weighed.mul_(codes)), product)

    def _sum(self, terms: torch.Tensor) -> torch.Tensor:
        """Over the columns: one after the other within a block, then block after block."""
        parts = terms.view(-1, self._block, *terms.shape[1:])
        made = torch.zeros_like(parts[:, 0])
        for i in range(self._block):
            made += parts[:, i]
        total = torch.zeros_like(made[0])
        for part in made:
            total += part
        return total

    def _refit(self, fit: _Fit, sums: _Sums) -> _Fit:
        if self._grid.symmetric:
            scale, zero = sums.product / sums.square, torch.zeros(())
            told = sums.square > 0
        else:
            whole = self._weight * sums.square
            spread = whole - sums.code * sums.code
            told = spread > whole * torch.tensor(_LEAST_SPREAD)
            scale = (self._weight * sums.product - sums.code * self._value) / spread
            zero = (sums.square * self._value - sums.code * sums.product) / spread
        scale, zero = self._stored(scale), self._stored(zero)
        told = told & (scale > 0)
        return _Fit(torch.where(told, scale, fit.scale), torch.where(told, zero, fit.zero))

    def _over(self, share: torch.Tensor) -> _Fit:
        grid = self._grid
        if grid.symmetric:
            scale = self._stored_scale(self._high * share / torch.tensor(float(grid.most)))
            return _Fit(scale, torch.zeros_like(scale))
        spacing = torch.tensor(float(grid.most - grid.least))
        scale = self._stored_scale((self._high - self._low) * share / spacing)
        middle = (self._low + self._high) * 0.5
        return _Fit(scale, self._stored(middle + 0.5 * scale))

    def _nearest(self) -> _Fit:
        fit = self._over(torch.ones(()))
        if self._grid.symmetric:
            return fit
        return _Fit(fit.scale, self._stored(self._low - self._grid.least * fit.scale))

    def _stored(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self._grid.dtype).float()

    def _stored_scale(self, scale: torch.Tensor) -> torch.Tensor:
        stored = self._stored(scale)
        return stored.masked_fill_(stored == 0, torch.finfo(self._grid.dtype).tiny)
