"""Finds out which parameters a model uses only while the module that owns them runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from pipeload_hooks._blocks import find_blocks
from pipeload_hooks._evicted import HARMLESS, parameters_in
from pipeload_hooks._watch import rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True, slots=True)
class Usage:
    """What one run of a model told about its modules and parameters. All by dotted name."""

    touched_outside: frozenset[str]
    """Parameters given to a torch function while their module was not the innermost one running.

    A parameter that several modules share is listed by each of its names.
    """
    executed: tuple[str, ...]
    """Modules in the order in which they began to run, once for each call.

    Of the parameters of one that is not here, nothing was learnt.
    """
    touched_past_block: frozenset[str] = frozenset()
    """Those of `touched_outside` that were used while not even the block around them ran."""


def observe_usage(model: nn.Module, run: Callable[[], object]) -> Usage:
    """Watch every module and parameter of `model` during `run()`, a forward of the whole model.

    A module whose forward is called past its hooks does not count as running: those who rely on
    hooks could not serve it. Asking for a parameter's shape, dtype and the like is no use of it,
    and picking rows of an embedding's is none of the parameter as a whole.
    Hooks are taken off again, whatever `run` raises. Not for use from several threads at once.
    """
    names: dict[int, list[str]] = {}
    owners: dict[int, set[int]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append(f"{path}.{leaf}" if path else leaf)
                owners.setdefault(id(parameter), set()).add(id(module))
    blocks = {
        id(parameter): id(block.module)
        for block in find_blocks(model)
        for parameter in block.module.parameters()
    }
    tables = frozenset(
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    )
    observer = _Observer(owners, blocks, tables)
    handles: list[RemovableHandle] = []
    executed: list[str] = []
    try:
        for path, module in model.named_modules():
            handles += _follow(path, module, observer.running, executed)
        with observer:
            run()
    finally:
        for handle in handles:
            handle.remove()
    outside, past = (
        frozenset(name for key in keys for name in names[key])
        for keys in (observer.outside, observer.past_block)
    )
    return Usage(outside, tuple(executed), past)


def _follow(
    path: str, module: nn.Module, running: list[nn.Module], executed: list[str]
) -> tuple[RemovableHandle, ...]:
    def enter(module: nn.Module, _args: tuple[Any, ...]) -> None:
        executed.append(path)
        running.append(module)

    def leave(module: nn.Module, _args: tuple[Any, ...], _output: object) -> None:
        while running and running.pop() is not module:
            pass  # inner ones that an exception ended, which the model caught

    return (
        # Innermost: what other hooks of the module do is not the module's own forward.
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, prepend=True, always_call=True),
    )


class _Observer(TorchFunctionMode):
    """Notes the parameters that anything but the innermost running module uses."""

    def __init__(
        self,
        owners: Mapping[int, set[int]],
        blocks: Mapping[int, int],
        tables: frozenset[int],
    ) -> None:
        super().__init__()
        self._tables = tables
        self._owners = owners
        self._blocks = blocks
        self.running: list[nn.Module] = []
        self.outside: set[int] = set()
        self.past_block: set[int] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in HARMLESS and not self._picks(func, args):
            innermost = id(self.running[-1]) if self.running else None
            for parameter in parameters_in((*args, *kwargs.values())):
                owners = self._owners.get(id(parameter))
                if owners is not None and innermost not in owners:
                    self.outside.add(id(parameter))
                    block = self._blocks.get(id(parameter))
                    if block is not None and all(id(module) != block for module in self.running):
                        self.past_block.add(id(parameter))
        return func(*args, **kwargs)

    def _picks(self, func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Whether it takes rows of a table by their numbers."""
        if func is not torch.Tensor.__getitem__ or id(args[0]) not in self._tables:
            return False
        return rows_of(*args) is not None
