"""4-bit products of our own: the library's bits, and the library's own where ours are not sure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pipeload.formats.bitsandbytes import kernel
from pipeload.formats.bitsandbytes import product as bitsandbytes_product
from pipeload.formats.bitsandbytes.kernel import (
    FILLED_DTYPES,
    Fill,
    compiled,
    compiled_fill,
    make_fill,
    torch_fill,
)
from pipeload.formats.bitsandbytes.product import (
    PackedProduct,
    QuickProduct,
    quick_product,
    with_product,
)
from tests.support.plain_loops import use_plain_loops

if TYPE_CHECKING:
    from collections.abc import Iterator

bnb: Any = pytest.importorskip("bitsandbytes")

ROOT = Path(__file__).parents[4]
KINDS = ("nf4", "fp4")
NO_COMPILER = "no compiler here, or no AVX2"


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library as on AVX2; what was found out here is not kept for other tests."""
    use_plain_loops(monkeypatch.setattr)
    bitsandbytes_product._checked_fill.cache_clear()
    yield
    bitsandbytes_product._checked_fill.cache_clear()


@pytest.fixture(params=["compiled", "torch"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the compiled kernel, and as if it could not be made."""
    if request.param == "torch":
        monkeypatch.setattr(kernel, "compiled", lambda: None)
    elif compiled() is None:
        pytest.skip(NO_COMPILER)
    return str(request.param)


def dequantised(packed: torch.Tensor, absmax: torch.Tensor, *rest: Any) -> torch.Tensor:
    """By the library: [rows, columns]. `rest`: block size, kind, shape, dtype."""
    made: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
        packed.view(-1, 1), absmax, *rest
    )
    return made


def codes_of(kind: str) -> torch.Tensor:
    codes: torch.Tensor = bnb.functional.get_4bit_type(kind, device="cpu")
    return codes


def make(engine: str, kind: str, blocksize: int) -> Fill:
    library = compiled()
    if engine == "torch" or library is None:
        return torch_fill(_codes(kind), blocksize)
    return compiled_fill(library, _codes(kind), blocksize)


def _codes(kind: str) -> torch.Tensor:
    every = torch.arange(16, dtype=torch.uint8) * 17
    pairs = dequantised(every, torch.ones(1), 32, kind, (4, 8), torch.float32)
    return pairs.view(-1)[::2].clone()


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocksize", [32, 64, 4096])
@pytest.mark.parametrize("dtype", sorted(FILLED_DTYPES, key=str))
@pytest.mark.parametrize("kind", KINDS)
def test_equal_bits(kind: str, dtype: torch.dtype, blocksize: int, engine: str) -> None:
    """Every byte times factors of every size, in the tail of a chunk too."""
    random = torch.Generator().manual_seed(blocksize)
    blocks = (3 << 18) // blocksize + 5
    packed = torch.randint(256, (blocks * blocksize // 2,), dtype=torch.uint8, generator=random)
    absmax = torch.rand(blocks, generator=random) * 10.0 ** torch.linspace(-45, 38.5, blocks)
    absmax[:4] = torch.tensor([0.0, -0.0, 3.0e38, 1.4e-45])
    wanted = dequantised(packed, absmax, blocksize, kind, (blocks, blocksize), dtype)
    made = torch.full_like(wanted, 7)
    make(engine, kind, blocksize)(packed, absmax, made)
    assert torch.equal(made.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_every_pair(kind: str, engine: str) -> None:
    """Each byte means the two values that the library's table has for its halves."""
    made = torch.empty(256, 2)
    make(engine, kind, 16)(torch.arange(256, dtype=torch.uint8), torch.ones(32), made)
    # Its table for fp4 was rounded in another place than the one that it computes with.
    wanted = torch.cartesian_prod(codes_of(kind), codes_of(kind))
    assert torch.allclose(made, wanted, rtol=1e-5, atol=0)


# -- what there is ---------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false"])
def test_without_a_compiler(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None, or one that fails: tables with few threads, the library with many."""
    monkeypatch.setenv("CC", compiler)
    compiled.cache_clear()
    try:
        assert compiled() is None
        for threads, found in ((1, True), (64, False)):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            assert (make_fill(_codes("nf4"), 64) is not None) == found
    finally:
        compiled.cache_clear()


def test_the_folder_of_the_compiler_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing stays on disk."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    compiled.cache_clear()
    if compiled() is None:
        pytest.skip(NO_COMPILER)
    assert not list(tmp_path.iterdir())


def test_a_library_with_other_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that rounds otherwise keeps its own way."""
    assert quick_product(linear(), "nf4", 64) is not None
    bitsandbytes_product._checked_fill.cache_clear()
    monkeypatch.setattr(
        bitsandbytes_product, "make_fill", lambda *_: lambda _packed, _absmax, out: out.fill_(1)
    )
    assert quick_product(linear(), "nf4", 64) is None


# -- products --------------------------------------------------------------------------------------


def linear(rows: int = 448, columns: int = 256, *, bias: bool = True, **options: Any) -> Any:
    """A Linear4bit with its values, in plain order."""
    torch.manual_seed(3)
    options = {"compute_dtype": torch.bfloat16, "quant_type": "nf4"} | options
    module = bnb.nn.Linear4bit(columns, rows, bias=bias, **options).to("cpu")
    if bias:
        module.bias.data = module.bias.data.to(options["compute_dtype"])
        module.bias.requires_grad = False
    return module.eval()


def product_of(module: Any) -> QuickProduct:
    state = module.weight.quant_state
    product = quick_product(module, state.quant_type, state.blocksize)
    assert product is not None
    return product


def by(multiply: PackedProduct, module: Any, given: torch.Tensor) -> torch.Tensor | None:
    """What `module` makes of `given` with that product; None if it was left to the library."""
    state = module.weight.quant_state
    plain = state.absmax
    answers: list[torch.Tensor | None] = []

    def answer(*args: Any) -> torch.Tensor | None:
        answers.append(multiply(*args))
        return answers[-1]

    state.absmax = with_product(plain, answer)
    try:
        made: torch.Tensor = module(given)
    finally:
        state.absmax = plain
    return made if answers and answers[-1] is not None else None


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype", sorted(FILLED_DTYPES, key=str))
@pytest.mark.parametrize("kind", KINDS)
def test_equal_products(kind: str, dtype: torch.dtype, nested: bool, engine: str) -> None:
    """One row to many, in every shape, another dtype than the compute's; with and without bias."""
    for bias in (True, False):
        module = linear(bias=bias, compute_dtype=dtype, quant_type=kind, compress_statistics=nested)
        product = product_of(module)
        for shape in ((256,), (1, 256), (1, 1, 256), (2, 5, 256), (70, 256)):
            for given in (torch.randn(shape, dtype=dtype), torch.randn(shape)):
                made = by(product, module, given)
                assert made is not None, engine
                wanted = module(given)
                assert (made.dtype, made.shape) == (wanted.dtype, wanted.shape)
                assert torch.equal(made, wanted)


def test_ranges_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoding step has a part of the weight at a time, other products all of it."""
    sizes: list[int] = []
    monkeypatch.setattr(bitsandbytes_product, "_RANGE_BYTES", 1)
    monkeypatch.setattr(bitsandbytes_product, "can_cut_rows", lambda _: True)
    exact = True
    monkeypatch.setattr(bitsandbytes_product, "ranges_are_exact", lambda *_: exact)
    module = linear()
    product = product_of(module)
    fill = product._fill

    def counted(packed: torch.Tensor, absmax: torch.Tensor, out: torch.Tensor) -> None:
        sizes.append(len(out))
        fill(packed, absmax, out)

    product._fill = counted
    for count in (1, 16, 17):
        sizes.clear()
        made = by(product, module, torch.ones(count, 256))
        assert made is not None
        assert (len(sizes) == 1) == (count > 16)
        assert sum(sizes) == 448
        assert torch.allclose(made, module(torch.ones(count, 256)), rtol=0.05, atol=0.05)
    exact = False  # with this number of rows, or with other threads
    sizes.clear()
    by(product, module, torch.ones(1, 256))
    assert sizes == [448]


def test_rows_that_cannot_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight is whole then, and nothing of its size is kept."""
    monkeypatch.setattr(bitsandbytes_product, "can_cut_rows", lambda _: False)
    module, given = linear(), torch.randn(1, 256)
    product = product_of(module)
    assert product.kept_bytes == 0
    made = by(product, module, given)
    assert made is not None
    assert torch.equal(made, module(given))


def test_what_is_left_to_the_library() -> None:
    """Whatever is more than inference, and weights that are not there."""
    module, given = linear(), torch.randn(3, 256)
    product = product_of(module)
    assert by(product, module, given) is not None
    assert by(product, module, given.clone().requires_grad_()) is None
    assert by(product, module, torch.empty(0, 256)) is None
    state = module.weight.quant_state
    factors, narrow = state.absmax.float(), torch.ones(3, 128, dtype=torch.bfloat16)
    assert product(narrow, module.weight, factors, module.bias) is None
    assert by(product, module, torch.nn.Parameter(given)) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert by(product, module, given) is None
    module.compute_dtype = torch.float16
    assert by(product, module, given) is None
    module.compute_dtype = torch.bfloat16
    assert by(product, module, given) is not None


@pytest.mark.parametrize(
    ("columns", "blocksize", "dtype"),
    [(96, 64, torch.float32), (256, 8, torch.float32), (256, 64, None), (256, 64, torch.float64)],
)
def test_weights_that_are_not_for_it(
    columns: int, blocksize: int, dtype: torch.dtype | None
) -> None:
    """Blocks that go over the end of a row, or are odd; no known dtype to compute in."""
    module = bnb.nn.Linear4bit(columns, 64, compute_dtype=dtype)
    assert quick_product(module, "nf4", blocksize) is None


def test_the_module_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its factors alone are asked, for products only, and are plain ones in the end."""
    module, given = linear(), torch.randn(3, 256)
    wanted, before, calls = module(given), {**vars(module)}, []

    def answer(*args: Any) -> torch.Tensor | None:
        calls.append(args)
        return None if len(calls) > 1 else torch.zeros(1)

    state = module.weight.quant_state
    state.absmax = with_product(state.absmax, answer)
    assert torch.equal(module(given), torch.zeros(1))
    assert torch.equal(module.forward(given), wanted)
    whole = bnb.functional.dequantize_4bit(module.weight, state)
    saved = module.state_dict()
    assert len(calls) == 2
    assert {type(made) for made in (whole, state.absmax.float())} == {torch.Tensor}
    assert torch.equal(saved["weight.absmax"].as_subclass(torch.Tensor), state.absmax)
    assert vars(module) == before
    assert type(module.weight) is bnb.nn.Params4bit


IN_A_CHILD = """
import torch
from tests.support.plain_loops import use_plain_loops
use_plain_loops(setattr)
from tests.rooms.formats.bitsandbytes.test_product import by, linear, product_of
torch.set_num_threads(2)
for dtype in (torch.bfloat16, torch.float32, torch.float16):
    module = linear(1024, 512, compute_dtype=dtype)
    product = product_of(module)
    for count in (1, 5, 40):
        given = torch.randn(count, 512, dtype=dtype)
        assert torch.equal(by(product, module, given), module(given)), (dtype, count)
print(torch.backends.cpu.get_cpu_capability())
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in {"AVX2", "AVX512"}, reason="x86")
def test_as_on_avx2() -> None:
    """All of torch and oneDNN as there, too."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_CHILD],
        env=os.environ
        | {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
        | {"PYTHONPATH": f"{ROOT}:{ROOT / 'hooks'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["AVX2"]
