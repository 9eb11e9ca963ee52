"""Integers of other programs: which codes and zeros their words hold, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pipeload.errors import CheckpointError, UnsupportedModelError
from pipeload.formats.codes.coded_weight import Grid, columns_by_group, held_in, moved_up
from pipeload.formats.codes.registry import CODES, codes_format
from pipeload.formats.form_names import DECODED
from tests.support.packers import (
    WAYS,
    Packed,
    aqlm,
    awq,
    digest,
    entries_of,
    gptq,
    gptq_p,
    gptq_v2,
    hqq,
    known_codes,
    mlx,
    random_codes,
    sawtooth,
)

if TYPE_CHECKING:
    from pipeload.formats.codes.coded_weight import CodedWeight, Codes

# By gptqmodel 7.7.0, of `known_codes`: `python tests/tools/original_packers.py` prints them.
ORIGINAL = {
    "gptq": {
        "qweight": "9750c69246a7dc08",
        "qzeros": "5ef0cb5429d9b66c",
        "scales": "7eace468cc589256",
        "g_idx": "fe5ef84623360b7b",
    },
    "gptq_v2": {
        "qweight": "9750c69246a7dc08",
        "qzeros": "25db7e75dbf4dfff",
        "scales": "7eace468cc589256",
        "g_idx": "8250eff897e95f9f",
    },
    "awq": {
        "qweight": "e966f0e37be5968a",
        "qzeros": "b99bcc898d6351a6",
        "scales": "7eace468cc589256",
    },
}

# By what gptqmodel 7.7.0 packs with (`pack_original`), zeros as they are: qweight and qzeros.
FEW_AND_PLANES = {
    ("gptq_v2", 2): ("fb5fce9f53b037c6", "ee58b9e8d83e1a2b"),
    ("gptq_v2", 3): ("2e8e4de18908f010", "7f4d4841e77645cb"),
    ("gptq_p", 3): ("0e526329897a00ac", "e7716b81c5a08b29"),
    ("gptq_p", 5): ("f7230de1a60c5290", "7732f17040e86d61"),
    ("gptq_p", 6): ("d3a83d71e06ba4ab", "0f2037938497d2f1"),
    ("gptq_p", 7): ("39378047dadc8e91", "501b2204c6942082"),
}


def intx(dtype: str, packing: str) -> dict[str, Any]:
    """What torchao says of integers of any bits."""
    data = {"weight_dtype": {"_data": dtype}, "intx_packing_format": {"_data": packing}}
    return {"quant_type": {"default": {"_type": "IntxWeightOnlyConfig", "_data": data}}}


# By torchao 0.18: codes of `sawtooth`, in bits, with so many groups.
# `python -m tests.tools.original_checkpoints` prints them, and that of hqq 0.2.8 below.
TORCHAO = {"torchao, int8": ("e35d5dcfa93c0343", 127.5), "torchao, int4": ("cdf7ae5def257239", 7.5)}
HQQ = {
    1: "d172749f5fb057af",
    2: "86126376be477ed1",
    3: "3b203213a0e2f172",
    4: "ad410587738b3bb4",
    8: "9532f321fcbfe108",
}
# By mlx 0.32: the first row of `sawtooth`, the scale, and what code 0 stands for.
MLX = {
    2: ("b6dcb6df c72db72d db6dcb6d dcb2db72", -0.390625),
    3: ("f078ceaf 50f19d5e a1e33abd 7bc6633a f543c675 ea878cea", -0.1953125),
    5: (
        "8b1ea29f 3faec276 b724870f 66979550 a01981bf 9da2c7a9 c453ebb8 582dc921 8fd9e7e5 ea6a0660",
        -0.048828125,
    ),
    6: (
        "a2e91a3f 5b447332 8383e6f9 eb09ac48 ed8d93c4 a4062f19 342e3e91 7fd6b447 c898783e 7d52c0da "
        "01dfd8d9 ed2a8163",
        -0.0244140625,
    ),
}
MLX_OFFSET = 0.78125


# By aqlm 1.1.7: `python -m tests.tools.original_checkpoints`.
AQLM = "68bd9152ac3fabad"


def find(settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> list[CodedWeight]:
    """What a format finds."""
    named = settings if "quant_method" in settings else {"quant_method": "mlx", **settings}
    form = codes_format(named)
    assert form is not None
    return form.find(named, entries_of(tensors))


def decoded(settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Codes:
    """The codes of the one weight."""
    (weight,) = find(settings, tensors)
    return weight.decode({key: tensors[entry.name] for key, entry in weight.parts.items()})


@pytest.mark.parametrize("name", ORIGINAL)
def test_the_packers_are_the_makers(name: str) -> None:
    """What the tests pack with makes the bytes that gptqmodel makes."""
    pack = {"gptq": gptq, "gptq_v2": gptq_v2, "awq": awq}[name]
    tensors = pack("", known_codes(shuffled=name == "gptq_v2"))
    assert {key: digest(tensor) for key, tensor in tensors.items()} == ORIGINAL[name]


@pytest.mark.parametrize(("name", "bits"), FEW_AND_PLANES)
def test_the_packers_of_other_bits(name: str, bits: int) -> None:
    """So do they of other bits; and those are what they stand for."""
    packed, pack = known_codes(bits), {"gptq_v2": gptq_v2, "gptq_p": gptq_p}[name]
    tensors = pack("w.", packed, bits)
    found = tuple(digest(tensors[f"w.{key}"]) for key in ("qweight", "qzeros"))
    assert found == FEW_AND_PLANES[name, bits]
    codes = decoded({"quant_method": "gptq", "checkpoint_format": name, "bits": bits}, tensors)
    assert torch.equal(codes.grid.numbers(codes.rows(8, 64), 8), packed.numbers[8:])


@pytest.mark.parametrize("bits", HQQ)
def test_the_packer_is_hqq(bits: int) -> None:
    """So does it what hqq makes; of few bits as well, which are codes of 4 bits here."""
    packed = known_codes()
    packed = packed._replace(codes=packed.codes & (1 << bits) - 1)
    tensors = hqq("w.", packed, bits)
    assert digest(tensors["w.W_q"]) == HQQ[bits]
    (weight,) = find(WAYS["hqq"].settings, tensors)
    assert weight.bits == (4 if bits <= 4 else 8)
    codes = decoded(WAYS["hqq"].settings, tensors)
    for start, stop in ((0, 64), (0, 8), (8, 40), (56, 64)):
        assert torch.equal(codes.rows(start, stop), packed.codes[start:stop] + moved_up(bits))
    assert torch.equal(codes.grid.numbers(codes.rows(8, 64), 8), packed.numbers[8:])


@pytest.mark.parametrize("bits", MLX)
def test_numbers_of_mlx(bits: int) -> None:
    """What it packs stands for the numbers that it was made of."""
    words, scale = MLX[bits]
    wanted = sawtooth()[:1]
    tensors = {
        "w.weight": torch.tensor([[int(word, 16) for word in words.split()]], dtype=torch.uint32),
        "w.scales": torch.tensor([[scale]]),
        "w.biases": torch.tensor([[MLX_OFFSET]]),
    }
    found = decoded({"bits": bits, "group_size": 64}, tensors)
    codes = ((wanted - MLX_OFFSET) / scale).round().clamp(0, (1 << bits) - 1).to(torch.uint8)
    assert torch.equal(found.rows(0, 1), codes + moved_up(bits))
    numbers = found.grid.numbers(found.rows(0, 1), 0)
    assert bool(((numbers - wanted).abs() <= 1.01 * abs(scale)).all())
    packed = Packed(codes, tensors["w.scales"], torch.zeros(1, 1), torch.zeros(64))
    assert torch.equal(mlx("w.", packed, bits)["w.weight"], tensors["w.weight"])


@pytest.mark.parametrize("name", ["hqq", "mlx"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_numbers_for_kernels(name: str, bits: int) -> None:
    """In bf16, they are as close for few bits as for four, and in fp32 by any default."""
    if name == "mlx" and bits not in MLX:
        pytest.skip("it packs no single bits")
    packed = random_codes((64, 256), WAYS[name], torch.Generator().manual_seed(4), torch.float16)
    middle = torch.full_like(packed.zero, 1 << bits - 1)
    packed = packed._replace(codes=packed.codes & (1 << bits) - 1, zero=middle)
    pack = {"hqq": hqq, "mlx": mlx}[name]
    tensors = pack("w.", packed, bits)
    settings = WAYS["hqq"].settings if name == "hqq" else {"bits": bits, "group_size": 64}
    codes = decoded(settings, tensors)
    assert isinstance(codes.grid, Grid)
    rows = codes.rows(0, 64)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        numbers = codes.grid.numbers(rows, 0)
    finally:
        torch.set_default_dtype(before)
    assert (numbers - packed.numbers).abs().max() < 1e-3 * packed.numbers.abs().max()
    both = codes.grid.scales_and_zeros(torch.bfloat16).float().repeat_interleave(64, 0)
    made = (rows.float() - codes.grid.middle) * both[..., 0].t() + both[..., 1].t()
    error = (made - numbers).square().mean() / numbers.square().mean()
    assert error.sqrt() < 0.003


@pytest.mark.parametrize("name", TORCHAO)
def test_numbers_of_torchao(name: str) -> None:
    """Its codes, which are made here as it makes them, stand for the numbers they were made of."""
    wanted, most = TORCHAO[name]
    way, numbers = WAYS[name], sawtooth()
    grouped = numbers.view(64, -1, way.group or 64)
    scale = grouped.abs().amax(-1) / most
    codes = (grouped / scale[..., None]).round().clamp(-most - 0.5, most - 0.5).view(64, 64)
    tensors = {
        "w._weight_qdata": codes.to(torch.int8),
        "w._weight_scale": scale,
        "w._weight_zero_point": torch.zeros(scale.shape, dtype=torch.int8),
    }
    assert digest(tensors["w._weight_qdata"]) == wanted
    found = decoded(way.settings, tensors)
    error = (found.grid.numbers(found.rows(0, 64), 0) - numbers).abs()
    assert bool((error.view(grouped.shape) <= 0.51 * scale[..., None]).all())


@pytest.mark.parametrize("name", WAYS)
def test_codes(name: str) -> None:
    """Every code, in any range of rows, and the numbers that they stand for."""
    way = WAYS[name]
    generator = torch.Generator().manual_seed(2)
    packed = random_codes((64, 256), way, generator, torch.float16)
    tensors = way.pack("model.one.", packed)
    (weight,) = find(way.settings, tensors)
    bits = held_in(way.bits)
    assert (weight.name, weight.shape, weight.bits) == ("model.one.weight", (64, 256), bits)
    assert weight.groups == len(packed.scale)
    assert weight.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    codes = decoded(way.settings, tensors)
    order = torch.arange(256) if codes.columns is None else codes.columns.long()
    assert (codes.columns is not None) == way.shuffled
    for start, stop in ((0, 64), (0, 8), (8, 40), (56, 64)):
        wanted = packed.codes[start:stop][:, order] + moved_up(way.bits)
        assert torch.equal(codes.rows(start, stop), wanted)
    numbers = codes.grid.numbers(codes.rows(16, 32), 16)
    # An offset was rounded where a zero was not.
    tolerance = 1e-3 if name == "mlx" else 0
    torch.testing.assert_close(numbers, packed.numbers[16:32][:, order], rtol=0, atol=tolerance)


def test_a_zero_that_borrowed() -> None:
    """Version 1 took one from whole words, so a zero of 0 has changed the next."""
    packed = known_codes()._replace(zero=torch.tensor([[0, 5] * 32, [15, 0] * 32]).int())
    codes = decoded(WAYS["gptq"].settings | {"sym": False}, gptq("w.", packed))
    assert torch.equal(codes.grid.numbers(codes.rows(0, 64), 0), packed.numbers)
    # Of 3 bits each lost one by itself.
    packed = packed._replace(zero=packed.zero % 8, codes=packed.codes % 8)
    codes = decoded(WAYS["gptq, 3 bits"].settings, gptq("w.", packed, 3))
    assert torch.equal(codes.grid.numbers(codes.rows(0, 64), 0), packed.numbers)


def test_zeros_as_gptqmodel_rounds_them() -> None:
    """Each factor in the dtype of the product first."""
    packed = known_codes()
    grid = decoded(WAYS["gptq_v2"].settings, gptq_v2("w.", packed)).grid
    assert isinstance(grid, Grid)
    both = grid.scales_and_zeros(torch.bfloat16)
    scale = packed.scale.to(torch.bfloat16)
    assert torch.equal(both[..., 0], scale)
    assert torch.equal(both[..., 1], (8 - packed.zero.to(torch.bfloat16)) * scale)


def test_the_order_of_columns() -> None:
    """Groups side by side, and columns of one as they came."""
    assert columns_by_group("w", torch.tensor([0, 0, 1, 1]), 2) is None
    found = columns_by_group("w", torch.tensor([1, 0, 1, 0]), 2)
    assert found is not None
    assert found.tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize(
    ("group_of", "groups"), [([0, 0, 0, 1], 2), ([0, 2, 1, 1], 2), ([-1, 0, 1, 1], 2), ([0] * 3, 2)]
)
def test_ragged_groups(group_of: list[int], groups: int) -> None:
    """They are refused: no kernel takes them."""
    with pytest.raises(CheckpointError, match="'w'"):
        columns_by_group("w", torch.tensor(group_of), groups)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gptq", {"bits": 5}, "its codes have 5 bits, and 2, 3, 4, 8 are known"),
        ("gptq_p, 6 bits", {"bits": 1}, "its codes have 1 bits, and 2, 3, 4, 5, 6, 7, 8 are"),
        ("auto-round as awq", {"bits": 3}, "its codes have 3 bits, and 4 are known"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ("gptq", {"pack_dtype": "int16"}, "words of 'int16'"),
        ("awq", {"version": "gemv"}, "version 'gemv'"),
        ("awq", {"bits": 8}, "8 bits, not 4"),
        ("auto-round", {"packing_format": "nvfp4"}, "packing_format 'nvfp4'"),
        ("compressed-tensors", {"format": "float-quantized"}, "format 'float-quantized'"),
        ("compressed-tensors", {"config_groups": {}}, "bits"),
        ("compressed-tensors", {"sparsity_config": {"format": "sparse"}}, "sparse"),
        ("mlx", {"mode": "mxfp4"}, "mode 'mxfp4'"),
        ("torchao, int8", {"quant_type": "int8_weight_only"}, "quant_type 'int8_weight_only'"),
        ("torchao, int8", {"quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}, "Int4W"),
        ("torchao, int8", intx("int4", "OPAQUE_ATEN"), "packing format 'OPAQUE_ATEN'"),
        ("torchao, int8", intx("int3", "UNPACKED_TO_INT8"), "its codes are 'int3'"),
        ("mlx", {"w": {"bits": 7, "group_size": 64}}, "its codes have 7 bits"),
        ("gptq", {"dynamic": {"w": {"bits": 8}}, "bits": 5}, "its codes have 5 bits"),
    ],
)
def test_settings_that_are_not_understood(name: str, change: dict[str, Any], words: str) -> None:
    """Each is refused by its name, before anything is read."""
    way = WAYS[name]
    tensors = way.pack("w.", known_codes())
    with pytest.raises(UnsupportedModelError, match=words):
        find(way.settings | change, tensors)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gptq", {"dynamic": {"+:.*down": {"bits": 8, "sym": False}, "-:.*up": {}}}),
        ("auto-round", {"extra_config": {"down": {"bits": 8}}}),
    ],
)
def test_modules_with_settings_of_their_own(name: str, change: dict[str, Any]) -> None:
    """Of other bits: the zeros that are stored tell; and none is said to be symmetric."""
    way = WAYS[name]
    pack = gptq if name == "gptq" else gptq_v2
    four, eight = known_codes(), known_codes(8)
    tensors = pack("one.", four) | pack("down.", eight, 8)
    found = {weight.name: weight for weight in find(way.settings | change, tensors)}
    assert {weight.bits for weight in found.values()} == {4, 8}
    for weight, packed in ((found["one.weight"], four), (found["down.weight"], eight)):
        codes = weight.decode({key: tensors[entry.name] for key, entry in weight.parts.items()})
        assert torch.equal(codes.grid.numbers(codes.rows(0, 64), 0), packed.numbers)
    with pytest.raises(CheckpointError, match=r"'down\.qzeros'"):
        find(way.settings, tensors)


def test_sparsity_that_is_none() -> None:
    """compressed-tensors used to say so of every checkpoint."""
    way = WAYS["compressed-tensors"]
    tensors = way.pack("w.", known_codes())
    assert find(way.settings | {"sparsity_config": {"format": "dense"}}, tensors)


def test_experts_that_are_stacked() -> None:
    """As MLX stores them: they are refused for what they are."""
    way = WAYS["mlx"]
    tensors = {name: one[None] for name, one in way.pack("w.", known_codes()).items()}
    with pytest.raises(UnsupportedModelError, match=r"'w\.weight' is several stacked weights"):
        find(way.settings, tensors)


def test_a_scheme_of_inputs_that_were_measured() -> None:
    """Inputs that are quantised by stored scales would be left as they are: refused."""
    settings = WAYS["compressed-tensors"].settings
    group = settings["config_groups"]["group_0"] | {"input_activations": {"dynamic": False}}
    with pytest.raises(UnsupportedModelError, match="scales that were stored"):
        find(settings | {"config_groups": {"group_0": group}}, {})


def test_a_strategy_that_is_not_by_rows() -> None:
    """Of compressed-tensors: blocks of rows and columns."""
    settings = WAYS["compressed-tensors"].settings
    group = {"weights": {"num_bits": 4, "type": "int", "strategy": "block"}}
    with pytest.raises(UnsupportedModelError, match="strategy 'block'"):
        find(settings | {"config_groups": {"group_0": group}}, {})


def test_groups_of_no_whole_columns() -> None:
    """Three scales for 64 columns."""
    tensors = WAYS["awq"].pack("w.", known_codes())
    tensors["w.scales"] = torch.ones(3, 64, dtype=torch.float16)
    with pytest.raises(
        CheckpointError, match=r"64 columns of 'w\.weight' are no whole number of 3"
    ):
        find(WAYS["awq"].settings, tensors)


def test_codes_that_were_cut() -> None:
    """Three bits fill three words of four bytes, and no two."""
    tensors = {
        "w.weight": torch.zeros((8, 16), dtype=torch.uint32),
        "w.scales": torch.ones((8, 2)),
        "w.biases": torch.ones((8, 2)),
    }
    with pytest.raises(CheckpointError, match=r"16 words of a row of 'w\.weight' are no whole"):
        find({"bits": 3, "group_size": 64}, tensors)


def test_words_of_gptq_that_were_cut() -> None:
    """Of 3 bits, 32 codes fill three words, along columns and rows."""
    tensors = WAYS["gptq, 3 bits"].pack("w.", known_codes())
    tensors["w.qweight"] = tensors["w.qweight"][:5]
    with pytest.raises(CheckpointError, match=r"5 words of 64 rows of 'w\.qweight' are no whole"):
        find(WAYS["gptq, 3 bits"].settings, tensors)


def test_a_version_that_cannot_be() -> None:
    """Said to be symmetric, and decoded by the other version's rule: its zeros show it."""
    packed = known_codes()._replace(zero=torch.full((2, 64), 8, dtype=torch.int32))
    settings = WAYS["gptq"].settings | {"sym": True}
    decoded(settings, gptq("w.", packed))
    with pytest.raises(CheckpointError, match="another version"):
        decoded(settings, gptq_v2("w.", packed))


