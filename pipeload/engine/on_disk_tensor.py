"""What a state dict shows of a weight that is on disk: all about it, but not its values.

Adapters are saved and loaded by way of the state dict of the whole model, of which they take their
own entries. So there is one, and whatever reads a weight out of it that may be on disk is refused.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from pipeload.engine.calling_code import called_by_adapter, makes_parameter, name_call
from pipeload.errors import UnsupportedOperationError
from pipeload_hooks import BESIDE, placeholder

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Collection, Mapping, MutableMapping

    from typing_extensions import Self

    from pipeload.engine.own_weights import OwnWeights
    from pipeload_hooks import OnUse


_DATA = vars(torch._C.TensorBase)["data"]  # noqa: SLF001 - where it is
_SHOWING = frozenset({_DATA.__get__, torch.Tensor.detach})
_GIVING = frozenset({_DATA.__set__, torch.Tensor.copy_})
_WRITING = frozenset({"__set__", "__setitem__", "__setstate__"})
_CASTING = frozenset(
    {
        torch.Tensor.to,
        torch.Tensor.cpu,
        torch.Tensor.cuda,
        torch.Tensor.float,
        torch.Tensor.half,
        torch.Tensor.double,
        torch.Tensor.bfloat16,
        torch.Tensor.type_as,
    }
)


class OnDisk(torch.Tensor):
    """Has shape, dtype and device of a weight; every use of its values is refused by its name."""

    weight_name: str
    """Where it stands in the state dict."""
    stands_for: int
    """The `id` of the parameter."""

    def __new__(cls, weight: torch.Tensor, name: str) -> Self:
        """Stand for `weight`, whose values are not looked at."""
        shown = placeholder(weight.shape, weight.dtype, weight.device)
        self = torch.Tensor._make_subclass(cls, shown)  # noqa: SLF001 - torch's documented way
        self.weight_name, self.stands_for = name, id(weight)
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
        if func in BESIDE:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as torch does
                return func(*args, **kwargs)
        if changes_nothing(func, args, kwargs):
            return args[0]
        name = next((found for found in _names(args)), None) or next(_names(kwargs.values()), "?")
        return refuse_use(func, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled: torch.save would write placeholders."""
        return self.__torch_function__(torch.Tensor.__reduce_ex__, (), (self, protocol))

    def __repr__(self) -> str:  # type: ignore[override]
        """Show its name and shape: the values are on disk."""
        return f"OnDisk({self.weight_name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def on_use_of(name: str) -> OnUse:
    """What is to be done when somebody uses the weight of that name while it is evicted."""
    return partial(_on_use, name)


def _on_use(
    name: str,
    func: Callable[..., Any],
    parameter: nn.Parameter,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    if func in _SHOWING and not makes_parameter():
        return OnDisk(parameter, name)
    if changes_nothing(func, args, kwargs):
        return parameter
    as_another = func in _CASTING and args[0] is not parameter
    if as_another or (called_by_adapter() and not _writes(func)):
        # For an adapter it is NaN, and so is what it makes of it: looked for before the next pass.
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as torch does
            return func(*args, **kwargs)
    return refuse_use(func, name)


def changes_nothing(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a weight would be given what it has, or be cast to what it is."""
    if not args:  # all by name
        return False
    first, *others = args
    if func in _GIVING and others:
        return shows(others[0], first)
    if func not in _CASTING or not isinstance(first, (OnDisk, nn.Parameter)):
        return False
    sample = torch.empty(0, dtype=first.dtype, device=first.device)
    return func(sample, *others, **kwargs) is sample


def shows(value: object, parameter: object) -> bool:
    """Whether it is the parameter, or stands for it."""
    return value is parameter or getattr(value, "stands_for", None) == id(parameter)


def _writes(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name in _WRITING or (name.endswith("_") and not name.endswith("__"))


def refuse_use(func: Callable[..., Any], name: str) -> NoReturn:
    """Say who needs what is on disk, and what to do."""
    raise UnsupportedOperationError(
        f"{name_call(func)} needs the weight {name!r}, which is on disk: of a streamed model it is "
        "in memory only while its module runs. Call handle.remove() first to get the plain model "
        "back (pipeload.handle(model).remove()); what is changed there is streamed again with "
        "pipeload.wrap(model, memory_limit, spill_dir=FOLDER). Values alone can be read from, and "
        "copied with, the checkpoint."
    )


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
        """Be shared by the copy of a module, as a function would be."""
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
