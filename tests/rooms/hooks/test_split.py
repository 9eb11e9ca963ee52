"""A Linear that runs in row ranges gives what the whole one gives, and is itself again after."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules.module import _has_any_global_hook, register_module_forward_hook
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode

from pipeload.weights.row_cuts import Cut, can_cut_rows, row_ranges
from pipeload_hooks import EvictedWeightWatch, placeholder
from pipeload_hooks._split import (
    attach_split,
    can_split,
    computes_linear,
    restore_split,
    share_rows,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Recording(Exception):  # noqa: N818
    """What the tests' source raises when autograd would record."""


@dataclass
class Source:
    """Holds a whole weight and gives it in ranges; keeps what it is asked."""

    weight: torch.Tensor
    cuts: Sequence[int]
    """Where ranges begin and end, 0 and the last row included."""
    whole: bool = False
    error: BaseException | None = None
    """Raised in place of the second range."""
    calls: list[str] = field(default_factory=list)
    closed: bool = False
    multiply: Callable[[int, torch.Tensor], torch.Tensor] | None = None
    """What multiplies instead of ranges by themselves."""

    def acquire(self, index: int) -> bool:
        self.calls.append(f"acquire {index}")
        return self.whole

    def chunks(self, index: int) -> Generator[tuple[int, int, torch.Tensor], None, None]:
        self.calls.append(f"chunks {index}")
        try:
            for start, stop in zip(self.cuts, self.cuts[1:], strict=False):
                if start and self.error is not None:
                    raise self.error
                yield start, stop, self.weight[start:stop].clone()
        finally:
            self.closed = True

    def by_whole(self, *_: object) -> Callable[[int, torch.Tensor], torch.Tensor] | None:
        return self.multiply

    def release(self, index: int) -> None:
        self.calls.append(f"release {index}")

    def refuse_recording(self, index: int) -> None:
        raise Recording(index)


class Pair:
    """A plain Linear, and the same one whose weight is evicted and comes in ranges."""

    def __init__(
        self, cuts: Sequence[int], inputs: int, *, integers: bool = False, **options: Any
    ) -> None:
        self.plain = nn.Linear(inputs, cuts[-1], **options)
        if integers:
            for parameter in self.plain.parameters():
                parameter.data.copy_(torch.randint(-1, 2, parameter.shape))
        self.split = copy.deepcopy(self.plain)
        self.source = Source(self.plain.weight.data, cuts)
        self.split.weight.data = placeholder(self.plain.weight.shape, self.plain.weight.dtype, CPU)
        self.handles = attach_split(self.split, 3, self.source)

    def is_whole_again(self) -> bool:
        """Whether the parameters hold what they held before the call."""
        weight, bias = self.split.weight, self.split.bias
        kept = bias is None or torch.equal(bias, self.plain.bias)
        return weight.shape == self.plain.weight.shape and bool(weight.isnan().all()) and kept


@pytest.fixture
def pair() -> Pair:
    return Pair([0, 64, 128, 150], 32)


IN_RANGES = ["acquire 3", "chunks 3", "release 3"]
WITHOUT_RANGES = ["acquire 3", "release 3"]


def assert_same(made: torch.Tensor, plain: torch.Tensor) -> None:
    """Values bit for bit, and everything else that can be asked of an output."""
    assert torch.equal(made, plain)
    assert (made.shape, made.dtype, made.device) == (plain.shape, plain.dtype, plain.device)
    assert made.is_inference() == plain.is_inference()
    assert made.requires_grad == plain.requires_grad
    assert made.stride() == plain.stride()


def test_some_rows_are_computed_elsewhere(pair: Pair) -> None:
    """They are filled in before any hook sees the output, and until that is undone."""
    x, seen = torch.randn(2, 32), []
    wanted = pair.plain(x)

    def complete(output: torch.Tensor) -> None:
        assert torch.equal(output[:, 64:128], wanted[:, 64:128])
        output[:, :64], output[:, 128:] = wanted[:, :64], wanted[:, 128:]

    every = register_module_forward_hook(lambda _module, _args, output: seen.append(output))
    undo = share_rows(pair.split, 64, 128, complete)
    cuts = pair.source.cuts
    try:
        with torch.no_grad():
            pair.source.cuts = [64, 128]
            assert torch.equal(pair.split(x), wanted)
            assert torch.equal(seen[-1], wanted)
            for wrong, said in (([64, 100], "only 100 of the 128 rows"), (cuts, "rows 0:64 of")):
                pair.source.cuts = wrong
                with pytest.raises(RuntimeError, match=said):
                    pair.split(x)
            undo()
            undo()
            assert torch.equal(pair.split(x), wanted)
    finally:
        every.remove()


