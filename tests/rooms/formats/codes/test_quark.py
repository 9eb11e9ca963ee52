"""Quark's integers and floats of few bits: what they stand for, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pipeload.errors import CheckpointError, UnsupportedModelError
from pipeload.formats.codes.awq import Awq
from pipeload.formats.codes.quark import Quark
from tests.support.packers import (
    Packed,
    awq,
    digest,
    entries_of,
    known_codes,
    quark,
    quark_settings,
)

if TYPE_CHECKING:
    from pipeload.formats.codes.coded_weight import CodedWeight, Codes

# By amd-quark 0.13, of `known_codes`: words and zeros. `python -m tests.tools.quark_checkpoints`
# prints them, and that of the floats below.
ORIGINAL = {
    ("int4", "per_group", "reorder"): ("540bcd3ae0a33330", "5d68021b89c4fdef"),
    ("uint4", "per_group", "order"): ("5cc150836b276835", "25db7e75dbf4dfff"),
    ("int4", "per_channel", "reorder"): ("d900d5f558268758", "b68214d6abb67e7c"),
    ("uint4", "per_channel", "order"): ("432fce969758f593", "e4298f7886b642d3"),
    ("int8", "per_group", "reorder"): ("3ff0680f2d0064fa", "8660ce4d65e3727f"),
    ("uint8", "per_channel", "reorder"): ("071f816ce443f9cd", "1a0e0ecf84382961"),
}
FP4 = "508655a0696bfed1"
HALVES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def find(settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> CodedWeight:
    """The one weight."""
    (weight,) = Quark().find(settings, entries_of(tensors))
    return weight


def decoded(weight: CodedWeight, tensors: dict[str, torch.Tensor]) -> Codes:
    """Its codes."""
    return weight.decode({key: tensors[entry.name] for key, entry in weight.parts.items()})


def assert_numbers(
    settings: dict[str, Any], tensors: dict[str, torch.Tensor], wanted: torch.Tensor
) -> CodedWeight:
    """Those that are found, in any range of rows."""
    weight = find(settings, tensors)
    assert (weight.name, weight.shape) == ("a.w.weight", tuple(wanted.shape))
    codes = decoded(weight, tensors)
    for start, stop in ((0, 64), (8, 24), (56, 64)):
        numbers = codes.grid.numbers(codes.rows(start, stop), start)
        assert torch.equal(numbers, wanted[start:stop])
    return weight


def known(dtype: str, scheme: str) -> Packed:
    """Known codes, with the one scale of each row, or of all, where there is one."""
    packed = known_codes(int(dtype[-1]))
    if scheme == "per_group":
        return packed
    scale, zero = packed.scale[:1], packed.zero[:1]
    if scheme == "per_tensor":
        scale, zero = (one[:, 5:6].expand(1, 64) for one in (scale, zero))
    return Packed(packed.codes, scale, zero, torch.zeros(64))


@pytest.mark.parametrize(("dtype", "scheme", "order"), ORIGINAL)
def test_the_packer_is_quark(dtype: str, scheme: str, order: str) -> None:
    """What the tests pack with makes the bytes that Quark makes; and the numbers are its own."""
    packed = known(dtype, scheme)
    tensors = quark("a.w.", packed, dtype, scheme, order)
    made = tuple(digest(tensors[f"a.w.{key}"]) for key in ("weight", "weight_zero_point"))
    assert made == ORIGINAL[dtype, scheme, order]
    weight = assert_numbers(quark_settings(dtype, scheme, order), tensors, packed.numbers)
    assert (weight.bits, weight.groups) == (int(dtype[-1]), len(packed.scale))


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("listed", [False, True])
def test_one_scale_for_all(dtype: str, listed: bool) -> None:
    """It is each row's; early versions stored a list of one."""
    packed = known(dtype, "per_tensor")
    tensors = quark("a.w.", packed, dtype, "per_tensor")
    if listed:
        tensors |= {f"a.w.{k}": tensors[f"a.w.{k}"][None] for k in ("weight_scale",)}
    weight = assert_numbers(quark_settings(dtype, "per_tensor"), tensors, packed.numbers)
    assert (weight.bits, weight.groups) == (8, 1)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scheme", ["per_tensor", "per_channel"])
