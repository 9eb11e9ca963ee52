"""Puts tensors into parameters and takes them out again, in about a microsecond each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of any shape that holds one element: NaN, so that reading an evicted weight shows.

    It keeps device, dtype and shape, which code outside the block may look at; a meta tensor would
    not, and cannot be assigned to `.data`.
    """
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(tuple(shape))


def is_placeholder(tensor: torch.Tensor) -> bool:
    """Whether `tensor` shows one element in every place."""
    return tensor.numel() > 1 and not any(tensor.stride())


def set_parameter(
    model: nn.Module, name: str, data: torch.Tensor, *, requires_grad: bool
) -> nn.Parameter:
    """Replace the parameter at the dotted `name` by a new one that holds `data`."""
    path, _, leaf = name.rpartition(".")
    # requires_grad is kept because matmul picks its kernel by it, even under no_grad.
    parameter = nn.Parameter(data, requires_grad=requires_grad)
    model.get_submodule(path)._parameters[leaf] = parameter
    return parameter


class Bound(NamedTuple):
    """A parameter and what it holds: values, or nothing."""

    parameter: nn.Parameter
    values: torch.Tensor
    evicted: torch.Tensor


class Binding:
    """The parameters of one site, and what each holds while evicted.

    It keeps the Parameter objects, not their names: adapters may move them to other modules.
    """

    __slots__ = ("_evicted", "parameters")

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        """By name."""
        self._evicted = {
            name: placeholder(p.shape, p.dtype, p.device) for name, p in self.parameters.items()
        }

    def pair(self, views: Mapping[str, torch.Tensor]) -> list[Bound]:
        """Prepare those parameters that `views` has values for."""
        return [
            Bound(self.parameters[name], view, self._evicted[name])
            for name, view in views.items()
            if name in self.parameters
        ]

    def evict(self) -> None:
        """Put the placeholder into every parameter."""
        with torch._C.DisableTorchFunction():
            for name, parameter in self.parameters.items():
                parameter.data = self._evicted[name]


def bind(pairs: Iterable[Bound]) -> None:
    """Give every parameter its values."""
    with torch._C.DisableTorchFunction():  # a watch of evicted weights has no say here
        for parameter, values, _ in pairs:
            parameter.data = values


def unbind(pairs: Iterable[Bound]) -> None:
    """Put the placeholders back."""
    with torch._C.DisableTorchFunction():
        for parameter, _, evicted in pairs:
            parameter.data = evicted