@given(
    cuts=st.sets(st.integers(1, 200), min_size=1, max_size=5),
    inputs=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    requires_grad=st.booleans(),
    shape=st.sampled_from([(), (1,), (4,), (0,), (2, 3), (2, 0), (1, 2, 3)]),
    mode=st.sampled_from([torch.no_grad, torch.inference_mode]),
)
def test_the_output_is_the_plain_one(
    *,
    cuts: set[int],
    inputs: int,
    dtype: torch.dtype,
    bias: bool,
    requires_grad: bool,
    shape: tuple[int, ...],
    mode: type,
) -> None:
    """Any cut and any rank of input, with no rows too. Small integers: every order of sums fits."""
    pair = Pair([0, *sorted(cuts)], inputs, integers=True, bias=bias, dtype=dtype)
    pair.plain.requires_grad_(requires_grad)
    pair.split.requires_grad_(requires_grad)
    x = torch.randint(-1, 2, (*shape, inputs)).to(dtype)
    with mode():
        assert_same(pair.split(x), pair.plain(x))
        assert_same(pair.split(input=x), pair.plain(x))
    assert pair.is_whole_again()
    assert pair.split.weight.requires_grad is requires_grad
    assert pair.source.calls == 2 * IN_RANGES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("total", [1024, 1000, 777])
def test_equal_bits(total: int, dtype: torch.dtype) -> None:
    """Arbitrary values, cut where this host is known to compute the same."""
    ranges = row_ranges(total, 256)
    if not can_cut_rows(Cut(dtype, 192, ranges, bias=True)):
        pytest.skip("this host computes ranges of rows differently")
    pair = Pair([0, *(stop for _, stop in ranges)], 192, dtype=dtype)
    for rows in (1, 2, 7, 40):
        x = torch.randn(1, rows, 192).to(dtype)
        with torch.inference_mode():
            assert_same(pair.split(x), pair.plain(x))
            # Not contiguous: the last tokens of several.
            assert_same(pair.split(x[:, -1:]), pair.plain(x[:, -1:]))


def test_another_product(pair: Pair) -> None:
    """Where the source knows that ranges by themselves are not exact, it says what is."""
    given = torch.randn(2, 3, 32)
    seen: list[tuple[int, int]] = []

    def multiply(start: int, values: torch.Tensor) -> torch.Tensor:
        seen.append((start, len(values)))
        assert torch.equal(values, pair.plain.weight[start : start + len(values)])
        made: torch.Tensor = pair.plain(given)
        return made[..., start : start + len(values)]

    pair.source.multiply = multiply
    with torch.no_grad():
        assert_same(pair.split(given), pair.plain(given))
    assert seen == [(0, 64), (64, 64), (128, 22)]


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "forward", lambda x: x),
        lambda module: setattr(module, "__class__", type("Other", (nn.Linear,), {"forward": id})),
        parametrizations.weight_norm,
        lambda module: module.register_parameter("scale", nn.Parameter(torch.ones(1))),
    ],
    ids=["object", "class", "parametrized", "scaled"],
)
def test_what_is_no_linear_any_more(change: Callable[[Any], object]) -> None:
    """A forward or weights of another's making are seen whenever it is asked; hooks are not."""
    module = nn.Linear(4, 4)
    module.register_forward_hook(lambda *_: None)
    assert computes_linear(module)
    change(module)
    assert not computes_linear(module)


def test_a_forward_replaced_in_the_class_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all Linear modules at once."""
    monkeypatch.setattr(nn.Linear, "forward", lambda _self, x: x)
    assert not computes_linear(nn.Linear(4, 4))


def test_a_whole_weight_runs_as_usual(pair: Pair) -> None:
    """When the source has bound all of it, the output is not touched."""
    pair.source.whole = True
    pair.split.weight.data = pair.plain.weight.data
    x = torch.randn(2, 32)
    with torch.no_grad():
        assert_same(pair.split(x), pair.plain(x))
    assert pair.source.calls == WITHOUT_RANGES


def test_under_autocast() -> None:
    """The output has the lower dtype; nothing empty or partial stays in autocast's cache."""
    pair = Pair([0, 64, 128], 32, integers=True)
    x = torch.randint(-1, 2, (2, 32)).float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = pair.plain(x)
        assert plain.dtype == torch.bfloat16
        assert_same(pair.split(x), plain)
        pair.source.whole = True
        pair.split.weight.data = pair.plain.weight.data
        assert_same(pair.split(x), plain)


