"""Answers the calls of a module that computes elsewhere, without running it.

[Note: how a call is answered] `nn.Module.__call__` asks `_compiled_call_impl` first, where
`Module.compile()` leaves what it made. An answer is put there: forward is not rebound, class and
tree are as before, and it is undone by deleting one attribute. The hooks of the module, and those
for all modules, run around it as they would around its own forward.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.nn.modules import module as torch_module

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

_SLOT = "_compiled_call_impl"


def answer(
    module: nn.Module,
    call: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    before: Callable[[tuple[Any, ...], dict[str, Any]], object] | None = None,
) -> Callable[[], None]:
    """Have `call(args, kwargs)` give what a call of `module` gives; returns what undoes it.

    `before` is called with them ahead of all hooks. What undoes it holds no module, and may be
    called again.
    """
    reference = weakref.ref(module)

    def answered(*args: Any, **kwargs: Any) -> Any:
        found = reference()
        if found is None:
            raise ReferenceError("the module is gone")
        if before is not None:
            before(args, kwargs)
        return _with_hooks(found, call, args, kwargs)

    object.__setattr__(module, _SLOT, answered)
    return partial(_take_out, reference)


def around(
    module: nn.Module,
    before: Callable[[tuple[Any, ...], dict[str, Any]], object],
    after: Callable[[], object],
) -> Callable[[], None]:
    """Have `before(args, kwargs)` called ahead of all hooks of a call of `module`.

    And `after()` behind them, unless anything raises. Returns what undoes it, as `answer`.
    """
    reference = weakref.ref(module)

    def called(*args: Any, **kwargs: Any) -> Any:
        found = reference()
        if found is None:
            raise ReferenceError("the module is gone")
        before(args, kwargs)
        output = found._call_impl(*args, **kwargs)
        after()
        return output

    object.__setattr__(module, _SLOT, called)
    return partial(_take_out, reference)


def guard(module: nn.Module, interrupted: Callable[[BaseException], object]) -> Callable[[], None]:
    """Have `interrupted(error)` called where Ctrl-C, or another end of all, leaves the module.

    Hooks run after exceptions alone, and not after these. Returns what undoes it, as `answer`.
    """
    reference = weakref.ref(module)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        found = reference()
        if found is None:
            raise ReferenceError("the module is gone")
        try:
            return found._call_impl(*args, **kwargs)
        except Exception:
            raise
        except BaseException as error:
            interrupted(error)
            raise

    object.__setattr__(module, _SLOT, guarded)
    return partial(_take_out, reference)


def _take_out(reference: weakref.ref[nn.Module]) -> None:
    module = reference()
    if module is not None:
        vars(module).pop(_SLOT, None)  # the class has one that is None


def _with_hooks(
    module: nn.Module,
    call: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """As torch runs hooks: those for all modules first; some also when anything raises."""
    every, own = torch_module._global_forward_hooks, module._forward_hooks
    always = torch_module._global_forward_hooks_always_called | module._forward_hooks_always_called
    with_kwargs = torch_module._global_forward_hooks_with_kwargs | module._forward_hooks_with_kwargs
    called: set[int] = set()
    output: Any = None
    try:
        for key, hook in [*torch_module._global_forward_pre_hooks.items()]:
            args, kwargs = _before(module, key, hook, args, kwargs)
        for key, hook in [*module._forward_pre_hooks.items()]:
            args, kwargs = _before(module, key, hook, args, kwargs)
        output = call(args, kwargs)
        for key, hook in [*every.items(), *own.items()]:
            called.add(key)
            given = (args, kwargs) if key in with_kwargs else (args,)
            made = hook(module, *given, output)
            output = output if made is None else made
    except Exception:
        for key, hook in [*every.items(), *own.items()]:
            if key in always and key not in called:
                given = (args, kwargs) if key in with_kwargs else (args,)
                hook(module, *given, output)
        raise
    return output


def _before(
    module: nn.Module, key: int, hook: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if key in module._forward_pre_hooks_with_kwargs:
        made = hook(module, args, kwargs)
        return (args, kwargs) if made is None else made
    made = hook(module, args)
    if made is None:
        return args, kwargs
    return (made if isinstance(made, tuple) else (made,)), kwargs
