"""Blocks that are alike: which ones are, and that a few of them tell what all would."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from pipeload.budget.twin_blocks import TwinList, short_copy, twin_lists, widen_usage
from pipeload_hooks import Usage, observe_usage

if TYPE_CHECKING:
    from collections.abc import Sequence


class Block(nn.Module):
    """Its kind says whether it calls its layer, reads the layer's weight, or both."""

    def __init__(self, kind: int = 0, width: int = 4) -> None:
        super().__init__()
        self.kind = "abc"[kind]  # no number: one that grows from block to block counts them
        self.layer = nn.Linear(width, width, device="meta")
        self.idle = nn.Linear(width, width, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind != "a":
            x = functional.linear(x, self.layer.weight)
        return x if self.kind == "b" else self.layer(x)


class Stack(nn.Module):
    """Blocks, one behind the other, `loops` times."""

    def __init__(self, blocks: Sequence[nn.Module], loops: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, device="meta")
        self.layers = nn.ModuleList(blocks)
        self.last = nn.Linear(4, 4, device="meta")
        self.loops = loops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.loops):
            for layer in self.layers:
                x = layer(x)
        result: torch.Tensor = self.last(x)
        return result


def use(model: nn.Module) -> Usage:
    return observe_usage(model, lambda: model(torch.ones(1, 4, device="meta")))


def only(model: nn.Module) -> TwinList:
    (found,) = twin_lists(model)
    return found


def numbered(block: nn.Module, **attributes: object) -> nn.Module:
    for name, value in attributes.items():
        setattr(block, name, value)
    return block


@given(st.lists(st.integers(0, 2), min_size=2, max_size=9))
def test_some_tell_of_all(kinds: list[int]) -> None:
    """Whatever the order of the kinds, the same uses, runs and order as of the whole model."""
    model = Stack([Block(kind) for kind in kinds])
    lists = twin_lists(model)
    needed = max(2, next(n for n in range(10) if set(kinds[:n]) == set(kinds)))
    assert [twins.kept for twins in lists] == ([needed] if needed < len(kinds) else [])
    assert widen_usage(use(short_copy(model, lists)), lists) == use(model)


def test_blocks_that_run_several_times() -> None:
    """As many calls of each as of the whole model, though not in its order."""
    model = Stack([Block(i % 3) for i in range(7)], loops=2)
    lists = twin_lists(model)
    told, whole = widen_usage(use(short_copy(model, lists)), lists), use(model)
    assert told.touched_outside == whole.touched_outside
    assert sorted(told.executed) == sorted(whole.executed)


@pytest.mark.parametrize(
    "blocks",
    [
        [numbered(Block(), layer_idx=i) for i in range(5)],
        [numbered(Block(), number=i + 3) for i in range(5)],
        [numbered(Block(), number=i if i % 2 else None) for i in range(4)] + [Block()],
        [numbered(Block(), act=partial(functional.gelu, approximate="tanh")) for _ in range(5)],
        [numbered(Block(), table=torch.ones(i + 2)[:2]) for i in range(5)],
        [numbered(Block(), sizes=[1, (2, {"a": None})]) for i in range(5)],
    ],
    ids=["position", "from three", "in some", "partial", "tensor", "nested"],
)
def test_what_makes_no_difference(blocks: list[nn.Module]) -> None:
    """Layer numbers, and values that are equal but not the same object."""
    groups = only(Stack(blocks)).groups
    assert len(set(groups)) <= 3
    assert groups[1] == groups[3]


@pytest.mark.parametrize(
    "blocks",
    [
        [Block(width=4), Block(width=4), Block(width=8)],
        [Block(), Block(), numbered(Block(), layer=nn.Linear(4, 4, bias=False))],
        [Block(), Block(), Block().to(torch.bfloat16)],
        [Block(), Block(), numbered(Block(), more=nn.Identity())],
        [numbered(Block(), window=window) for window in (4, 4, 8)],
        [
            numbered(Block(), act=partial(functional.gelu, approximate=a))
            for a in ("none", "none", "tanh")
        ],
        [Block(), Block(), numbered(Block(), forward=lambda x: x)],
    ],
    ids=["shape", "bias", "dtype", "module", "attribute", "partial", "function"],
)
def test_what_makes_a_difference(blocks: list[nn.Module]) -> None:
    """The last of three is another kind, and twice the last is two of it."""
    blocks.append(copy.deepcopy(blocks[0]))
    twins = only(Stack(blocks))
    assert twins.groups == (0, 0, 1, 0)
    assert twins.kept == 3


