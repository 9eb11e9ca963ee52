"""Runs one nn.Linear in row ranges, for a weight that does not fit in memory as a whole.

[Note: how a Linear is split] The module's own forward runs, as every hook and profiler expects it
to, but with no rows: a `[0, K]` weight gives `[..., 0]`, whose shape, dtype, device and
inference-mode-ness say what the output must be. The post-hook allocates that output, computes it
range by range and returns it in place of the empty one. Nothing is rebound on the module. Before
every call the post-hook is put before all others, so that they see the whole output.
"""

from __future__ import annotations

import contextlib
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import (
    _global_forward_hooks,
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
)

from pipeload_hooks._evicted import plain_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch.utils.hooks import RemovableHandle


class SplitSource(Protocol):
    """Makes the weight of a Linear real while it runs: all of it, or a range of rows at a time."""

    def acquire(self, site: int) -> bool:
        """Return True once the whole weight is bound, False if it comes through `chunks`."""

    def chunks(self, site: int) -> Generator[tuple[int, int, torch.Tensor], None, None]:
        """Yield (start, stop, rows `start:stop` of the weight), without gaps and in order.

        The tensor is used until the next one is asked for. The generator is always closed.
        """

    def by_whole(
        self, site: int, module: nn.Module, given: torch.Tensor, dtype: torch.dtype
    ) -> Callable[[int, torch.Tensor], torch.Tensor] | None:
        """What multiplies `given` where ranges by themselves would give other bits than the whole.

        Of the first row of a range and its values it makes the range's part of the output, bias
        included. None where ranges are exact. `dtype` is the output's.
        """

    def release(self, site: int) -> None:
        """The Linear has run. Must do nothing for one that was never acquired."""

    def refuse_recording(self, site: int) -> None:
        """Autograd would record weights that are gone by the time of backward: raise."""


class _OwnRows(NamedTuple):
    """The rows that are computed here of a Linear that others compute, too."""

    start: int
    stop: int
    complete: Callable[[torch.Tensor], object]


_emptied: weakref.WeakKeyDictionary[nn.Module, _Emptied] = weakref.WeakKeyDictionary()
_shared: weakref.WeakKeyDictionary[nn.Module, _OwnRows] = weakref.WeakKeyDictionary()
# As torch has them: whoever replaces one in the class itself does so after this was imported.
_FORWARD, _CALL = nn.Linear.forward, nn.Linear.__call__
_OWN = frozenset({"weight", "bias"})


def computes_linear(module: nn.Module) -> bool:
    """Whether `module` computes `F.linear(input, weight, bias)`, its hooks aside."""
    kind = type(module)
    return (
        isinstance(module, nn.Linear)
        and kind.forward is _FORWARD
        and kind.__call__ is _CALL
        and "forward" not in vars(module)
        # Parametrizations are children; older ones keep other parameters and make a plain `weight`.
        and not module._modules
        and module._parameters.keys() <= _OWN
    )


def can_split(module: nn.Module) -> bool:
    """Whether `module` computes `F.linear(input, weight, bias)` and nothing else.

    No for a forward, a weight or hooks of another's making: they may need the whole weight.
    """
    hooks = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    if not isinstance(module, nn.Linear) or not computes_linear(module) or any(hooks):
        return False
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    return (
        type(weight) is nn.Parameter
        and weight.shape == (module.out_features, module.in_features)
        and weight.numel() > 0
        and weight.is_floating_point()
        and (bias is None or (type(bias) is nn.Parameter and bias.shape == weight.shape[:1]))
    )


def attach_split(module: nn.Linear, index: int, source: SplitSource) -> tuple[RemovableHandle, ...]:
    """Have `module` computed in row ranges whenever `source.acquire(index)` returns False.

    Release also runs when anything raises an Exception. A KeyboardInterrupt within the forward
    itself skips it: torch runs no hook then. The next call, or `restore_split`, puts weight and
    bias back first. Take the handles off only after `restore_split`.
    """
    # Closures, not bound methods: a deep copy of the module shares them instead of copying source.
    emptied = _emptied[module] = _Emptied()

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        emptied.fill()
        if torch.is_grad_enabled() and _recorded(module, args, kwargs):
            source.refuse_recording(index)
        if not source.acquire(index):
            # Not before: until then, another thread may be in the module.
            emptied.go_first(module)
            emptied.empty(module)

    def leave(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> torch.Tensor | None:
        try:
            if not emptied.fill() or not isinstance(output, torch.Tensor):
                return None
            given = args[0] if args else kwargs["input"]
            multiply = source.by_whole(index, module, given, output.dtype)
            with contextlib.closing(source.chunks(index)) as chunks:
                return _by_rows(module, output, chunks, multiply or _by_ranges(module, given))
        finally:
            emptied.step_back()
            source.release(index)

    after = module.register_forward_hook(leave, prepend=True, always_call=True, with_kwargs=True)
    emptied.hook = after.id
    return module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True), after


def share_rows(
    module: nn.Linear, start: int, stop: int, complete: Callable[[torch.Tensor], object]
) -> Callable[[], object]:
    """Have rows `start:stop` of a split Linear computed here, and the output completed.

    `complete` is called with `[..., N]`, of which it fills in the others, before any other hook of
    the module. Returns what undoes it, which may be called again.
    """
    _shared[module] = _OwnRows(start, stop, complete)
    return partial(_share_no_more, weakref.ref(module))


