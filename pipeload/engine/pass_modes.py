"""What stands between a running pass and torch's functions: a watch, and attention aside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pipeload.engine.pass_refusals import is_single
from pipeload_hooks import AttentionAside, kernels_stay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

    from pipeload.engine.pass_refusals import FirstCalls
    from pipeload_hooks import PassGate


class PassModes:
    """The watch of a pass that is called as none was before; attention aside, of all prompts."""

    def __init__(
        self,
        first_calls: FirstCalls,
        dtypes: Iterable[torch.dtype],
        aside: AttentionAside | None = None,
    ) -> None:
        """`first_calls` has the watch; `dtypes` are those of the weights."""
        self._first_calls = first_calls
        self.done: Callable[[], None] = self._first_calls.done
        """The pass that is over has given its output."""
        self._dtypes = frozenset(dtypes)
        self._aside = AttentionAside() if aside is None else aside
        # Else every function of torch would take longer for nothing.
        self._keeps = any(map(kernels_stay, self._dtypes))
        """Whether attention of prompts leaves kernels behind, autocast apart."""
        self.end: Callable[[], None] = _both(self._first_calls.end, self._aside.close)
        """Be done with both, in any thread; holds no more than them."""

    def twin(self, gate: PassGate) -> PassModes:
        """The same for passes of another thread, which `gate` is around."""
        return PassModes(self._first_calls.twin(gate), self._dtypes, self._aside.twin())

    def renew(self) -> None:
        """A pass begins, and nobody knows yet how it was called."""
        self._first_calls.call = None

    def begin(
        self, module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        """It was called so."""
        self._first_calls.begin(module, args, kwargs)
        keeps = self._keeps or torch.is_autocast_enabled("cpu")
        if keeps and _has_prompt(args, kwargs):
            self._aside.begin()

    def stop(self) -> None:
        """The pass is over, whatever became of it."""
        if self._aside.active:
            self._aside.discard()
        self._first_calls.stop()

    def discard(self) -> None:
        """The pass died: take what is left of it off this thread."""
        self._aside.discard()
        self._first_calls.discard()


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both


def _has_prompt(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether more than one token comes at once, to the CPU."""
    for value in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device.type == "cpu" and not is_single(value)
    return False