def test_numbers_that_happen_to_be_positions() -> None:
    """An attribute counts blocks only if it does so in all of them."""
    blocks = [numbered(Block(), window=4) for _ in range(7)]
    assert set(only(Stack(blocks)).groups) == {0}


def test_a_configuration_that_speaks_of_blocks() -> None:
    """Behaviour may hang on `config.kinds[layer_idx]`, which the block does not show."""
    config = SimpleNamespace(kinds=["a", "b", "b", "a", "c", "c"], other=[1, 2, 3])
    blocks = [numbered(Block(), config=config, layer_idx=i) for i in range(6)]
    assert only(Stack(blocks)).groups == (0, 1, 1, 0, 2, 2)


def test_lists_that_are_left_alone() -> None:
    """Too short, without twins, with a block that appears twice or shares what it has."""
    assert twin_lists(Stack([Block(), Block()])) == []
    assert twin_lists(Stack([Block(width=width) for width in (4, 5, 6)])) == []
    block = Block()
    assert twin_lists(Stack([Block(), block, Block(), block])) == []
    tied = [Block() for _ in range(4)]
    tied[3].layer.weight = tied[0].layer.weight
    assert twin_lists(Stack(tied)) == []
    assert (
        twin_lists(numbered(Stack(elsewhere := [Block() for _ in range(4)]), top=elsewhere[3]))
        == []
    )
    sequence = Stack([])
    sequence.layers = nn.Sequential(*(Block() for _ in range(4)))  # type: ignore[assignment]
    assert twin_lists(sequence) == []


class Uncopied(Block):
    """Must not be copied."""

    def __deepcopy__(self, _memo: object) -> Any:
        raise AssertionError("copied")


def test_a_short_copy_is_short() -> None:
    """Blocks left out are not copied; a block that knows the model knows the copy."""
    model = Stack([Block(), Block(), Uncopied(), Uncopied()])
    model.layers[1].__dict__["parent"] = model
    before = list(model.layers)
    made = short_copy(model, [TwinList("layers", model.layers, (0, 0, 0, 0), 2)])
    assert isinstance(made, Stack)
    assert len(made.layers) == 2
    assert made.layers[1].__dict__["parent"] is made
    assert not set(made.parameters()) & set(model.parameters())
    assert [*map(id, before)] == [*map(id, model.layers)]


def test_a_copy_that_fails_leaves_the_model_as_it_was() -> None:
    """Nothing is put in its place for the while, so nothing has to be put back."""
    model = Stack([Block(), Uncopied(), Block(), Block()])
    before = list(model.layers)
    with pytest.raises(AssertionError, match="copied"):
        short_copy(model, [TwinList("layers", model.layers, (0, 0, 0, 0), 2)])
    assert [*map(id, before)] == [*map(id, model.layers)]


def test_twins_know_of_each_other() -> None:
    """What one of them did holds for all, those that ran among them."""
    twins = TwinList("a", nn.ModuleList(), (0, 0, 1, 0, 1), 3)
    seen = Usage(
        frozenset({"a.1.x.w", "b.w"}), ("", "a.0", "a.1", "a.1.x", "a.2", "a.2.y", "b", "ab.1")
    )
    told = widen_usage(seen, [twins])
    assert told.touched_outside == {"a.0.x.w", "a.1.x.w", "a.3.x.w", "b.w"}
    assert told.executed == (
        *("", "a.0", "a.1", "a.1.x", "a.2", "a.2.y"),
        *("a.0.x", "a.3", "a.3.x", "a.4", "a.4.y"),
        *("b", "ab.1"),
    )


def test_a_list_that_ran_in_part_or_not_at_all() -> None:
    """From a part nothing follows; a list that did not run would not have in the whole either."""
    twins = TwinList("a", nn.ModuleList(), (0, 0, 0), 2)
    with pytest.raises(LookupError):
        widen_usage(Usage(frozenset(), ("", "a.1")), [twins])
    assert widen_usage(Usage(frozenset(), ("", "b")), [twins]).executed == ("", "b")
