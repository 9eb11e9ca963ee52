"""What requests that share each reading on several ranks come to where something fails."""

from __future__ import annotations

import os
import signal
import socket
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

import pipeload
from pipeload.budget.governor import Governor
from tests.promises.failures.test_ranks import _answer, _is_here, _wait_for
from tests.support.exact import ROOMY, load, prompt, smallest_limit, steady_floor
from tests.support.models import load_plain
from tests.support.ranks import Ranks, on_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

__all__ = ["steady_floor"]  # a fixture: every test here runs with it

pytestmark = pytest.mark.slow
HOST = socket.gethostname()
TOKENS = 6


def requests(count: int = 4, tokens: int = TOKENS) -> list[dict[str, Any]]:
    """Greedy ones, of other prompts."""
    options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None}
    return [{"input_ids": prompt(seed=11 + number), **options} for number in range(count)]


def told_of(outcome: Any) -> Any:
    """What came of a request, as JSON can hold it."""
    if isinstance(outcome, torch.Tensor):
        return outcome[0].tolist()
    return f"{type(outcome).__name__}: {outcome}"


def plain_answers(folder: Path, count: int = 4) -> list[list[int]]:
    plain = load_plain(folder)
    return [plain.generate(**request)[0].tolist() for request in requests(count)]


class Boom(transformers.StoppingCriteria):
    """Raises once a request has made some tokens."""

    def __call__(self, ids: torch.Tensor, _scores: object, **_options: object) -> torch.Tensor:
        if ids.shape[1] > prompt().shape[1] + 2:
            raise ValueError("boom")
        return torch.zeros(len(ids), dtype=torch.bool)


@pytest.mark.parametrize("at_once", [7, 2, 1, "auto"])
def test_one_fails_alone(tiny: TinyCheckpoint, at_once: int | str) -> None:
    """By its own fault, in a block of one rank, between passes on one rank, or for its arguments.

    The others have their results, those that begin later, too, and the group goes on.
    """
    folder = tiny("llama")
    limit, wanted = smallest_limit(folder), plain_answers(folder)

    def act(rank: int) -> Any:
        model, many = load(folder, limit, ranks="auto"), requests()
        many.append(many[0] | {"output_attentions": True, "return_dict_in_generate": True})
        many.append(many[0] | {"stopping_criteria": [Boom()]})
        if rank:
            many[1] = many[1] | {"stopping_criteria": [Boom()]}
        block = model.model.layers[next(n for n in range(6) if _is_here(model, n))]

        def fail(_module: object, args: tuple[torch.Tensor]) -> None:
            if len(args[0]) == 3:
                raise OSError("the cable is loose")

        many.append(many[0] | {"input_ids": prompt(3)})
        hook = block.register_forward_pre_hook(fail) if rank == 1 else None
        found = dict(pipeload.generate_many(model, many, at_once=at_once))
        if hook is not None:
            hook.remove()
        return [told_of(found[number]) for number in range(len(many))], _answer(model)

    (found, first), (there, other) = on_ranks(2, act, seconds=90)
    assert first == other == _answer(load_plain(folder))
    for answers in (found, there):
        assert [answers[0], *answers[2:4]] == [wanted[0], *wanted[2:]]
        assert answers[4].startswith("UnsupportedOperationError: output_attentions is recorded")
        assert answers[5] == "ValueError: boom"
    assert found[1].startswith(f"GroupError: the request has ended on rank 1 ({HOST}) alone.")
    assert there[1] == "ValueError: boom"
    assert f"rank 1 ({HOST}) failed in 'model.layers." in found[6]
    assert there[6] == "OSError: the cable is loose"


def test_one_that_never_begins_on_a_rank(tiny: TinyCheckpoint) -> None:
    """Before its first pass: others do not wait for it, nor ask each other for ever."""
    folder = tiny("llama")
    limit, wanted = smallest_limit(folder), plain_answers(folder)

    def act(rank: int) -> Any:
        model, many = load(folder, limit, ranks="auto"), requests()
        many = [request | {"seed": 1} for request in many]
        if rank:
            many[0] |= {"max_new_tokens": -1}
        found = dict(pipeload.generate_many(model, many, at_once=1))
        return [told_of(found[number]) for number in range(len(many))]

    found, there = on_ranks(2, act, seconds=60)
    assert found[1:] == there[1:] == wanted[1:]
    assert found[0].startswith(f"GroupError: the request has ended on rank 1 ({HOST}) alone.")
    assert there[0].startswith("ValueError: ")


