"""After any failure or interrupt in the middle of a pass, the same model is right again."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from pipeload import UnsupportedOperationError
from pipeload.prefetch.unit import Ticket
from tests.support.models import load_plain
from tests.support.streaming import (
    IDS,
    WAIT_SECONDS,
    ReadGate,
    assert_nothing_held,
    finish_messages,
    generated,
    in_thread,
    load_streamed,
    logits,
    prefetcher_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

LAYERS = 6
ERRORS = [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit]


class Reference(NamedTuple):
    """What the plain model gives."""

    folder: Path
    logits: torch.Tensor
    tokens: list[int]

    def check(self, model: Any) -> None:
        assert torch.equal(logits(model), self.logits)
        assert generated(model) == self.tokens
        assert_nothing_held(model)


@pytest.fixture(scope="module")
def reference(tiny: TinyCheckpoint) -> Reference:
    folder = tiny("llama")
    plain = load_plain(folder)
    return Reference(folder, logits(plain), generated(plain))


class Breaker:
    """Raises in the middle of a block's forward."""

    def __init__(self, model: Any, layer: int, error: type[BaseException]) -> None:
        self.error = error
        hook = model.model.layers[layer].mlp.register_forward_pre_hook(self)
        self.remove = hook.remove

    def __call__(self, *_args: object) -> None:
        raise self.error("broken on purpose")


def break_pass(model: Any, layer: int, error: type[BaseException]) -> None:
    breaker = Breaker(model, layer, error)
    with pytest.raises(error, match="broken on purpose"):
        logits(model)
    breaker.remove()


@pytest.mark.parametrize("error", ERRORS)
def test_a_first_pass_that_dies(reference: Reference, error: type[BaseException]) -> None:
    """Whatever layer the very first pass dies at, the next one is right."""
    for layer in range(LAYERS):
        model = load_streamed(reference.folder)
        break_pass(model, layer, error)
        reference.check(model)


@pytest.mark.parametrize("error", ERRORS)
def test_a_later_pass_that_dies(reference: Reference, error: type[BaseException]) -> None:
    """Whatever layer a later pass dies at, the next one is right."""
    model = load_streamed(reference.folder)
    reference.check(model)
    for layer in range(LAYERS):
        break_pass(model, layer, error)
        reference.check(model)


@pytest.mark.parametrize("error", ERRORS)
def test_a_generation_that_dies(reference: Reference, error: type[BaseException]) -> None:
    """generate() that is cut off at its third token leaves nothing behind."""
    model = load_streamed(reference.folder)
    for layer in range(LAYERS):
        passes = 0

        def third(*_args: object) -> None:
            nonlocal passes
            passes += 1
            if passes == 3:
                raise error

        hook = model.model.layers[layer].mlp.register_forward_pre_hook(third)
        with pytest.raises(error):
            generated(model)
        hook.remove()
        reference.check(model)


@pytest.mark.parametrize("spare", [0, 700_000, 10_000_000])
def test_two_deaths_in_a_row(reference: Reference, spare: int) -> None:
    """Dead passes do not add up, however much of the model is resident."""
    model = load_streamed(reference.folder, spare=spare)
    for layer in (2, 4, 4, 1):
        break_pass(model, layer, KeyboardInterrupt)
    reference.check(model)


@pytest.mark.parametrize("error", ERRORS)
def test_another_thread_goes_on(reference: Reference, error: type[BaseException]) -> None:
    """A pass that died in one thread does not keep another one out, nor the first one later."""
    model = load_streamed(reference.folder)
    for layer in (0, 3, 5):
        break_pass(model, layer, error)
        in_thread(reference.check, model).result(WAIT_SECONDS)
        future = in_thread(break_pass, model, layer, error)
        future.result(WAIT_SECONDS)
        reference.check(model)


def test_a_waiting_thread_takes_over(reference: Reference) -> None:
    """While one pass runs, another thread waits; when the first dies, the second has its turn."""
    model = load_streamed(reference.folder)
    inside, waiting, die = threading.Event(), threading.Event(), threading.Event()

    def stop(*_args: object) -> None:
        hook.remove()
        inside.set()
        assert die.wait(WAIT_SECONDS)
        raise SystemExit("this thread ends")

    hook = model.model.layers[2].mlp.register_forward_pre_hook(stop)
    first = in_thread(logits, model)
    assert inside.wait(WAIT_SECONDS)
    changed = pipeload_gate(model)._changed
    original = changed.wait

    def wait(timeout: float | None = None) -> bool:
        waiting.set()
        return bool(original(timeout))

    changed.wait = wait
    second = in_thread(logits, model)
    assert waiting.wait(WAIT_SECONDS)
    die.set()
    with pytest.raises(SystemExit, match="this thread ends"):
        first.result(WAIT_SECONDS)
    assert torch.equal(second.result(WAIT_SECONDS), reference.logits)
    reference.check(model)


def pipeload_gate(model: Any) -> Any:
    return model.pipeload._session.passes._gate


