"""All tensors of whatever a model gives, and where two such outputs differ."""

from __future__ import annotations

from typing import Any

import torch

_DEEPEST = 6


def tensors_of(output: Any) -> dict[str, torch.Tensor]:
    """Every tensor of an output by its path: through containers and caches."""
    found: dict[str, torch.Tensor] = {}
    _collect(output, "output", found, 0, set())
    return found


def _collect(
    value: Any, path: str, found: dict[str, torch.Tensor], depth: int, seen: set[int]
) -> None:
    if depth > _DEEPEST or isinstance(value, (str, bytes, int, float, type, torch.nn.Module)):
        return
    if isinstance(value, torch.Tensor):
        found[path] = value.detach().clone()
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    else:
        items = list(getattr(value, "__dict__", {}).items())
    for key, item in items:
        _collect(item, f"{path}.{key}", found, depth + 1, seen)


def difference_of(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> str:
    """The first that differs, in words; empty if none does."""
    if got.keys() != wanted.keys():
        return f"other tensors: {sorted(got.keys() ^ wanted.keys())[:4]}"
    for name, tensor in wanted.items():
        one = got[name]
        if one.dtype != tensor.dtype or one.shape != tensor.shape:
            return (
                f"{name}: {one.dtype} {tuple(one.shape)}, not {tensor.dtype} {tuple(tensor.shape)}"
            )
        same = torch.equal(one, tensor)
        if not same and tensor.is_floating_point() and tensor.isnan().any():  # in a cache
            same = torch.equal(one.nan_to_num(0.5), tensor.nan_to_num(0.5))
        if not same:
            return f"{name}: {int((one != tensor).sum())} of {tensor.numel()} differ"
    return ""
