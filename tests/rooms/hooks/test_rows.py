"""Rows are wanted before a lookup and done with after it, whatever else hooks into the module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipeload_hooks import attach_rows, placeholder

if TYPE_CHECKING:
    from collections.abc import Callable

VALUES = torch.arange(40.0).view(10, 4)


class Source:
    """Rows from `VALUES`; all others are NaN."""

    def __init__(self, module: nn.Embedding) -> None:
        self.weight = module.weight
        self.evicted = placeholder(VALUES.shape, VALUES.dtype, VALUES.device)
        self.weight.data = self.evicted
        self.events: list[Any] = []
        self.fails = False

    def rows_wanted(self, ids: torch.Tensor) -> None:
        if self.fails:
            raise RuntimeError("no such sector")
        self.events.append(ids.tolist())
        table = torch.full_like(VALUES, float("nan"))
        table[ids] = VALUES[ids]
        self.weight.data = table

    def rows_done(self) -> None:
        self.events.append("done")
        self.weight.data = self.evicted


class Named(nn.Embedding):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids) * 2


@pytest.fixture
def module() -> nn.Embedding:
    return nn.Embedding(10, 4)


@pytest.mark.parametrize("cls", [nn.Embedding, Named])
@pytest.mark.parametrize("keyword", [False, True])
def test_one_call(cls: type[nn.Embedding], *, keyword: bool) -> None:
    """Ids come by place or by the name that forward gives them; afterwards nothing is bound."""
    module = cls(10, 4)
    source = Source(module)
    handles = attach_rows(module, source)
    ids = torch.tensor([[1, 5], [5, 9]])
    name = "input_ids" if cls is Named else "input"
    got = module(**{name: ids}) if keyword else module(ids)
    assert torch.equal(got, functional.embedding(ids, VALUES) * (2 if cls is Named else 1))
    assert source.events == [[[1, 5], [5, 9]], "done"]
    assert module.weight.isnan().all()
    for handle in handles:
        handle.remove()
    assert module(ids).isnan().all()
    assert len(source.events) == 2


def test_a_lookup_that_fails(module: nn.Embedding) -> None:
    """The library's own error comes through, and the rows are done with."""
    source = Source(module)
    attach_rows(module, source)
    with pytest.raises(TypeError):
        module()
    with pytest.raises(TypeError):
        module([1])
    assert source.events == ["done", "done"]
    source.events.clear()
    source.fails = True
    with pytest.raises(RuntimeError, match="no such sector"):
        module(torch.tensor([1]))
    assert source.events == ["done"]


def another(_module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (args[0].clamp(max=3),)


def in_place(_module: nn.Module, args: tuple[torch.Tensor]) -> None:
    args[0].clamp_(max=3)


@pytest.mark.parametrize("change", [another, in_place])
@pytest.mark.parametrize("late", [False, True])
def test_other_hooks_that_change_ids(
    module: nn.Embedding, change: Callable[..., Any], *, late: bool
) -> None:
    """The rows of the final ids are returned, and no other hook sees anything else."""
    seen: list[torch.Tensor] = []
    source = Source(module)

    def hook_in() -> None:
        module.register_forward_pre_hook(change)
        module.register_forward_hook(lambda _m, _a, output: seen.append(output))

    if not late:
        hook_in()
    attach_rows(module, source)
    if late:
        hook_in()
    got = module(torch.tensor([2, 8]))
    assert torch.equal(got, VALUES[[2, 3]])
    assert len(seen) == 1
    assert torch.equal(seen[0], got)
    assert source.events == [[2, 8], [2, 3], "done"]


def test_inference_mode(module: nn.Embedding) -> None:
    """Inference tensors do not count their changes; they are looked up all the same."""
    source = Source(module)
    attach_rows(module, source)
    with torch.inference_mode():
        assert torch.equal(module(torch.tensor([7])), VALUES[[7]])
    assert source.events == [[7], "done"]


def test_after_an_interrupt(module: nn.Embedding) -> None:
    """torch runs no hook then; the next call is right."""
    source = Source(module)
    attach_rows(module, source)

    def interrupt(_module: nn.Module, _args: object) -> None:
        raise KeyboardInterrupt

    handle = module.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        module(torch.tensor([1]))
    handle.remove()
    assert torch.equal(module(torch.tensor([4])), VALUES[[4]])
    assert source.events == [[1], [4], "done"]
