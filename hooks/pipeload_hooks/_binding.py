"""Puts tensors into parameters and takes them out again, in about a microsecond each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from pipeload_hooks._evicted import OnUse, evicted_kind, note_changes, plain_kind, tell_uses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


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
    kind: type
    """Its class while it holds values; see [Note: kinds of parameters] in _evicted.py."""
    evicted_kind: type


class Binding:
    """The parameters of one site, and what each holds while evicted.

    It keeps the Parameter objects, not their names: adapters may move them to other modules.
    """

    __slots__ = ("_companions", "_evicted", "_kinds", "_on_use", "parameters")

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        companions: Mapping[str, Sequence[Companion]] | None = None,
        on_use: Callable[[str], OnUse] | None = None,
    ) -> None:
        """`companions` are what goes with a parameter, by its name.

        `on_use`, given that name, makes what is called when an evicted one is used, once `arm` was
        called; without it they give NaN.
        """
        self.parameters = dict(parameters)
        """By name."""
        self._companions = dict(companions or {})
        self._evicted = {
            name: placeholder(p.shape, p.dtype, p.device) for name, p in self.parameters.items()
        }
        self._on_use = on_use
        self._kinds = {name: plain_kind(p) for name, p in self.parameters.items()}

    def arm(self) -> None:
        """Report uses of what is evicted from now on, and count changes of what is not."""
        for name, parameter in self.parameters.items():
            if self._on_use is not None:
                tell_uses(parameter, self._on_use(name))
            if is_placeholder(parameter):
                parameter.__class__ = self._evicted_kind(name)
            else:
                note_changes(parameter)

    def disarm(self) -> None:
        """Make plain parameters of them."""
        for name in [*self.parameters]:
            self.forget(name)

    def forget(self, name: str) -> None:
        """Leave a parameter as it is from now on, a plain one."""
        parameter = self.parameters.pop(name)
        parameter.__class__ = self._kinds[name]
        tell_uses(parameter, None)

    def _evicted_kind(self, name: str) -> type:
        kind = self._kinds[name]
        return kind if self._on_use is None else evicted_kind(kind)

    def pair(self, views: Mapping[str, torch.Tensor]) -> list[Bound]:
        """Prepare those parameters that `views` has values for."""
        pairs: list[Bound] = []
        for name, view in views.items():
            if name in self.parameters:
                kinds = self._kinds[name], self._evicted_kind(name)
                pairs.append(Bound(self.parameters[name], view, self._evicted[name], *kinds))
                for one in self._companions.get(name, ()):
                    values = view if one.values is None else one.values
                    pairs.append(Bound(_Field(one), values, None, _Field, _Field))
        return pairs

    def evict(self) -> None:
        """Put the placeholder into every parameter."""
        with torch._C.DisableTorchFunction():
            for name, parameter in self.parameters.items():
                parameter.__class__ = self._kinds[name]
                parameter.data = self._evicted[name]
                parameter.__class__ = self._evicted_kind(name)
            for one in (one for several in self._companions.values() for one in several):
                _Field(one).data = None


def bind(pairs: Iterable[Bound]) -> None:
    """Give every parameter its values."""
    with torch._C.DisableTorchFunction():  # a watch of evicted weights has no say here
        for parameter, values, _, kind, _ in pairs:
            parameter.__class__ = kind
            parameter.data = values


def bind_for_long(pairs: Sequence[Bound]) -> None:
    """The same, and have all changes of them count."""
    bind(pairs)
    for pair in pairs:
        if isinstance(pair.parameter, nn.Parameter):
            note_changes(pair.parameter)


def unbind(pairs: Iterable[Bound]) -> None:
    """Put the placeholders back into what `bind` has filled."""
    with torch._C.DisableTorchFunction():
        for parameter, _, evicted, _, kind in pairs:
            parameter.data = evicted
            parameter.__class__ = kind
