"""Makes integers of one weight. Pure functions.

What its columns weigh may be given: their inputs' mean squares. No other data is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from pipeload.formats.integers.compensation import Factor, compensate
from pipeload.formats.integers.search import search

GROUPS = (32, 64, 128)
"""Sizes of groups of int4 weights that share a scale and a zero point."""
ZERO_POINTS = ("search", "rtn", "hqq")
"""How scales and zero points of int4 are found; the first by default."""
IMPORTANCE = "importance"
"""As "search", with what columns weigh."""
GPTQ = "gptq"
"""As that, and columns make up for each other's errors."""
_ROUNDS = 20
_CHUNK_ITEMS = 1 << 18  # temporaries that stay in the cache: several times as fast
_NORM = 0.7
_FIRST_WEIGHT = 10.0
_GROWTH = 1.01
_LEAST_WEIGHT = 0.01  # of a column, against the mean of all: a text is not every text


class Int8(NamedTuple):
    """weight ~ values * scale[:, None]."""

    values: torch.Tensor
    """int8 of [rows, columns], -127 to 127."""
    scale: torch.Tensor
    """[rows]."""


class Int4(NamedTuple):
    """A group of a row ~ (values - 8) * scale + zero."""

    values: torch.Tensor
    """uint8 of [rows, columns], 0 to 15."""
    scales_and_zeros: torch.Tensor
    """[columns / group, rows, 2]."""


Rounding: TypeAlias = Callable[[torch.Tensor], Int8 | Int4]
"""Makes whole rows of a weight, [rows, columns], into codes, scales and zero points."""


def to_int8(weight: torch.Tensor, column_weights: torch.Tensor | None = None) -> Int8:
    """Round to the nearest of 255 values, symmetric about zero, one scale a row.

    Args:
        weight: of [rows, columns]; the scale gets its dtype.
        column_weights: of [columns], as `weigh_columns` makes them: scales are searched that make
            the weighed error small. Without, the largest value of a row is the largest code.
    """
    if column_weights is not None:
        found = search(weight, column_weights, weight.shape[1], 8)
        return Int8(found.codes, found.scale[:, 0].to(weight.dtype))
    exact = weight.float()
    scale = _storable(exact.abs().amax(1) / 127, weight.dtype)
    values = (exact / scale.float()[:, None]).round_().clamp_(-127, 127)
    return Int8(values.to(torch.int8), scale)


def to_int4(
    weight: torch.Tensor,
    group: int,
    zero_points: str = "search",
    column_weights: torch.Tensor | None = None,
    factors: Sequence[Factor] = (),
) -> Int4:
    """Round to the nearest of 16 evenly spread values of each group.

    Args:
        weight: of [rows, columns]; scales and zeros get its dtype.
        group: neighbours in a row that share a scale; divides the columns.
        zero_points: "search" looks for what makes the squared error small. With "rtn" the least and
            the largest value of a group are the outer ones of the 16, with "hqq" the zero moves
            from there: see `_move_zeros`.
        column_weights: of "search", [columns], as `weigh_columns` makes them; None is all alike.
        factors: of "search", of each block of columns: they make up for each other's errors.
    """
    rows, columns = weight.shape
    if zero_points == "search":
        alike = torch.ones(columns) if column_weights is None else column_weights
        found = search(weight, alike, group, 4)
        both = torch.stack((found.scale, found.zero), -1).transpose(0, 1).to(weight.dtype)
        codes = compensate(weight, found, factors) if factors else found.codes
        return Int4(codes.add_(8).view(torch.uint8), both.contiguous())
    exact = weight.float().view(rows, columns // group, group)
    least, most = exact.amin(-1, keepdim=True), exact.amax(-1, keepdim=True)
    scale = _storable((most - least) / 15, weight.dtype).float()
    zero = least + 8 * scale
    if zero_points == "hqq":
        step = max(1, _CHUNK_ITEMS // columns)
        parts = (t.split(step) for t in (exact, scale, zero))
        zero = torch.cat([_move_zeros(*part) for part in zip(*parts, strict=True)])
    zero = zero.to(weight.dtype).float()
    values = _nearest(exact, scale, zero).add_(8).to(torch.uint8).view(rows, columns)
    both = torch.cat((scale, zero), -1).transpose(0, 1)
    return Int4(values, both.to(weight.dtype).contiguous())


def weigh_columns(mean_squares: torch.Tensor) -> torch.Tensor:
    """What columns weigh whose inputs have these mean squares: about 1, and nothing near 0.

    All weigh the same where no input ever came, or none was a number.
    """
    mean = mean_squares.double().mean()
    if not (bool(mean.isfinite()) and mean > 0):
        return torch.ones_like(mean_squares, dtype=torch.float32)
    return (mean_squares / mean).clamp_(min=_LEAST_WEIGHT).float()


def from_int4(values: torch.Tensor, scales_and_zeros: torch.Tensor) -> torch.Tensor:
    """What `to_int4` has made, as fp32 of [rows, columns]."""
    groups, rows, _ = scales_and_zeros.shape
    scale, zero = scales_and_zeros.float().transpose(0, 1).split(1, -1)
    grouped = values.view(rows, groups, -1).float()
    made: torch.Tensor = ((grouped - 8) * scale + zero).view(values.shape)
    return made


def error_of_rows(
    weight: torch.Tensor, made: Int8 | Int4, column_weights: torch.Tensor
) -> torch.Tensor:
    """Sum of each row's squared errors, each times what its column weighs: fp32 of [rows].

    Args:
        weight: of [rows, columns].
        made: of it.
        column_weights: of [columns].
    """
    if isinstance(made, Int4):
        error = from_int4(made.values, made.scales_and_zeros)
    else:
        error = made.values.float().mul_(made.scale.float()[:, None])
    return error.sub_(weight).square_() @ column_weights


def _nearest(exact: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return ((exact - zero) / scale).round_().clamp_(-8, 7)


def _move_zeros(exact: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Zeros that leave most errors small and few large, with scales as they are.

    Half-quadratic splitting after Badri and Shaji, "Half-Quadratic Quantization of Large Machine
    Learning Models", Mobius Labs 2023, https://mobiusml.github.io/hqq_blog. The sum of the errors'
    magnitudes to the power 0.7 is made small by turns: outliers are set aside by shrinking the
    errors, then the zero is the mean of what the rest wants. Here in units of a step, so that the
    size of the weights does not matter; and each group keeps the best zero it has seen, so none is
    worse by that sum than where it began.
    """
    weight = _FIRST_WEIGHT
    best, least = zero, torch.full_like(zero, torch.inf)
    for _ in range(_ROUNDS):
        steps = _nearest(exact, scale, zero)
        error = (exact - zero).div_(scale).sub_(steps)
        size = error.abs()
        # 1e-4 of a step: the power has a pole at no error at all.
        power = size.clamp(min=1e-4).pow_(_NORM - 1)
        total = (size * power).sum(-1, keepdim=True)
        better = total < least
        best, least = torch.where(better, zero, best), torch.where(better, total, least)
        if not better.any():
            break
        aside = size.sub_(power, alpha=1 / weight).clamp_(min=0).copysign_(error)
        zero = zero + scale * error.sub_(aside).mean(-1, keepdim=True)
        weight *= _GROWTH
    return best


def _storable(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a scale to the dtype it is stored in, and not to zero: a row of zeros stays one."""
    stored = scale.to(dtype)
    return stored.masked_fill_(stored == 0, torch.finfo(dtype).tiny)
