"""Calls a weight source before and after a module, through torch's own hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.utils.hooks import RemovableHandle

    from pipeload_hooks._source import WeightSource


class Attachment:
    """The hooks on a model's sites. `remove` takes them off, one site's or all."""

    def __init__(self) -> None:
        self._handles: dict[int, list[RemovableHandle]] = {}

    def add(self, site: int, *handles: RemovableHandle) -> None:
        """Remember the hooks of `site`."""
        self._handles.setdefault(site, []).extend(handles)

    def remove(self, site: int | None = None) -> None:
        """Take the hooks off `site`, or off all sites. May be called again."""
        for index in list(self._handles) if site is None else [site]:
            for handle in self._handles.pop(index, []):
                handle.remove()

    def sites(self) -> list[int]:
        """The sites that still carry hooks."""
        return list(self._handles)

    def __len__(self) -> int:
        """How many sites still carry hooks."""
        return len(self._handles)


def attach(module: nn.Module, index: int, source: WeightSource) -> tuple[RemovableHandle, ...]:
    """Have `source.acquire(index)` run before `module` and `source.release(index)` after it.

    The hooks wrap the module's own forward and any hook that was there: acquire runs first. Release
    also runs when the forward raises an Exception, but not for a KeyboardInterrupt: torch skips its
    hooks then, so the source must recover by itself.
    """

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and recording((*args, *kwargs.values())):
            source.refuse_recording(index)
        source.acquire(index)

    def leave(_module: nn.Module, _args: tuple[Any, ...], output: object) -> None:
        source.release(index)
        # A weight inside is trained, an adapter's: backward would pass through those around it.
        values = output if isinstance(output, (tuple, list)) else (output,)
        if torch.is_grad_enabled() and recording(values):
            source.refuse_recording(index)

    return (
        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
        module.register_forward_hook(leave, always_call=True),
    )


def inside_compiled_call() -> bool:
    """Whether a caller up the stack is a function that torch.compile made.

    Asked of the C module: importing torch._dynamo for it would take 70 MB.
    """
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


def recording(values: Sequence[object]) -> bool:
    """Whether autograd has any of these on its record."""
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)
