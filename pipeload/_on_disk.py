"""What a state dict shows of a weight that is on disk: all about it, but not its values.

Adapters are saved and loaded by way of the state dict of the whole model, of which they take their
own entries. So there is one, and whatever reads a weight out of it that may be on disk is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pipeload.errors import UnsupportedOperationError
from pipeload_hooks import HARMLESS, placeholder

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Collection, Mapping, MutableMapping

    from torch import nn
    from typing_extensions import Self

    from pipeload._own_weights import OwnWeights


class OnDisk(torch.Tensor):
    """Has shape, dtype and device of a weight; every use of its values is refused by its name."""

    weight_name: str
    """Where it stands in the state dict."""

    def __new__(cls, weight: torch.Tensor, name: str) -> Self:
        """Stand for `weight`, whose values are not looked at."""
        shown = placeholder(weight.shape, weight.dtype, weight.device)
        self = torch.Tensor._make_subclass(cls, shown)  # noqa: SLF001 - torch's documented way
        self.weight_name = name
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what a placeholder can; for anything else the values are needed."""
        kwargs = kwargs or {}
        if func in HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as torch does
                return func(*args, **kwargs)
        name = next((found for found in _names(args)), None) or next(_names(kwargs.values()), "?")
        raise UnsupportedOperationError(
            f"{getattr(func, '__name__', func)}() needs the weight {name!r} of a state dict, which "
            "is on disk: a streamed model's state dict has values of adapters alone. Call "
            "handle.remove() first to get the plain model back (pipeload.handle(model).remove()), "
            "or read or copy the checkpoint itself."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled: torch.save would write placeholders."""
        return self.__torch_function__(torch.Tensor.__reduce_ex__, (), (self, protocol))

    def __repr__(self) -> str:  # type: ignore[override]
        """Not the values."""
        return f"OnDisk({self.weight_name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def _names(values: Any) -> Any:
    for value in values:
        if isinstance(value, OnDisk):
            yield value.weight_name
        elif isinstance(value, (list, tuple)):
            yield from _names(value)


class Hide:
    """A post-hook for state dicts of modules: weights that may be on disk are hidden."""

    def __init__(self, weights: OwnWeights) -> None:
        self._weights = weights

    def __call__(
        self, module: nn.Module, state: MutableMapping[str, Any], prefix: str, _metadata: object
    ) -> None:
        """Put what stands for them in their place."""
        for leaf, parameter in module._parameters.items():  # noqa: SLF001 - its own alone
            name = prefix + leaf
            if parameter is not None and id(parameter) in self._weights.hidden and name in state:
                state[name] = OnDisk(parameter, name)

    def __deepcopy__(self, _memo: object) -> Self:
        """Shared, as a function would be."""
        return self

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Refuse to be pickled, and with it the module: its weights would be placeholders."""
        raise UnsupportedOperationError(
            "A part of a streamed model cannot be pickled: its weights are on disk. Call "
            "handle.remove() first to get the plain model back (pipeload.handle(model).remove())."
        )


def save_hidden(weights: OwnWeights, reference: weakref.ref[nn.Module]) -> Callable[..., None]:
    """In place of what a quantised module does for a state dict: that would need its values."""

    def save(destination: MutableMapping[str, Any], prefix: str, keep_vars: bool) -> None:
        module = reference()
        for leaf, parameter in module.named_parameters(recurse=False) if module else ():
            name = prefix + leaf
            if id(parameter) in weights.hidden:
                destination[name] = OnDisk(parameter, name)
            else:
                destination[name] = parameter if keep_vars else parameter.detach()

    return save
