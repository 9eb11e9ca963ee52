"""Experts as integers: products of a Linear's bits, and sums that depend on no order."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

from pipeload.errors import OptionError, UnsupportedModelError
from pipeload.formats.integers import byte_product, packed_experts, product, tile_product
from pipeload.formats.integers.expert_matrices import (
    ExpertMatrix,
    ExpertProducts,
    ExpertShape,
    shape_of,
)
from pipeload.formats.integers.expert_rows import MOST_TOGETHER, activates_rows_alone
from pipeload.formats.integers.format import FLOATS, INTEGERS, OURS, TORCHS
from pipeload.formats.integers.linear import Int4Linear, Int8Linear
from pipeload.formats.integers.order import BY_ROWS, kernel_order, pack
from pipeload.formats.integers.packed_experts import PackedExperts
from pipeload.formats.integers.quantizer import PipeloadConfig
from pipeload.formats.integers.rounding import to_int4, to_int8
from pipeload.weights.arena import DTYPE_CODES
from pipeload_hooks import ServeExperts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeload.formats.integers.packed_linear import PackedLinear

EXPERTS, HIDDEN, INNER, GROUP = 5, 96, 64, 32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Config:
    _experts_implementation = "eager"


class Library(nn.Module):
    """As the library's modules are, before its decorator."""

    def __init__(self, config: object, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.act_fn = nn.SiLU()
        self.gate_up_proj = parameter(EXPERTS, 2 * INNER, HIDDEN, dtype=dtype)
        self.down_proj = parameter(EXPERTS, HIDDEN, INNER, dtype=dtype)

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for expert in ids.unique():
            rows, places = torch.where(ids == expert)
            gate, up = nn.functional.linear(hidden[rows], self.gate_up_proj[expert]).chunk(2, -1)
            made = nn.functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
            out.index_add_(0, rows, made * by[rows, places, None])
        return out


Gated = use_experts_implementation(type("Gated", (Library,), {"forward": Library.forward}))


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    generator = torch.Generator().manual_seed(sum(shape))
    made = torch.randn(shape, generator=generator) / 8
    return nn.Parameter(made.to(dtype), requires_grad=False)


def packed_bytes(made: Sequence[PackedLinear], size: int) -> torch.Tensor:
    """One expert's, of the Linears that it stands for."""
    parts = []
    for linear in made:
        for tensor in (linear.weight, linear.get_parameter(linear.statistics)):
            raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
            parts += [raw, raw.new_zeros(-len(raw) % 64)]
    whole = torch.cat(parts)
    assert len(whole) == size
    return whole


def linear_of(matrix: torch.Tensor, bits: int) -> PackedLinear:
    rows, columns = matrix.shape
    if bits == 8:
        eight = Int8Linear(columns, rows, bias=False, dtype=matrix.dtype)
        eight.weight.data, eight.scale.data = to_int8(matrix)
        return eight
    four = Int4Linear(
        columns, rows, bias=False, group_size=GROUP, order=BY_ROWS, dtype=matrix.dtype
    )
    values, four.scales_and_zeros.data = to_int4(matrix, GROUP)
    four.weight.data = pack(values, BY_ROWS)
    return four


def make(bits: int, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, list[Any]]:
    """The library's module, ours, and Linears of the same integers, two for each expert."""
    library: Any = Gated(Config(), dtype)
    shape = shape_of(library, bits, GROUP if bits == 4 else 0, DTYPE_CODES[dtype])
    assert shape is not None
    linears = [
        [
            linear_of(matrices[expert], bits)
            for matrices in (library.gate_up_proj, library.down_proj)
        ]
        for expert in range(EXPERTS)
    ]
    ours = PackedExperts(copy.deepcopy(library), shape, path="some.experts")
    ours.packed.data = torch.stack([packed_bytes(pair, shape.nbytes) for pair in linears])
    return library, ours, linears


def routing(rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    ids = torch.rand(rows, EXPERTS, generator=generator).topk(2, -1).indices
    return hidden, ids, torch.rand(rows, 2, generator=generator)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@torch.no_grad()
def test_products_are_a_linears(bits: int, dtype: torch.dtype) -> None:
    """Few rows and many, and what backward multiplies with."""
    _, ours, linears = make(bits, dtype)
    for expert in range(EXPERTS):
        for place, linear in zip(ours.shape.places, linears[expert], strict=True):
            matrix = ExpertMatrix(ours.packed[expert], place, ours.shape, exact_inputs=False)
            for rows in (1, 3, 17, 70):
                given = torch.randn(rows, place.columns, dtype=torch.float32).to(dtype)
                assert torch.equal(matrix.product(given), linear.product(given)), rows
            assert torch.equal(matrix.dequantised(), linear.dequantised())


@pytest.mark.parametrize("start", [2, 9])
@pytest.mark.parametrize("bits", [4, 8])
@torch.no_grad()
def test_wherever_it_begins(bits: int, start: int) -> None:
    """As other writers than ours may lay it."""
    _, ours, _ = make(bits, torch.bfloat16)
    given = routing(9, torch.bfloat16)
    expected = ours(*given)
    moved = torch.empty(ours.packed.numel() + start, dtype=torch.uint8)[start:]
    ours.packed.data = moved.view(ours.packed.shape).copy_(ours.packed)
    assert torch.equal(ours(*given), expected)
    ours.settle()
    assert ours.packed.data_ptr() % 16 == 0
    assert torch.equal(ours(*given), expected)


@pytest.mark.parametrize("bits", [4, 8])
@torch.no_grad()
def test_near_the_librarys(bits: int) -> None:
    """Of the same floats; ids that name no expert give nothing."""
    library, ours, linears = make(bits)
    for expert, pair in enumerate(linears):
        library.gate_up_proj[expert], library.down_proj[expert] = (w.dequantised() for w in pair)
    for rows in (1, 7, 40):
        hidden, ids, by = routing(rows)
        torch.testing.assert_close(
            ours(hidden, ids, by), library(hidden, ids, by), rtol=1e-3, atol=1e-3
        )
        ids[:, 1] = EXPERTS
        alone = library(hidden, ids[:, :1], by[:, :1])
        torch.testing.assert_close(ours(hidden, ids, by), alone, rtol=1e-3, atol=1e-3)
    assert ours(*routing(0)).shape == (0, HIDDEN)


@torch.no_grad()
def test_ids_of_any_integers_and_rows_of_any_shape() -> None:
    _, ours, _ = make(4)
    hidden, ids, by = routing(6)
    expected = ours(hidden, ids, by)
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert torch.equal(ours(hidden, ids.to(dtype), by), expected)
    assert torch.equal(ours(hidden.view(2, 3, HIDDEN), ids, by), expected.view(2, 3, HIDDEN))


class Backwards:
    """Has the experts taken from the last to the first."""

    def __init__(self) -> None:
        self.needed: list[int] = []

    def order(self, _name: str, experts: Sequence[int]) -> Sequence[int]:
        return sorted(experts, reverse=True)

    def need(self, _name: str, expert: int) -> None:
        self.needed.append(expert)

    def together(self, name: str, experts: Sequence[int]) -> Iterator[Sequence[int]]:
        for expert in self.order(name, experts):
            self.need(name, expert)
            yield [expert]

    def refuse(self, function: str, name: str) -> Any:
        raise LookupError(f"{function} of {name}")


@torch.no_grad()
def test_in_any_order() -> None:
    """Each is asked for once, and no bit changes."""
    _, ours, _ = make(4, torch.bfloat16)
    given = routing(20, torch.bfloat16)
    expected = ours(*given)
    service = Backwards()
    mode = ServeExperts({"packed": ours.packed}, service)
    mode.begin()
    try:
        assert torch.equal(ours(*given), expected)
    finally:
        mode.discard()
    assert service.needed == [4, 3, 2, 1, 0]


def one_by_one(ours: Any, *given: torch.Tensor) -> torch.Tensor:
    """What a module gives whose experts are computed with by themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_experts, "most_together", lambda *_, **__: 0)
        made: torch.Tensor = ours(*given)
        return made


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("threads")
@torch.no_grad()
def test_together_as_one_by_one(dtype: torch.dtype) -> None:
    """However many rows are sent to however many; nobody looks at those that none is sent to."""
    _, ours, _ = make(4, dtype)
    packed = ours.packed.data
    for rows in (*range(1, 18), 70):
        for count in range(1, EXPERTS):
            hidden, _, _ = routing(rows, dtype)
            ids = torch.rand(rows, EXPERTS).topk(count, -1).indices
            ours.packed.data = packed.clone()
            ours.packed.data[[e for e in range(EXPERTS) if e not in ids]] = 255
            given = hidden, ids, torch.rand(rows, count)
            made = ours(*given)
            assert made.isfinite().all()
            assert torch.equal(made, one_by_one(ours, *given)), (rows, count)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_together_whatever_the_activation(dtype: torch.dtype) -> None:
    """The library's own, and torch's: those of numbers by themselves, and all others."""
    _, ours, _ = make(4, dtype)
    torchs = nn.GELU(), nn.GELU("tanh"), nn.Sigmoid(), nn.Tanh(), nn.ReLU(), nn.SiLU()
    for function in (*(ACT2FN[name] for name in ACT2FN), *torchs):
        ours._library[0].act_fn = function.to(dtype)
        for rows in (1, 2, 5, 8):
            hidden, ids, by = routing(rows, dtype)
            given = 8 * hidden, ids, by
            made, alone = ours(*given), one_by_one(ours, *given)
            assert torch.equal(made.nan_to_num(), alone.nan_to_num()), (function, rows)


@pytest.mark.skipif(product.compiled() is None, reason="there is no kernel here")
@torch.no_grad()
def test_two_calls_for_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each matrix, while that is few rows; what AVX512-VNNI adds changes nothing."""
    _, ours, _ = make(4, torch.bfloat16)
    given = routing(9, torch.bfloat16)
    expected, counts, rounded = ours(*given), [], []
    multiply = product.multiply_sent

    def counted(rows: torch.Tensor, sent: product.Sent, into: torch.Tensor) -> torch.Tensor:
        counts.append(len(sent.pairs))
        rounded.append(len(rows))
        return multiply(rows, sent, into, vnni=False)

    monkeypatch.setattr(product, "multiply_sent", counted)
    assert torch.equal(ours(*given), expected)
    assert counts == [18, 18]
    assert rounded == [9, 18]
    tiled = tile_product.takes(torch.bfloat16, HIDDEN)  # more rows of one expert are theirs
    given = routing(22 if tiled else 40, torch.bfloat16)
    assert torch.equal(ours(*given), one_by_one(ours, *given))
    assert len(counts) > 2
    assert max(counts) <= MOST_TOGETHER
    # Of a prompt, none but those that are multiplied.
    assert rounded[2:] == counts[2:]


def test_what_is_rounded_of_a_prompt_is_counted() -> None:
    """No more than as floats, however many rows."""
    shape = ExpertShape(8, hidden=2048, inner=64, wide=128, bits=4, group=32, dtype="BF16")
    rounded = ExpertProducts(shape, torch.bfloat16, rounded=True)
    assert 0 < rounded.of(4096) <= rounded._replace(rounded=False).of(4096)


def other_kinds() -> list[type[nn.Module]]:
    """With biases of another dtype and a gate of their own, and without gates."""

    def own_gate(_module: nn.Module, made: torch.Tensor) -> torch.Tensor:
        gate, up = made[:, ::2], made[:, 1::2]
        return (up + 1) * torch.sigmoid(gate * 1.7) * gate.clamp(max=2)

    def with_biases(self: Any, config: object, dtype: torch.dtype = torch.float32) -> None:
        Library.__init__(self, config, dtype)
        self.gate_up_proj_bias = parameter(EXPERTS, 2 * INNER)
        self.down_proj_bias = parameter(EXPERTS, HIDDEN)

    def without_gates(self: Any, config: object, dtype: torch.dtype = torch.float32) -> None:
        Library.__init__(self, config, dtype)
        self.up_proj = parameter(EXPERTS, INNER, HIDDEN, dtype=dtype)
        del self.gate_up_proj

    forward = {"forward": Library.forward}
    biased = type(
        "Biased", (Library,), {**forward, "__init__": with_biases, "_apply_gate": own_gate}
    )
    ungated = type("Ungated", (Library,), {**forward, "__init__": without_gates})
    return [
        use_experts_implementation(biased, has_bias=True),
        use_experts_implementation(ungated, has_gate=False),
    ]


def make_other(kind: Any) -> tuple[Any, Any]:
    """The library's module without its parameters, and ours in bf16."""
    library = kind(Config(), torch.bfloat16)
    shape = shape_of(library, 4, GROUP, "BF16")
    assert shape is not None
    first = library.gate_up_proj if library.has_gate else library.up_proj
    pairs = [(linear_of(first[e], 4), linear_of(library.down_proj[e], 4)) for e in range(EXPERTS)]
    ours: Any = PackedExperts(library, shape)
    ours.packed.data = torch.stack([packed_bytes(pair, shape.nbytes) for pair in pairs])
    return library, ours


@pytest.mark.parametrize("kind", other_kinds(), ids=lambda kind: kind.__name__)
@torch.no_grad()
def test_other_kinds_together(kind: Any) -> None:
    """Each expert's rows are activated as if there were no other."""
    library, ours = make_other(kind)
    shape = ours.shape
    for rows in (1, 2, 7, 17):
        given = routing(rows, torch.bfloat16)
        assert torch.equal(ours(*given), one_by_one(ours, *given))
    assert activates_rows_alone(library, shape.wide, shape.inner) is (kind.__name__ == "Ungated")


def test_which_activations_take_each_number_by_itself() -> None:
    """Those that are known; and only where rows are whole vectors."""
    library, _, _ = make(4)
    assert activates_rows_alone(library, 2 * INNER, INNER)
    assert not activates_rows_alone(library, 160, 80)
    library.act_fn = nn.Softmax(-1)
    assert not activates_rows_alone(library, 2 * INNER, INNER)
    for function in (ACT2FN["gelu_pytorch_tanh"], ACT2FN["silu"], nn.GELU("tanh")):
        library.act_fn = function
        assert activates_rows_alone(library, 2 * INNER, INNER)
    for function in (ACT2FN["gelu"], ACT2FN["gelu_10"], nn.GELU()):
        library.act_fn = function
        assert not activates_rows_alone(library, 2 * INNER, INNER)


@torch.no_grad()
def test_what_was_not_read_is_nan() -> None:
    """Bytes of 0xFF make scales that are no numbers."""
    for bits in (4, 8):
        _, ours, _ = make(bits, torch.bfloat16)
        ours.packed[3] = 255
        hidden, _, by = routing(4, torch.bfloat16)
        ids = torch.tensor([[0, 1], [2, 3], [4, 0], [1, 3]])
        made = ours(hidden, ids, by).isnan().all(1)
        assert made.tolist() == [False, True, False, True]


@torch.no_grad()
def test_exact_inputs() -> None:
    """Then it is always floats that are multiplied."""
    _, ours, linears = make(4)
    ours.exact_inputs = True
    place, linear = ours.shape.places[0], linears[2][0]
    matrix = ExpertMatrix(ours.packed[2], place, ours.shape, exact_inputs=True)
    given = torch.randn(3, HIDDEN)
    wanted = given @ linear.dequantised().t()
    torch.testing.assert_close(matrix.product(given), wanted, rtol=1e-5, atol=1e-5)
    if product.compiled() is not None:
        assert not torch.equal(matrix.product(given), linear.product(given))
    rounded = ExpertProducts(ours.shape, torch.float32, rounded=True)
    exact = rounded._replace(rounded=False)
    assert exact.of(1) >= HIDDEN * 64 * 4  # floats of a block
    assert exact.of(1) > rounded.of(1) or product.compiled() is None
    assert exact.of(200) >= rounded.of(200)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As floats: there is one order."""
    _, ours, _ = make(4)
    given = routing(5)
    ours.exact_inputs = True
    expected = ours(*given)
    ours.exact_inputs = False
    monkeypatch.setattr(product, "compiled", lambda: None)
    assert torch.equal(ours(*given), expected)


def test_what_multiplies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of experts too, where no Linear is quantised: ranks compare it."""
    four, eight = make(4)[1], make(8)[1]
    both = nn.ModuleList((eight, four))
    monkeypatch.setattr(product, "compiled", lambda: product)
    monkeypatch.setattr(byte_product, "compiled", lambda: byte_product)
    assert INTEGERS.kernel(four) == OURS.format("int4")
    assert INTEGERS.kernel(both) == "; ".join((OURS.format("int4"), OURS.format("int8")))
    both.append(linear_of(torch.ones(32, 64), 4))
    assert INTEGERS.kernel(both) == "; ".join((OURS.format("int4"), OURS.format("int8")))
    monkeypatch.setattr(product, "compiled", lambda: None)
    eight.exact_inputs = True
    wanted = (TORCHS.format("int4"), FLOATS.format("int4"), TORCHS.format("int8"))
    assert INTEGERS.kernel(both) == "; ".join(wanted)
    assert INTEGERS.kernel(nn.Linear(2, 2)) is None


@pytest.mark.parametrize("bits", [4, 8])
def test_gradients_of_inputs(bits: int) -> None:
    """For adapters on a plain model; the experts get none."""
    library, ours, linears = make(bits)
    for expert, pair in enumerate(linears):
        library.gate_up_proj[expert], library.down_proj[expert] = (w.dequantised() for w in pair)
    found = []
    for module in (library, ours):
        hidden, ids, by = routing(12)
        hidden.requires_grad_()
        module(hidden, ids, by).square().sum().backward()
        found.append(hidden.grad)
    torch.testing.assert_close(*found, rtol=2e-3, atol=2e-3)
    assert ours.packed.grad is None


def test_gradients_of_biases() -> None:
    """Of inputs that need none; and of what an activation function has."""
    _, ours = make_other(other_kinds()[0])
    given = routing(5, torch.bfloat16)
    found = []
    for run in (ours, partial(one_by_one, ours)):
        biases = ours.gate_up_proj_bias, ours.down_proj_bias
        for bias in biases:
            bias.requires_grad_()
            bias.grad = None
        run(*given).square().sum().backward()
        found.append([bias.grad for bias in biases])
    for grads in zip(*found, strict=True):
        assert all(grad is not None and grad.abs().sum() > 0 for grad in grads)
        assert torch.equal(*grads)
    _, ours, _ = make(4)
    ours.act_fn = ours._library[0].act_fn = nn.PReLU()
    ours(*routing(5)).square().sum().backward()
    assert ours.act_fn.weight.grad


def test_without_values() -> None:
    """Sizes alone, for trials of what a pass takes."""
    _, ours, _ = make(4)
    hidden, ids, by = (tensor.to("meta") for tensor in routing(6))
    assert ours(hidden, ids, by).shape == (6, HIDDEN)
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(tensor) for tensor in routing(6)]
        assert ours(*given).shape == (6, HIDDEN)


def test_a_placeholder_and_another_device() -> None:
    """What is not there is refused by the module's name."""
    _, ours, _ = make(8)
    there = ours.packed.data
    ours.packed.data = torch.zeros((), dtype=torch.uint8).expand(there.shape)
    with pytest.raises(UnsupportedModelError, match=r"'some.experts' .* int8 experts are on disk"):
        ours(*routing(2))
    ours.packed = nn.Parameter(there.to("meta"), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match="its int8 experts on 'meta'"):
        ours(*routing(2))


def test_copied_and_pickled() -> None:
    """With what the library's module is needed for."""
    _, ours, _ = make(4)
    given = routing(3)
    expected = ours(*given)
    assert torch.equal(copy.deepcopy(ours)(*given), expected)
    assert "experts=5, hidden=96, inner=64, bits=4, group_size=32" in repr(ours)
    ours._library = (nn.Identity(),)  # the test's own class cannot be found by its name
    assert torch.equal(pickle.loads(pickle.dumps(ours)).packed, ours.packed)


def _change(**parameters: object) -> Any:
    made = Gated(Config())
    for name, value in parameters.items():
        setattr(made, name, value)
    return made


def with_a_buffer() -> Any:
    """As an activation function of somebody's own may have one."""
    made = Gated(Config())
    made.register_buffer("bounds", torch.zeros(3, device="meta"))
    return made


def test_what_a_product_copies_is_counted() -> None:
    """Of int8 that begins where the kernel cannot read."""
    shape = make(8)[1].shape
    largest = max(place.rows * place.columns for place in shape.places)
    there, copied = (
        ExpertProducts(shape, torch.bfloat16, True, copies) for copies in (False, True)
    )
    assert copied.of(1) == there.of(1) + largest


def test_a_gate_of_another_dtype() -> None:
    """The result has that of the input."""
    _, ours, _ = make(8, torch.bfloat16)
    hidden, ids, weights = routing(3, torch.bfloat16)
    expected = ours(hidden, ids, weights)
    gate = ours._gate
    ours._gate = lambda made: gate(made).float()
    assert torch.equal(ours(hidden, ids, weights), expected)


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(4, 4),
        with_a_buffer(),
        Library(Config()),  # a loop of its own that nobody has told about
        _change(has_post_expert_norm=True),
        _change(has_gate=False),
        _change(has_bias=True),
        _change(norm=nn.LayerNorm(HIDDEN)),
        _change(down_proj=parameter(EXPERTS + 1, HIDDEN, INNER)),
        _change(down_proj=parameter(EXPERTS, INNER)),
        _change(is_transposed=True),
        _change(
            gate_up_proj=parameter(1, 2 * INNER, HIDDEN), down_proj=parameter(1, HIDDEN, INNER)
        ),
        _change(gate_up_proj=parameter(EXPERTS, 2 * INNER, 40)),
    ],
)
def test_modules_that_stay_floats(module: nn.Module) -> None:
    for bits, group in ((4, GROUP), (8, 0)):
        assert shape_of(module, bits, group, "F32") is None


def test_the_dtype_in_a_configuration() -> None:
    assert (
        PipeloadConfig(4, group_size=GROUP, order=kernel_order(), experts="BF16").experts == "BF16"
    )
    with pytest.raises(OptionError, match="experts='I8'"):
        PipeloadConfig(8, experts="I8")
