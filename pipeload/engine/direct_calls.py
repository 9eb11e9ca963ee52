"""Calls past a model's own hooks: `model.forward(...)`, or methods that compute with its parts.

See [Note: calls without a hook] in the lower layer's _callers.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pipeload_hooks import Caller, Callers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from pipeload.engine.hooking import Hooks
    from pipeload_hooks import Mark


_LOOPS = ("generate",)
"""Methods that some models have of their own, which call parts: an encoder once, others often."""


class PassCall(NamedTuple):
    """A call that is a pass: of which module, and with which arguments."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mark: Mark | None = None
    """Where nobody says that it is over: on its frame."""
    first: bool = False
    """Whether it is the first in a thread of its own."""


class DirectCalls:
    """Finds whose pass it is that begins at some part of a model."""

    def __init__(self, hooks: Hooks, pass_modules: Sequence[nn.Module]) -> None:
        """`pass_modules` are those whose methods are looked for."""
        self._hooks = hooks
        self._callers = Callers(pass_modules, loops=_LOOPS)

    def call_at(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> PassCall:
        """The pass that begins with this call: its own, or that of a method further up."""
        caller = self._callers.find(module)
        if not isinstance(caller, Caller):
            return PassCall(module, args, kwargs)
        caller.mark.begins(module, again=True)
        return PassCall(caller.module, (), caller.arguments, caller.mark)

    def settled_call_at(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> PassCall | None:
        """The same of a model that is all resident; None where its pass has begun before."""
        if module is self._hooks.outermost():
            return PassCall(module, args, kwargs)
        if torch.compiler.is_compiling():
            return None  # the stack is not the model's then
        found = self._callers.find(module)
        if found is None:
            return PassCall(module, args, kwargs)
        if isinstance(found, Caller) and found.mark.begins(
            module, again=self._hooks.begins_at(module)
        ):
            return PassCall(module, (), found.arguments)
        return None  # it has, or its hooks have told