def test_hooks_around_it(pair: Pair) -> None:
    """A hook of another's before it may change the input; one after it sees the whole output."""
    seen = []
    pair.split.register_forward_pre_hook(lambda _module, args: (args[0] * 2,))
    pair.split.register_forward_hook(lambda _module, _args, output: seen.append(output))
    x = torch.randn(2, 32)
    with torch.no_grad():
        made = pair.split(x)
        assert_same(made, pair.plain(x * 2))
    assert seen[0] is made


@pytest.mark.parametrize("everywhere", [False, True], ids=["prepended", "for all modules"])
def test_hooks_that_would_be_first(pair: Pair, everywhere: bool) -> None:
    """They see the whole output, may replace it, and nothing is left when they have gone."""
    seen: list[torch.Tensor] = []

    def after(_module: object, _args: object, output: torch.Tensor) -> torch.Tensor:
        seen.append(output)
        return output + 1

    given = torch.randn(3, pair.plain.in_features)
    with torch.no_grad():
        wanted = pair.plain(given)
        if everywhere:
            register: Any = register_module_forward_hook
            hook = register(after)
        else:
            hook = pair.split.register_forward_hook(after, prepend=True)
        try:
            assert torch.equal(pair.split(given), wanted + 1)
        finally:
            hook.remove()
        assert torch.equal(pair.split(given), wanted)
    assert [torch.equal(output, wanted) for output in seen] == [True]
    assert pair.source.calls.count("chunks 3") == 2
    assert not _has_any_global_hook()


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_failing_ranges(pair: Pair, error: BaseException) -> None:
    """Whatever a range raises comes out; the Linear is itself again and can run again."""
    pair.source.error = error
    x = torch.randn(2, 32)
    with torch.no_grad(), pytest.raises(type(error)):
        pair.split(x)
    assert pair.is_whole_again()
    assert pair.source.closed
    assert pair.source.calls == IN_RANGES
    pair.source.error = None
    with torch.no_grad():
        assert_same(pair.split(x), pair.plain(x))


def test_an_input_that_does_not_fit(pair: Pair) -> None:
    """The module's own forward refuses it; nothing is read."""
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        pair.split(torch.randn(2, 33))
    assert pair.is_whole_again()
    assert pair.source.calls == WITHOUT_RANGES


