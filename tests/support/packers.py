"""Packs random models as other programs store 4-bit and 8-bit integers."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from pipeload.checkpoint.headers import TensorEntry
from pipeload.weights.arena import DTYPE_CODES

if TYPE_CHECKING:
    from collections.abc import Callable

    Packer = Callable[[torch.Tensor, int], torch.Tensor]

_AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Whose code each nibble of a word is, by the makers of the format."""
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


class Packed(NamedTuple):
    """One weight as codes, as they are meant: w = (code - zero) * scale."""

    codes: torch.Tensor
    """uint8 of [rows, columns]."""
    scale: torch.Tensor
    """[groups, rows]."""
    zero: torch.Tensor
    """int32 of [groups, rows]."""
    group_of: torch.Tensor
    """The group of each column."""

    @property
    def numbers(self) -> torch.Tensor:
        """fp32 of [rows, columns]."""
        of = self.group_of.long()
        scale, zero = self.scale.float()[of].t(), self.zero.float()[of].t()
        return (self.codes.float() - zero) * scale


class Way(NamedTuple):
    """How a model is packed."""

    settings: dict[str, Any]
    """`quantization_config`."""
    pack: Callable[[str, Packed], dict[str, torch.Tensor]]
    """Tensors of a weight; its stem, dot and all."""
    bits: int = 4
    group: int = 64
    """0 is one scale a row."""
    symmetric: bool = False
    shuffled: bool = False
    """Whether columns of a group are anywhere."""


