"""Inputs put right by what a model's error says is wrong with them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    _Shape = tuple[int, ...]

_WHOLE = re.compile(r"indices must be long|argument #1 'indices'")
_BOOLEAN = re.compile(r"boolean mask|dtype to be bool|must have bool")


def repaired(given: dict[str, Any], error: str) -> Iterator[dict[str, Any]]:
    """Other inputs of the same names, each with one tensor of another shape or type."""
    change = _change(error)
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            continue
        if value.is_floating_point():
            if change is not None:
                shape = change(tuple(value.shape))
                if shape is not None and shape != tuple(value.shape):
                    yield {**given, name: torch.randn(shape)}
            if _WHOLE.search(error):
                yield {**given, name: torch.randint(0, 4, value.shape[:-1] or value.shape)}
                yield {**given, name: torch.randint(0, 4, value.shape)}
        elif name.endswith("mask") and value.dtype is not torch.bool and _BOOLEAN.search(error):
            yield {**given, name: value.bool()}


def _replaced(shape: _Shape, where: int, old: int, new: int) -> _Shape | None:
    """The shape with another size at one place; None where that place is not of the old size."""
    if not 0 <= where < len(shape) or shape[where] != old:
        return None
    return (*shape[:where], new, *shape[where + 1 :])


def _change(error: str) -> Callable[[_Shape], _Shape | None] | None:
    """What an error makes of a shape; None where it says nothing about shapes."""
    for pattern, change in _CHANGES:
        found = pattern.search(error)
        if found:
            numbers = [int(number) for number in found.groups()]
            return lambda shape, change=change: change(shape, *numbers)  # type: ignore[misc]
    return None


def _last(shape: _Shape, old: int, new: int) -> _Shape | None:
    return _replaced(shape, len(shape) - 1, old, new)


def _matching(shape: _Shape, one: int, other: int, where: int) -> _Shape | None:
    return (
        _replaced(shape, where, one, other)
        or _replaced(shape, where, other, one)
        or _last(shape, one, other)
    )


def _channels(shape: _Shape, new: int, old: int) -> _Shape | None:
    return _replaced(shape, 1, old, new) or _replaced(shape, 2, old, new) or _last(shape, old, new)


def _longer(shape: _Shape, old: int, new: int) -> _Shape | None:
    return _replaced((1, *shape)[-3:], 1, old, new) if len(shape) == 2 else None


def _deeper(shape: _Shape, wanted: int) -> _Shape | None:
    return (1,) * (wanted - len(shape)) + shape if len(shape) < wanted else None


def _flatter(shape: _Shape, wanted: int) -> _Shape | None:
    return shape[len(shape) - wanted :] if len(shape) > wanted else None


_CHANGES: tuple[tuple[re.Pattern[str], Callable[..., _Shape | None]], ...] = (
    (re.compile(r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x"), _last),
    (
        re.compile(r"tensor a \((\d+)\) must match .* tensor b \((\d+)\) at .*dimension (\d+)"),
        _matching,
    ),
    (re.compile(r"to have (\d+) channels, but got (\d+) channels"), _channels),
    (
        re.compile(r"normalized_shape=\[(\d+)\].*input of size\[(?:\d+, )*(\d+)\]"),
        lambda shape, new, old: _last(shape, old, new),
    ),
    (
        re.compile(r"sequence length \((\d+)\) doesn't match model configuration \((\d+)\)"),
        _longer,
    ),
    (re.compile(r"not enough values to unpack \(expected (\d+), got \d+\)"), _deeper),
    (re.compile(r"too many values to unpack \(expected (\d+)\)"), _flatter),
)
"""What errors look like, and what a shape becomes with the numbers in them."""
