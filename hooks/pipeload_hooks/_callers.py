"""Which method of a model is running, where it was called past the model's own hooks.

[Note: calls without a hook] `model.forward(...)` runs no hook of the model, nor does a method that
computes with its parts, such as `encode`. What is hooked inside sees such a call on the stack: a
frame of a method of the model. That the call is over nobody says, and a frame can be looked for
later only if it is known again: its address may be another one's by then, it takes no weak
reference, and whoever holds it holds all its variables. But it has a place for a tracer's function,
`f_trace`, which goes when the frame does and means nothing without a tracer. A mark is left there.
"""

from __future__ import annotations

import inspect
import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping
    from types import CodeType, FrameType

CALL_CODE = nn.Module._call_impl.__code__


class Mark:
    """Left on the frame of a call. A tracer whose place it takes is called as before."""

    def __init__(self, tracer: Callable[..., Any] | None = None) -> None:
        self._tracer = tracer
        self._ran: set[int] = set()

    def __call__(self, frame: FrameType, event: str, arg: object) -> Mark:
        if self._tracer is not None:
            self._tracer = self._tracer(frame, event, arg)
        return self

    def begins(self, module: nn.Module, *, again: bool) -> bool:
        """Whether a pass begins when the call comes to `module`: its first, or one run `again`."""
        begins = not self._ran or (again and id(module) in self._ran)
        self._ran = {id(module)} if begins else {*self._ran, id(module)}
        return begins

    def is_on(self, frame: FrameType | None) -> bool:
        """Whether the call it was left on runs on the stack of `frame`."""
        while frame is not None:
            if frame.f_trace is self:
                return True
            frame = frame.f_back
        return False


class Caller(NamedTuple):
    """A method of a model that runs."""

    module: nn.Module
    arguments: Mapping[str, Any]
    """By name, as they are now."""
    mark: Mark


class Callers:
    """Finds calls of the methods of some modules."""

    def __init__(self, modules: Iterable[nn.Module], loops: Container[str] = ()) -> None:
        """Holds none of `modules`. Methods are those of the classes that say what one computes.

        `loops`: names of methods that call some of `modules` again and again, of which each call
        stands for itself.
        """
        modules = list(modules)
        self._ids = frozenset(map(id, modules))
        classes = {c for m in modules for c in type(m).__mro__ if "forward" in vars(c)}
        methods = [named for c in classes - {nn.Module} for named in vars(c).items()]
        self._codes = frozenset(_code(method) for _, method in methods)
        looping = frozenset(_code(method) for name, method in methods if name in loops)
        self._codes_of_parts = self._codes - looping
        """Those by which one of `modules` itself may be called."""
        self._forwards = frozenset(_code(vars(c)["forward"]) for c in classes)

    def find(self, arriving: nn.Module) -> Caller | nn.Module | None:
        """The method on this thread's stack by which `arriving` is called.

        The outermost `forward`, which may use other methods; else the innermost method, as others
        may call it many times. A module if its own hooks ran; None where there is nothing.
        """
        found: tuple[FrameType, nn.Module] | None = None
        frame: FrameType | None = sys._getframe()
        codes = self._codes_of_parts if id(arriving) in self._ids else self._codes
        while frame is not None:
            code = frame.f_code
            if code is CALL_CODE:
                module = frame.f_locals.get("self")
                if id(module) in self._ids and module is not arriving:
                    return cast("nn.Module", module)
            # Of other code nothing is asked: in old Pythons the answer keeps all variables, as they
            # are then, as long as the call runs.
            elif code in codes:
                module = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
                if isinstance(module, nn.Module) and id(module) in self._ids:
                    found = (frame, module) if found is None or code in self._forwards else found
            frame = frame.f_back
        return None if found is None else _caller(*found)


def arguments_of(module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `module` was called with in its innermost call on this thread's stack."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CALL_CODE and frame.f_locals.get("self") is module:
            return frame.f_locals["args"], frame.f_locals["kwargs"]
        frame = frame.f_back
    return (), {}


def _caller(frame: FrameType, module: nn.Module) -> Caller:
    mark = frame.f_trace
    if not isinstance(mark, Mark):
        mark = frame.f_trace = Mark(mark)
    code, found = frame.f_code, frame.f_locals
    named = code.co_argcount + code.co_kwonlyargcount
    arguments = {name: found[name] for name in code.co_varnames[1:named] if name in found}
    if code.co_flags & inspect.CO_VARKEYWORDS:
        rest = code.co_varnames[named + bool(code.co_flags & inspect.CO_VARARGS)]
        arguments |= found.get(rest, {})
    return Caller(module, arguments, mark)


def _code(method: object) -> CodeType | None:
    """Of the function itself: decorators share theirs between many."""
    method = inspect.unwrap(method) if callable(method) else method
    return method.__code__ if isinstance(method, FunctionType) else None