def test_floats_of_8_bits(dtype: torch.dtype, scheme: str) -> None:
    """Each times its scale; no kernel takes them."""
    weight = (torch.arange(64 * 32).view(64, 32) * 37 % 101 - 50).to(dtype)
    scale = torch.tensor(0.375) if scheme == "per_tensor" else torch.arange(1, 65) / 64
    tensors = {"a.w.weight": weight, "a.w.weight_scale": scale}
    name = "fp8_e4m3" if dtype == torch.float8_e4m3fn else "fp8_e5m2"
    wanted = weight.float() * (scale if scheme == "per_tensor" else scale[:, None])
    assert assert_numbers(quark_settings(name, scheme), tensors, wanted).bits == 0


@pytest.mark.parametrize("form", ["e8m0", None])
def test_floats_of_4_bits(form: str | None) -> None:
    """MXFP4, with powers of 2 for scales, and others; packed as Quark packs them."""
    places = torch.arange(64 * 64).view(64, 64) * 7 % 16
    packed = (places[:, ::2] | places[:, 1::2] << 4).to(torch.uint8)
    assert digest(packed) == FP4
    exponents = (torch.arange(64)[:, None] + torch.arange(2) * 5) % 9 + 120
    scale = exponents.to(torch.uint8) if form else exponents.half() / 128
    scales = torch.exp2(exponents.float() - 127) if form else scale.float()
    settings = quark_settings("fp4", scheme="per_group", scale_format=form, symmetric=None)
    wanted = torch.tensor(HALVES)[places] * scales.repeat_interleave(32, 1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        weight = find(settings, tensors := {"a.w.weight": packed, "a.w.weight_scale": scale})
        codes = decoded(weight, tensors)
        assert torch.equal(codes.grid.numbers(codes.rows(8, 64), 8), wanted[8:])
    finally:
        torch.set_default_dtype(before)
    assert assert_numbers(settings, tensors, wanted).groups == 2


def test_modules_with_settings_of_their_own() -> None:
    """The first pattern that matches counts, then the kind of module, then what is said of all."""
    one, other = known("uint4", "per_group"), known("int8", "per_channel")
    tensors = quark("a.w.", one) | quark("b.down.", other, "int8", "per_channel")
    told = quark_settings("int8", "per_channel")["global_quant_config"]
    settings = quark_settings("uint4") | {"layer_quant_config": {"*.down": told, "b.*": {}}}
    by_kind = settings | {
        "global_quant_config": {"weight": None},
        "layer_type_quant_config": {"Linear": settings["global_quant_config"]},
    }
    for each in (settings, by_kind):
        found = Quark().find(each, entries_of(tensors))
        assert {weight.name: weight.bits for weight in found} == {
            "a.w.weight": 4,
            "b.down.weight": 8,
        }
        for weight, packed in zip(found, (one, other), strict=True):
            codes = decoded(weight, tensors)
            assert torch.equal(codes.grid.numbers(codes.rows(0, 64), 0), packed.numbers)


DYNAMIC = {"dtype": "int8", "qscheme": "per_tensor", "is_dynamic": True}
MEASURED = DYNAMIC | {"is_dynamic": False}
LAYER = quark_settings("uint4")["global_quant_config"]
WEIGHT = LAYER["weight"]


def of_all(**more: Any) -> dict[str, Any]:
    """What is said of all modules, changed."""
    return {"global_quant_config": LAYER | more}


def of_weights(**more: Any) -> dict[str, Any]:
    """The same of their weights."""
    return of_all(weight=WEIGHT | more)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"export": None}, "do not say how it was exported"),
        ({"export": {"weight_format": "fake_quantized"}}, "weight_format 'fake_quantized'"),
        (
            {"export": {"weight_format": "real_quantized", "pack_method": "other"}},
            "pack_method 'other' is unknown",
        ),
        ({"layer_type_quant_config": {"Embedding": LAYER}}, "settings of 'Embedding' modules"),
        (of_all(input_tensors=MEASURED), "inputs are quantised by scales that were stored"),
        (of_all(output_tensors=[DYNAMIC, MEASURED]), "outputs are quantised by scales that"),
        (
            {"kv_cache_quant_config": {"*k_proj": {"output_tensors": MEASURED}}},
            "outputs are quantised by scales that",
        ),
        ({"layer_quant_config": {"*k": {"input_tensors": MEASURED}}}, "inputs are quantised by"),
        ({"softmax_quant_spec": MEASURED}, "products of softmax are quantised by scales"),
        (of_all(bias=WEIGHT), "biases are quantised"),
        ({"algo_config": [{"name": "rotation", "r1": True, "r4": True}]}, r"rotated .* \(r4\)"),
        ({"algo_config": {"name": "quarot", "online_had": True}}, r"rotated .* \(online_had\)"),
        (of_all(weight=[WEIGHT, WEIGHT]), "quantised in several steps"),
        (of_all(weight=None), "'?a.w.weight has scales, and its settings say nothing of it"),
        (of_weights(dtype="int3"), "weights of 'int3', 'per_group' are unknown"),
        (of_weights(dtype="mx"), "weights of 'mx', 'per_group' are unknown"),
        (of_weights(qscheme="per_tensor"), "weights of 'uint4', 'per_tensor' are unknown"),
        (of_weights(dtype="fp8_e4m3", qscheme="per_block"), "'fp8_e4m3', 'per_block' are unknown"),
        (of_weights(ch_axis=0), "scales 'per_group' along the axis 0 are unknown"),
        (of_weights(scale_format="e5m3"), "scales of 'e5m3' are unknown for 'uint4'"),
        (of_weights(scale_format="e8m0"), "scales of 'e8m0' are unknown for 'uint4'"),
        (of_weights(zero_point_type="float32"), "zeros of 'float32'"),
        (of_weights(is_dynamic=True), "scales that are not stored, are unknown"),
    ],
)
def test_settings_that_are_not_understood(change: dict[str, Any], words: str) -> None:
    """Each is refused by its name."""
    tensors = entries_of(quark("a.w.", known_codes()))
    with pytest.raises(UnsupportedModelError, match=words):
        Quark().find(quark_settings("uint4") | change, tensors)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"layer_quant_config": None, "layer_type_quant_config": None, "algo_config": None},
        {"algo_config": [{"name": "awq"}, {"name": "rotation", "r1": True, "r3": False}]},
        of_all(input_tensors=DYNAMIC, output_tensors=[DYNAMIC]),
        of_weights(zero_point_type=None, scale_format="float32"),
    ],
)
def test_settings_that_change_nothing(change: dict[str, Any]) -> None:
    """Inputs whose scales are made of each are left as they are, for one."""
    packed = known_codes()
    assert_numbers(quark_settings("uint4") | change, quark("a.w.", packed), packed.numbers)


