"""Code that reads an evicted weight is caught; code that asks for its shape is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from pipeload_hooks import EvictedWeightWatch, discard_ended, placeholder
from tests.support.streaming import WAIT_SECONDS, in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Caught(Exception):  # noqa: N818
    """What the tests' watches raise."""


def refuse(function: str, name: str) -> NoReturn:
    raise Caught(f"{function} of {name}")


class Watched:
    """A layer whose weight is watched, and its watch."""

    def __init__(self) -> None:
        self.layer = nn.Linear(3, 2)
        weight = self.layer.weight
        self.values = weight.data
        weight.data = placeholder(weight.shape, weight.dtype, weight.device)
        self.watch = EvictedWeightWatch({id(weight): "layer.weight"}, refuse)

    def bind(self) -> None:
        with torch._C.DisableTorchFunction():
            self.layer.weight.data = self.values


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    made.watch.begin()
    yield made
    made.watch.discard()
    assert _get_current_function_mode_stack() == []


READS: dict[str, Callable[[nn.Linear], Any]] = {
    "forward": lambda layer: layer(torch.ones(1, 3)),
    "operator": lambda layer: layer.weight + 1,
    "reverse operator": lambda layer: 1 + layer.weight,
    "method": lambda layer: layer.weight.norm(),
    "keyword": lambda layer: torch.add(input=torch.ones(2, 3), other=layer.weight),
    "index": lambda layer: layer.weight[0],
    "list": lambda layer: torch.cat([torch.ones(2, 3), layer.weight]),
    "in place": lambda layer: layer.weight.data.mul_(2),
    "transpose": lambda layer: layer.weight.T,
    "item": lambda layer: layer.weight.tolist(),
    "assignment": lambda layer: setattr(layer.weight, "data", torch.ones(2, 3)),
    "copy": lambda layer: layer.weight.clone(),
    "functional": lambda layer: nn.functional.linear(torch.ones(1, 3), layer.weight),
}


@pytest.mark.parametrize("name", READS)
def test_reads_are_caught(watched: Watched, name: str) -> None:
    """The error names the function and the weight."""
    with pytest.raises(Caught, match=r"\w+ of layer\.weight"):
        READS[name](watched.layer)


ASKS: dict[str, Callable[[nn.Linear], Any]] = {
    "shape": lambda layer: layer.weight.shape,
    "size": lambda layer: layer.weight.size(0),
    "dim": lambda layer: layer.weight.dim(),
    "ndim": lambda layer: layer.weight.ndim,
    "numel": lambda layer: layer.weight.numel(),
    "dtype": lambda layer: layer.weight.dtype,
    "device": lambda layer: layer.weight.device,
    "requires_grad": lambda layer: layer.weight.requires_grad,
    "is_floating_point": lambda layer: layer.weight.is_floating_point(),
    "element_size": lambda layer: layer.weight.element_size(),
    "cast of another": lambda layer: torch.ones(1).to(layer.weight.dtype),
    "another weight": lambda layer: layer.bias + 1,
}


@pytest.mark.parametrize("name", ASKS)
def test_questions_are_not(watched: Watched, name: str) -> None:
    """Placeholders answer them truthfully."""
    ASKS[name](watched.layer)


def test_a_bound_weight_may_be_read(watched: Watched) -> None:
    """Between acquire and release everything is allowed."""
    watched.bind()
    for read in READS.values():
        if read is not READS["in place"]:
            with torch.no_grad():
                read(watched.layer)


def test_an_ended_watch_lets_everything_pass() -> None:
    """And leaves the stack of modes as it was."""
    made = Watched()
    made.watch.begin()
    made.watch.discard()
    assert _get_current_function_mode_stack() == []
    made.layer(torch.ones(1, 3))
    made.watch.discard()


def test_a_watch_left_in_another_thread() -> None:
    """It does nothing there any more, and goes when that thread clears up."""
    made = Watched()
    made.watch.begin()
    in_thread(made.watch.discard).result(WAIT_SECONDS)
    assert _get_current_function_mode_stack() == [made.watch]
    made.layer(torch.ones(1, 3))
    discard_ended()
    assert _get_current_function_mode_stack() == []


class Own(TorchFunctionMode):
    """A mode of the user's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_the_users_own_modes_stay() -> None:
    """Below and above a watch that is taken out, in their order; live watches, too."""
    below, above, dead, live = Own(), Own(), Watched(), Watched()
    with below:
        dead.watch.begin()
        live.watch.begin()
        with above:
            dead.watch.discard()
            assert _get_current_function_mode_stack() == [below, live.watch, above]
        live.watch.discard()
        assert _get_current_function_mode_stack() == [below]
    assert _get_current_function_mode_stack() == []
