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
    not, and cannot be assigned to `.data`. Integers know no NaN: whoever computes with them needs
    `Companion`s, which are None while they are evicted.
    """
    nothing = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    with torch.inference_mode(False):  # else the parameter would be an inference tensor for good
        return torch.full((), nothing, dtype=dtype, device=device).expand(tuple(shape))


def is_placeholder(tensor: torch.Tensor) -> bool:
    """Whether `tensor` shows one element in every place."""
    return tensor.numel() > 1 and not any(tensor.stride())


def set_parameter(
    model: nn.Module, name: str, data: torch.Tensor, *, requires_grad: bool
) -> nn.Parameter:
    """Replace the parameter at the dotted `name` by a new one that holds `data`."""
    # requires_grad is kept because matmul picks its kernel by it, even under no_grad.
    parameter = nn.Parameter(data, requires_grad=requires_grad)
    put_parameter(model, name, parameter)
    return parameter


def put_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Make `parameter` the one at the dotted `name`."""
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path)._parameters[leaf] = parameter


class Companion(NamedTuple):
    """An attribute that goes with a parameter: statistics of a quantised weight, or itself again.

    It is None while the parameter is evicted, so that nobody computes with a placeholder.
    """

    owner: object
    attribute: str
    values: torch.Tensor | None
    """What it holds; the parameter's own values if None."""

    @property
    def there(self) -> bool:
        """Whether it is not evicted."""
        return getattr(self.owner, self.attribute) is not None


class _Field:
    """A companion, set as a parameter is."""

    __slots__ = ("_attribute", "_owner")

    def __init__(self, companion: Companion) -> None:
        self._owner, self._attribute = companion.owner, companion.attribute

    def _set(self, values: torch.Tensor | None) -> None:
        setattr(self._owner, self._attribute, values)

    data = property(None, _set)


class Bound(NamedTuple):
    """A parameter and what it holds: values, or nothing."""

    parameter: nn.Parameter | _Field
    values: torch.Tensor
    evicted: torch.Tensor | None


class Binding:
    """The parameters of one site, and what each holds while evicted.

    It keeps the Parameter objects, not their names: adapters may move them to other modules.
    """

    __slots__ = ("_companions", "_evicted", "parameters")

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        companions: Mapping[str, Sequence[Companion]] | None = None,
    ) -> None:
        """`companions` are what goes with a parameter, by its name."""
        self.parameters = dict(parameters)
        """By name."""
        self._companions = dict(companions or {})
        self._evicted = {
            name: placeholder(p.shape, p.dtype, p.device) for name, p in self.parameters.items()
        }

    def pair(self, views: Mapping[str, torch.Tensor]) -> list[Bound]:
        """Prepare those parameters that `views` has values for."""
        pairs: list[Bound] = []
        for name, view in views.items():
            if name in self.parameters:
                pairs.append(Bound(self.parameters[name], view, self._evicted[name]))
                for one in self._companions.get(name, ()):
                    values = view if one.values is None else one.values
                    pairs.append(Bound(_Field(one), values, None))
        return pairs

    def evict(self) -> None:
        """Put the placeholder into every parameter."""
        with torch._C.DisableTorchFunction():
            for name, parameter in self.parameters.items():
                parameter.data = self._evicted[name]
            for one in (one for several in self._companions.values() for one in several):
                _Field(one).data = None


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
