"""Joins the two towers: hooks ask for a block, the prefetcher fetches it, its views are bound."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from pipeload._passlog import PassLog
from pipeload.errors import UnsupportedModelError, UnsupportedOperationError
from pipeload_hooks import (
    Attachment,
    Binding,
    Block,
    EvictedWeightWatch,
    PassGate,
    attach,
    discard_ended,
    inside_compiled_call,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from pipeload._prefetcher import Prefetcher
    from pipeload._reader import FileSet, PinnedRead


class _Seat:
    """One block on the model's side: its parameters and the views prepared for them."""

    __slots__ = ("block", "name", "pairs", "resident", "settled", "streamed")

    def __init__(self, block: Block, resident: Binding, streamed: Binding) -> None:
        self.name = block.name
        self.block = weakref.ref(block.module)
        self.resident = resident
        self.streamed = streamed
        self.pairs: dict[int, list[tuple[nn.Parameter, torch.Tensor]]] = {}
        self.settled = False
        """Its resident part is bound for good."""


class Streamer:
    """A `WeightSource` for the blocks of one model, and the life of its passes.

    It holds parameters and weak references to modules, never the model: a forgotten model goes, and
    takes this, the prefetcher and its threads along.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        parameters: Sequence[tuple[Mapping[str, nn.Parameter], Mapping[str, nn.Parameter]]],
        prefetcher: Prefetcher,
        files: FileSet,
        pinned_read: PinnedRead,
    ) -> None:
        """`parameters` holds, for each block, the resident and the streamed ones by name."""
        self.pinned_read = pinned_read
        self.prefetcher = prefetcher
        self.log = PassLog()
        self.files = files
        self._seats = [
            _Seat(block, Binding(resident), Binding(streamed))
            for block, (resident, streamed) in zip(blocks, parameters, strict=True)
        ]
        self._gate = PassGate()
        self._held: set[int] = set()
        self._open = False
        self._alone: int | None = None
        self._bindings: dict[int, Binding] = {}
        """By the `id` of each of their parameters."""
        self._watch: EvictedWeightWatch | None = self._make_watch()
        self._attachment = Attachment()
        self._pass_hooks: list[RemovableHandle] = []
        self._outermost: Callable[[], nn.Module | None] = _nothing
        self._settled = False

    # -- hooks -----------------------------------------------------------------------------------

    def attach(self, blocks: Sequence[Block], pass_modules: Sequence[nn.Module]) -> None:
        """Put the hooks on: around every block, and around every module a pass may begin at."""
        self._attachment = attach(blocks, self)
        self._outermost = weakref.ref(pass_modules[0])
        for module in pass_modules:
            self._pass_hooks += [
                module.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True),
                module.register_forward_hook(self._end, always_call=True),
            ]

    def detach(self) -> None:
        """Take all hooks off. The weights stay as they are."""
        self._attachment.remove()
        while self._pass_hooks:
            self._pass_hooks.pop().remove()

    @property
    def hooked_blocks(self) -> int:
        """Blocks that still carry hooks."""
        return len(self._attachment)

    @property
    def busy(self) -> bool:
        """Whether a pass is running in any thread."""
        return self._gate.busy

    # -- WeightSource ----------------------------------------------------------------------------

    def acquire(self, block: int) -> None:
        """Bind the block's weights, waiting for the disk if they are not there yet."""
        _refuse_compiled()
        seat = self._seats[block]
        # Called by itself; or still held by a pass of this thread that died, which only a new pass,
        # or the gate's look at the stack, can tell.
        if not self._gate.owned() or block in self._held:
            module = seat.block()
            if module is not None:
                self._begin(module, (), {})
                if self._gate.is_outermost(module):
                    self._alone = block
        self._held.add(block)
        self.log.stall_seconds += self.prefetcher.acquire(block)
        unit = self.prefetcher.units[block]
        if not seat.settled:
            if unit.resident is not None:
                seat.resident.bind(seat.resident.pair(unit.resident.views))
            seat.settled = True
        if unit.slot is not None:
            pairs = seat.pairs.get(unit.slot)
            if pairs is None:
                pairs = seat.pairs[unit.slot] = seat.streamed.pair(unit.slots[unit.slot].views)
            seat.streamed.bind(pairs)

    def release(self, block: int) -> None:
        """Unbind what is streamed. Does nothing for a block that is not held."""
        if block not in self._held:
            return
        seat = self._seats[block]
        seat.streamed.unbind()
        self.prefetcher.release(block)
        self._held.discard(block)
        if self._alone == block:
            module = seat.block()
            if module is not None:
                self._end(module, (), None)

    def refuse_recording(self, block: int) -> NoReturn:
        """Training is not possible: weights are overwritten before backward could use them."""
        raise UnsupportedOperationError(
            f"autograd is recording: the input of block {self._seats[block].name!r} requires "
            "grad, but streamed weights are gone by the time of backward. For inference, wrap "
            "the call in torch.no_grad() or torch.inference_mode(). Training a streamed model "
            "is not possible."
        )

    @contextlib.contextmanager
    def borrowed(self, block: int) -> Iterator[Mapping[str, torch.Tensor]]:
        """All views of a block's weights, filled; streamed ones are valid inside only."""
        self.prefetcher.acquire(block)
        try:
            unit = self.prefetcher.units[block]
            streamed = unit.slots[unit.slot].views if unit.slot is not None else {}
            yield {**(unit.resident.views if unit.resident is not None else {}), **streamed}
        finally:
            self.prefetcher.release(block)

    # -- passes ----------------------------------------------------------------------------------

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        _refuse_compiled()
        if not self._gate.enter(module):
            return
        if self._open or self._held:
            self.recover()
        discard_ended()  # another thread may have ended a pass that died in this one
        self._open = True
        self.files.check_unchanged()
        self.log.begin(args, kwargs)
        if self._watch is not None:
            self._watch.begin()

    def _end(self, module: nn.Module, _args: tuple[Any, ...], output: object) -> None:
        if self._gate.is_outermost(module):
            self._close(done=output is not None or self._alone is not None)
        self._gate.leave(module)

    def _close(self, *, done: bool) -> None:
        if self._watch is not None and self._watch.active:
            self._watch.discard()
        if self._held:
            self.recover()  # an exception that somebody caught inside the pass
        self._alone = None
        self._open = False
        if done:
            self._watch = None
            self.log.end()
            self._drop_settled()

    def recover(self) -> None:
        """Give back what a pass that died was holding; the next pass starts clean."""
        if self._watch is not None:
            self._watch.discard()
        for seat in self._seats:
            seat.streamed.unbind()
        self._held.clear()
        self._alone = None
        if not self._settled:
            self.prefetcher.reset()

    def _drop_settled(self) -> None:
        """A block that is all resident and bound needs no hook any more."""
        units = self.prefetcher.units
        for index in self._attachment.blocks():
            if self._seats[index].settled and not units[index].streams:
                self._attachment.remove(index)
        if not len(self._attachment):
            self._settle()

    def _settle(self) -> None:
        """Everything is resident and bound: one hook that counts passes is left."""
        self._settled = True
        self.detach()
        if (model := self._outermost()) is not None:
            self._pass_hooks.append(model.register_forward_pre_hook(self._count, with_kwargs=True))
        self.prefetcher.close()

    def _count(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.log.begin(args, kwargs)
        self.log.count()

    # -- evicted weights -------------------------------------------------------------------------

    def _make_watch(self) -> EvictedWeightWatch:
        names: dict[int, str] = {}
        for seat in self._seats:
            for binding in (seat.resident, seat.streamed):
                for name, parameter in binding.parameters.items():
                    names[id(parameter)] = name
                    self._bindings[id(parameter)] = binding
        # Weak: a pass that died leaves its watch on its thread's stack of modes.
        reference = weakref.WeakMethod(self._is_evicted)

        def is_evicted(key: int) -> bool:
            method = reference()
            return method is not None and method(key)

        def refuse(function: str, name: str) -> NoReturn:
            raise UnsupportedModelError(
                f"{function}() was called on the weight {name!r} while its block was not "
                "running, so its values are on disk. This model uses block weights from outside "
                "the block and cannot be streamed; load it without pipeload."
            )

        watch = EvictedWeightWatch(names, is_evicted, refuse)
        weakref.finalize(self, watch.end).atexit = False
        return watch

    def _is_evicted(self, key: int) -> bool:
        return not self._bindings[key].bound


def _refuse_compiled() -> None:
    if inside_compiled_call():
        raise UnsupportedOperationError(
            "torch.compile cannot trace a streamed model, whose weights come and go. Call the "
            "model itself, or call pipeload.handle(model).remove() before torch.compile if it "
            "fits in memory."
        )


def _nothing() -> None:
    pass
