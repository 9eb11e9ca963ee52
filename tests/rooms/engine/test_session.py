"""One stack of steps takes a model down: after a failed load, by remove(), or when dropped."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import pipeload
from pipeload.budget.shared_limit import ACCOUNTANT
from pipeload.engine.teardown import Undo
from tests.support.models import load_plain
from tests.support.streaming import (
    IDS,
    load_streamed,
    logits,
    our_threads,
    prefetcher_of,
    session_of,
    smallest_limit,
    steady_floor,
    wait_for_threads,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

    Step = Callable[[], object]

SPARES = [0, 700_000, 10_000_000]


@pytest.fixture(scope="module")
def folder(tiny: TinyCheckpoint) -> Path:
    return tiny("llama")


class Steps:
    """Numbers all steps that are pushed, and notes which were taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pushed = 0
        self.taken: list[int] = []
        self.striking: dict[int, type[BaseException]] = {}
        """Numbers of steps that raise this the first time, before they do anything."""
        push = Undo.push
        steps = self

        def push_numbered(undo: Undo, step: Step) -> None:
            number = steps.pushed
            steps.pushed += 1

            def take() -> None:
                if (error := steps.striking.pop(number, None)) is not None:
                    raise error(f"step {number}")
                step()
                steps.taken.append(number)

            push(undo, take)

        monkeypatch.setattr(Undo, "push", push_numbered)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    gc.collect()
    return Steps(monkeypatch)


def load_and_fail(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise KeyboardInterrupt("at the last step")

    with monkeypatch.context() as patch:
        patch.setattr("pipeload.engine.assembly.Handle", fail)
        with pytest.raises(KeyboardInterrupt, match="at the last step"):
            load_streamed(folder)


def load_and_drop(folder: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_streamed(folder)
    logits(model)
    del model


def load_and_remove(folder: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    load_streamed(folder).pipeload.remove()


@pytest.mark.parametrize("way", [load_and_fail, load_and_drop, load_and_remove])
def test_one_way_down(
    folder: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch, way: Callable[..., None]
) -> None:
    """All steps are taken at once, each one time, the last one first; nothing runs or counts."""
    before, clients = our_threads(), len(ACCOUNTANT.clients)
    way(folder, monkeypatch)
    assert steps.taken == [*reversed(range(steps.pushed))]
    assert steps.pushed > 20
    wait_for_threads(before)
    assert len(ACCOUNTANT.clients) == clients


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", [0, 1, 2, 5, -5, -1])
def test_a_step_that_is_struck_keeps_no_other(
    folder: Path, steps: Steps, error: type[BaseException], where: int
) -> None:
    """After the error remove() is over: the model is a plain one, and nothing is left of us."""
    before = our_threads()
    expected = logits(load_plain(folder))
    model = load_streamed(folder)
    logits(model)
    number = where % steps.pushed
    steps.striking[number] = error
    with pytest.raises(error, match=f"step {number}"):
        model.pipeload.remove()
    struck = () if error is KeyboardInterrupt else (number,)  # else it was taken the second time
    assert steps.taken == [n for n in reversed(range(steps.pushed)) if n not in struck]
    wait_for_threads(before)
    assert torch.equal(logits(model), expected)
    assert steps.striking == {}


def test_remove_goes_on_where_it_was_interrupted(
    folder: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should Ctrl-C come through between two steps: the weights are not put back twice."""
    expected = logits(load_plain(folder))
    model = load_streamed(folder)
    handle = pipeload.handle(model)
    session = session_of(model)
    restored: list[int] = []
    restore = handle._restore
    assert restore is not None

    def restore_and_count(model: Any) -> None:
        restored.append(1)
        restore(model)

    def struck(_undo: Undo) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(handle, "_restore", restore_and_count)
    with monkeypatch.context() as patch:
        patch.setattr(Undo, "__call__", struck)
        with pytest.raises(KeyboardInterrupt):
            handle.remove()
    assert not session.close.is_done
    handle.remove()
    assert session.close.is_done
    assert steps.taken == [*reversed(range(steps.pushed))]
    assert restored == [1]
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("spare", SPARES)
def test_what_is_kept_of_a_dropped_model_streams_on(folder: Path, spare: int) -> None:
    """The base of a model outlives it, as for embeddings: it is right, and goes with `del`."""
    with torch.no_grad():
        expected = load_plain(folder).model(IDS).last_hidden_state
    model = load_streamed(folder, spare=spare)
    before = our_threads()
    logits(model)
    base, dispatcher = model.model, weakref.ref(prefetcher_of(model)._dispatcher)
    del model
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(base(IDS).last_hidden_state, expected)
    gc.collect()
    gc.disable()
    try:
        del base
        assert dispatcher() is None
    finally:
        gc.enable()
    assert len(our_threads()) <= len(before)


@pytest.mark.parametrize("spare", SPARES)
def test_del_is_enough_for_a_wrapped_model(folder: Path, spare: int) -> None:
    """Nothing that takes a model down holds the model, whichever way it came to stream."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    with steady_floor():
        pipeload.wrap(model, smallest_limit(folder) + spare)
    logits(model)
    gone = [weakref.ref(model), weakref.ref(prefetcher_of(model)._dispatcher)]
    gone += map(weakref.ref, model.parameters())
    gc.collect()
    gc.disable()
    try:
        del model
        assert [one() for one in gone if one() is not None] == []
    finally:
        gc.enable()
