"""Integers as the package compressed-tensors stores them: "pack-quantized" and "int-quantized".

    weight_packed      int32 [rows, columns / 8]: codes are values + 8 (of 8 bits: + 128)
    weight             int8 [rows, columns] in the other packing: values
    weight_scale       [rows, groups], or [rows, 1]
    weight_zero_point  int32 [rows / 8, groups], packed down the rows; int8 [rows, 1]
    weight_g_idx       int32 [columns]: the group of each, with the activation order "group"

Layouts checked against compressed-tensors 0.20, which has given up the last of them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from pipeload.errors import CheckpointError
from pipeload.formats.codes.coded_weight import (
    FLOATS,
    GROUP_OF,
    MIDDLE,
    CodedWeight,
    Codes,
    Lay,
    Words,
    ZeroCodes,
    columns_by_group,
    group_columns,
    not_taken_over,
    part,
    stems,
)
from pipeload.formats.codes.words import codes_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeload.checkpoint.headers import TensorEntry

_PACKED, _PLAIN = "pack-quantized", "int-quantized"
_BY_ROWS: Final = {"group", "channel"}


class CompressedTensors:
    """A `CodesFormat`."""

    method = "compressed-tensors"
    title = "compressed-tensors"

    def find(
        self, config: Mapping[str, Any], stored: Mapping[str, TensorEntry]
    ) -> list[CodedWeight]:
        """Find the weights of quantised Linears. Raises what `CodesFormat.find` does."""
        bits = self._bits(config)
        if config.get("format") == _PLAIN:
            named = [stem for stem in stems(stored, "weight") if f"{stem}weight_scale" in stored]
            return [_plain(stem, stored) for stem in named]
        return [_packed(stem, stored, bits) for stem in stems(stored, "weight_packed")]

    def _bits(self, config: Mapping[str, Any]) -> int:
        """Check the settings, and return the bits of a code.

        Raises:
            UnsupportedModelError: one is not understood.
        """
        if config.get("format") not in {_PACKED, _PLAIN}:
            raise not_taken_over(self.method, f"its format {config.get('format')!r} is unknown")
        groups = list((config.get("config_groups") or {}).values())
        schemes = [group.get("weights") or {} for group in groups]
        bits = {scheme.get("num_bits") for scheme in schemes}
        if len(bits) != 1 or not bits <= {*MIDDLE}:
            raise not_taken_over(
                self.method, f"its weights have {sorted(map(str, bits))} bits, not 4 or 8 alone"
            )
        for group, scheme in zip(groups, schemes, strict=True):
            if scheme.get("type") != "int" or scheme.get("strategy") not in _BY_ROWS:
                kind = f"type {scheme.get('type')!r}, strategy {scheme.get('strategy')!r}"
                raise not_taken_over(self.method, f"weights of {kind} are unknown")
            if (group.get("input_activations") or {}).get("dynamic") is False:
                raise not_taken_over(
                    self.method, "its inputs are quantised by scales that were stored"
                )
        sparse = (config.get("sparsity_config") or {}).get("format", "dense") != "dense"
        if sparse or config.get("transform_config"):
            raise not_taken_over(self.method, "it is sparse or transformed besides")
        (found,) = bits
        assert isinstance(found, int)  # noqa: S101 - see above
        return found


def _packed(stem: str, stored: Mapping[str, TensorEntry], bits: int) -> CodedWeight:
    each, name = 32 // bits, f"{stem}weight"
    words = part(stored, f"{stem}weight_packed", (None, None), torch.int32)
    rows = words.shape[0]
    scale = part(stored, f"{stem}weight_scale", (rows, None), *FLOATS)
    parts = {"words": words, "scale": scale}
    columns, groups = words.shape[1] * each, scale.shape[1]
    group_columns(name, columns, groups)
    parts["shape"] = part(stored, f"{stem}weight_shape", (2,), torch.int64, torch.int32)
    if f"{stem}weight_zero_point" in stored:
        shape = (-(-rows // each), groups)
        parts["zero"] = part(stored, f"{stem}weight_zero_point", shape, torch.int32)
    if f"{stem}weight_g_idx" in stored:
        integers = (torch.int32, torch.int64)
        parts[GROUP_OF] = part(stored, f"{stem}weight_g_idx", (columns,), *integers)
    return CodedWeight(name, (rows, columns), bits, groups, parts, partial(_decode, name, bits))


def _plain(stem: str, stored: Mapping[str, TensorEntry]) -> CodedWeight:
    name = f"{stem}weight"
    weight = part(stored, name, (None, None), torch.int8)
    rows, columns = weight.shape
    parts = {
        "values": weight,
        "scale": part(stored, f"{stem}weight_scale", (rows, None), *FLOATS),
    }
    groups = parts["scale"].shape[1]
    group_columns(name, columns, groups)
    if f"{stem}weight_zero_point" in stored:
        shape = parts["scale"].shape
        parts["zero"] = part(stored, f"{stem}weight_zero_point", shape, torch.int8)
    return CodedWeight(name, (rows, columns), 8, groups, parts, _decode_plain)


def _decode(name: str, bits: int, tensors: Mapping[str, torch.Tensor]) -> Codes:
    words, scale = tensors["words"], tensors["scale"].float().t()
    shape = [words.shape[0], words.shape[1] * 32 // bits]
    if tensors["shape"].tolist() != shape:
        raise CheckpointError(
            f"{name!r} is said to be {tensors['shape'].tolist()}, and the codes of {shape} are "
            "stored. Use the float checkpoint."
        )
    zero = torch.full_like(scale, MIDDLE[bits])
    if "zero" in tensors:
        zero = codes_of(tensors["zero"].t(), bits)[:, : shape[0]].float()
    group_of = tensors.get(GROUP_OF)
    order = None if group_of is None else columns_by_group(name, group_of, len(scale))

    def rows(start: int, stop: int) -> torch.Tensor:
        codes = codes_of(words[start:stop], bits)
        return codes if order is None else codes[:, order]

    grid = ZeroCodes(scale, zero, MIDDLE[bits])
    return Codes(rows, grid, order, Words(Lay.ALONG, words, bits))


def _decode_plain(tensors: Mapping[str, torch.Tensor]) -> Codes:
    values, scale = tensors["values"], tensors["scale"].float().t()
    middle = MIDDLE[8]
    zero = tensors["zero"].float().t() + middle if "zero" in tensors else None
    grid = ZeroCodes(scale, torch.full_like(scale, middle) if zero is None else zero, middle)

    def rows(start: int, stop: int) -> torch.Tensor:
        return values[start:stop].view(torch.uint8) ^ middle  # adds 128

    return Codes(rows, grid)
