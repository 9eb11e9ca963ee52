"""Calls of a module that computes elsewhere, and tensors that go past what blocks give."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from pipeload_hooks import answer, around, find_crossing, guard


def test_an_answer_runs_all_hooks_and_no_forward() -> None:
    """In torch's order: arguments are changed on the way in, the output on the way out."""
    module, seen = nn.Linear(2, 2), []
    undo = answer(module, lambda args, kwargs: (*args, *kwargs.values()))
    module.register_forward_pre_hook(lambda _, args: (*args, 2))
    module.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "more": 3}), with_kwargs=True
    )
    module.register_forward_pre_hook(lambda _, args: None)
    module.register_forward_hook(lambda _, args, output: [*output, 4])
    module.register_forward_hook(lambda _, *given: seen.append(given), with_kwargs=True)
    every = register_module_forward_hook(lambda _, args, output: seen.append(output))
    try:
        call: Any = module
        assert call(1) == [1, 2, 3, 4]
    finally:
        every.remove()
    assert seen == [(1, 2, 3), ((1, 2), {"more": 3}, [1, 2, 3, 4])]
    undo()
    undo()
    assert not vars(module).get("_compiled_call_impl")
    assert "forward" not in vars(module)


def test_what_runs_around_all_hooks() -> None:
    """Ahead of the first, whoever answers, and behind the last; not behind one that raises."""
    module = nn.Linear(2, 2)
    seen: list[Any] = []

    def before(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        seen.append(("before", *args))

    call: Any = module
    x = torch.zeros(1, 2)
    module.register_forward_pre_hook(lambda _, args: seen.append("hook"), prepend=True)
    undo = around(module, before, lambda: seen.append("after"))
    module.register_forward_hook(lambda *given: seen.append("last"))
    call(x)
    assert seen == [("before", x), "hook", "last", "after"]
    undo()
    answer(module, lambda args, kwargs: args[0], before)
    call(1)
    assert seen[4:] == [("before", 1), "hook", "last"]
    around(module, before, lambda: seen.append("after"))
    module.register_forward_hook(lambda *given: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        call(x)
    assert seen[7:] == [("before", x), "hook", "last"]


def test_hooks_that_always_run() -> None:
    """Also when the answer raises; others do not."""
    module, seen = nn.Linear(2, 2), []

    def fail(_args: object, _kwargs: object) -> None:
        raise KeyError("gone")

    answer(module, fail)
    module.register_forward_hook(lambda *given: seen.append("always"), always_call=True)
    module.register_forward_hook(lambda *given: seen.append("else"))
    with pytest.raises(KeyError, match="gone"):
        module(1)
    assert seen == ["always"]


@pytest.mark.parametrize("put_on", [answer, guard, lambda module, act: around(module, act, act)])
def test_such_a_module_can_go(put_on: Any) -> None:
    """Neither the answer, or guard, nor what undoes it keeps it alive."""
    module = nn.Linear(2, 2)
    undo, reference = put_on(module, max), weakref.ref(module)
    call = vars(module)["_compiled_call_impl"]
    del module
    gc.collect()
    assert reference() is None
    undo()
    with pytest.raises(ReferenceError):
        call()


def test_an_interrupt_is_told() -> None:
    """Also where no hook would run; other errors, and calls that end well, are none."""
    module = nn.Linear(2, 2)
    seen: list[object] = []
    module.register_forward_hook(lambda *_: seen.append("hook"), always_call=True)
    undo, x = guard(module, seen.append), torch.ones(2)
    assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias))
    with pytest.raises(TypeError):
        module()
    error = KeyboardInterrupt()

    def interrupt(*_: object) -> None:
        raise error

    module.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        module(x)
    assert seen == ["hook", "hook", error]
    undo()
    assert "_compiled_call_impl" not in vars(module)


class _Block(nn.Module):
    """Adds its weight; `kept` is what it leaves behind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, *, write: bool = False) -> torch.Tensor:
        self.kept = self.weight * 2 if self.kept is None else self.kept + 1
        if write:
            x += self.kept
            return x * 1
        return x + self.kept


def _crossing(way: str) -> Any:
    with torch.device("meta"):
        blocks, x = [_Block(), _Block()], torch.empty(3)

    def run() -> None:
        for _ in range(2):
            given = x * 1
            first = blocks[0](given, write=way == "in place")
            if way == "in place":
                given + 1
            if way == "outside":
                first = first + blocks[0].kept
            if way == "other block":
                blocks[1].kept = blocks[0].kept
            blocks[1](first[:2] if way == "view of an output" else first)

    with torch.no_grad():
        if way == "view of an output":
            for block in blocks:
                block.weight = nn.Parameter(torch.empty(1, device="meta"))
        return find_crossing(blocks, run)


@pytest.mark.parametrize(
    ("way", "found"),
    [
        ("none", None),
        ("view of an output", None),
        ("in place", (0, None)),
        ("outside", (0, None)),
        ("other block", (0, 1)),
    ],
)
def test_crossings(way: str, found: tuple[int, int | None] | None) -> None:
    """A block may use what it has kept itself, and what others gave."""
    crossing = _crossing(way)
    assert (None if crossing is None else crossing[:2]) == found
