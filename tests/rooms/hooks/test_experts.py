"""Experts that are served while a module runs, without the product: a service made of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from pipeload_hooks import (
    COUNTS,
    MARKS,
    ServeExperts,
    attach_experts,
    experts_at_hand,
    names_of_others,
    takes_slices_alone,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import NoReturn

EXPERTS, WIDE, NARROW = 6, 16, 8


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.full((EXPERTS, WIDE, NARROW), float("nan")))

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(hidden.shape[0], WIDE)
        for expert in ids.unique():
            rows = (ids == expert).any(-1)
            out[rows] += nn.functional.linear(hidden[rows], self.up[expert])
        return out


class Numbers:
    """Fills a slice when it is needed, and takes the one before away."""

    def __init__(self, module: Module, values: torch.Tensor) -> None:
        self.module, self.values = module, values
        self.asked: list[int] = []

    def order(self, _name: str, experts: Sequence[int]) -> Sequence[int]:
        return sorted(experts, reverse=True)

    def need(self, _name: str, expert: int) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self.module.up.fill_(float("nan"))
            self.module.up[expert] = self.values[expert]
        self.asked.append(expert)

    def together(self, name: str, experts: Sequence[int]) -> Iterator[Sequence[int]]:
        for expert in self.order(name, experts):
            self.need(name, expert)
            yield [expert]

    def refuse(self, function: str, name: str) -> NoReturn:
        raise LookupError(f"{function} of {name}")


@pytest.fixture
def served() -> Any:
    module, values = Module(), torch.randn(EXPERTS, WIDE, NARROW)
    numbers = Numbers(module, values)
    mode = ServeExperts({"up": module.up}, numbers)
    mode.begin()
    yield module, values, numbers
    mode.discard()


@torch.no_grad()
def test_a_loop(served: Any) -> None:
    module, values, numbers = served
    hidden, ids = torch.randn(5, NARROW), torch.tensor([[1, 4], [4, 2], [1, 2], [2, 4], [4, 1]])
    plain = Module()
    plain.up.data = values
    with torch._C.DisableTorchFunction():
        expected = plain(hidden, ids)
    assert torch.equal(module(hidden, ids), expected)
    assert numbers.asked == [1, 2, 4]


@torch.no_grad()
def test_told_how_many_rows_each_gets() -> None:
    """A list of them is as good as ids; one that a hook of the user's has changed is seen."""

    class Counted(Module):
        def forward(self, hidden: torch.Tensor, sizes: Any) -> torch.Tensor:
            return hidden * 2

    class Source:
        def __init__(self) -> None:
            self.wanted: list[list[int]] = []

        def experts_wanted(self, ids: torch.Tensor) -> None:
            self.wanted.append(ids.tolist())

        def experts_done(self) -> None:
            self.wanted.append([])

        def refuse_recording(self) -> None:
            raise LookupError

    module, source = Counted(), Source()
    attach_experts(module, source, told_by=COUNTS)
    module(torch.ones(4, NARROW), [1, 0, 3])
    assert source.wanted == [[0, 2, 2, 2], []]
    for other in (torch.tensor([1, 0, 3]), [1.5, 2.5], None):
        module(torch.ones(4, NARROW), other)
    assert source.wanted == [[0, 2, 2, 2], *[[]] * 4]
    sizes = [2, 2, 0]
    module.register_forward_pre_hook(lambda *_: sizes.reverse())
    module(torch.ones(4, NARROW), sizes)
    assert source.wanted[5:] == [[0, 0, 1, 1], [1, 1, 2, 2], []]


@torch.no_grad()
def test_told_by_marks() -> None:
    """The last dimension of what is not 0; what has none tells nothing."""

    class Marked(Module):
        def forward(self, hidden: torch.Tensor, marks: Any) -> torch.Tensor:
            return hidden * 2

    class Source:
        wanted: list[int]

        def experts_wanted(self, ids: torch.Tensor) -> None:
            self.wanted = ids.tolist()

        def experts_done(self) -> None:
            pass

        def refuse_recording(self) -> None:
            raise LookupError

    module, source = Marked(), Source()
    attach_experts(module, source, told_by=MARKS)
    module(torch.ones(3, NARROW), torch.tensor([[[0, 1, 0]], [[0, 0, 0]], [[1, 0, 1]]]))
    assert source.wanted == [1, 0, 2]
    source.wanted = []
    module(torch.ones(3, NARROW), None)
    assert source.wanted == []


