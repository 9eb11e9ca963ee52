"""Puts tensors into parameters and takes them out again, in about a microsecond each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of any shape that holds one element: NaN, so that reading an evicted weight shows.

    It keeps device, dtype and shape, which code outside the block may look at; a meta tensor would
    not, and cannot be assigned to `.data`.
    """
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(tuple(shape))


def set_parameter(
    model: nn.Module, name: str, data: torch.Tensor, *, requires_grad: bool
) -> nn.Parameter:
    """Replace the parameter at the dotted `name` by a new one that holds `data`."""
    path, _, leaf = name.rpartition(".")
    # requires_grad is kept because matmul picks its kernel by it, even under no_grad.
    parameter = nn.Parameter(data, requires_grad=requires_grad)
    model.get_submodule(path)._parameters[leaf] = parameter
    return parameter


class Binding:
    """The streamed parameters of one block, and what each holds while evicted.

    It keeps the Parameter objects, not their names: adapters may move them to other modules.
    """

    __slots__ = ("_evicted", "_parameters", "bound")

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._evicted = [
            (p, placeholder(p.shape, p.dtype, p.device)) for p in self._parameters.values()
        ]
        self.bound = False

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """By name."""
        return self._parameters

    def pair(self, views: Mapping[str, torch.Tensor]) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Prepare `views` (by parameter name) for `bind`."""
        return [(parameter, views[name]) for name, parameter in self._parameters.items()]

    def bind(self, pairs: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Give every parameter its values."""
        self.bound = True
        for parameter, view in pairs:
            parameter.data = view

    def unbind(self) -> None:
        """Put the placeholders back. Does nothing when nothing is bound."""
        if not self.bound:
            return
        for parameter, evicted in self._evicted:
            parameter.data = evicted
        self.bound = False
