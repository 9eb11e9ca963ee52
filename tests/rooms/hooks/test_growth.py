"""Modules that come into a tree, or around it, are told once; nothing is kept alive for it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from torch import nn

from pipeload_hooks import TreeWatch


class Seen(list[tuple[nn.Module, bool]]):
    """What a watch has told."""

    def see(self, module: nn.Module, inside: bool) -> None:
        self.append((module, inside))


class Wrapper(nn.Module):
    """Holds another module, as adapters do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.extra: Any = nn.ModuleDict({"one": nn.Linear(2, 2)})


@pytest.fixture
def tree() -> Any:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))


def watched(tree: nn.Module) -> tuple[Seen, TreeWatch]:
    seen = Seen()
    return seen, TreeWatch(tree, seen.see)


def test_an_adapter_in_a_place(tree: Any) -> None:
    """First it holds a part, then it stands in the tree with all that it has."""
    seen, _ = watched(tree)
    wrapper = Wrapper(tree[0])
    assert seen == [(wrapper, False)]
    tree[0] = wrapper
    own = [wrapper, wrapper.extra, wrapper.extra["one"]]
    assert seen[1:] == [(module, True) for module in own]
    added = wrapper.extra["two"] = nn.Linear(2, 2)
    assert seen[4:] == [(added, True)]
    tree[0] = wrapper.inner  # and out again
    assert len(seen) == 5


def test_around_all(tree: Any) -> None:
    """What holds the whole is told, and what holds that; what is beside it is not."""
    seen, _ = watched(tree)
    holder = Wrapper(tree)
    outer = Wrapper(holder)
    assert seen == [(holder, False), (outer, False)]
    Wrapper(nn.Linear(2, 2))
    assert len(seen) == 2


def test_lists_are_not_adapters(tree: Any) -> None:
    """Models make lists of their layers while they run."""
    seen, _ = watched(tree)
    nn.ModuleList(tree)[:1]
    nn.Sequential(tree[1])
    assert seen == []
    tree[1].append(nn.ModuleList([nn.Linear(2, 2)]))
    assert len(seen) == 2


def test_closed(tree: Any) -> None:
    """Nothing is told any more; others still are."""
    seen, watch = watched(tree)
    others, _ = watched(tree)
    watch.close()
    watch.close()
    tree.append(nn.Linear(2, 2))
    assert (len(seen), len(others)) == (0, 1)


def test_who_is_told_is_not_kept(tree: Any) -> None:
    """It may hold what is large: that goes without the tree, and nobody is told then."""
    seen, _watch = watched(tree)
    reference = weakref.ref(seen)
    del seen
    assert reference() is None
    tree.append(nn.Linear(2, 2))


def test_a_forgotten_tree_goes() -> None:
    """With it goes the watch, and whatever that calls."""
    tree = nn.Sequential(nn.Linear(2, 2))
    _, watch = watched(tree)
    references: list[Any] = [weakref.ref(tree), weakref.ref(watch)]
    gc.disable()
    try:
        del watch, tree
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()