@pytest.mark.parametrize("name", WAYS)
def test_tensors_that_do_not_fit(name: str) -> None:
    """One that is missing, of another length or dtype is named, with what was wanted."""
    way = WAYS[name]
    tensors = way.pack("w.", random_codes((64, 256), way, torch.Generator(), torch.float16))
    known_by = ("qweight", "weight_packed", "scales", "w.weight_scale", "W_q", "_weight_qdata")
    for key in tensors:
        other = {**tensors, key: torch.zeros(3, 3, 3, dtype=torch.float64)}
        with pytest.raises(CheckpointError, match=f"'{key}'.*wanted"):
            find(way.settings, other)
        if not key.endswith((*known_by, "g_idx", "zero_point")) and key != "w.weight":
            other.pop(key)
            with pytest.raises(CheckpointError, match=f"no tensor '{key}', wanted"):
                find(way.settings, other)


def test_what_config_says_and_what_is_stored() -> None:
    """compressed-tensors says the shape once more: it has to be that of the codes."""
    tensors = WAYS["compressed-tensors"].pack("w.", known_codes())
    tensors["w.weight_shape"] = torch.tensor([64, 60])
    with pytest.raises(CheckpointError, match="said to be"):
        decoded(WAYS["compressed-tensors"].settings, tensors)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("axis", 0, "'w.weight' has axis 0, not 1"),
        ("quant_zero", 1, "has quant_zero 1"),
        ("view_as_float", 1, "has view_as_float 1"),
        ("packing", [*b"5bit_u8"], "is packed as '5bit_u8'"),
    ],
)
def test_what_hqq_says_beside_a_weight(key: str, value: Any, words: str) -> None:
    """Groups along columns, and other packings, are refused by name."""
    tensors = WAYS["hqq"].pack("w.", known_codes())
    tensors[f"w.{key}"] = torch.tensor(value, dtype=tensors[f"w.{key}"].dtype)
    with pytest.raises(UnsupportedModelError, match=words):
        find(WAYS["hqq"].settings, tensors)


