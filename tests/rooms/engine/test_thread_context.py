"""Random numbers and attributes of callers that take turns."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipeload.engine.thread_context import (
    OwnAttributes,
    RandomNumbers,
    ThreadContext,
    modules_outside,
)


def test_seeds_are_torchs() -> None:
    """The numbers are those that `torch.manual_seed` gives, and go on where they were."""
    torch.manual_seed(7)
    wanted = torch.rand(4), torch.randn(5)
    numbers = RandomNumbers(None, 7)
    torch.manual_seed(1)
    numbers.restore()
    first = torch.rand(4)
    numbers.note()
    torch.manual_seed(2)
    numbers.restore()
    assert torch.equal(first, wanted[0])
    assert torch.equal(torch.randn(5), wanted[1])


def test_each_has_its_own_attributes() -> None:
    """Tensors, caches and numbers; flags are everybody's, and what was there before comes back."""
    module: Any = nn.Linear(2, 2)
    module.register_buffer("grown", torch.zeros(1))
    module.length = 3
    callers = [OwnAttributes([module]) for _ in range(2)]
    for number, caller in enumerate(callers):
        caller.put_on()
        assert module.length == 3
        module.length = 10 + number
        module.grown = torch.ones(1) * number
        module.positions = torch.tensor(number)
        module.prepared = True
        caller.take_off()
    assert module.length == 3
    assert module.grown.tolist() == [0]
    assert not hasattr(module, "positions")
    assert module.prepared is True
    for number, caller in enumerate(callers):
        caller.put_on()
        found = module.length, module.grown.item(), module.positions.item()
        assert found == (10 + number, number, number)
        del module.positions
        caller.take_off()
        caller.put_on()
        assert not hasattr(module, "positions")
        caller.take_off()


def test_blocks_are_left_out() -> None:
    """They are many, and keep nothing."""
    model = nn.Sequential(nn.Linear(1, 1), nn.ModuleList([nn.Linear(1, 1)]))
    assert list(modules_outside(model)) == [model, model[0]]


def test_both() -> None:
    """A turn begins and ends with either."""
    module: Any = nn.Identity()
    context = ThreadContext(RandomNumbers(None, 3), [module])
    before = torch.get_rng_state()
    context.put_on()
    drawn = torch.rand(1)
    module.value = 1
    context.take_off()
    torch.set_rng_state(before)
    context.put_on()
    assert not torch.equal(torch.rand(1), drawn)
    assert module.value == 1
    context.take_off()
    assert not hasattr(module, "value")
