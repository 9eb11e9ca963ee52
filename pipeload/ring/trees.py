"""What a block gave, as text and bytes: tensors in tuples, lists and dicts.

The text says how it is put together; it is JSON, and makes nothing but what is named here.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from pipeload.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_DTYPES = {
    str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)
}
_PLAIN = (type(None), bool, int, float, str)
_DICTS = {"dict": dict, "ordered": OrderedDict}


def take_apart(output: Any, given: Mapping[str, Any]) -> tuple[str, list[torch.Tensor]]:
    """How an output is put together, and its tensors.

    `given`: what the block was called with, which it may have handed on as it was.

    Raises:
        UnsupportedOperationError: it holds something else.
    """
    tensors: list[torch.Tensor] = []
    return json.dumps(_described(output, given, tensors)), tensors


def _described(value: Any, given: Mapping[str, Any], tensors: list[torch.Tensor]) -> list[Any]:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        stride = None if value.is_contiguous() else list(value.stride())
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), stride]
    if isinstance(value, _PLAIN):
        return ["value", value]
    if type(value) in (tuple, list):
        inner = [_described(one, given, tensors) for one in value]
        return [type(value).__name__, inner]
    for name, kind in _DICTS.items():
        if type(value) is kind:
            return [name, [[key, _described(one, given, tensors)] for key, one in value.items()]]
    for name, one in given.items():
        if one is value:
            return ["given", name]
    raise UnsupportedOperationError(
        f"a block gave a {type(value).__name__}, which cannot be sent to other ranks. Load the "
        "model without ranks."
    )


def put_together(text: str, given: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
    """The output that `take_apart` took apart."""
    return _made(json.loads(text), given, iter(tensors))


def _made(described: Any, given: Mapping[str, Any], tensors: Iterator[torch.Tensor]) -> Any:
    kind, inner = described[0], described[1]
    if kind == "tensor":
        return next(tensors)
    if kind == "value":
        return inner
    if kind == "given":
        return given[inner]
    if kind in _DICTS:
        return _DICTS[kind]((key, _made(one, given, tensors)) for key, one in inner)
    items = (_made(one, given, tensors) for one in inner)
    return tuple(items) if kind == "tuple" else list(items)


def by_name(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, those without one by place."""
    return {str(place): value for place, value in enumerate(args)} | dict(kwargs)


# -- bytes ---------------------------------------------------------------------------------------


class TensorSize:
    """What one tensor of a described output is, and takes."""

    __slots__ = ("dtype", "nbytes", "shape", "stride")

    def __init__(self, described: Sequence[Any]) -> None:
        _, dtype, shape, stride = described
        self.dtype, self.shape, self.stride = _DTYPES[dtype], tuple(shape), stride
        count = 1
        for size in shape:
            count *= size
        self.nbytes = count * self.dtype.itemsize


def sizes_in(text: str) -> list[TensorSize]:
    """The tensors of a described output, in order."""
    found: list[TensorSize] = []
    todo = [json.loads(text)]
    while todo:
        described = todo.pop(0)
        if described[0] == "tensor":
            found.append(TensorSize(described))
        elif described[0] in _DICTS:
            todo = [one for _, one in described[1]] + todo
        elif described[0] in ("tuple", "list"):
            todo = [*described[1], *todo]
    return found


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its memory; of one that is not contiguous a copy, with elements in their order."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def of_bytes(size: TensorSize, data: torch.Tensor) -> torch.Tensor:
    """The tensor of `as_bytes`, laid out in memory as it was."""
    tensor = data.view(size.dtype).view(size.shape)
    if size.stride is None:
        return tensor
    return torch.empty_strided(size.shape, size.stride, dtype=size.dtype).copy_(tensor)


def write_bytes(tensors: Sequence[torch.Tensor], room: torch.Tensor) -> None:
    """Copy tensors one behind the other into `room`, which is bytes."""
    start = 0
    for tensor in tensors:
        flat = as_bytes(tensor)
        room[start : start + flat.numel()].copy_(flat)
        start += flat.numel()


def read_bytes(sizes: Sequence[TensorSize], room: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that `write_bytes` wrote, laid out in memory as they were."""
    found: list[torch.Tensor] = []
    start = 0
    for size in sizes:
        part = room[start : start + size.nbytes]
        # Kernels look at where memory begins: as a tensor's own does, but for the first.
        found.append(of_bytes(size, part.clone() if start else part))
        start += size.nbytes
    return found
