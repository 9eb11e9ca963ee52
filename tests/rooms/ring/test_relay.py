"""What a relay makes of what other ranks say, where no other rank is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from pipeload.errors import GroupError, UnsupportedOperationError
from pipeload.ring.block_inputs import check_recorded, checksum
from pipeload.ring.outputs import Outputs, Part
from pipeload.ring.relay import Relay
from pipeload.ring.told import told
from pipeload.ring.trees import take_apart
from pipeload.ring.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable

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

    def lane(self) -> FakeGroup:
        return self

    def gather(self, tensor: torch.Tensor, _doing: str) -> list[torch.Tensor]:
        return [tensor, tensor if self.other is None else torch.tensor(self.other)]

    def begin_gather(self, tensor: torch.Tensor, doing: str) -> Callable[[], list[torch.Tensor]]:
        return lambda: self.gather(tensor, doing)

    def broadcast(self, tensor: torch.Tensor, _root: int, _doing: str) -> None:
        self.sent.append(tensor.clone())

    def send(self, tensor: torch.Tensor, doing: str) -> None:
        self.broadcast(tensor, self.rank, doing)

    def settle(self) -> None:
        """All is there at once."""


def relay_of(group: FakeGroup) -> Relay:
    return Relay(cast("Group", group), Turns(cast("Group", group)), compare=True)


class Same(nn.Module):
    """Gives what it is given first."""

    def forward(self, x: torch.Tensor, **_given: Any) -> torch.Tensor:
        return x


class Model(nn.Module):
    """Two blocks that add one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Same(), Same()])
        self.fails = False

    def forward(self, x: torch.Tensor, mask: Any = None, **given: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, **given) + 1
            if self.fails:
                raise ValueError("between blocks")
        return x


def test_another_number_of_passes() -> None:
    """One that has called the model more often is named."""
    for number, said in ((7, "is at pass 7, and rank 0 at 1"), (-1, "does something else")):
        turns = Turns(cast("Group", FakeGroup([number, 0, 0, 0])))
        with pytest.raises(GroupError, match=f"rank 1 {said}") as caught:
            turns.own.exchange([0, 0, 0])
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


def test_an_interrupt_within_a_pass_is_told_at_once() -> None:
    """No hook runs after one, and others would wait."""
    group, model = FakeGroup(), Model()
    list(relay_of(group).attach(model, [Part("blocks.0", 0), Part("blocks.1", 0)]))

    def interrupt(*_: object) -> Any:
        raise KeyboardInterrupt

    model.blocks[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 1, 1))
    assert group.broken == "a pass ended by KeyboardInterrupt."


@pytest.mark.parametrize("name", ["output_attentions", "output_router_logits", "output_indices"])
def test_what_is_recorded_inside_of_blocks(name: str) -> None:
    """Asked for by the call, or for all calls: that of others' blocks would be missing."""
    inner = SimpleNamespace(to_diff_dict=None)
    model: Any = SimpleNamespace(config=SimpleNamespace(inner=inner))
    check_recorded(model, {name: False, "output_hidden_states": True})
    check_recorded(nn.Identity(), {})
    with pytest.raises(UnsupportedOperationError, match=f"Pass {name}=False, or load the model"):
        check_recorded(model, {name: True})
    if name != "output_indices":
        setattr(inner, name, True)
        check_recorded(model, {name: False})
        with pytest.raises(UnsupportedOperationError, match=f"{name} is recorded inside of blocks"):
            check_recorded(model, {})


def test_what_goes_into_a_pass() -> None:
    """Every tensor counts; where processors differ, whole numbers alone do."""
    x, ids = torch.ones(2), torch.tensor([1, 2])
    for whole in (True, False):
        first = checksum([x, None, ids], whole=whole)
        assert first == checksum([x, "other", ids.clone()], whole=whole)
        assert first != checksum([x, ids + 1], whole=whole)
        assert first != checksum([x[:1], ids], whole=whole)
        assert (first == checksum([x * 2, ids], whole=whole)) is not whole


@pytest.mark.parametrize("changed", ["mask", "cache"])
def test_other_masks_and_longer_caches(changed: str) -> None:
    """They are told to the others, and not only what the first block is given first."""
    said, model = [], Model()

    class Group(FakeGroup):
        def gather(self, tensor: torch.Tensor, _doing: str) -> list[torch.Tensor]:
            said.append(tensor.tolist()[1:])
            return [tensor, tensor]

    list(relay_of(Group()).attach(model, [Part("blocks.0", 0), Part("blocks.1", 0)]))
    x = torch.ones(1, 1, 1)
    for n in range(2):
        cache = DynamicCache()
        cache.update(torch.ones(1, 1, 2 + n, 1), torch.ones(1, 1, 2 + n, 1), 0)
        mask = torch.tensor([n])
        model(x, **({"mask": mask} if changed == "mask" else {"past_key_values": cache}))
    first, other = said
    assert first != other


def test_large_outputs_are_sent_from_their_own_memory() -> None:
    """Behind a byte that announces them: a copy would double a prompt's logits."""
    x = torch.randn(1, 64, 8192)
    sent: list[torch.Tensor] = []

    class Group(FakeGroup):
        def broadcast(self, tensor: torch.Tensor, _root: int, _doing: str) -> None:
            sent.append(tensor)

    Outputs(cast("Any", Group())).send(Part("a", 0), {"0": x}, *take_apart([x, x.mT, x[:, :0]], {}))
    assert [tensor.numel() for tensor in sent[-3:]] == [1, 4 * x.numel(), 4 * x.numel()]
    assert sent[-2].data_ptr() == x.data_ptr()
    sent.reverse()

    class Other(FakeGroup):
        def broadcast(self, tensor: torch.Tensor, _root: int, _doing: str) -> None:
            tensor.copy_(sent.pop())

    same, turned, empty = Outputs(cast("Any", Other())).receive(Part("a", 1), {"0": x})
    assert torch.equal(same, x)
    assert torch.equal(turned, x.mT)
    assert turned.stride() == x.mT.stride()
    assert empty.shape == (1, 0, 8192)


def test_sizes_of_input_are_forgotten() -> None:
    """A script that goes on for days meets many."""
    outputs = Outputs(cast("Any", FakeGroup()))
    for tokens in range(50):
        x = torch.ones(1, tokens + 1, 2)
        outputs.send(Part("a", 0), {"0": x}, *take_apart(x, {}))
    assert len(outputs._known["a"]) == 16


def test_errors_in_a_line() -> None:
    """As other ranks are told of them."""
    assert told(OSError("a\nb")) == "OSError: a b."
    assert told(None) == "it raised nothing."
    assert len(told(ValueError("x" * 5000))) == 601