def test_two_threads_take_turns(reference: Reference) -> None:
    """Many passes from several threads, some of them dying, are all right or dead."""
    model = load_streamed(reference.folder)

    def work(dying: bool) -> int:
        right = 0
        for layer in range(LAYERS):
            own = IDS + layer
            if dying:
                module, kwargs = model.model.layers[layer], {"hidden_states": "nonsense"}
                with pytest.raises(Exception, match=r"str|tensor"):
                    module(**kwargs)
            else:
                right += torch.isfinite(logits(model, own)).all().item() is True
        return right

    futures = [in_thread(work, dying) for dying in (True, False, False)]
    assert [future.result(WAIT_SECONDS) for future in futures] == [0, LAYERS, LAYERS]
    reference.check(model)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_swallowed_inside_the_forward(
    reference: Reference, error: type[BaseException]
) -> None:
    """A forward that catches a block's error and goes on is right, and so is the next."""
    model = load_streamed(reference.folder)
    broken = model.model.layers[2]
    original = broken.mlp.forward

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        broken.mlp.forward = original
        raise error

    class Tolerant(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return self.inner(*args, **kwargs)
            except error:
                return self.inner(*args, **kwargs)

    broken.mlp.forward = fail_once
    model.model.layers[2] = Tolerant(broken)
    assert torch.equal(logits(model), reference.logits)
    reference.check(model)


@pytest.mark.parametrize("prepend", [True, False])
@pytest.mark.parametrize("place", ["before", "after"])
def test_an_error_in_the_users_own_hook(reference: Reference, prepend: bool, place: str) -> None:
    """A user's hook that raises, before or after ours, on a block or the model, breaks nothing."""
    model = load_streamed(reference.folder)

    def fail(*_args: object) -> None:
        raise ValueError("the user's hook")

    for module in (model, model.model, model.model.layers[3]):
        register = (
            module.register_forward_pre_hook if place == "before" else module.register_forward_hook
        )
        hook = register(fail, prepend=prepend)
        with pytest.raises(ValueError, match="the user's hook"):
            logits(model)
        hook.remove()
        reference.check(model)


def test_an_interrupt_while_waiting_for_the_disk(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C reaches a model that waits for a read, and the read that is under way does no harm."""
    model = load_streamed(reference.folder)
    finish_messages(prefetcher_of(model))
    main = threading.main_thread().ident
    assert main is not None
    for _ in range(3):
        with monkeypatch.context() as patch:
            interrupt_while_waiting(model, main, patch)
        reference.check(model)


def interrupt_while_waiting(model: Any, main: int, patch: pytest.MonkeyPatch) -> None:
    gate, waiting, original = ReadGate(patch), threading.Event(), Ticket.wait

    def wait(ticket: Ticket, *args: Any) -> None:
        if ticket.unit >= 0:  # for a block, whose read is held up: not for a reset, which is short
            waiting.set()
        original(ticket, *args)

    def interrupt() -> None:
        assert gate.entered.wait(WAIT_SECONDS)
        assert waiting.wait(WAIT_SECONDS)
        signal.pthread_kill(main, signal.SIGINT)

    patch.setattr(Ticket, "wait", wait)
    sent = in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        logits(model)
    sent.result(WAIT_SECONDS)
    gate.opened.set()


def test_a_block_called_by_itself(reference: Reference) -> None:
    """A block that the user calls is a pass of its own, and may die like one."""
    model = load_streamed(reference.folder)
    block, plain = model.model.layers[4], load_plain(reference.folder).model.layers[4]
    hidden = torch.randn(1, 3, 96, generator=torch.Generator().manual_seed(1))
    angles = torch.randn(2, 1, 3, 16, generator=torch.Generator().manual_seed(2)).unbind()
    for error in (ValueError, KeyboardInterrupt):
        break_alone = Breaker(model, 4, error)
        with torch.no_grad(), pytest.raises(error):
            block(hidden, position_embeddings=angles)
        break_alone.remove()
        with torch.no_grad():
            result = block(hidden, position_embeddings=angles)
            assert torch.equal(result, plain(hidden, position_embeddings=angles))
        reference.check(model)


def test_blocks_that_die_one_after_the_other(reference: Reference) -> None:
    """Each gives back what the one before held, so that no buffer is taken for good."""
    model, plain = load_streamed(reference.folder), load_plain(reference.folder)
    hidden = torch.randn(1, 3, 96, generator=torch.Generator().manual_seed(1))
    angles = torch.randn(2, 1, 3, 16, generator=torch.Generator().manual_seed(2)).unbind()
    break_pass(model, 0, KeyboardInterrupt)
    for layer in (2, 4, 1, 5):
        breaker = Breaker(model, layer, KeyboardInterrupt)
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            model.model.layers[layer](hidden, position_embeddings=angles)
        breaker.remove()
    with torch.no_grad():
        result = model.model.layers[3](hidden, position_embeddings=angles)
        assert torch.equal(result, plain.model.layers[3](hidden, position_embeddings=angles))
    reference.check(model)


def test_nobody_watches_after_a_death(reference: Reference) -> None:
    """What is asked of weights between two passes is no part of the one that died."""
    model = load_streamed(reference.folder)
    break_pass(model, 2, KeyboardInterrupt)
    model.requires_grad_(False)
    with pytest.raises(UnsupportedOperationError, match=r"sum\(\) needs .*0\.mlp\.up_proj\.weight"):
        model.model.layers[0].mlp.up_proj.weight.sum()
    reference.check(model)


def test_recording_is_refused_and_forgotten(reference: Reference) -> None:
    """With autograd on, the error says what to do; doing that works on the same model."""
    model = load_streamed(reference.folder)
    with pytest.raises(UnsupportedOperationError, match=r"model\.layers\.0.*torch\.no_grad"):
        model(IDS)
    reference.check(model)
