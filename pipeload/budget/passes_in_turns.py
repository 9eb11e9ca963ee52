"""What passes need together that take turns: each computes alone, beside what the others keep."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from pipeload.budget.pass_needs import PassNeeds


_THREAD_BYTES = 5_000_000
"""What a thread takes on that computes for the first time: its part of the heap, OpenMP's threads
and their buffers. Measured: 3 to 4.5 MB."""


class Call(Protocol):
    """A call of a model."""

    @property
    def module(self) -> nn.Module | None:
        """What is called; None is the whole model."""

    @property
    def args(self) -> tuple[Any, ...]:
        """With what, by place."""

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """With what, by name."""

    @property
    def first(self) -> bool:
        """Whether it is the first in a thread of its own."""


class Called(NamedTuple):
    """A `Call`."""

    module: nn.Module | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    first: bool = False


def needs_in_turns(needs: PassNeeds, calls: Sequence[Call]) -> list[int]:
    """Bytes that the first pass takes on, the first two together, and so on."""
    alone = [needs.for_pass(call.args, call.kwargs, call.module) for call in calls]
    if len(calls) == 1:
        return alone
    kept = [
        min(need, needs.between_turns(call.args, call.kwargs))
        for need, call in zip(alone, calls, strict=True)
    ]
    # Not of the oldest: what fits alone is to fit.
    threads = accumulate(_THREAD_BYTES * call.first * bool(at) for at, call in enumerate(calls))
    # One computes at a time: beside what all keep, there is what the largest takes for that.
    computing = accumulate((need - one for need, one in zip(alone, kept, strict=True)), max)
    return [*map(sum, zip(accumulate(kept), computing, threads, strict=True))]
