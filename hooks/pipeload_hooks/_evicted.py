"""Parameters that tell who uses them while their values are elsewhere, or changes them.

[Note: kinds of parameters] A parameter's class is exchanged with its values. One that is evicted is
of a class whose every use but asking for its shape and the like is reported: a placeholder would
give NaN, and what is written to it would be lost. One that is bound for long is of a class whose
`.data` counts changes as other ways of changing it do, in `_version`; it is no slower to compute
with. While a parameter is bound for one run only it is a plain one: that must cost nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, MutableMapping

OnUse = Callable[[Callable[..., Any], nn.Parameter, tuple[Any, ...], Mapping[str, Any]], Any]
"""Called with a torch function, an evicted parameter that it was given, and all that it was given;
raises, or returns what is to be its result."""

# What may be asked of an evicted weight: its placeholder answers these truthfully.
_METADATA = ("shape", "dtype", "device", "requires_grad", "layout", "is_meta", "ndim", "grad")
HARMLESS = frozenset(
    {
        *(vars(torch._C.TensorBase)[name].__get__ for name in _METADATA),
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.element_size,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.Tensor.get_device,
    }
)
_SETTINGS = ("requires_grad", "grad")
_MORE_METADATA = (
    *("itemsize", "nbytes", "is_leaf", "grad_fn", "is_sparse", "is_quantized"),
    *("_version", "_backward_hooks", "is_cpu", "is_cuda", "is_xpu", "is_mps"),
)
BESIDE = HARMLESS | {
    *(vars(torch._C.TensorBase)[name].__set__ for name in _SETTINGS),
    *(vars(torch._C.TensorBase)[name].__get__ for name in _MORE_METADATA),
    torch.Tensor.__len__,
    torch.Tensor.__dir__,
    torch.Tensor.__format__,
    torch.Tensor.data_ptr,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_inference,
    torch.Tensor.is_pinned,
    torch.Tensor.is_shared,
    torch.Tensor.ndimension,
    torch.Tensor.nelement,
    torch.Tensor.requires_grad_,
    torch.Tensor.storage_offset,
    torch.Tensor.stride,
    torch.is_complex,
    torch.is_floating_point,
    torch.numel,
    torch.empty_like,
    torch.full_like,
    torch.ones_like,
    torch.rand_like,
    torch.randn_like,
    torch.zeros_like,
}
"""More of the kind, which are asked between passes rather than in one."""


_on_use: MutableMapping[nn.Parameter, OnUse] = WeakIdKeyDictionary()
"""Not attributes of the parameters: they would be pickled with them."""


def tell_uses(parameter: nn.Parameter, on_use: OnUse | None) -> None:
    """Have `on_use` called for that parameter while it is evicted; nothing any more if None."""
    if on_use is None:
        _on_use.pop(parameter, None)
    else:
        _on_use[parameter] = on_use


class Kind:
    """A class that parameters are of for a while."""

    plain: type[nn.Parameter]
    """What they are otherwise."""


class Evicted(Kind):
    """Its values are elsewhere."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in BESIDE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = (p for p in parameters_in((*args, *kwargs.values())) if isinstance(p, Evicted))
        parameter: Any = next(found)
        return _on_use[parameter](func, parameter, args, kwargs)

    def __repr__(self) -> str:
        """Not the values."""
        parameter: Any = self
        return f"Parameter on disk, shape={tuple(parameter.shape)}, dtype={parameter.dtype}"


class Resident(Kind, nn.Parameter):
    """Its values are there until memory is short."""

    plain = nn.Parameter

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a plain one: libraries call the class of a parameter to make another."""
        return nn.Parameter(*args, **kwargs)

    def detach(self) -> torch.Tensor:
        """As of any other. Another parameter that is made of it takes it: it shares its memory."""
        made = super().detach()
        if sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            self._take()
            made.__class__ = nn.Parameter  # the constructor wants one of the same class back
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        """As of a plain one."""
        return repr(nn.Parameter(super().detach(), self.requires_grad))

    @property
    def data(self) -> torch.Tensor:
        """As of any other, but changes of it count as the parameter's."""
        return super().detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self._take()
        self.data = values

    def _take(self) -> None:
        """Make a plain one of it, which counts as changed."""
        parameter: Any = self
        parameter.__class__ = nn.Parameter
        torch.autograd.graph.increment_version(parameter)


def plain_kind(parameter: object) -> type:
    """The class of a parameter, as it is outside of streaming."""
    kind = type(parameter)
    return kind.plain if issubclass(kind, Kind) else kind


@functools.cache
def evicted_kind(plain: type) -> type:
    """That of a parameter of class `plain` while it is evicted."""

    def make(_cls: type, *args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    own = {"__new__": make, "plain": plain, "__module__": plain.__module__}
    kind: type = type(plain)(plain.__name__, (Evicted, plain), own)
    return kind


def note_changes(parameter: nn.Parameter) -> None:
    """Have changes by way of `.data` count, of a plain parameter that will be there for long."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = Resident


def parameters_in(values: Iterable[object]) -> Iterator[nn.Parameter]:
    """Parameters among a function's arguments, those in lists and dictionaries included."""
    for value in values:
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            yield from parameters_in(value)
        elif isinstance(value, dict):
            yield from parameters_in(value.values())
