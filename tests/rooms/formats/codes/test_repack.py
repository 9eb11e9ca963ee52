"""The compiled way to put codes in order makes what torch's operations make."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pipeload.formats.codes import repack
from pipeload.formats.codes.coded_weight import Codes, Lay, Words, ZeroCodes, moved_up
from pipeload.formats.codes.mlx import Mlx
from pipeload.formats.codes.registry import codes_format
from pipeload.formats.integers.order import BY_ROWS, ORDERS, pack
from tests.support.packers import WAYS, Way, entries_of, mlx, random_codes

SHAPES = ((32, 128), (96, 384), (160, 1152), (1056, 256))
"""Less than a tile, whole ones, and what is left, both ways."""


def codes_of(name: str, shape: tuple[int, int]) -> tuple[Codes, torch.Tensor, int]:
    """Codes of a random weight, what they are for our kernels, and in how many bits."""
    way = WAYS[name]
    packed = random_codes(shape, way, torch.Generator().manual_seed(3), torch.float16)
    tensors = way.pack("x.", packed)
    settings = {"quant_method": "mlx", **way.settings}
    form = codes_format(settings)
    assert form is not None
    (weight,) = form.find(settings, entries_of(tensors))
    codes = weight.decode({key: tensors[entry.name] for key, entry in weight.parts.items()})
    wanted = packed.codes + moved_up(way.bits)
    columns = None if codes.columns is None else codes.columns.long()
    return codes, wanted if columns is None else wanted[:, columns], weight.bits


def empty(shape: tuple[int, int], bits: int) -> torch.Tensor:
    if bits == 8:
        return torch.empty(shape, dtype=torch.int8)
    return torch.empty((shape[0], shape[1] // 2), dtype=torch.uint8)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", WAYS)
def test_every_code_is_in_its_place(
    name: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled, where there is a compiler, and without one."""
    codes, wanted, bits = codes_of(name, shape)
    packed = pack(wanted, BY_ROWS) if bits == 4 else (wanted ^ 128).view(torch.int8)
    for uncompiled in (False, True):
        if uncompiled:
            monkeypatch.setattr(repack, "compiled", lambda: None)
        made = empty(shape, bits)
        repack.repack(codes, bits, BY_ROWS, made)
        assert torch.equal(made, packed)


@pytest.mark.parametrize("bits", [2, 3])
def test_few_bits_along_rows(bits: int) -> None:
    """As MLX stores them, which alone has fewer than 4 bits so."""
    way = Way({"bits": bits, "group_size": 64}, partial(mlx, bits=bits), bits=bits)
    packed = random_codes((96, 384), way, torch.Generator().manual_seed(3), torch.float16)
    tensors = way.pack("x.", packed)
    (weight,) = Mlx("mlx").find(way.settings, entries_of(tensors))
    codes = weight.decode({key: tensors[entry.name] for key, entry in weight.parts.items()})
    assert codes.stored is not None
    made = empty((96, 384), 4)
    repack.repack(codes, 4, BY_ROWS, made)
    assert torch.equal(made, pack(packed.codes + moved_up(bits), BY_ROWS))


@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_the_kernels_of_torch(order: str) -> None:
    """For processors that our own kernel does not run on."""
    codes, wanted, bits = codes_of("gptq", (128, 128))
    made = empty((128, 128), bits)
    repack.repack(codes, bits, order, made)
    assert torch.equal(made, pack(wanted, order))


def test_there_is_a_compiler_to_test_with() -> None:
    """Otherwise the first test shows half of what it says."""
    if repack.compiled() is None:
        pytest.skip("no C compiler")
    assert hasattr(repack.compiled(), "across")


def test_floats_are_those_of_the_grid() -> None:
    """Each rounded once, in the order of the inputs."""
    codes, _, _ = codes_of("gptq, desc_act", (48, 256))
    made = torch.empty((48, 256), dtype=torch.bfloat16)
    repack.fill_floats(codes, made)
    numbers = codes.grid.numbers(codes.rows(0, 48), 0)
    assert codes.columns is not None
    assert torch.equal(made[:, codes.columns.long()], numbers.to(torch.bfloat16))


def test_words_need_not_be_contiguous() -> None:
    """A part of a larger tensor is copied first."""
    words = torch.randint(-(2**31), 2**31, (16, 64), dtype=torch.int32)[:, ::2]
    one = torch.ones((1, 32))
    codes = Codes(
        lambda _first, _last: words, ZeroCodes(one, one, 8), None, Words(Lay.DOWN, words, 4)
    )
    made, again = empty((32, 128), 4), empty((32, 128), 4)
    repack.repack(codes, 4, BY_ROWS, made)
    contiguous = codes._replace(stored=Words(Lay.DOWN, words.contiguous(), 4))
    repack.repack(contiguous, 4, BY_ROWS, again)
    assert torch.equal(made, again)
