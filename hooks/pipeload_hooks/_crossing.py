"""Finds tensors that go from one block of a model to another past the outputs of the blocks.

[Note: what crosses] Where one block computes here and the next one elsewhere, all that is known
elsewhere of the first is what it gave. A tensor that was made inside it and is used outside (keys
that later blocks share, a state on an attribute) or that it has written into what others made
(in place) would be missing there. A block may use what it made itself in an earlier call: a cache.
Tensors are known by their memory: a view is what it is a view of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode

from pipeload_hooks._answers import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle


class Crossing(NamedTuple):
    """A tensor that was used where it would not be."""

    made_in: int
    """The place of the block that made it, or wrote to it."""
    used_in: int | None
    """The place of the block that used it; None: outside of them all."""
    operation: str
    """What used it."""


def find_crossing(blocks: Sequence[nn.Module], run: Callable[[], object]) -> Crossing | None:
    """The first tensor that crosses blocks while `run()` runs the model; None if none does.

    `run` may run it several times; what it raises is raised. It works without values, too, on the
    meta device.
    """
    watch = _Watch()
    handles: list[RemovableHandle] = []
    try:
        for place, block in enumerate(blocks):
            handles += watch.follow(block, place)
        with watch:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return watch.found


class _Watch(TorchDispatchMode):
    """Remembers in which block each piece of memory was made or written to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Crossing | None = None
        self._running: list[int] = []
        self._made: dict[int, int] = {}
        """By memory; what was made outside of all blocks, or given by one, is not listed."""
        self._alive: list[Any] = []
        """Memory that goes would be taken for other memory at the same address."""

    def follow(self, block: nn.Module, place: int) -> Iterable[RemovableHandle]:
        """Know when a block runs."""

        def enter(*_: object) -> None:
            self._running.append(place)

        def leave(_module: object, _args: object, output: object) -> None:
            while self._running and self._running.pop() != place:
                pass
            for tensor in tensors_in(output):
                self._made.pop(_memory(tensor), None)

        yield block.register_forward_pre_hook(enter)
        yield block.register_forward_hook(leave, prepend=True, always_call=True)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        inside = self._running[0] if self._running else None
        given = tensors_in((args, kwargs))
        for tensor in given:
            maker = self._made.get(_memory(tensor))
            if maker is not None and maker != inside and self.found is None:
                self.found = Crossing(maker, inside, str(func))
        output = func(*args, **kwargs)
        known = {_memory(tensor) for tensor in given}
        made = [t for t in tensors_in(output) if _memory(t) not in known]
        if func._schema.is_mutable:
            made += _written(func, args, kwargs)
        for tensor in made:
            self._alive.append(tensor.untyped_storage())
            if inside is None:
                self._made.pop(_memory(tensor), None)
            else:
                self._made[_memory(tensor)] = inside
        return output


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operation writes to."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += tensors_in(value)
    return found