def test_a_shape_that_hqq_does_not_hold() -> None:
    """As many codes as it says, or it is no whole file."""
    tensors = WAYS["hqq"].pack("w.", known_codes())
    tensors["w.shape"] = torch.tensor([64, 60])
    with pytest.raises(CheckpointError, match=r"of \[64, 60\], and its codes are 128 groups of 32"):
        find(WAYS["hqq"].settings, tensors)


def test_numbers_of_aqlm() -> None:
    """Sums of entries, in any range of rows: those that aqlm finds."""
    tensors, numbers = aqlm("w.", torch.empty(64, 64))
    assert digest(numbers) == AQLM
    (weight,) = find({"quant_method": "aqlm"}, tensors)
    assert (weight.name, weight.shape) == ("w.weight", (64, 64))
    found = decoded({"quant_method": "aqlm"}, tensors)
    for start, stop in ((0, 64), (8, 24), (56, 64)):
        made = found.grid.numbers(found.rows(start, stop), start)
        assert torch.equal(made, numbers[start:stop])
    # Entries of several rows.
    tall = {"w.codes": tensors["w.codes"][:16], "w.scales": tensors["w.scales"][:16]}
    tall["w.codebooks"] = tensors["w.codebooks"].view(2, 128, 4, 4)
    found = decoded({"quant_method": "aqlm"}, tall)
    rows, entries = found.rows(8, 16), tall["w.codebooks"].float()
    wanted = (entries[0, rows[0, 3, 0] & 127] + entries[1, rows[0, 3, 1] & 127]) * 1.5
    assert torch.equal(found.grid.numbers(rows, 8)[:4, 12:16], wanted)
    tall["w.codebooks"] = tensors["w.codebooks"][:, :100]
    with pytest.raises(CheckpointError, match=r"'w\.weight' are \[2, 100, 1, 8\], wanted a power"):
        find({"quant_method": "aqlm"}, tall)


def test_codes_of_torchao_that_are_too_large() -> None:
    """They are stored in bytes, and have to be of the bits that the settings say."""
    way = WAYS["torchao, int4"]
    tensors = way.pack("w.", known_codes())
    tensors["w._weight_qdata"][3, 3] = 8
    with pytest.raises(CheckpointError, match="other values than -8 to 7"):
        decoded(way.settings, tensors).rows(0, 64)


def test_names() -> None:
    """The registry and the list of names that checkpoints may say are one."""
    assert tuple(one.method for one in CODES) == DECODED
    assert codes_format({"quant_method": "fp8"}) is None