def _share_no_more(reference: weakref.ref[nn.Module]) -> None:
    if (module := reference()) is not None:
        _shared.pop(module, None)


def _leave_early(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
) -> torch.Tensor | None:
    """Run the post-hook of a split module; when its turn comes, nothing is left for it to do."""
    emptied = _emptied.get(module)
    leave = None if emptied is None else module._forward_hooks.get(emptied.hook)
    made: torch.Tensor | None = None if leave is None else leave(module, args, kwargs, output)
    return made


def restore_split(module: nn.Module) -> None:
    """Put back weight and bias of a split Linear whose last call died. May be called any time."""
    if (emptied := _emptied.get(module)) is not None:
        emptied.step_back()
        emptied.fill()


class _Emptied:
    """What the parameters of a Linear held before their rows were taken away.

    It keeps no module: that would be a cycle through the hooks, and keep a dropped model alive.
    """

    __slots__ = ("_early", "_taken", "hook")

    def __init__(self) -> None:
        self.hook = -1
        """The id of the post-hook."""
        self._early: RemovableHandle | None = None
        self._taken: tuple[tuple[nn.Parameter, torch.Tensor, type], ...] = ()

    def go_first(self, module: nn.Module) -> None:
        """Have the post-hook run before others of `module`, and before those for all modules."""
        self.step_back()
        own: Any = module._forward_hooks  # ordered, whatever their annotation says
        if self.hook in own and next(iter(own)) != self.hook:
            own.move_to_end(self.hook, last=False)
        if _global_forward_hooks:
            every: Any = _global_forward_hooks
            register: Any = register_module_forward_hook  # annotated as if it could return nothing
            self._early = early = register(_leave_early, with_kwargs=True)
            every.move_to_end(early.id, last=False)

    def step_back(self) -> None:
        """Leave nothing among the hooks for all modules."""
        early, self._early = self._early, None
        if early is not None:
            early.remove()
            _global_forward_hooks_with_kwargs.pop(early.id, None)  # torch 2.13 leaves it there

    def empty(self, module: nn.Module) -> None:
        """Leave every parameter of `module` with no rows."""
        with torch._C.DisableTorchFunction():  # a watch of evicted weights has no say here
            # Recorded before the first is changed: an interrupt may come in between.
            own = (p for p in module._parameters.values() if p is not None)
            self._taken = tuple((p, p.data, type(p)) for p in own)
            for parameter, data, _ in self._taken:
                parameter.__class__ = plain_kind(parameter)
                # A view, because one that is made in inference mode could not be bound outside.
                parameter.data = data[:0]

    def fill(self) -> bool:
        """Undo `empty`. Returns whether there was anything to undo."""
        if not self._taken:
            return False
        with torch._C.DisableTorchFunction():
            for parameter, data, kind in self._taken:
                if parameter.shape[0] == 0:  # else somebody has given it new values since
                    parameter.data = data
                    parameter.__class__ = kind
        self._taken = ()
        torch.clear_autocast_cache()  # or the weight without rows is kept there as the weight
        return True


def _by_ranges(
    module: nn.Module, given: torch.Tensor
) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """The product of each range by itself."""
    weight, bias = module._parameters["weight"], module._parameters.get("bias")

    def multiply(start: int, values: torch.Tensor) -> torch.Tensor:
        # requires_grad is kept because matmul picks its kernel by it, even under no_grad.
        part = nn.Parameter(values, requires_grad=weight is not None and weight.requires_grad)
        part_bias = None if bias is None else bias[start : start + len(values)]
        return functional.linear(given, part, part_bias)

    return multiply


def _by_rows(
    module: nn.Module,
    empty: torch.Tensor,
    chunks: Generator[tuple[int, int, torch.Tensor], None, None],
    multiply: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The output `[..., N]` of a Linear from its `empty` one `[..., 0]`, bit for bit.

    Raises:
        RuntimeError: the chunks have gaps, overlap, or do not cover the rows.
    """
    weight = module._parameters["weight"]
    if weight is None:
        raise RuntimeError("a Linear that runs in row ranges has lost its weight")
    with torch._C.DisableTorchFunction():  # it is evicted
        rows = weight.shape[0]
    out = torch.empty((*empty.shape[:-1], rows), dtype=empty.dtype, device=empty.device)
    own = _shared.get(module)
    done, end = (0, rows) if own is None else (own.start, own.stop)
    for start, stop, values in chunks:
        if start != done or not start < stop <= end or values.shape[0] != stop - start:
            raise RuntimeError(
                f"rows {start}:{stop} of a Linear with {rows} rows came after row {done}, "
                f"as a tensor of shape {tuple(values.shape)}"
            )
        # Not computed into the slice: only in this form is it the very call that a whole one is.
        out[..., start:stop].copy_(multiply(start, values))
        torch.clear_autocast_cache()  # where a cast of every range would stay
        done = stop
    if done != end:
        raise RuntimeError(f"only {done} of the {end} rows of a Linear were given")
    if own is not None:
        own.complete(out)
    return out


def _recorded(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    values = (*args, *kwargs.values(), *module._parameters.values())
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)
