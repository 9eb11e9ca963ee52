"""Calls whoever has what a module reads by number: rows of a table, or experts."""

from __future__ import annotations

import inspect
import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    Before = Callable[[tuple[Any, ...], dict[str, Any]], None]


def attach_ids(
    module: nn.Module,
    place: int,
    wanted: Callable[[torch.Tensor], None],
    done: Callable[[], None],
    *,
    before: Before | None = None,
    read: Callable[[object], torch.Tensor | None] | None = None,
) -> tuple[RemovableHandle, ...]:
    """Have `wanted(ids)` called before `module` runs, and `done()` after it.

    `done` is called also when `wanted` or the forward raises an Exception, and where there were no
    ids, but not for a KeyboardInterrupt: torch skips its hooks then.

    Args:
        module: whose argument number `place` are ids; it is called without them where it is given
            something else.
        place: from 0.
        wanted: may be called again before `done`, with other ids: another pre-hook, run after ours,
            may put these in their place.
        done: what was there for these ids may go.
        before: called first, with what the module is given; nothing else is called if it raises.
        read: makes ids of the argument, None where it tells none; else tensors are taken for ids.
    """
    read = _tensor if read is None else read
    name = list(inspect.signature(type(module).forward).parameters)[place + 1]
    call = _Call()

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call.ids, call.begun = None, False
        if before is not None:
            before(args, kwargs)
        call.begun = True
        given = args[place] if len(args) > place else kwargs.get(name)
        ids = read(given)
        if ids is not None:
            wanted(ids)
            call.ids = (given, _version(given))

    def leave(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> object:
        if not call.begun:  # `before` has refused it, perhaps beside a call in another thread
            return None
        seen, call.ids, call.begun = call.ids, None, False
        given = args[place] if len(args) > place else kwargs.get(name)
        try:
            ids = None if output is None else read(given)
            if ids is None:
                return None
            if seen is not None and seen[0] is given and seen[1] == _version(given):
                return None
            wanted(ids)
            return module.forward(*args, **kwargs)
        finally:
            done()

    return (
        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
        # First, too: no other hook may see what was computed of the wrong ones.
        module.register_forward_hook(leave, prepend=True, with_kwargs=True, always_call=True),
    )


class _Call(threading.local):
    """The running call, in each thread."""

    ids: tuple[object, object] | None = None
    """What told which are needed, and its version then."""
    begun: bool = False
    """Whether nothing has refused it."""


def _tensor(given: object) -> torch.Tensor | None:
    return given if isinstance(given, torch.Tensor) else None


def _version(given: object) -> object:
    """Another one after every change in place; inference tensors do not count theirs."""
    if isinstance(given, torch.Tensor):
        return 0 if given.is_inference() else given._version
    return repr(given)