def words(codes: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """int32 of [..., n * bits / 32] of codes of [..., n]: one behind the other, low bits first."""
    single = codes[..., None] >> torch.arange(bits) & 1
    spread = single.flatten(-2).long().unflatten(-1, (-1, 32)) << torch.arange(32)
    made: torch.Tensor = spread.sum(-1).to(torch.int32)
    return made


def planes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The same in gptqmodel's planes: of each 32 codes the low bits, then those above."""
    blocks, made, place = codes.unflatten(-1, (-1, 32)), [], 0
    for width in {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}.get(bits, (bits,)):
        made.append(words(blocks >> place & (1 << width) - 1, width))
        place += width
    return torch.cat(made, -1).flatten(-2)


def gptq(
    stem: str, packed: Packed, bits: int = 4, *, less: int = 1, by: Packer = words
) -> dict[str, torch.Tensor]:
    """Version 1, which stores zeros with one less."""
    zero = packed.zero
    if bits in {2, 4, 8}:
        # From all of a word at once, as gptqmodel does: a zero of 0 borrows from the next.
        stored = by(zero, bits) - less * words(torch.ones(32 // bits, dtype=torch.int32), bits)
    else:
        stored = by(zero - less & (1 << bits) - 1, bits)
    return {
        f"{stem}qweight": by(packed.codes, bits).t().contiguous(),
        f"{stem}qzeros": stored,
        f"{stem}scales": packed.scale,
        f"{stem}g_idx": packed.group_of.to(torch.int32),
    }


def gptq_v2(stem: str, packed: Packed, bits: int = 4) -> dict[str, torch.Tensor]:
    """Zeros as they are."""
    return gptq(stem, packed, bits, less=0)


def gptq_p(stem: str, packed: Packed, bits: int = 4) -> dict[str, torch.Tensor]:
    """The same, in planes."""
    return gptq(stem, packed, bits, less=0, by=planes)


def awq(stem: str, packed: Packed) -> dict[str, torch.Tensor]:
    """Of the version "gemm"."""

    def interleaved(codes: torch.Tensor) -> torch.Tensor:
        return words(codes.unflatten(-1, (-1, 8))[..., _AWQ_ROWS].flatten(-2))

    return {
        f"{stem}qweight": interleaved(packed.codes.t()),
        f"{stem}qzeros": interleaved(packed.zero),
        f"{stem}scales": packed.scale,
    }


def compressed(stem: str, packed: Packed) -> dict[str, torch.Tensor]:
    """As compressed-tensors packs, by its own functions."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    bits = 4 if int(packed.codes.max()) < 16 else 8
    middle = 1 << bits - 1
    made = {
        f"{stem}weight_packed": pack_to_int32((packed.codes.int() - middle).to(torch.int8), bits),
        f"{stem}weight_scale": packed.scale.t().contiguous(),
        f"{stem}weight_shape": torch.tensor(packed.codes.shape),
    }
    if bool((packed.zero != middle).any()):
        zero = (packed.zero.t() - middle).to(torch.int8)
        made[f"{stem}weight_zero_point"] = pack_to_int32(zero, bits, packed_dim=0).contiguous()
    if bool((packed.group_of.diff() < 0).any()):
        made[f"{stem}weight_g_idx"] = packed.group_of.to(torch.int32)
    return made


def integers(stem: str, packed: Packed) -> dict[str, torch.Tensor]:
    """int8, one scale a row."""
    return {
        f"{stem}weight": (packed.codes.int() - 128).to(torch.int8),
        f"{stem}weight_scale": packed.scale.t().contiguous(),
    }


def mlx(stem: str, packed: Packed, bits: int = 4) -> dict[str, torch.Tensor]:
    """With the offset of code 0. Eight codes lie in as many bytes as one has bits."""
    scale = packed.scale.float()
    eight = packed.codes.long().unflatten(1, (-1, 8)) << torch.arange(0, 8 * bits, bits)
    stored = eight.sum(-1, keepdim=True) >> torch.arange(0, 8 * bits, 8)
    return {
        f"{stem}weight": (stored & 255).to(torch.uint8).flatten(1).view(torch.uint32),
        f"{stem}scales": packed.scale.t().contiguous(),
        f"{stem}biases": (-packed.zero * scale).t().to(packed.scale.dtype).contiguous(),
    }


HQQ_PACKINGS = {1: "1bit_u8", 2: "2bit_u8", 3: "3bit_32", 4: "4bit_u8", 8: "8bit_u8"}


def hqq(stem: str, packed: Packed, bits: int = 4) -> dict[str, torch.Tensor]:
    """As HQQLinear's state dict has it, encoded for safetensors."""
    rows, groups = len(packed.codes), len(packed.scale)
    lines, each = packed.codes.reshape(rows * groups, -1).int(), 10 if bits == 3 else 8 // bits
    count = -(-len(lines) // each)
    lines = torch.nn.functional.pad(lines, (0, 0, 0, count * each - len(lines)))
    shifts = torch.arange(each - 1, -1, -1)[:, None, None] * bits
    words = (lines.view(each, count, -1) << shifts).sum(0)
    flags = ("view_as_float", "quant_scale", "quant_zero")
    return {
        f"{stem}W_q": words.to(torch.int32 if bits == 3 else torch.uint8),
        f"{stem}scale": packed.scale.t().reshape(-1, 1),
        f"{stem}zero": packed.zero.t().reshape(-1, 1).to(packed.scale.dtype),
        f"{stem}shape": torch.tensor(packed.codes.shape),
        f"{stem}axis": torch.tensor(1, dtype=torch.int32),
        f"{stem}packing": torch.tensor([*HQQ_PACKINGS[bits].encode()], dtype=torch.uint8),
        **{f"{stem}{flag}": torch.tensor(0, dtype=torch.uint8) for flag in flags},
    }


def torchao(stem: str, packed: Packed) -> dict[str, torch.Tensor]:
    """As transformers save torchao's tensors."""
    middle = 8 if int(packed.codes.max()) < 16 else 128
    return {
        f"{stem}_weight_qdata": (packed.codes.int() - middle).to(torch.int8),
        f"{stem}_weight_scale": packed.scale.t().contiguous(),
        f"{stem}_weight_zero_point": (packed.zero.t() - middle).to(torch.int8).contiguous(),
    }


def quark(
    stem: str,
    packed: Packed,
    dtype: str = "uint4",
    scheme: str = "per_group",
    order: str = "reorder",
) -> dict[str, torch.Tensor]:
    """As AMD's Quark stores integers; a scheme of one scale takes the first."""
    bits, by_groups = int(dtype[-1]), scheme == "per_group"
    middle = 0 if dtype.startswith("u") else 1 << bits - 1
    eight = list(_AWQ_ROWS if order == "reorder" else range(8))

    def stored(codes: torch.Tensor) -> torch.Tensor:
        values = codes.int() - middle
        if bits == 8:
            return values.to(getattr(torch, dtype)).contiguous()
        if values.dim() == 0:
            return values
        return words((values & 15).unflatten(-1, (-1, 8))[..., eight].flatten(-2))

    scale, zero = packed.scale, packed.zero
    if not by_groups:
        scale, zero = (
            one[0] if scheme == "per_channel" else one[0, 0].clone() for one in (scale, zero)
        )
    return {
        f"{stem}weight": stored(packed.codes.t() if by_groups else packed.codes),
        f"{stem}weight_scale": scale,
        f"{stem}weight_zero_point": stored(zero),
    }


def quark_settings(
    dtype: str, scheme: str = "per_group", order: str = "reorder", **more: Any
) -> dict[str, Any]:
    """What it says of them."""
    axis = {"per_group": 1, "per_channel": 0}.get(scheme)
    weight = {"dtype": dtype, "qscheme": scheme, "ch_axis": axis, "is_dynamic": False, **more}
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": None, "bias": None},
        "layer_quant_config": {},
        "exclude": ["lm_head"],
        "export": {"pack_method": order, "weight_format": "real_quantized"},
    }


def aqlm(stem: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Two codebooks of 256 entries for any weight of that shape, and the numbers that come out."""
    rows, columns = weight.shape
    place = torch.arange(rows * columns // 8 * 2).view(rows, -1, 2)
    codes = (place * 29 + place // 7) % 256
    books = ((torch.arange(2 * 256 * 8) * 37) % 101 - 50).view(2, 256, 1, 8) / 1024
    scale = 1 + torch.arange(rows).view(-1, 1, 1, 1) % 5 / 4
    numbers = (books[0, codes[..., 0], 0] + books[1, codes[..., 1], 0]).view(rows, columns)
    return {
        f"{stem}codes": codes.to(torch.uint8).view(torch.int8),
        f"{stem}codebooks": books.half(),
        f"{stem}scales": scale.half(),
    }, numbers * scale.view(-1, 1)


def _torchao(kind: str, **data: Any) -> dict[str, Any]:
    settings = {"_type": kind, "_version": 2, "_data": data}
    return {"quant_method": "torchao", "quant_type": {"default": settings}}


def _intx(dtype: str) -> dict[str, Any]:
    return {
        "weight_dtype": {"_type": "torch.dtype", "_data": dtype},
        "intx_packing_format": {"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"},
    }


def _settings(method: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": method, "bits": 4, "group_size": 64, **more}


def _scheme(bits: int, strategy: str, format_name: str) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True}
    groups = {"group_0": {"weights": weights, "targets": ["Linear"], "input_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


WAYS: dict[str, Way] = {
    "gptq": Way(_settings("gptq", sym=True), gptq, symmetric=True),
    "gptq, asymmetric": Way(_settings("gptq", checkpoint_format="gptq"), gptq),
    "gptq_v2": Way(_settings("gptq", checkpoint_format="gptq_v2"), gptq_v2, group=32),
    "gptq, desc_act": Way(_settings("gptq", desc_act=True), gptq, group=128, shuffled=True),
    "gptq, one group a row": Way(_settings("gptq", group_size=-1), gptq, group=0),
    "gptq, 8 bits": Way(
        _settings("gptq", sym=True) | {"bits": 8},
        partial(gptq, bits=8),
        bits=8,
        group=0,
        symmetric=True,
    ),
    "gptq, 2 bits": Way(_settings("gptq") | {"bits": 2}, partial(gptq, bits=2), bits=2),
    "gptq, 3 bits": Way(
        _settings("gptq", desc_act=True) | {"bits": 3},
        partial(gptq, bits=3),
        bits=3,
        group=128,
        shuffled=True,
    ),
    "gptq_p, 3 bits": Way(
        _settings("gptq", checkpoint_format="gptq_p") | {"bits": 3},
        partial(gptq_p, bits=3),
        bits=3,
    ),
    "gptq_p, 6 bits": Way(
        _settings("gptq", checkpoint_format="gptq_p", sym=True) | {"bits": 6},
        partial(gptq_p, bits=6),
        bits=6,
        group=0,
        symmetric=True,
    ),
    "awq": Way(_settings("awq", version="gemm"), awq),
    "auto-round as gptq": Way(
        _settings("auto-round", packing_format="auto_round:auto_gptq:exllamav2", sym=True),
        gptq,
        symmetric=True,
    ),
    "auto-round": Way(_settings("auto-round", packing_format="auto_round"), gptq_v2),
    "auto-round as awq": Way(
        _settings("auto-round", packing_format="auto_round:auto_awq"), awq, group=128
    ),
    "compressed-tensors": Way(_scheme(4, "group", "pack-quantized"), compressed, symmetric=True),
    "compressed-tensors, asymmetric": Way(_scheme(4, "group", "pack-quantized"), compressed),
    "compressed-tensors, actorder": Way(
        _scheme(4, "group", "pack-quantized"), compressed, shuffled=True
    ),
    "compressed-tensors, w8a16": Way(
        _scheme(8, "channel", "pack-quantized"), compressed, bits=8, group=0, symmetric=True
    ),
    "compressed-tensors, int8": Way(
        _scheme(8, "channel", "int-quantized"), integers, bits=8, group=0, symmetric=True
    ),
    "mlx": Way({"bits": 4, "group_size": 64}, mlx),
    "hqq": Way(_settings("hqq"), hqq),
    "torchao, int8": Way(
        _torchao("Int8WeightOnlyConfig"), torchao, bits=8, group=0, symmetric=True
    ),
    "torchao, int4": Way(_torchao("IntxWeightOnlyConfig", **_intx("int4")), torchao, group=32),
    "quark": Way(quark_settings("uint4"), quark),
    "quark, in order": Way(
        quark_settings("int4", order="order"), partial(quark, dtype="int4", order="order"), group=32
    ),
    "quark, one scale a row": Way(
        quark_settings("int4", "per_channel", "order"),
        partial(quark, dtype="int4", scheme="per_channel", order="order"),
        group=0,
    ),
    "quark, int8": Way(
        quark_settings("int8", "per_channel"),
        partial(quark, dtype="int8", scheme="per_channel"),
        bits=8,
        group=0,
        symmetric=True,
    ),
}


def known_codes(bits: int = 4, *, shuffled: bool = False) -> Packed:
    """64 x 64 codes in groups of 32 that are the same everywhere."""
    row, column = torch.arange(64)[:, None], torch.arange(64)
    codes = (row * 5 + column * 3 + row * column // 7) % (1 << bits)
    group = torch.arange(2)[:, None]
    scale = (1 + (column + group * 11) % 13).half() / 128
    zero = (column * 3 + group * 5) % (1 << bits)
    group_of = column * 29 % 64 // 32 if shuffled else column // 32
    return Packed(codes.to(torch.uint8), scale, zero.to(torch.int32), group_of)


def sawtooth() -> torch.Tensor:
    """64 x 64 numbers that are the same everywhere, each exact in fp32."""
    return ((torch.arange(64 * 64) * 37) % 101 - 50).view(64, 64) / 64


def digest(tensor: torch.Tensor) -> str:
    """What a tensor's bytes are known by."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def entries_of(tensors: dict[str, torch.Tensor]) -> dict[str, TensorEntry]:
    """Entries of a file that is there: some formats say in tensors how others are packed."""
    file = Path(_files().name, f"{next(_COUNT)}")
    found, start = {}, 0
    with file.open("wb") as opened:
        for name, t in tensors.items():
            opened.write(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            code, stop = DTYPE_CODES[t.dtype], start + t.nbytes
            found[name] = TensorEntry(name, file, code, tuple(t.shape), start, stop)
            start = stop
    return found


_COUNT = itertools.count()


@functools.cache
def _files() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()  # until the process ends


def random_codes(
    shape: tuple[int, int], way: Way, generator: torch.Generator, dtype: torch.dtype
) -> Packed:
    """Codes of every value."""
    rows, columns = shape
    groups = columns // way.group if way.group else 1
    most, middle = 1 << way.bits, 1 << way.bits - 1
    codes = torch.randint(0, most, shape, generator=generator).to(torch.uint8)
    scale = (torch.rand((groups, rows), generator=generator) + 0.5) / 16 / middle
    zero = torch.full((groups, rows), middle)
    if not way.symmetric:
        zero = torch.randint(0, most, (groups, rows), generator=generator)
    group_of = torch.arange(columns) // (columns // groups)
    if way.shuffled:
        group_of = group_of[torch.randperm(columns, generator=generator)]
    return Packed(codes, scale.to(dtype), zero.to(torch.int32), group_of)


def save_packed(
    folder: Path,
    way: Way,
    *,
    dtype: torch.dtype = torch.float16,
    family: str = "llama",
    seed: int = 5,
    **sizes: Any,
) -> dict[str, Packed]:
    """Make a checkpoint of a random model, with all Linears but the head packed.

    Returns them by the paths of the Linears.
    """
    generator = torch.Generator().manual_seed(seed)
    config = AutoConfig.for_model(family, **(SIZES | sizes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    linears = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and path != "lm_head"
    }
    made: dict[str, Packed] = {}
    tensors = model.state_dict()
    for path, module in linears.items():
        shape = (module.out_features, module.in_features)
        made[path] = random_codes(shape, way, generator, dtype)
        del tensors[f"{path}.weight"]
        tensors |= way.pack(f"{path}.", made[path])
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    if config.tie_word_embeddings:
        kept.pop("lm_head.weight", None)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    name = "quantization_config" if "quant_method" in way.settings else "quantization"
    written = config.to_dict() | {name: way.settings, "architectures": [type(model).__name__]}
    written["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(written), encoding="utf-8")
    return made
