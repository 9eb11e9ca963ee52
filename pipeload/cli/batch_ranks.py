"""`pipeload batch --ranks`: rank 0 has the files, and tells the others of each request."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

import pipeload
from pipeload.cli.end_signals import end_signals
from pipeload.cli.load_model import traced
from pipeload.cli.log_lines import log
from pipeload.entry.ranks import turns_of
from pipeload.errors import GroupError
from pipeload.serving.answer_text import StopAt
from pipeload.serving.outcome import blamed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pipeload.cli.cooling import Cooling
    from pipeload.serving.request import Asked


def tell(
    model: Any,
    requests: Iterator[dict[str, Any]],
    last: Callable[[], Asked],
    *,
    ending: Callable[[], bool],
) -> Iterator[dict[str, Any]]:
    """The requests, of each of which the other ranks are told, if there are any.

    Args:
        model: what answers them.
        requests: `generate`'s arguments.
        last: what was asked for by the one that was taken last.
        ending: whether this rank is to begin no more; so may others be.

    Raises:
        GroupError: a rank is lost.
    """
    turns = turns_of(model)
    if turns is None:
        yield from requests
        return
    while True:
        ends = turns.any_says(ending())
        arguments = None if ends else next(requests, None)
        turns.from_rank_0(None if arguments is None else _packed(last()))
        if arguments is None:
            return
        yield arguments


def _packed(asked: Asked) -> dict[str, Any]:
    """A request, as JSON can hold it."""
    options = {n: value for n, value in asked.options.items() if n != "stopping_criteria"}
    inputs = {name: values.tolist() for name, values in asked.inputs.items()}
    return {"inputs": inputs, "options": options, "stops": asked.stops}


def follow(
    model: Any, tokenizer: Any, at_once: int | str, cooling: Cooling | None, trace: Path | None
) -> None:
    """Compute this rank's share of the answers, until rank 0 has no more requests.

    Raises:
        PipeloadError: something is wrong with the limit, the disk, or another rank.
    """
    follower = _Follower(model, tokenizer, cooling)
    with end_signals(follower.end), traced(model, trace):
        many: Any = pipeload.generate_many(model, follower.requests(), at_once=at_once)
        with contextlib.closing(many):
            for _, outcome in many:
                _check(outcome)
                del outcome  # with its cache, before the next one wants memory


def _check(outcome: Any) -> None:
    """Raise what is of this machine, and not of a request."""
    told = isinstance(outcome, GroupError)  # rank 0 has been told more, and says whether to go on
    if isinstance(outcome, BaseException) and not told and blamed(outcome) is None:
        raise outcome


class _Follower:
    """A rank that is told of requests."""

    def __init__(self, model: Any, tokenizer: Any, cooling: Cooling | None) -> None:
        self._turns, self._tokenizer, self._cooling = turns_of(model), tokenizer, cooling
        self._ending = False

    def end(self) -> None:
        """Have no rank begin more requests; the second time, end at once."""
        if self._ending:
            if self._cooling is not None:
                self._cooling.end()
            raise KeyboardInterrupt
        self._ending = True
        log.warning("finishing what runs; once more ends at once")

    def requests(self) -> Iterator[dict[str, Any]]:
        """`generate`'s arguments, as rank 0 has them."""
        turns = self._turns
        assert turns is not None  # noqa: S101 - there are other ranks
        while True:
            turns.any_says(self._ending)
            given = turns.from_rank_0(None)
            if given is None:
                return
            yield self._arguments(given)

    def _arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        inputs = {name: torch.tensor(values) for name, values in given["inputs"].items()}
        criteria: list[Any] = [] if self._cooling is None else [self._cooling]
        if given["stops"]:
            tokens = int(inputs["input_ids"].shape[1])
            criteria.append(StopAt(self._tokenizer, given["stops"], prompt_tokens=tokens))
        more = {"stopping_criteria": criteria} if criteria else {}
        return {**inputs, **given["options"], **more}
