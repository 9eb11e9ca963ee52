"""What streaming cannot do exactly is refused, in words."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from pipeload.errors import UnsupportedModelError, UnsupportedOperationError
from pipeload_hooks import EvictedWeightWatch, PassGate, inside_compiled_call

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pipeload.engine.adapter_watch import Adapters
    from pipeload.engine.evictable import Evictable
    from pipeload.engine.table_parameters import TableSeat


_AS_IT_IS = (
    "block was not running, so its values are on disk. This model uses block weights from outside "
    "the block and cannot be streamed; load it without pipeload."
)
_ADAPTED = (
    "module was not running, so its values are on disk: an adapter uses them beside that module. "
    "Call handle.remove() (pipeload.handle(model).remove()), then pipeload.wrap(model) while this "
    "adapter is active: what it uses is then in memory whenever it runs."
)

Call = tuple[int, tuple[bool, ...], frozenset[tuple[str, bool]]]
"""How a model is called: which module of it, and with which arguments, each one token or not."""


def arguments_alone(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """What a part of a model that is called by itself is called with, as a pass of a whole one.

    A block has no logits.
    """
    is_head = isinstance(module, nn.Linear)
    return args, kwargs if is_head else {**kwargs, "logits_to_keep": 1}


class _Known:
    """What watching calls has shown of a model."""

    def __init__(self) -> None:
        self.seen: set[Call] = set()
        """Calls that have been watched to their end."""
        self.served = False
        """Whether a table was used past its module: then every call is watched."""


class FirstCalls:
    """Watches each kind of call once, to its end, for reads of weights that are on disk."""

    def __init__(
        self,
        seats: Sequence[Evictable],
        tables: Sequence[TableSeat],
        adapters: Adapters,
        gate: PassGate,
        known: _Known | None = None,
    ) -> None:
        """Watch the weights of these seats and tables; `gate` tells whether a pass died.

        `known` is what others have found out about the same model.
        """
        self.call: Call | None = None
        """How the running pass was called; None until that is known."""
        self._known = _Known() if known is None else known
        self._adapters = adapters
        # Held weakly: a pass that died leaves its watch on its thread's stack of modes.
        adapters_then, gate_then = weakref.ref(adapters), weakref.ref(gate)

        def adapted() -> bool:
            adapters = adapters_then()
            return adapters is not None and adapters.present

        def ended() -> bool:
            gate = gate_then()
            return gate is None or gate.died()

        self._watched = seats, tables
        self._watch = _make_watch(seats, tables, adapted=adapted, ended=ended)
        self.end: Callable[[], None] = self._watch.end
        """Watches no more, in any thread; holds no more than the watch."""

    def twin(self, gate: PassGate) -> FirstCalls:
        """The same for passes of another thread, which `gate` is around."""
        return FirstCalls(*self._watched, self._adapters, gate, self._known)

    def begin(
        self, module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        """A pass begins that was called so: watch it, unless that is known to need nothing."""
        self.call = call = _call_of(module, args, kwargs)
        # With adapters, it depends on which of them are active.
        if self._adapters.present or self._known.served or call not in self._known.seen:
            self._watch.begin()

    def stop(self) -> None:
        """The pass is over, whatever became of it."""
        if self._watch.active:
            self._watch.discard()

    def discard(self) -> None:
        """The pass died: take what is left of its watch off this thread."""
        self._watch.discard()

    def done(self) -> None:
        """The pass that is over has given its output."""
        if self.call is not None and not self._adapters.present:
            self._known.seen.add(self.call)
        self._known.served |= self._watch.has_served


def _call_of(module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> Call:
    """The same for two calls that differ in nothing but values, and in how many tokens there are.

    What a model reads depends on that: a picture has a tower run that text alone has not, and
    models with a state go another way where one token continues it.
    """
    named = ((name, is_single(value)) for name, value in kwargs.items() if value is not None)
    return id(module), tuple(map(is_single, args)), frozenset(named)


def is_single(value: object) -> bool:
    """Whether that is one token of each sequence, as input."""
    return isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == 1


def _make_watch(
    seats: Sequence[Evictable],
    tables: Sequence[TableSeat],
    *,
    adapted: Callable[[], bool],
    ended: Callable[[], bool],
) -> EvictedWeightWatch:
    """Refuses whatever reads a weight of these while it is evicted, but rows of a table.

    `adapted` tells whether modules were added to the model, so that they may be what reads it;
    `ended` whether the pass of the calling thread died.
    """
    owners = [*seats, *tables]
    names = {id(p): name for owner in owners for name, p in owner.parameters.items()}
    rows = {id(p): table for table in tables for p in table.parameters.values()}

    def refuse(function: str, name: str) -> NoReturn:
        raise UnsupportedModelError(
            f"{function}() was called on the weight {name!r} while its "
            + (_ADAPTED if adapted() else _AS_IT_IS)
        )

    return EvictedWeightWatch(names, refuse, rows, ended)


def refuse_compiled() -> None:
    """Raise if the model is called from a function that torch.compile made."""
    if inside_compiled_call():
        raise UnsupportedOperationError(
            "torch.compile cannot trace a streamed model, whose weights come and go. Call the "
            "model itself, or call pipeload.handle(model).remove() before torch.compile if it "
            "fits in memory."
        )


def refuse_recording(name: str) -> NoReturn:
    """Training is not possible: weights are overwritten before backward could use them."""
    raise UnsupportedOperationError(
        f"autograd is recording: the input of block {name!r} requires grad, but streamed weights "
        "are gone by the time of backward. For inference, wrap the call in torch.no_grad() or "
        "torch.inference_mode(). Training a streamed model is not possible."
    )
