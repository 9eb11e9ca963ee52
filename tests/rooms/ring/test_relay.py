"""What a relay makes of what other ranks say, where no other rank is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import nn

from pipeload.errors import GroupError
from pipeload.ring.relay import Part, Relay, told

if TYPE_CHECKING:
    from pipeload.ring.group import Group


class FakeGroup:
    """Rank 0 of two; the other one says what it is told to."""

    def __init__(self, other: list[int] | None = None) -> None:
        self.rank, self.size, self.hosts = 0, 2, ["here", "there"]
        self.broken: str | None = None
        self.other = other
        self.sent: list[torch.Tensor] = []

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def check(self) -> None:
        assert self.broken is None

    def break_off(self, why: str) -> None:
        self.broken = why

    def gather(self, tensor: torch.Tensor, _doing: str) -> list[torch.Tensor]:
        return [tensor, tensor if self.other is None else torch.tensor(self.other)]

    def broadcast(self, tensor: torch.Tensor, _root: int, _doing: str) -> None:
        self.sent.append(tensor.clone())


def relay_of(group: FakeGroup) -> Relay:
    return Relay(cast("Group", group), compare=True)


class Model(nn.Module):
    """Two blocks that add one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), nn.Identity()])
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) + 1
            if self.fails:
                raise ValueError("between blocks")
        return x


def test_another_number_of_passes() -> None:
    """One that has called the model more often is named."""
    relay = relay_of(FakeGroup([7, 0, 0, 0]))
    with pytest.raises(GroupError, match="rank 1 is at pass 7, and rank 0 at 1") as caught:
        relay._exchange([0, 0, 0])
    assert (caught.value.rank, caught.value.host) == (1, "there")


def test_one_transfer_a_block() -> None:
    """The first time a block is described; then its bytes and one more are all that is sent."""
    group, model = FakeGroup(), Model()
    undo = [*relay_of(group).attach(model, [Part("blocks.0", 0), Part("blocks.1", 0)])]
    x = torch.randn(1, 3, 5)
    for _ in range(3):
        group.sent.clear()
        model(x)
    sizes = [tensor.numel() for tensor in group.sent]
    assert sizes == [len(torch.get_rng_state()), 3 * 5 * 4 + 1, 3 * 5 * 4 + 1]
    assert torch.equal(group.sent[1][:-1].view(torch.float32).view(1, 3, 5), x)
    for step in reversed(undo):
        step()
    hooked = [model, *model.blocks]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in hooked)


def test_an_error_between_blocks_ends_the_group() -> None:
    """Nobody knows whether others met it, too."""
    group, model = FakeGroup(), Model()
    list(relay_of(group).attach(model, [Part("blocks.0", 0), Part("blocks.1", 0)]))
    model.fails = True
    with pytest.raises(ValueError, match="between"):
        model(torch.ones(1, 1, 1))
    assert group.broken == "a pass ended by ValueError: between blocks."


def test_an_interrupt_within_a_pass_ends_it() -> None:
    """No hook runs after one, so the next pass finds it."""
    group, model = FakeGroup(), Model()
    list(relay_of(group).attach(model, [Part("blocks.0", 0), Part("blocks.1", 0)]))

    def interrupt(*_: object) -> Any:
        raise KeyboardInterrupt

    hook = model.blocks[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 1, 1))
    hook.remove()
    assert group.broken is None
    with pytest.raises(AssertionError):
        model(torch.ones(1, 1, 1))
    assert group.broken == "it was interrupted in a pass"


def test_errors_in_a_line() -> None:
    """As other ranks are told of them."""
    assert told(OSError("a\nb")) == "OSError: a b."
    assert told(None) == "it raised nothing."
    assert len(told(ValueError("x" * 5000))) == 601
