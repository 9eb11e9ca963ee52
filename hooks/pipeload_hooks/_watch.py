"""Catches code that reads a block's weight while it is evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class OutsideReadError(RuntimeError):
    """A block's weight was used while the block was not running."""


# What may be asked of an evicted weight: its placeholder answers these truthfully.
_HARMLESS = frozenset(
    {
        torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
        torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
        torch.Tensor.device.__get__,  # type: ignore[attr-defined]
        torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
        torch.Tensor.is_meta.__get__,  # type: ignore[attr-defined]
        torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
        torch.Tensor.grad.__get__,  # type: ignore[attr-defined]
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.element_size,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.Tensor.get_device,
    }
)


class EvictedWeightWatch(TorchFunctionMode):
    """While active in a thread, every torch function that gets an evicted weight raises.

    Meant for a model's first pass: what a model reads does not depend on the token.
    """

    def __init__(self, names: Mapping[int, str], is_evicted: Callable[[int], bool]) -> None:
        super().__init__()
        self._names = names
        self._is_evicted = is_evicted
        self.active = True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - torch's own signature
        kwargs = kwargs or {}
        if self.active and func not in _HARMLESS:
            for value in (*args, *kwargs.values()):
                if isinstance(value, nn.Parameter) and id(value) in self._names and self._is_evicted(id(value)):
                    self._refuse(func, self._names[id(value)])
        return func(*args, **kwargs)

    def _refuse(self, func: Callable[..., Any], name: str) -> None:
        raise OutsideReadError(
            f"{getattr(func, '__name__', func)} was called on the weight {name!r} while its block is not "
            "running, so its values are on disk. This model uses block weights from outside the block "
            "and cannot be streamed; load it without pipeload."
        )