@torch.no_grad()
def test_parameters_of_one_expert() -> None:
    """Any function that is given one has its expert come; what shows its shape alone does not."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    asked: list[tuple[str, int]] = []

    class Asked(Numbers):
        def need(self, name: str, expert: int) -> None:
            asked.append((name, expert))

    both = Two()
    parameters = {name: p for name, p in both.named_parameters() if p.dim() > 1}
    mode = ServeExperts(
        parameters, Asked(Module(), torch.empty(0)), {"first.weight": 0, "second.weight": 1}
    )
    mode.begin()
    try:
        assert both.first.weight.shape == both.second.weight.shape
        assert asked == []
        both.second(torch.ones(1, 4))
        both.first(torch.ones(1, 4))
    finally:
        mode.discard()
    assert asked == [("second.weight", 1), ("first.weight", 0)]


def test_what_is_at_hand(served: Any) -> None:
    """In portions that are there; of other parameters, and while nothing is served, all at once."""
    module, values, numbers = served
    for portion in experts_at_hand(module.up, [1, 4, 2]):
        with torch._C.DisableTorchFunction():
            assert torch.equal(module.up[portion[0]], values[portion[0]])
    assert numbers.asked == [4, 2, 1]
    assert [*experts_at_hand(torch.zeros(2), [1, 4, 2])] == [[1, 4, 2]]
    with torch._C.DisableTorchFunction():
        assert [*experts_at_hand(module.up, [1, 4, 2])] == [[1, 4, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_grouped_product(dtype: torch.dtype) -> None:
    """In another order than the experts', rows of nobody left out."""
    module, values = Module(), torch.randn(EXPERTS, WIDE, NARROW).to(dtype)
    module.up.data = torch.full_like(values, float("nan"))
    numbers = Numbers(module, values)
    given, stops = torch.randn(9, NARROW).to(dtype), torch.tensor([0, 2, 2, 7, 9, 9])
    offs = stops.to(torch.int32)
    expected = nn.functional.grouped_mm(given, values.transpose(-2, -1), offs=offs)
    mode = ServeExperts({"up": module.up}, numbers)
    mode.begin()
    try:
        found = nn.functional.grouped_mm(given, module.up.transpose(-2, -1), offs=offs)
        other = nn.functional.grouped_mm(given, values.transpose(-2, -1), offs=offs)
    finally:
        mode.discard()
    assert torch.equal(found, expected)
    assert torch.equal(other, expected)
    assert found.stride() == expected.stride()
    assert numbers.asked == [4, 3, 1]


@torch.no_grad()
def test_copies_of_slices(served: Any) -> None:
    module, values, numbers = served
    ids = torch.tensor([3, 0, 3, 5])
    assert torch.equal(module.up[ids], values[ids])
    assert numbers.asked == [5, 3, 0]
    assert torch.equal(module.up[4], values[4])


@pytest.mark.parametrize(
    "use",
    [
        torch.sum,
        lambda up: up[1:3],
        lambda up: up[torch.tensor([True] * EXPERTS)],
        lambda up: torch.bmm(torch.ones(EXPERTS, 1, WIDE), up),
        lambda up: nn.functional.grouped_mm(
            torch.ones(2, NARROW),
            up.transpose(-2, -1),
            offs=torch.tensor([0, 1, 1, 2, 2, 2], dtype=torch.int32),
            out_dtype=torch.float32,
        ),
    ],
    ids=["sum", "range", "mask", "bmm", "dtype"],
)
@torch.no_grad()
def test_what_takes_more_is_refused(served: Any, use: Any) -> None:
    module, _, _ = served
    with pytest.raises(LookupError, match="of up"):
        use(module.up)
    assert module.up.shape == (EXPERTS, WIDE, NARROW)
    assert module.up.dtype == torch.float32


class Recorder:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def experts_wanted(self, ids: torch.Tensor) -> None:
        self.calls.append(ids.tolist())

    def experts_done(self) -> None:
        self.calls.append("done")

    def refuse_recording(self) -> NoReturn:
        raise RuntimeError("recording")


@torch.no_grad()
def test_hooks_see_ids() -> None:
    """By place or by name, also those that another hook has put there, and after an error."""
    module, source = Module(), Recorder()
    module.up.data = torch.randn_like(module.up)
    handles = attach_experts(module, source)
    hidden, ids = torch.randn(2, NARROW), torch.tensor([[1], [2]])
    module(hidden, ids)
    module(hidden, ids=ids)
    assert source.calls == [[[1], [2]], "done"] * 2
    source.calls.clear()
    changer = module.register_forward_pre_hook(lambda _, args: (args[0], args[1] + 1))
    plain = Module()
    plain.up.data = module.up.data
    assert torch.equal(module(hidden, ids), plain(hidden, ids + 1))
    assert source.calls == [[[1], [2]], [[2], [3]], "done"]
    changer.remove()
    source.calls.clear()
    with pytest.raises(RuntimeError):
        module(torch.randn(2, NARROW + 1), ids)
    assert source.calls == [[[1], [2]], "done"]
    for handle in handles:
        handle.remove()
    module(hidden, ids)
    assert source.calls == [[[1], [2]], "done"]


def test_recording_is_refused() -> None:
    module, source = Module(), Recorder()
    attach_experts(module, source)
    with pytest.raises(RuntimeError, match="recording"):
        module(torch.randn(2, NARROW, requires_grad=True), torch.tensor([[1], [2]]))


class Whole(Module):
    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return hidden @ self.up.sum(0).T + ids


class Sliced(Module):
    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return hidden @ self.up[:2].sum(0).T + ids


class Hidden(Module):
    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        expert = ids[0]
        out: torch.Tensor = self.up[expert] + getattr(self, "up").sum()  # noqa: B009
        return out


class Careful(Module):
    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if self.up is None:
            return hidden
        expert = ids[0]
        out: torch.Tensor = nn.functional.linear(hidden.to(self.up.dtype), self.up[expert])
        return out


def test_judged_by_the_code() -> None:
    assert takes_slices_alone(Module.forward, ("up",))
    assert takes_slices_alone(Careful.forward, ("up",))
    for other in (Whole, Sliced, Hidden):
        assert not takes_slices_alone(other.forward, ("up",)), other
    assert not takes_slices_alone(Module.forward, ("down",))
    assert not takes_slices_alone(eval("lambda self, hidden, ids: self.up[ids]"), ("up",))


def test_names_of_others() -> None:
    """This file reads `module.up` of what is not self."""
    assert names_of_others(__name__, ("up",))
    assert not names_of_others(__name__, ("nowhere",))
    assert names_of_others("no.such.module", ("up",))
