"""One pass at a time, and a dead one does not keep the next out."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

from pipeload_hooks import PassGate
from tests.support.streaming import WAIT_SECONDS, in_thread

if TYPE_CHECKING:
    from collections.abc import Callable


class Gated(nn.Module):
    """Enters the gate before its forward and leaves it after, as a streamed model does."""

    def __init__(self, gate: PassGate, action: Callable[[], object]) -> None:
        super().__init__()
        self.gate = gate
        self.action = action
        self.log: list[tuple[str, bool]] = []
        self.register_forward_pre_hook(self._enter, prepend=True)
        self.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *_args: object) -> None:
        self.log.append(("enter", self.gate.enter(self)))

    def _leave(self, *_args: object) -> None:
        self.log.append(("outermost", self.gate.is_outermost(self)))
        self.log.append(("leave", self.gate.leave(self)))

    def forward(self) -> Any:
        assert self.gate.owned()
        return self.action()


@pytest.fixture
def gate() -> PassGate:
    return PassGate()


def nothing() -> None:
    pass


WHOLE_PASS = [("enter", True), ("outermost", True), ("leave", True)]
INNER_PASS = [("enter", False), ("outermost", False), ("leave", False)]


def test_one_pass(gate: PassGate) -> None:
    """It begins, it ends, and the gate is free."""
    model = Gated(gate, nothing)
    model()
    assert model.log == WHOLE_PASS
    assert not gate.busy
    assert not gate.owned()


def test_a_model_inside_a_model(gate: PassGate) -> None:
    """The outer one's pass is the pass."""
    inner = Gated(gate, nothing)
    outer = Gated(gate, inner)
    outer()
    inner()
    assert outer.log == WHOLE_PASS
    assert inner.log == INNER_PASS + WHOLE_PASS


def test_a_model_that_calls_itself(gate: PassGate) -> None:
    """The first of its calls is the outermost one."""
    depth = 0

    def again() -> None:
        nonlocal depth
        depth += 1
        if depth < 3:
            model()

    model = Gated(gate, again)
    model()
    assert [entered for what, entered in model.log if what == "enter"] == [True, False, False]
    assert [left for what, left in model.log if what == "leave"] == [False, False, True]
    assert not gate.busy


def fail(error: type[BaseException]) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


ERRORS = [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit]


@pytest.mark.parametrize("error", ERRORS)
def test_after_a_pass_that_died(gate: PassGate, error: type[BaseException]) -> None:
    """The gate is free at once, and the next pass of the same thread is a new one."""
    model = Gated(gate, fail(error))
    for _ in range(2):
        with pytest.raises(error):
            model()
        assert not gate.busy
        model.log.clear()
        model.action = nothing
        model()
        assert model.log == WHOLE_PASS
        model.action = fail(error)


@pytest.mark.parametrize("error", ERRORS)
def test_an_inner_model_that_died(gate: PassGate, error: type[BaseException]) -> None:
    """An outer pass that catches it goes on, and ends the pass."""
    inner = Gated(gate, fail(error))

    def tolerate() -> None:
        with pytest.raises(error):
            inner()
        inner.action = nothing
        inner()

    outer = Gated(gate, tolerate)
    outer()
    assert outer.log == WHOLE_PASS
    assert ("enter", True) not in inner.log
    assert not gate.busy


@pytest.mark.parametrize("error", ERRORS)
def test_another_thread_after_a_dead_one(gate: PassGate, error: type[BaseException]) -> None:
    """Whether the thread of the dead pass lives on or has ended."""
    model = Gated(gate, fail(error))
    with pytest.raises(error):
        model()
    model.action = nothing
    assert in_thread(model).result(WAIT_SECONDS) is None
    model.action = fail(error)
    with pytest.raises(error):
        in_thread(model).result(WAIT_SECONDS)
    model.action = nothing
    model()
    assert model.log[-3:] == WHOLE_PASS


def test_a_second_thread_waits(gate: PassGate) -> None:
    """Two passes are never inside at once."""
    inside, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        inside.set()
        assert go_on.wait(WAIT_SECONDS)
        order.append("first")

    running = in_thread(Gated(gate, first))
    assert inside.wait(WAIT_SECONDS)
    assert gate.busy
    assert not gate.owned()
    waiting = watch_wait(gate)
    second = in_thread(Gated(gate, lambda: order.append("second")))
    assert waiting.wait(WAIT_SECONDS)
    go_on.set()
    running.result(WAIT_SECONDS)
    second.result(WAIT_SECONDS)
    assert order == ["first", "second"]
    assert not gate.busy


def watch_wait(gate: PassGate) -> threading.Event:
    """Set as soon as a thread waits at the gate."""
    waiting, original = threading.Event(), gate._changed.wait

    def wait(timeout: float | None = None) -> bool:
        waiting.set()
        return original(timeout)

    gate._changed.wait = wait  # type: ignore[method-assign]
    return waiting


def test_many_threads(gate: PassGate) -> None:
    """Every pass gets its turn, alone."""
    busy: list[int] = []
    most = 0

    def alone() -> None:
        nonlocal most
        busy.append(1)
        most = max(most, len(busy))
        busy.pop()

    def work() -> None:
        for _ in range(20):
            Gated(gate, alone)()

    for future in [in_thread(work) for _ in range(6)]:
        future.result(WAIT_SECONDS)
    assert most == 1


def test_leaving_what_was_never_entered(gate: PassGate) -> None:
    """torch calls the after-hook also when a before-hook raised."""
    module = nn.Identity()
    assert gate.leave(module) is False
    assert gate.is_outermost(module) is False
    outer = Gated(gate, lambda: gate.leave(module))
    outer()
    assert outer.log == WHOLE_PASS


def test_a_gate_that_is_held(gate: PassGate) -> None:
    """No pass begins until it is let go; it is held once the running one has ended."""
    began, go_on = threading.Event(), threading.Event()

    def run() -> None:
        began.set()
        assert go_on.wait(WAIT_SECONDS)

    first = in_thread(Gated(gate, run))
    assert began.wait(WAIT_SECONDS)
    wanted = threading.Event()
    held = in_thread(gate.hold, wanted.set)
    assert not held.done()
    go_on.set()
    held.result(WAIT_SECONDS)
    first.result(WAIT_SECONDS)
    assert gate.busy
    assert not gate.owned()
    with gate.idle([], []) as idle:
        assert not idle
    with gate.idle([], [], held=True) as idle:
        assert idle
    assert not wanted.is_set()
    later = in_thread(Gated(gate, nothing))
    assert wanted.wait(WAIT_SECONDS)
    assert not later.done()
    gate.let_go()
    later.result(WAIT_SECONDS)
    assert not gate.busy
