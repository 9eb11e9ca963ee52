"""Weights as AMD's Quark stores them: integers, and floats of 8 and 4 bits.

    weight             of 4 bits int32: [columns, rows / 8] by groups, [rows, columns / 8] by rows
                       int8, uint8: [columns, rows] by groups, else [rows, columns]
                       float8: [rows, columns]; fp4 uint8: [rows, columns / 2], low halves first
    weight_scale       [groups, rows], of fp4 [rows, groups]; [rows]; or a single one
    weight_zero_point  of integers alone, beside each scale: int32 packed as codes are; int8, uint8

Signed integers are values, zeros as well. In words of 32 bits, codes are in order or AWQ's. What
settings say of a module is found by its name. Layouts checked against what amd-quark 0.13 packs.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from pipeload.formats.codes import awq
from pipeload.formats.codes.coded_weight import (
    FLOATS,
    MIDDLE,
    CodedWeight,
    Codes,
    Lay,
    Numbers,
    Words,
    ZeroCodes,
    group_columns,
    not_taken_over,
    part,
    stems,
)
from pipeload.formats.codes.words import codes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pipeload.checkpoint.headers import TensorEntry

_TENSOR, _ROWS, _GROUPS = "per_tensor", "per_channel", "per_group"
_AXES: Final = {_TENSOR: None, _ROWS: (0,), _GROUPS: (1, -1)}
"""Along which there are several scales; of a single one nothing is asked."""
_NAMES: Final = ("weight", "weight_scale", "weight_zero_point")
_EXPONENTS: Final = "e8m0"
_SCALES: Final = (None, "float32", "float16", "bfloat16", _EXPONENTS)
_ONLINE: Final = ("r3", "r4", "online_r1_rotation", "online_had")
"""Rotations that are no part of any weight."""
_HALVES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class _Kind(NamedTuple):
    """Numbers of one kind."""

    stored: torch.dtype
    schemes: tuple[str, ...]
    bits: int = 0
    """Of integers."""
    signed: bool = False


_KINDS: Final = {
    "int4": _Kind(torch.int32, (_GROUPS, _ROWS), 4, signed=True),
    "uint4": _Kind(torch.int32, (_GROUPS, _ROWS), 4),
    "int8": _Kind(torch.int8, (_GROUPS, _ROWS, _TENSOR), 8, signed=True),
    "uint8": _Kind(torch.uint8, (_GROUPS, _ROWS, _TENSOR), 8),
    "fp8_e4m3": _Kind(torch.float8_e4m3fn, (_ROWS, _TENSOR)),
    "fp8_e5m2": _Kind(torch.float8_e5m2, (_ROWS, _TENSOR)),
    "fp4": _Kind(torch.uint8, (_GROUPS,)),
}


class _Spec(NamedTuple):
    """What settings say of a weight."""

    kind: _Kind
    scheme: str
    exponents: bool
    """Whether scales are stored as powers of 2."""


@dataclass(frozen=True)
class ScaledFloats(Numbers):
    """Floats of few bits, each times the scale of its group of neighbouring columns."""

    scale: torch.Tensor
    """fp32 of [rows, groups]."""
    values: torch.Tensor | None
    """What each code stands for, in fp32; None where torch has floats of so few bits."""

    def numbers(self, codes: torch.Tensor, first: int) -> torch.Tensor:
        """Make fp32 of codes of [rows, columns], of which the first is row `first`."""
        made = codes.float() if self.values is None else self.values[codes.int()]
        scale = self.scale[first : first + len(codes)]
        made.unflatten(1, (scale.shape[1], -1)).mul_(scale[..., None])
        return made


class Quark:
    """A `CodesFormat`."""

    method = "quark"
    title = "Quark"

    def find(
        self, config: Mapping[str, Any], stored: Mapping[str, TensorEntry]
    ) -> list[CodedWeight]:
        """Find quantised weights. Raises what `CodesFormat.find` does."""
        places = self._places(config)
        self._check_steps(config)
        layers = [(pattern, self._spec(told)) for pattern, told in self._layers(config)]
        named = [stem for stem in stems(stored, "weight") if f"{stem}weight_scale" in stored]
        found = []
        for stem in named:
            path = stem.removesuffix(".")
            spec = next(spec for pattern, spec in layers if fnmatchcase(path, pattern))
            if spec is None:
                why = f"{stem}weight has scales, and its settings say nothing of it"
                raise not_taken_over(self.method, why)
            found.append(_coded(stem, stored, spec, places))
        return found

    def _places(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Where codes lie in a word.

        Raises:
            UnsupportedModelError: nothing is said of it, or it is unknown.
        """
        export = config.get("export")
        if not isinstance(export, dict):
            raise not_taken_over(self.method, "its settings do not say how it was exported")
        if export.get("weight_format") != "real_quantized":
            why = f"its weight_format {export.get('weight_format')!r} is unknown"
            raise not_taken_over(self.method, why)
        order = export.get("pack_method")
        if order not in awq.PLACES:
            raise not_taken_over(self.method, f"its pack_method {order!r} is unknown")
        return awq.PLACES[order]

    def _layers(self, config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Settings by patterns of paths, of which the first counts that matches.

        Raises:
            UnsupportedModelError: there are some of modules that are no Linears.
        """
        yield from (config.get("layer_quant_config") or {}).items()
        types = config.get("layer_type_quant_config") or {}
        for kind in types:
            if kind != "Linear":
                raise not_taken_over(self.method, f"it has settings of {kind!r} modules")
        yield "*", types.get("Linear") or config.get("global_quant_config") or {}

    def _check_steps(self, config: Mapping[str, Any]) -> None:
        """Refuse what weights alone do not tell.

        Raises:
            UnsupportedModelError: there is such a thing; names it.
        """
        told = [told for _, told in self._layers(config)]
        caches = [*(config.get("kv_cache_quant_config") or {}).values()]
        for key, what in (("input_tensors", "inputs"), ("output_tensors", "outputs")):
            self._check_measured(what, *(one.get(key) for one in [*told, *caches]))
        self._check_measured("products of softmax", config.get("softmax_quant_spec"))
        if any(one.get("bias") for one in told):
            raise not_taken_over(self.method, "its biases are quantised")
        for algorithm in _listed(config.get("algo_config")):
            online = [key for key in _ONLINE if algorithm.get(key)]
            if online:
                why = f"its inputs are rotated while it computes ({online[0]})"
                raise not_taken_over(self.method, why)

    def _check_measured(self, what: str, *told: Any) -> None:
        """Refuse scales that were measured. Others are made of each input, which is left exact."""
        if any(one.get("is_dynamic") is not True for some in told for one in _listed(some)):
            raise not_taken_over(
                self.method, f"its {what} are quantised by scales that were stored"
            )

    def _spec(self, layer: Mapping[str, Any]) -> _Spec | None:
        """What settings of a module say of its weight.

        Raises:
            UnsupportedModelError: that is not understood.
        """
        steps = _listed(layer.get("weight"))
        if not steps:
            return None
        if len(steps) > 1:
            raise not_taken_over(self.method, "its weights are quantised in several steps")
        told = steps[0]
        dtype, scheme, axis = (told.get(key) for key in ("dtype", "qscheme", "ch_axis"))
        kind = _KINDS.get(str(dtype))
        if kind is None or scheme not in kind.schemes:
            raise not_taken_over(self.method, f"weights of {dtype!r}, {scheme!r} are unknown")
        axes = _AXES[scheme]
        if axes is not None and axis not in axes:
            why = f"scales {scheme!r} along the axis {axis!r} are unknown"
            raise not_taken_over(self.method, why)
        scales, zeros = told.get("scale_format"), told.get("zero_point_type") or "int32"
        exponents = scales == _EXPONENTS
        if scales not in _SCALES or (exponents and dtype != "fp4"):
            raise not_taken_over(self.method, f"scales of {scales!r} are unknown for {dtype!r}")
        if zeros != "int32" or told.get("is_dynamic") is True:
            why = f"zeros of {zeros!r}, or scales that are not stored, are unknown"
            raise not_taken_over(self.method, why)
        return _Spec(kind, scheme, exponents)


def _listed(told: Any) -> list[Mapping[str, Any]]:
    """One or several things, or none, as they are told of."""
    return [] if told is None else told if isinstance(told, list) else [told]


def _coded(
    stem: str, stored: Mapping[str, TensorEntry], spec: _Spec, places: tuple[int, ...]
) -> CodedWeight:
    if not spec.kind.bits:
        return _floats(stem, stored, spec)
    if spec.kind.bits == 8:
        return _bytes(stem, stored, spec)
    how = awq.Packing(places, spec.kind.signed, _NAMES)
    return awq.coded(stem, stored, how) if spec.scheme == _GROUPS else _words(stem, stored, how)


def _beside(
    name: str, stored: Mapping[str, TensorEntry], scheme: str, rows: int, *dtypes: torch.dtype
) -> TensorEntry:
    """What is stored beside each group, row or weight."""
    if scheme != _TENSOR:
        shape = (rows,) if scheme == _ROWS else (None, rows)
        return part(stored, name, shape, *dtypes)
    # Early versions wrote a list of one.
    listed = name in stored and len(stored[name].shape) == 1
    return part(stored, name, (1,) if listed else (), *dtypes)


def _words(stem: str, stored: Mapping[str, TensorEntry], how: awq.Packing) -> CodedWeight:
    words = part(stored, f"{stem}weight", (None, None), torch.int32)
    rows = words.shape[0]
    scale = _beside(f"{stem}weight_scale", stored, _ROWS, rows, *FLOATS)
    zero = _beside(f"{stem}weight_zero_point", stored, _ROWS, -(-rows // 8), torch.int32)
    parts = {"words": words, "scale": scale, "zero": zero}
    shape = (rows, words.shape[1] * 8)
    return CodedWeight(f"{stem}weight", shape, 4, 1, parts, partial(_decode_words, how))


def _decode_words(how: awq.Packing, tensors: Mapping[str, torch.Tensor]) -> Codes:
    words = tensors["words"]
    zero = awq.in_order(tensors["zero"], how)[: len(words)]
    grid = ZeroCodes(tensors["scale"].float()[None], zero.float()[None], MIDDLE[4])

    def rows(start: int, stop: int) -> torch.Tensor:
        return awq.in_order(words[start:stop], how)

    in_order = how.places == awq.PLACES["order"]
    kept = Words(Lay.ALONG, words, 4, signed=how.signed) if in_order else None
    return Codes(rows, grid, stored=kept)


def _bytes(stem: str, stored: Mapping[str, TensorEntry], spec: _Spec) -> CodedWeight:
    name, scheme = f"{stem}weight", spec.scheme
    weight = part(stored, name, (None, None), spec.kind.stored)
    rows, columns = weight.shape[::-1] if scheme == _GROUPS else weight.shape
    scale = _beside(f"{stem}weight_scale", stored, scheme, rows, *FLOATS)
    groups = scale.shape[0] if scheme == _GROUPS else 1
    group_columns(name, columns, groups)
    zero = _beside(f"{stem}weight_zero_point", stored, scheme, rows, spec.kind.stored)
    parts = {"values": weight, "scale": scale, "zero": zero}
    decode = partial(_decode_bytes, spec, (groups, rows))
    return CodedWeight(name, (rows, columns), 8, groups, parts, decode)


def _decode_bytes(
    spec: _Spec, shape: tuple[int, int], tensors: Mapping[str, torch.Tensor]
) -> Codes:
    values, middle = tensors["values"], MIDDLE[8]
    scale, zero = (tensors[key].float().expand(shape) for key in ("scale", "zero"))
    moved = middle if spec.kind.signed else 0

    def rows(start: int, stop: int) -> torch.Tensor:
        some = values[:, start:stop].t() if spec.scheme == _GROUPS else values[start:stop]
        return some.view(torch.uint8) ^ moved  # adds 128, or nothing

    return Codes(rows, ZeroCodes(scale, zero + moved, middle))


def _floats(stem: str, stored: Mapping[str, TensorEntry], spec: _Spec) -> CodedWeight:
    name, halves = f"{stem}weight", spec.scheme == _GROUPS
    weight = part(stored, name, (None, None), spec.kind.stored)
    rows, columns = weight.shape[0], weight.shape[1] * (2 if halves else 1)
    of_scales = f"{stem}weight_scale"
    if halves:
        exponents = (torch.uint8, torch.float8_e8m0fnu)
        scale = part(stored, of_scales, (rows, None), *(exponents if spec.exponents else FLOATS))
    else:
        scale = _beside(of_scales, stored, spec.scheme, rows, *FLOATS)
    groups = scale.shape[1] if halves else 1
    group_columns(name, columns, groups)
    parts = {"values": weight, "scale": scale}
    decode = partial(_decode_floats, spec, (rows, groups))
    return CodedWeight(name, (rows, columns), 0, groups, parts, decode)


def _decode_floats(
    spec: _Spec, shape: tuple[int, int], tensors: Mapping[str, torch.Tensor]
) -> Codes:
    weight, scale = tensors["values"], tensors["scale"]
    if spec.exponents:
        scale = scale.view(torch.float8_e8m0fnu)
    if spec.scheme == _ROWS:
        scale = scale[:, None]
    values = None
    if spec.scheme == _GROUPS:
        of_bits = [*_HALVES, *(-value for value in _HALVES)]
        values = torch.tensor(of_bits, dtype=torch.float32)

    def rows(start: int, stop: int) -> torch.Tensor:
        some = weight[start:stop]
        return some if values is None else codes_of(some, 4)

    return Codes(rows, ScaledFloats(scale.float().expand(shape), values))
