"""The repeated blocks of any model are found by its structure alone."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from pipeload_hooks import find_blocks


class Layer(nn.Module):
    """Looks like a decoder layer: a forward of its own, children, parameters."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.attention = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))

    def forward(self, x: Any) -> Any:
        return self.mlp(self.attention(x))


class GradientCheckpointingLayer(Layer):
    """The library's mark, known by name."""


class MarkedLayer(GradientCheckpointingLayer):
    """Carries the mark through its base."""


class Empty(nn.Module):
    """No parameters."""

    def forward(self, x: Any) -> Any:
        return x


class Holder(nn.Module):
    """Any children, by name."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class Caller(Holder):
    """A module that runs, with layers inside."""

    def forward(self, x: Any) -> Any:
        return x


class NoForward(nn.Module):
    """Has parameters, but nothing to call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)


def layers(count: int) -> nn.ModuleList:
    return nn.ModuleList(Layer() for _ in range(count))


def marked_by_name() -> Holder:
    model = Holder(parts=nn.ModuleList([Layer(), Empty()]))
    model._no_split_modules = ["Layer"]  # type: ignore[assignment]
    return model


def shared() -> Holder:
    layer = Layer()
    return Holder(layers=nn.ModuleList([layer, layer, Layer()]))


CASES: dict[str, tuple[nn.Module, list[str]]] = {
    "decoder": (Holder(model=Holder(layers=layers(3))), [f"model.layers.{i}" for i in range(3)]),
    "two towers": (
        Holder(a=layers(2), b=layers(2)),
        ["a.0", "a.1", "b.0", "b.1"],
    ),
    "one layer": (Holder(layers=layers(1)), []),
    "one marked layer": (
        Holder(layers=nn.ModuleList([GradientCheckpointingLayer()])),
        ["layers.0"],
    ),
    "marked through a base": (Holder(layers=nn.ModuleList([MarkedLayer()])), ["layers.0"]),
    "named in _no_split_modules": (marked_by_name(), ["parts.0"]),
    "in a dict": (Holder(h=nn.ModuleDict({"x": Layer(), "y": Layer()})), ["h.x", "h.y"]),
    "in a sequential": (Holder(h=nn.Sequential(Layer(), Layer())), ["h.0", "h.1"]),
    "lists in lists": (
        Holder(h=nn.ModuleList([layers(2), layers(2)])),
        ["h.0.0", "h.0.1", "h.1.0", "h.1.1"],
    ),
    "inside a caller": (
        Holder(encoder=Caller(layers=layers(2))),
        ["encoder.layers.0", "encoder.layers.1"],
    ),
    "outermost only": (
        Holder(layers=nn.ModuleList(GradientCheckpointingLayer() for _ in range(2))),
        ["layers.0", "layers.1"],
    ),
    "shared layers once": (shared(), ["layers.0", "layers.2"]),
    "different classes": (Holder(layers=nn.ModuleList([Layer(), Caller(x=Layer())])), []),
    "single matrices": (Holder(layers=nn.ModuleList(nn.Linear(2, 2) for _ in range(4))), []),
    "nothing to call": (Holder(layers=nn.ModuleList(NoForward() for _ in range(3))), []),
    "no parameters": (Holder(layers=nn.ModuleList(Empty() for _ in range(3))), []),
    "not in a container": (Holder(a=Layer(), b=Layer()), []),
    "empty": (Holder(), []),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_found(name: str) -> None:
    """Names in the order of the tree, and the modules that they name."""
    model, expected = CASES[name]
    found = find_blocks(model)
    assert [block.name for block in found] == expected
    assert all(model.get_submodule(block.name) is block.module for block in found)
