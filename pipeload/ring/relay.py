"""Has every rank know what each block gave: an own one is computed and sent, another's received.

[Note: in step] Outside of blocks all ranks compute the same, from the same numbers, so they come to
the same transfers in the same order, and nothing says which one comes next. Each call of the model
meets all others once, before its first block: with its number, the length of its cache, and a
checksum of all tensors that the model was called with, and of what goes into the block. A rank that
cannot begin comes there, too, and says why; one whose block fails sends that in its output's place.
So the others raise, and all are in step again.

Requests that take turns are each in step by themselves: see turns.py.
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
from pipeload.ring.outputs import Failure
from pipeload.ring.shared_rows import SharedRows
from pipeload.ring.told import could_not_begin, failed_there, told
from pipeload.ring.trees import by_name, take_apart
from pipeload_hooks import answer, around, guard, share_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from pipeload.ring.group import Group
    from pipeload.ring.outputs import Part, RowsPart
    from pipeload.ring.passing import Passing
    from pipeload.ring.turns import Turns

_log = logging.getLogger("pipeload")


class Relay:
    """Sends and receives what the parts of one model give. It holds no module."""

    def __init__(self, group: Group, turns: Turns, *, compare: bool) -> None:
        """`compare`: whether what is computed is the same on all ranks, to a bit."""
        self._group, self._turns, self._compare = group, turns, compare

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
                yield self._answered(module, part, first=place == 0)
        if shared is not None:
            yield from self._compute_rows(model.get_submodule(shared.name), shared)

    # -- own parts -------------------------------------------------------------------------------

    def _compute(
        self, module: nn.Module, part: Part, *, first: bool
    ) -> Iterator[Callable[[], object]]:
        def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            now = self._turns.now()
            if first:
                self._meet(now, args, kwargs)
            self._turns.go_on_together(now)
            self._group.check()
            now.computing = part.name
            now.seen = positions_in(cache_among(args, kwargs))

        def leave(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            now, given = self._turns.now(), by_name(args, kwargs)
            now.computing = ""
            if _is_missing(output):
                self._send_failure(now, part, given)
                return
            try:
                grown = growth(cache_among(args, kwargs), now.seen, given)
                taken = take_apart((output, grown), given)
            except Exception:
                self._send_failure(now, part, given)
                raise
            now.sends_large = now.outputs.send(part, given, *taken)
            now.sent += 1
            hooks = module._forward_hooks.values()  # noqa: SLF001
            if now.sends_large and any(map(_is_of_others, hooks)):
                now.settle()  # those behind this one may change it in place
            now.handed_over = self._turns.handed_over

        def after() -> None:
            now = self._turns.now()
            # Where the block's weights are resident, or come one by one, nobody has done so since.
            if now.handed_over == self._turns.handed_over:
                self._turns.hand_over()
            now.settle()

        # Ahead of all hooks: where others have their turns, no weight may be in use. And behind.
        yield around(module, enter, after)
        yield module.register_forward_hook(
            leave, prepend=True, with_kwargs=True, always_call=True
        ).remove

    def _send_failure(self, now: Passing, part: Part, given: Mapping[str, Any]) -> None:
        """Say what ended the block. It goes on its way: nothing else is raised."""
        try:
            now.outputs.send_failure(part, given, told(sys.exc_info()[1]))
            now.told = True
        except GroupError as error:
            _log.debug("%s", error)

    # -- parts of others -------------------------------------------------------------------------

    def _answered(self, module: nn.Module, part: Part, *, first: bool) -> Callable[[], object]:
        def meet(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._meet(self._turns.now(), args, kwargs)

        def receive(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            now, given = self._turns.now(), by_name(args, kwargs)
            found = now.outputs.receive(part, given)
            if not isinstance(found, Failure):
                output, grown = found
                pass_through(cache_among(args, kwargs), grown, given)
                return output
            now.told = True
            raise failed_there(self._group, part.owner, part.name, found.why)

        return answer(module, receive, meet if first else None)

    # -- a part of all ---------------------------------------------------------------------------

    def _compute_rows(self, module: Any, part: RowsPart) -> Iterator[Callable[[], object]]:
        group, shared = self._group, weakref.ref(module.weight)
        rows: weakref.WeakKeyDictionary[Passing, SharedRows] = weakref.WeakKeyDictionary()

        def mine() -> SharedRows:
            now = self._turns.now()
            if now not in rows:
                rows[now] = SharedRows(now.lane, group.rank, part.name, part.ranges)
            return rows[now]

        def complete(output: torch.Tensor) -> None:
            if failures := mine().complete(output):
                self._turns.now().told = True
                rank, why = min(failures.items())
                raise failed_there(group, rank, part.name, why)

        def leave(module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            if mine().settle() or not _is_missing(output):
                return
            weight = shared()
            if weight is None or module._parameters.get("weight") is not weight:  # noqa: SLF001
                return  # a weight of the user's own, here as a whole: nobody waits for its rows
            try:
                mine().tell_failure(told(sys.exc_info()[1]))
                self._turns.now().told = True
            except GroupError as error:
                _log.debug("%s", error)

        yield share_rows(module, *part.ranges[self._group.rank], complete)
        yield module.register_forward_hook(leave, prepend=True, always_call=True).remove

    # -- passes ----------------------------------------------------------------------------------

    def _meet(self, now: Passing, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Meet the same call of all other ranks: see [Note: in step].

        Raises:
            GroupError: one does something else, or cannot begin.
        """
        group, turns = self._group, self._turns
        if now.computing:  # nobody has said how that ended: an interrupt struck within
            group.break_off(f"it was interrupted in {now.computing!r}")
        now.met, now.expected = True, now is turns.own

        def come() -> None:
            turns.begin_in_order(now)
            now.told = True  # what is raised from here on, is raised on all ranks

        cache = cache_among(args, kwargs)
        seen = 0 if cache is None else seen_positions(self_and_cross(cache)[0])
        given = checksum([first_tensor(by_name(args, kwargs))], now.given, whole=self._compare)
        found = now.exchange([given, seen, 0], come)
        if refused := [rank for rank, (_, _, no) in enumerate(found) if no]:
            texts = now.lane.gather_json("", "a refusal is told", turns.hand_over)
            raise could_not_begin(group, refused[0], texts[refused[0]])
        others = [rank for rank, what in enumerate(found) if what != found[0]]
        if others:
            rank = others[0]
            raise GroupError(
                f"{group.name(rank)} computes other tokens than {group.name(0)}, from pass "
                f"{now.number} on. Have all ranks run the same script on the same inputs, "
                "without limits of time; with seeds where they draw numbers of their own.",
                rank=rank,
                host=group.hosts[rank],
            )
        if not seen and now is turns.own:  # members are given seeds that are the same
            now.share_random_state()
        now.told = False

    def _begun(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now = self._turns.now()
        if now.inside:
            self._group.break_off("it was interrupted in a pass")
        self._group.check()
        now.inside, now.met, now.told = True, False, False
        given = by_name(args, kwargs)
        check_recorded(model, given)
        now.given = checksum(given.values(), whole=self._compare)

    def _interrupted(self, error: BaseException) -> None:
        """No hook runs after Ctrl-C, and others would wait until this rank's next call."""
        self._group.break_off(f"a pass ended by {told(error)}")

    def _ended(self, _model: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        """A call of the model is over; it failed where there is no output."""
        turns = self._turns
        now = turns.now()
        met, known = now.met, now.told
        now.inside = now.met = now.told = now.sends_large = False
        now.given = 0
        if output is not None:
            now.lane.settle()
            return
        error = sys.exc_info()[1]
        if met and not known and self._group.broken is None:
            # Somewhere between blocks, perhaps on this rank alone.
            self._group.break_off(f"a pass ended by {told(error)}")
        try:
            if not met and now.expected:
                now.expected = now is turns.own
                turns.leave(now)
                if any(no for _, _, no in now.exchange([0, 0, 1])):
                    now.lane.gather_json(told(error), "a refusal is told", turns.hand_over)
            if now is turns.own:  # a member waits for nobody here who may wait for another one
                now.lane.settle()
        except GroupError as lost:  # the model's own error is on its way
            _log.debug("%s", lost)


def _is_of_others(hook: object) -> bool:
    function = getattr(hook, "func", hook)  # of a partial
    return not str(getattr(function, "__module__", "")).startswith("pipeload")


def _is_missing(output: Any) -> bool:
    """Whether the module has failed; a Linear that comes in ranges of rows had none by then."""
    return output is None or (isinstance(output, torch.Tensor) and output.shape[-1:] == (0,))
