"""A pass made larger: more rows of the same inputs, longer texts and sounds, larger pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Grow = Callable[[Mapping[str, Any], int], dict[str, Any]]

_TEXTS = ("input_ids", "decoder_input_ids", "inputs_embeds", "inputs")
_MOST_SHAPES = 6
_LONG = 96
"""Tokens of a text: the tiny configurations have 128 positions."""
_GRID = "grid_thw"
_SIDE = 8
_IN_A_ROW = ("feature_lens", "aftercnn_lens")
"""With these, the sounds of all rows lie one after the other."""


def shapes_of(value: Any, name: str = "") -> str:
    """Names and sizes of all tensors in a call's arguments: "input_ids 8x96 mask 8x96"."""
    if isinstance(value, Tensor):
        return f"{name} {'x'.join(map(str, value.shape))}"
    if callable(getattr(value, "get_seq_length", None)):
        return f"{name} after {value.get_seq_length()}"
    if isinstance(value, (list, tuple)):
        value = {f"{name}.{index}": item for index, item in enumerate(value)}
    if isinstance(value, dict):
        texts = [text for key, item in value.items() if (text := shapes_of(item, str(key)))]
        more = [f"and {len(texts) - _MOST_SHAPES} more"] if len(texts) > _MOST_SHAPES else []
        return " ".join([*texts[:_MOST_SHAPES], *more])
    return ""


def growths(given: Mapping[str, Any]) -> list[tuple[str, Grow]]:
    """Ways of making a pass so many times as large, best first: a name, and the function.

    Which of them a model can take is for the caller to find out.
    """
    long = _longer(given, _LONG)
    found: list[tuple[str, Grow]] = []
    if any(name.endswith(_GRID) for name in given) and long is None:
        found.append(("rows of larger pictures", lambda _, times: _rows(_grids(given), times)))
    if any(name in given for name in _IN_A_ROW):
        found.append(("sounds in a row", _sounds_in_a_row))
    if long is not None:
        found += [
            ("rows, longer", lambda _, times: _rows(long, times)),
            ("rows of batch, longer", lambda _, times: _rows(long, times, alone=True)),
        ]
    return [
        *found,
        ("rows", _rows),
        ("rows of batch", lambda given, times: _rows(given, times, alone=True)),
        ("longer", _lengthened),
        ("more positions", lambda given, times: _along(given, times, 1)),
        ("longer sound", lambda given, times: _along(given, times, -1)),
        ("larger picture", _larger),
    ]


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _each(item, change) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_each(item, change) for item in value)
    return value


def _rows(given: Mapping[str, Any], times: int, *, alone: bool = False) -> dict[str, Any]:
    """Every tensor so often along its first dimension; `alone`: those of one row there."""

    def change(tensor: Tensor) -> Tensor:
        if not tensor.dim() or (alone and tensor.shape[0] != 1):
            return tensor
        return tensor.repeat(times, *(1,) * (tensor.dim() - 1))

    return _each(dict(given), change)  # type: ignore[no-any-return]


def _sounds_in_a_row(given: Mapping[str, Any], times: int) -> dict[str, Any]:
    return {
        name: value.repeat(1, times) if value.is_floating_point() else value.repeat(times)
        for name, value in given.items()
    }


def _along(given: Mapping[str, Any], times: int, dim: int) -> dict[str, Any]:
    """Every tensor that is as long as the longest there, so often."""
    tensors = [v for v in given.values() if isinstance(v, Tensor) and v.dim() > 1]
    most = max((tensor.shape[dim] for tensor in tensors), default=0)

    def change(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or tensor.shape[dim] != most:
            return tensor
        return torch.cat([tensor] * times, dim)

    return _each(dict(given), change)  # type: ignore[no-any-return]


def _larger(given: Mapping[str, Any], times: int) -> dict[str, Any]:
    """Pictures with sides that are so many times as long, in steps of two."""
    side = 1 << max(1, (times.bit_length() - 1) // 2)

    def change(tensor: Tensor) -> Tensor:
        if tensor.dim() < 4 or not tensor.is_floating_point():
            return tensor
        return tensor.repeat(*(1,) * (tensor.dim() - 2), side, side)

    return _each(dict(given), change)  # type: ignore[no-any-return]


def _grids(given: Mapping[str, Any]) -> dict[str, Any]:
    """Pictures whose patches lie in a row, with longer sides: as many patches as those of use have.

    Thousands of small ones take time for each, and have no scores to speak of.
    """
    grids = [value for name, value in given.items() if name.endswith(_GRID)]
    patches = sum(int(grid.prod(1).sum()) for grid in grids)
    times = torch.tensor([1, _SIDE, _SIDE])

    def change(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() == 2 and value.shape[0] == patches:
            return value.repeat(_SIDE**2, 1)
        return value

    return {
        name: value * times if name.endswith(_GRID) else change(value)
        for name, value in given.items()
    }


def _lengthened(given: Mapping[str, Any], times: int) -> dict[str, Any]:
    text = next((given[name] for name in _TEXTS if name in given), None)
    tokens = text.shape[1] if isinstance(text, Tensor) and text.dim() > 1 else 0
    return _longer(given, tokens * times) or dict(given)


def _longer(given: Mapping[str, Any], tokens: int) -> dict[str, Any] | None:
    """Texts of so many tokens more or less, and what has one number for each; None without text.

    What was there stays in front: places of pictures among it.
    """
    found = dict(given)
    changed = False
    for name in _TEXTS:
        text = given.get(name)
        if not isinstance(text, Tensor) or text.dim() < 2 or text.shape[1] < 2:
            continue
        old, more = text.shape[1], tokens - text.shape[1]
        if more <= 0:
            continue
        changed = True
        found[name] = torch.cat([text, _some(text, more)], 1)
        for other, value in given.items():
            beside = isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == old
            if not beside or other in _TEXTS or value.is_floating_point():
                continue
            if other.endswith("position_ids"):
                last = value[:, -1:] + torch.arange(1, more + 1)
                found[other] = torch.cat([value, last.to(value.dtype)], 1)
            else:
                end = value[:, -1:]
                found[other] = torch.cat([value, end.expand(-1, more, *value.shape[2:])], 1)
    return found if changed else None


def _some(text: Tensor, more: int) -> Tensor:
    """Tokens like the last ones, among which no picture is."""
    if text.is_floating_point():
        return torch.randn(text.shape[0], more, *text.shape[2:], dtype=text.dtype)
    last = text[:, -8:]
    return last[:, torch.randint(0, last.shape[1], (more,))]
