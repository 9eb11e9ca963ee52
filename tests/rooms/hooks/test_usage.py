"""Weights that are used past the module that owns them are found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack

from pipeload_hooks import Usage, observe_usage

if TYPE_CHECKING:
    from collections.abc import Callable


class Pair(nn.Module):
    """Two Linear layers and a scale; `use` says what becomes of them."""

    def __init__(self, use: Callable[[Pair, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self._use = use

    def forward(self, x: torch.Tensor) -> Any:
        return self._use(self, x)


def observe(use: Callable[[Pair, torch.Tensor], Any]) -> Usage:
    model = Pair(use).to("meta")
    return observe_usage(model, lambda: model(torch.ones(2, 3, device="meta")))


USES: dict[str, tuple[Callable[[Pair, torch.Tensor], Any], set[str]]] = {
    "in turn": (lambda m, x: m.second(m.first(x)) * m.scale, set()),
    "metadata": (lambda m, x: m.first(x.to(m.first.weight.dtype)) * m.first.weight.shape[0], set()),
    "functional": (lambda m, x: functional.linear(x, m.first.weight), {"first.weight"}),
    "by keyword": (
        lambda m, x: functional.linear(input=x, weight=m.first.weight),
        {"first.weight"},
    ),
    "in a list": (
        lambda m, _: torch.cat([m.first.weight, m.second.weight]),
        {"first.weight", "second.weight"},
    ),
    "transposed": (lambda m, x: x @ m.first.weight.T, {"first.weight"}),
    "its data": (lambda m, x: x @ m.second.weight.data, {"second.weight"}),
    "before it runs": (lambda m, x: m.first(x + m.first.bias), {"first.bias"}),
    "after it ran": (lambda m, x: m.first(x) + m.first.bias, {"first.bias"}),
    "past its hooks": (lambda m, x: m.first.forward(x), {"first.weight", "first.bias"}),
}


@pytest.mark.parametrize("name", USES)
def test_what_is_found(name: str) -> None:
    """Exactly the parameters that something else than their own forward uses."""
    use, expected = USES[name]
    assert observe(use).touched_outside == expected


def test_the_order_of_modules() -> None:
    """By name, the model itself included, once for each call; what does not run is not there."""
    usage = observe(lambda m, x: m.second(m.second(x)))
    assert usage.executed == ("", "second", "second")


class Inner(nn.Module):
    """Uses a weight that it does not own, while its owner waits for it."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight


class Outer(nn.Module):
    """Hands its own weight to a module inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x, self.weight)


def test_the_innermost_module_counts() -> None:
    """An owner that only waits is not the one that uses it."""
    model = Outer()
    usage = observe_usage(model, lambda: model(torch.ones(3)))
    assert usage.touched_outside == {"weight"}


def test_shared_parameters() -> None:
    """Each owner may use it; when something else does, every name is listed."""
    model: Any = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model.head.weight = model.embed.weight
    tokens = torch.tensor([1, 2])
    inside = observe_usage(model, lambda: model.head(model.embed(tokens)))
    assert inside.touched_outside == set()
    outside = observe_usage(model, lambda: model.embed.weight + 1)
    assert outside.touched_outside == {"embed.weight", "head.weight"}


def test_an_exception_that_the_model_catches() -> None:
    """The module that raised it is over."""

    def use(model: Pair, x: torch.Tensor) -> torch.Tensor:
        try:
            model.first(x[:, :2])
        except RuntimeError:
            return x * model.first.bias
        pytest.fail("the shapes do not fit")

    assert observe(use).touched_outside == {"first.bias"}


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_nothing_stays(error: type[BaseException] | None) -> None:
    """No hook, no mode, no attribute, however the run ends."""

    def use(model: Pair, x: torch.Tensor) -> Any:
        if error is not None:
            raise error
        return model.first(x)

    model = Pair(use)
    before = {name: sorted(vars(module)) for name, module in model.named_modules()}
    try:
        observe_usage(model, lambda: model(torch.ones(2, 3)))
    except (RuntimeError, KeyboardInterrupt) as raised:
        assert type(raised) is error  # noqa: PT017 - one of them, or none
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._forward_hooks_always_called
    assert before == {name: sorted(vars(module)) for name, module in model.named_modules()}
    assert _get_current_function_mode_stack() == []
