"""A pass over a prompt has its attention computed aside where kernels would stay."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import pipeload
from pipeload.engine import pass_modes
from pipeload_hooks import _attention_thread
from tests.support.models import load_plain
from tests.support.streaming import IDS, load_streamed, session_of

if TYPE_CHECKING:
    from tests.conftest import TinyCheckpoint


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("pipeload-attention")]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Dtypes that were asked about, on a processor where kernels of all of them stay."""
    asked: list[Any] = []

    def stay(dtype: Any) -> bool:
        asked.append(dtype)
        return True

    monkeypatch.setattr(_attention_thread, "kernels_stay", stay)
    monkeypatch.setattr(pass_modes, "kernels_stay", lambda _dtype: True)
    return asked


@torch.no_grad()
def test_prompts_are_attended_to_aside(tiny: TinyCheckpoint, kernels: list[Any]) -> None:
    """Same tokens, one thread, of prompts alone; it ends with the streaming."""
    folder = tiny("llama")
    want = load_plain(folder).generate(IDS, max_new_tokens=4, do_sample=False)
    model, before = load_streamed(folder), threads()
    assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False), want)
    layers = model.config.num_hidden_layers
    assert len(kernels) == layers
    model(IDS[:, :1])
    assert len(kernels) == layers
    (mine,) = set(threads()) - set(before)
    assert torch._C._len_torch_function_stack() == 0
    pipeload.handle(model).remove()
    mine.join(10)
    assert not mine.is_alive()


@torch.no_grad()
def test_a_pass_that_dies_leaves_nothing_active(
    tiny: TinyCheckpoint, kernels: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt runs no hook: the next pass puts things in order."""
    model = load_streamed(tiny("llama"))
    want = model(IDS).logits
    replan = type(session_of(model).streamer._replan)
    with monkeypatch.context() as patch:

        def interrupt(_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(replan, "look_again", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(IDS)
    kernels.clear()
    assert torch.equal(model(IDS).logits, want)
    assert len(kernels) == model.config.num_hidden_layers
    assert torch._C._len_torch_function_stack() == 0
