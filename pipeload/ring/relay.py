"""Has every rank know what each block gave: an own one is computed and sent, another's received.

[Note: in step] Outside of blocks all ranks compute the same, from the same numbers, so they come to
the same transfers in the same order, and nothing says which one comes next. Each call of the model
meets all others once, before its first block: with its number, the length of its cache, and a
checksum of all tensors that the model was called with, and of what goes into the block. A rank that
cannot begin comes there, too, and says why; one whose block fails sends that in its output's place.
So the others raise, and all are in step again.
"""

from __future__ import annotations

import logging
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch

from pipeload.budget.kv_cache import seen_positions, self_and_cross
from pipeload.errors import GroupError
from pipeload.ring.block_inputs import (
    cache_among,
    check_recorded,
    checksum,
    first_tensor,
    growth,
    pass_through,
    positions_in,
)
from pipeload.ring.outputs import Failure, Outputs
from pipeload.ring.shared_rows import SharedRows
from pipeload.ring.trees import by_name, take_apart
from pipeload_hooks import answer, guard, share_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from pipeload.ring.group import Group
    from pipeload.ring.outputs import Part, RowsPart

_log = logging.getLogger("pipeload")

_TEXT_CHARACTERS = 600
"""The most that is said of a failure."""


class Relay:
    """Sends and receives what the parts of one model give. It holds no module."""

    def __init__(self, group: Group, *, compare: bool) -> None:
        """`compare`: whether what is computed is the same on all ranks, to a bit."""
        self._group, self._compare = group, compare
        self._number = 0
        """Of the pass."""
        self._inside = False
        """Whether a call of the model runs, or was left by an interrupt."""
        self._met = False
        """Whether it has met those of the other ranks."""
        self._told = False
        """Whether all ranks know of its failure, so that they are in step again."""
        self._given = 0
        """A checksum of what the model was called with."""
        self._computing = ""
        """The part that this rank computes now."""
        self._seen: Sequence[int] = ()
        """By each layer of the cache, before that part."""
        self._outputs = Outputs(group)

    def attach(
        self, model: nn.Module, parts: Sequence[Part], shared: RowsPart | None = None
    ) -> Iterator[Callable[[], object]]:
        """Put hooks and answers on; the first part is where a pass begins.

        Gives what takes each off again, as soon as it is on.
        """
        yield guard(model, self._interrupted)
        yield model.register_forward_pre_hook(self._begun, with_kwargs=True).remove
        yield model.register_forward_hook(self._ended, always_call=True).remove
        for place, part in enumerate(parts):
            module = model.get_submodule(part.name)
            if part.owner == self._group.rank:
                yield from self._compute(module, part, first=place == 0)
            else:
                yield answer(module, self._receiver(part, first=place == 0))
        if shared is not None:
            yield from self._compute_rows(model.get_submodule(shared.name), shared)

    # -- own parts -------------------------------------------------------------------------------

    def _compute(
        self, module: nn.Module, part: Part, *, first: bool
    ) -> Iterator[Callable[[], object]]:
        def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if first:
                self._meet(args, kwargs)
            self._group.check()
            self._computing = part.name
            self._seen = positions_in(cache_among(args, kwargs))

        def leave(
            _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            begun, self._computing = bool(self._computing), ""
            given = by_name(args, kwargs)
            if _is_missing(output):
                if begun or not first:  # else no rank has begun
                    self._send_failure(part, given)
                return
            try:
                grown = growth(cache_among(args, kwargs), self._seen, given)
                taken = take_apart((output, grown), given)
            except Exception:
                self._send_failure(part, given)
                raise
            self._outputs.send(part, given, *taken)

        yield module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True).remove
        # Before others of the module, which run on all ranks.
        yield module.register_forward_hook(
            leave, prepend=True, with_kwargs=True, always_call=True
        ).remove

    def _send_failure(self, part: Part, given: Mapping[str, Any]) -> None:
        """Say what ended the block. It goes on its way: nothing else is raised."""
        try:
            self._outputs.send_failure(part, given, told(sys.exc_info()[1]))
            self._told = True
        except GroupError as error:
            _log.debug("%s", error)

    # -- parts of others -------------------------------------------------------------------------

    def _receiver(
        self, part: Part, *, first: bool
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        def receive(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if first:
                self._meet(args, kwargs)
            given = by_name(args, kwargs)
            found = self._outputs.receive(part, given)
            if not isinstance(found, Failure):
                output, grown = found
                pass_through(cache_among(args, kwargs), grown, given)
                return output
            self._told = True
            raise _failed_there(self._group, part.owner, part.name, found.why)

        return receive

    # -- a part of all ---------------------------------------------------------------------------

    def _compute_rows(self, module: Any, part: RowsPart) -> Iterator[Callable[[], object]]:
        rows = SharedRows(self._group, part.name, part.ranges)
        shared = weakref.ref(module.weight)

        def complete(output: torch.Tensor) -> None:
            if failures := rows.complete(output):
                self._told = True
                rank, why = min(failures.items())
                raise _failed_there(self._group, rank, part.name, why)

        def leave(module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            if rows.settle() or not _is_missing(output):
                return
            weight = shared()
            if weight is None or module._parameters.get("weight") is not weight:  # noqa: SLF001
                return  # a weight of the user's own, here as a whole: nobody waits for its rows
            try:
                rows.tell_failure(told(sys.exc_info()[1]))
                self._told = True
            except GroupError as error:
                _log.debug("%s", error)

        yield share_rows(module, *part.ranges[self._group.rank], complete)
        yield module.register_forward_hook(leave, prepend=True, always_call=True).remove

    # -- passes ----------------------------------------------------------------------------------

    def _meet(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Meet the same call of all other ranks: see [Note: in step].

        Raises:
            GroupError: one does something else, or cannot begin.
        """
        group = self._group
        if self._computing:  # nobody has said how that ended: an interrupt struck within
            group.break_off(f"it was interrupted in {self._computing!r}")
        self._met = self._told = True  # what is raised here, is raised on all ranks
        cache = cache_among(args, kwargs)
        seen = 0 if cache is None else seen_positions(self_and_cross(cache)[0])
        given = checksum([first_tensor(by_name(args, kwargs))], self._given, whole=self._compare)
        found = self._exchange([given, seen, 0])
        if refused := [rank for rank, (_, _, no) in enumerate(found) if no]:
            texts = group.gather_json("", "a refusal is told")
            raise _could_not_begin(group, refused[0], texts[refused[0]])
        others = [rank for rank, what in enumerate(found) if what != found[0]]
        if others:
            rank = others[0]
            raise GroupError(
                f"{group.name(rank)} computes other tokens than {group.name(0)}, from pass "
                f"{self._number} on. Have all ranks run the same script on the same inputs, "
                "without limits of time; with seeds where they draw numbers of their own.",
                rank=rank,
                host=group.hosts[rank],
            )
        if not seen:
            self.share_random_state()
        self._told = False

    def _exchange(self, mine: list[int]) -> list[list[int]]:
        self._number += 1
        doing = f"pass {self._number} begins"
        found = [t.tolist() for t in self._group.gather(torch.tensor([self._number, *mine]), doing)]
        numbers = [number for number, *_ in found]
        if len(set(numbers)) > 1:
            rank = next(r for r, number in enumerate(numbers) if number != numbers[0])
            raise GroupError(
                f"{self._group.name(rank)} is at pass {numbers[rank]}, and rank 0 at "
                f"{numbers[0]}. Have all ranks run the same script.",
                rank=rank,
                host=self._group.hosts[rank],
            )
        return [what for _, *what in found]

    def share_random_state(self) -> None:
        """Have all ranks draw the numbers that rank 0 would: they choose tokens by them."""
        state = torch.get_rng_state()
        self._group.broadcast(state, 0, "random numbers are shared")
        torch.set_rng_state(state)

    def _begun(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._inside:
            self._group.break_off("it was interrupted in a pass")
        self._group.check()
        self._inside, self._met, self._told = True, False, False
        given = by_name(args, kwargs)
        check_recorded(model, given)
        self._given = checksum(given.values(), whole=self._compare)

    def _interrupted(self, error: BaseException) -> None:
        """No hook runs after Ctrl-C, and others would wait until this rank's next call."""
        self._group.break_off(f"a pass ended by {told(error)}")

    def _ended(self, _model: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        """A call of the model is over; it failed where there is no output."""
        met, known = self._met, self._told
        self._inside = self._met = self._told = False
        self._given = 0
        if output is not None or known or self._group.broken is not None:
            return
        error = sys.exc_info()[1]
        if met:  # somewhere between blocks, perhaps on this rank alone
            self._group.break_off(f"a pass ended by {told(error)}")
            return
        try:
            if any(no for _, _, no in self._exchange([0, 0, 1])):
                self._group.gather_json(told(error), "a refusal is told")
        except GroupError as lost:  # the model's own error is on its way
            _log.debug("%s", lost)


def _is_missing(output: Any) -> bool:
    """Whether the module has failed; a Linear that comes in ranges of rows had none by then."""
    return output is None or (isinstance(output, torch.Tensor) and output.shape[-1:] == (0,))


def _failed_there(group: Group, rank: int, part: str, why: str) -> GroupError:
    return GroupError(
        f"{group.name(rank)} failed in {part!r}: {why} Check that rank, then do the same again: "
        "the group goes on.",
        rank=rank,
        host=group.hosts[rank],
    )


def _could_not_begin(group: Group, rank: int, text: str) -> GroupError:
    return GroupError(
        f"{group.name(rank)} could not begin the pass: {text} Check that rank, then do the same "
        "again: the group goes on.",
        rank=rank,
        host=group.hosts[rank],
    )


def told(error: BaseException | None) -> str:
    """An error in a line, for another rank."""
    text = "it raised nothing" if error is None else f"{type(error).__name__}: {error}".rstrip(": ")
    text = " ".join(text.split())[:_TEXT_CHARACTERS]
    return text if text.endswith(".") else f"{text}."
