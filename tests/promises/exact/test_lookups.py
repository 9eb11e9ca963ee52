"""Embeddings that several threads use at once, also by themselves, on a model that is all there."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.models import load_plain, save_random, tiny_config
from tests.support.streaming import (
    IDS,
    WAIT_SECONDS,
    assert_nothing_held,
    in_thread,
    load_streamed,
    logits,
    session_of,
)
from tests.support.users import small_ranges

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OTHER = IDS + 300
"""Rows on other pages."""
SOON = 0.1  # seconds; what is awaited so long must not come


def load(folder: Path, *, tied: bool) -> Any:
    """A model that fits, and whose table is read by rows."""
    config = tiny_config("llama", tie_word_embeddings=tied)
    save_random(config, folder, "fp32", seed=3)
    with small_ranges():
        model = load_streamed(folder, spare=10_000_000, modules=True)
    assert len(session_of(model).streamer.tables) == 1
    return model


def look_up(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        rows: torch.Tensor = model.get_input_embeddings()(ids)
    return rows


def test_two_lookups_at_once(tmp_path: Path) -> None:
    """Passes run beside each other then, but the second one's rows do not replace the first's."""
    model, plain = load(tmp_path, tied=False), load_plain(tmp_path)
    logits(model)
    assert session_of(model).passes._replan.settled
    others: list[Future[torch.Tensor]] = []

    def have_another(*_args: object) -> None:
        hook.remove()
        others.append(in_thread(look_up, model, OTHER))
        assert wait(others, SOON).not_done

    hook = model.get_input_embeddings().register_forward_pre_hook(have_another)
    assert torch.equal(look_up(model), look_up(plain))
    assert torch.equal(others[0].result(WAIT_SECONDS), look_up(plain, OTHER))
    assert torch.equal(logits(model), logits(plain))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_lookup_that_dies(tmp_path: Path, error: type[BaseException]) -> None:
    """It keeps nobody out, in whatever thread."""
    model, plain = load(tmp_path, tied=False), load_plain(tmp_path)
    logits(model)

    def fail(*_args: object) -> None:
        hook.remove()
        raise error("on purpose")

    for _ in range(2):
        hook = model.get_input_embeddings().register_forward_pre_hook(fail)
        with pytest.raises(error):
            look_up(model)
        assert torch.equal(in_thread(logits, model).result(WAIT_SECONDS), logits(plain))
    assert torch.equal(look_up(model), look_up(plain))


def head(model: Any) -> torch.Tensor:
    with torch.no_grad():
        made: torch.Tensor = model.lm_head(torch.linspace(-1, 1, 96)[None])
    return made


@pytest.mark.parametrize("alone", [look_up, head])
def test_called_while_the_first_pass_ends(
    tmp_path: Path, alone: Callable[[Any], torch.Tensor]
) -> None:
    """A part that waits for the pass after which all is there leaves table and head as they are."""
    model, plain = load(tmp_path, tied=True), load_plain(tmp_path)
    inside, waiting = threading.Event(), threading.Event()

    def stop(*_args: object) -> None:
        hook.remove()
        inside.set()
        assert waiting.wait(WAIT_SECONDS)

    hook = model.model.layers[2].mlp.register_forward_pre_hook(stop)
    first = in_thread(logits, model)
    assert inside.wait(WAIT_SECONDS)
    changed: Any = session_of(model).passes._gate._changed
    original = changed.wait

    def tell(timeout: float | None = None) -> bool:
        waiting.set()
        return bool(original(timeout))

    changed.wait = tell
    second = in_thread(alone, model)
    assert torch.equal(first.result(WAIT_SECONDS), logits(plain))
    assert torch.equal(second.result(WAIT_SECONDS), alone(plain))
    assert session_of(model).passes._replan.settled
    assert_nothing_held(model)
    assert torch.equal(logits(model), logits(plain))