def test_other_numbers_at_once(tiny: TinyCheckpoint) -> None:
    """Ranks would begin others, and wait for each other: refused at once, with the cure."""
    folder = tiny("llama")

    def act(rank: int) -> str:
        model = load(folder, ROOMY, ranks="auto")
        with pytest.raises(pipeload.GroupError) as refusal:
            next(iter(pipeload.generate_many(model, requests(), at_once=2 + rank)))
        return str(refusal.value)

    for said in on_ranks(2, act, seconds=60):
        assert "has another number of requests run at once. Give the same at_once" in said


@pytest.mark.parametrize(
    ("ended", "how"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGINT)]
)
def test_a_rank_ends(tiny: TinyCheckpoint, tmp_path: Path, ended: int, how: signal.Signals) -> None:
    """All others raise one error, that names it, and have answered nothing wrongly."""
    folder = tiny("llama")
    limit = smallest_limit(folder)

    def act(rank: int) -> Any:
        model = load(folder, limit, ranks="auto")

        def endless() -> Iterator[dict[str, Any]]:
            while True:
                yield from requests(tokens=20)
                (tmp_path / str(rank)).touch()

        said = []
        try:
            for _, outcome in pipeload.generate_many(model, endless(), at_once=3):
                assert not isinstance(outcome, BaseException)
        except pipeload.GroupError as error:
            said.append(f"{error.rank} {error.host}: {error}")
        with pytest.raises(pipeload.GroupError, match="the group of 2 ranks is broken"):
            next(iter(pipeload.generate_many(model, requests())))
        return said

    ranks = Ranks(2, act, seconds=60)
    _wait_for(*(tmp_path / str(rank) for rank in range(2)))
    os.kill(ranks.pids[ended], how)
    found = ranks.results()
    assert found.pop(ended) == (how if how == signal.SIGKILL else "KeyboardInterrupt: ")
    ((said,),) = found
    assert said.startswith(f"{ended} {HOST}: rank {ended} ({HOST}) of 2 is lost")


def test_no_room_on_one_rank(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest gives up what it has on all of them, and is begun again: all have answers.

    One that finds no room by itself is refused on all ranks as on that one.
    """
    folder = tiny("llama")
    limit, wanted = smallest_limit(folder), plain_answers(folder)
    real = Governor.before_passes

    def act(rank: int) -> Any:
        model = load(folder, limit, ranks="auto")
        refused: list[bool] = []

        def before_passes(governor: Governor, calls: Any) -> int:
            alone = [len(call.kwargs["input_ids"]) for call in calls] == [3]
            later = not any(call.first for call in calls)
            if rank and (alone or (later and len(calls) > 2 and not refused)):
                refused.append(alone)
                raise pipeload.MemoryLimitError("no room", limit=5, smallest_limit=7)
            return real(governor, calls)

        monkeypatch.setattr(Governor, "before_passes", before_passes)
        found = dict(pipeload.generate_many(model, requests(), at_once=3))
        many = [requests()[0] | {"input_ids": prompt(3)}]
        ((_, error),) = pipeload.generate_many(model, many)
        return [told_of(found[n]) for n in range(4)], told_of(error), error.smallest_limit

    first, other = on_ranks(2, act, seconds=60)
    assert first[0] == other[0] == wanted
    assert other[1:] == ["MemoryLimitError: no room", 7]
    assert first[1].startswith(f"MemoryLimitError: rank 1 ({HOST}) has no room for the pass: ")
    assert first[2] == 7


def test_other_requests(tiny: TinyCheckpoint) -> None:
    """A rank that has one more, or other ones, is named; nobody has wrong answers."""
    folder = tiny("llama")

    def act(rank: int) -> Any:
        model, many = load(folder, ROOMY, ranks="auto"), requests()
        many[1] = many[1] | {"input_ids": prompt(seed=99 + rank)}
        found = dict(pipeload.generate_many(model, many, at_once=4))
        said = [told_of(found[number]) for number in range(4)]
        try:
            if rank:
                _answer(model)
            else:
                list(pipeload.generate_many(model, many))
        except pipeload.GroupError as error:
            said.append(str(error))
        return [*said, _answer(model)]  # the group goes on

    wanted, goes_on = plain_answers(folder), _answer(load_plain(folder))
    for said in on_ranks(2, act, seconds=60):
        assert [said[0], *said[2:4]] == [wanted[0], *wanted[2:]]
        assert said[1].startswith(f"GroupError: rank 1 ({HOST}) computes other tokens than")
        assert said[4].startswith(f"rank 1 ({HOST}) does something else than answer")
        assert said[5] == goes_on
