"""A call past the model's own hooks is one pass, and governed as one."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import LlamaForCausalLM

from pipeload import MemoryLimitError
from tests.support.models import load_plain
from tests.support.streaming import (
    IDS,
    WAIT_SECONDS,
    assert_nothing_held,
    load_streamed,
    session_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

ALL = 10_000_000
"""Bytes over the smallest limit with which everything fits."""


@pytest.fixture(scope="module")
def folder(tiny: TinyCheckpoint) -> Path:
    return tiny("llama")


def forwarded(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.forward(IDS).logits
    return result


def by_parts(model: Any) -> torch.Tensor:
    """As a model's own `encode` does; the method's name says nothing."""
    with torch.no_grad():
        hidden = model.model.forward(inputs_embeds=model.model.embed_tokens(IDS))[0]
        result: torch.Tensor = model.lm_head(hidden)
    return result


@pytest.mark.parametrize("spare", [0, 700_000, ALL])
def test_forward_is_one_pass(folder: Path, spare: int) -> None:
    """As many as calls, by whatever way they come, and the same bits."""
    plain, model = load_plain(folder), load_streamed(folder, spare=spare)
    want = forwarded(plain)
    for number in range(1, 9):
        way: Callable[..., Any] = model.forward if number % 3 else model
        with torch.no_grad():
            assert torch.equal(way(IDS).logits, want)
        assert model.pipeload.stats().passes == number
    assert session_of(model).passes._replan.settled == (spare == ALL)
    assert torch.equal(by_parts(model), by_parts(plain))


@pytest.mark.parametrize("spare", [0, ALL])
def test_forward_is_refused_before_it_runs(folder: Path, spare: int) -> None:
    """With the needs of its own arguments; what is inside a pass is not asked again."""
    model = load_streamed(folder, spare=spare)
    for _ in range(3):
        want = forwarded(model)
    ran: list[int] = []
    hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: ran.append(1))
    before = model.pipeload.stats().passes
    large = torch.ones(4000, 400, dtype=torch.long)
    hidden = torch.empty(1, 1, 96).expand(100_000, 400, 96)
    for way in (model.forward, model, model.model.forward, model.model.layers[0]):
        given = hidden if way is model.model.layers[0] else large
        with torch.no_grad(), pytest.raises(MemoryLimitError, match=r"000 x 400 (tokens|x 96)"):
            way(given)
        assert not ran
    assert model.pipeload.stats().passes == before
    hook.remove()
    assert torch.equal(forwarded(model), want)


def test_a_call_that_died_is_over(folder: Path) -> None:
    """An exception between two blocks, kept with its frames, and the next call is a new one."""
    plain, model = load_plain(folder), load_streamed(folder, spare=0)
    norm = model.model.norm

    def fail(*_args: object) -> None:
        raise KeyboardInterrupt

    hook = norm.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt) as kept:
        forwarded(model)
    hook.remove()
    assert not session_of(model).passes.busy
    assert torch.equal(forwarded(model), forwarded(plain))
    assert kept.value.__traceback__ is not None
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, forwarded(plain))
    assert_nothing_held(model)


def test_a_tracer_still_sees_the_call(folder: Path) -> None:
    """A debugger's place on the frame is shared."""
    model = load_streamed(folder, spare=0)
    lines: list[int] = []

    def trace(frame: Any, event: str, _arg: object) -> Any:
        if frame.f_code.co_name == "forward" and frame.f_locals.get("self") is model:
            if event == "line":
                lines.append(frame.f_lineno)
            return trace
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        traced = forwarded(model)
    finally:
        sys.settrace(before)
    assert len(set(lines)) > 2
    assert torch.equal(traced, forwarded(model))


class Encoder(LlamaForCausalLM):
    """As code that comes with a checkpoint."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)

    def encode(self) -> torch.Tensor:
        """Its last part runs in a thread that it waits for."""
        with torch.inference_mode():
            hidden = self.model(IDS)[0]

            def head() -> torch.Tensor:
                with torch.inference_mode():
                    made: torch.Tensor = self.lm_head(hidden)
                return made

            with ThreadPoolExecutor(1) as pool:
                pool.submit(head).result(WAIT_SECONDS)
            return head()


@pytest.mark.parametrize("spare", [0, ALL])
def test_a_call_that_waits_for_another_thread(folder: Path, spare: int) -> None:
    """Between its parts the model is free for others."""
    model = load_streamed(folder, spare=spare, auto_class=Encoder)
    wanted = forwarded(load_plain(folder))
    for _ in range(3):
        assert torch.equal(model.encode(), wanted)
        assert_nothing_held(model)


class Speaker(LlamaForCausalLM):
    """With a `generate` of its own, as those have that speak or draw."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)

    @torch.no_grad()
    def generate(self, input_ids: Any = None, **_: Any) -> torch.Tensor:
        hidden = self.model(input_ids[:, :2])[0]
        return torch.cat([hidden, self.model(input_ids)[0]], dim=1)


@pytest.mark.parametrize("spare", [0, ALL])
def test_parts_that_generate_calls_are_passes_of_their_own(folder: Path, spare: int) -> None:
    """With the needs of what they are called with, not of what `generate` was."""
    model = load_streamed(folder, spare=spare, auto_class=Speaker)
    for _ in range(2):
        forwarded(model)
    wanted = model.generate(IDS)
    governor, seen = session_of(model).passes._governor, []
    before = governor.before_passes

    def look(calls: Any) -> int:
        (call,) = calls
        given = (*call.args, *call.kwargs.values())
        seen.append((call.module, [tuple(value.shape) for value in given if value is not None]))
        return before(calls)

    governor.before_passes = look  # type: ignore[method-assign]
    assert torch.equal(model.generate(IDS), wanted)
    assert [shapes for _, shapes in seen] == [[(1, 2)], [tuple(IDS.shape)]]
    assert all(module is model.model for module, _ in seen)
    assert_nothing_held(model)