@pytest.mark.parametrize(
    ("dtype", "scheme"),
    [
        ("uint4", "per_group"),
        ("int4", "per_channel"),
        ("int8", "per_tensor"),
        ("int8", "per_group"),
    ],
)
def test_tensors_that_do_not_fit(dtype: str, scheme: str) -> None:
    """One that is missing, of another length or dtype is named, with what was wanted."""
    tensors = quark("a.w.", known(dtype, scheme), dtype, scheme)
    for key in tensors:
        for wrong in (torch.zeros(3, 3, 3), None):
            if wrong is None and key != "a.w.weight_zero_point":
                continue
            other = {name: one for name, one in tensors.items() if name != key}
            other |= {} if wrong is None else {key: wrong}
            with pytest.raises(CheckpointError, match=f"'{key}'.*wanted"):
                find(quark_settings(dtype, scheme), other)


def test_groups_of_no_whole_columns() -> None:
    """Three scales for 64 columns."""
    settings = quark_settings("fp4", scale_format="e8m0")
    tensors = {
        "a.w.weight": torch.zeros((8, 32), dtype=torch.uint8),
        "a.w.weight_scale": torch.zeros((8, 3), dtype=torch.uint8),
    }
    with pytest.raises(CheckpointError, match=r"64 columns of 'a\.w\.weight' are no whole number"):
        find(settings, tensors)


@pytest.mark.parametrize("order", ["order", "reorder"])
@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_what_it_calls_awq(order: str, dtype: str) -> None:
    """Its own order of words, and values where zeros are none: other codes than AWQ's."""
    packed = known_codes()
    stored = quark("w.", packed, dtype, order=order)
    names = ("qweight", "scales", "qzeros")
    tensors = {f"w.{name}": one for name, one in zip(names, stored.values(), strict=True)}
    settings = {"quant_method": "awq", "bits": 4, "version": "gemm", "pack_method": order}
    settings["zero_point"] = dtype == "uint4"
    (weight,) = Awq().find(settings, entries_of(tensors))
    codes = decoded(weight, tensors)
    assert torch.equal(codes.rows(8, 64), packed.codes[8:])
    assert torch.equal(codes.grid.numbers(codes.rows(8, 64), 8), packed.numbers[8:])
    if (order, dtype) == ("reorder", "uint4"):
        for name, one in awq("w.", packed).items():
            assert torch.equal(one, tensors[name])
    with pytest.raises(UnsupportedModelError, match="pack_method 'other' is unknown"):
        Awq().find(settings | {"pack_method": "other"}, entries_of(tensors))