class Interrupt(TorchFunctionMode):
    """Ctrl-C while the module's own forward runs: torch calls no hook after it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def interrupt(pair: Pair) -> None:
    pair.source.calls.clear()
    with torch.no_grad(), Interrupt(), pytest.raises(KeyboardInterrupt):
        pair.split(torch.randn(2, 32))
    assert pair.source.calls == ["acquire 3"]
    assert pair.split.bias.shape == (0,)


def test_a_call_that_died(pair: Pair) -> None:
    """The next call begins by putting back what the dead one took."""
    x = torch.randn(2, 32)
    interrupt(pair)
    with torch.no_grad():
        assert_same(pair.split(x), pair.plain(x))
    assert pair.is_whole_again()
    interrupt(pair)
    pair.source.whole = True
    pair.split.weight.data = pair.plain.weight.data  # bound by the source before the call
    with torch.no_grad():
        assert_same(pair.split(x), pair.plain(x))


def test_restoring(pair: Pair) -> None:
    """The source can do it without a call; again, or for any module, it does nothing."""
    interrupt(pair)
    restore_split(pair.split)
    assert pair.is_whole_again()
    restore_split(pair.split)
    restore_split(pair.plain)
    assert pair.is_whole_again()


def test_new_values_after_a_call_that_died(pair: Pair) -> None:
    """They are not overwritten by the old ones."""
    interrupt(pair)
    ones = torch.ones(150)
    pair.split.bias.data = ones
    restore_split(pair.split)
    assert pair.split.bias.data_ptr() == ones.data_ptr()
    assert pair.split.weight.shape == (150, 32)


@pytest.mark.parametrize("what", ["input", "weight", "bias"])
def test_autograd_is_refused(pair: Pair, what: str) -> None:
    """Anything that would make autograd record: before the source is asked for a weight."""
    pair.split.requires_grad_(False)
    x = torch.randn(2, 32, requires_grad=what == "input")
    if what != "input":
        pair.split.get_parameter(what).requires_grad_(True)
    with pytest.raises(Recording):
        pair.split(x)
    assert pair.source.calls == ["release 3"]
    with torch.no_grad():
        assert_same(pair.split(x), pair.plain(x))


def test_grad_mode_with_nothing_to_record(pair: Pair) -> None:
    """A frozen Linear runs with gradients switched on."""
    pair.split.requires_grad_(False)
    pair.plain.requires_grad_(False)
    x = torch.randn(2, 32)
    assert_same(pair.split(x), pair.plain(x))


@pytest.mark.parametrize("cuts", [[0, 64], [0, 64, 64, 150], [64, 150], [0, 150, 151], [0, 64, 32]])
def test_ranges_that_do_not_fit(pair: Pair, cuts: list[int]) -> None:
    """An output with values nobody computed is never returned."""
    pair.source.cuts = cuts
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"\d+ rows"):
        pair.split(torch.randn(2, 32))
    assert pair.is_whole_again()


def test_a_watch_is_not_disturbed(pair: Pair) -> None:
    """Taking the rows of an evicted weight away is no use of its values."""

    def refuse(function: str, name: str) -> None:
        pytest.fail(f"{function} of {name}")

    weight = pair.split.weight
    weight.data = placeholder(weight.shape, weight.dtype, weight.device)
    watch = EvictedWeightWatch({id(weight): "weight"}, refuse)
    watch.begin()
    try:
        with torch.no_grad():
            pair.split(torch.randn(2, 32))
    finally:
        watch.discard()


def test_taken_off(pair: Pair) -> None:
    """Without its hooks it is a Linear like any other; nothing of its own was changed."""
    assert pair.split.__dict__.keys() == pair.plain.__dict__.keys()
    for handle in pair.handles:
        handle.remove()
    pair.split.weight.data = pair.plain.weight.data
    assert can_split(pair.split)
    assert_same(pair.split(torch.ones(1, 32)), pair.plain(torch.ones(1, 32)))
    assert pair.source.calls == []


def test_a_dropped_module_is_freed(pair: Pair) -> None:
    """The hooks make no cycle: weights go when the model goes."""
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(pair.split)
        del pair.split
        assert gone() is None
    finally:
        gc.enable()


class Same(nn.Linear):
    """A Linear by another name."""


class Other(nn.Linear):
    """One that computes something else."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def with_own_forward(module: nn.Linear) -> nn.Module:
    module.forward = lambda input: input  # type: ignore[method-assign]
    return module


def with_hook(module: nn.Linear) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


def with_more(module: nn.Linear) -> nn.Module:
    module.scale = nn.Parameter(torch.ones(1))
    return module


CASES: dict[str, tuple[bool, Callable[[], nn.Module]]] = {
    "plain": (True, lambda: nn.Linear(3, 2)),
    "no bias": (True, lambda: nn.Linear(3, 2, bias=False)),
    "meta": (True, lambda: nn.Linear(3, 2, device="meta")),
    "subclass": (True, lambda: Same(3, 2)),
    "another forward": (False, lambda: Other(3, 2)),
    "rebound forward": (False, lambda: with_own_forward(nn.Linear(3, 2))),
    "parametrized": (False, lambda: parametrizations.weight_norm(nn.Linear(3, 2))),
    "spectral norm": (False, lambda: nn.utils.spectral_norm(nn.Linear(3, 2))),
    "hooked": (False, lambda: with_hook(nn.Linear(3, 2))),
    "more parameters": (False, lambda: with_more(nn.Linear(3, 2))),
    "no rows": (False, lambda: nn.Linear(3, 0)),
    "lazy": (False, lambda: nn.LazyLinear(3)),
    "bilinear": (False, lambda: nn.Bilinear(3, 2, 2)),
    "embedding": (False, lambda: nn.Embedding(3, 2)),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", CASES)
def test_what_can_be_split(name: str) -> None:
    """What is a Linear, and nothing but that."""
    expected, make = CASES[name]
    assert can_split(make()) is expected
