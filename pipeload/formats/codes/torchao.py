"""Integers of torchao, as transformers save its tensors: one in a byte, whatever its bits.

    _weight_qdata       int8 [rows, columns]
    _weight_scale       [rows, groups]
    _weight_zero_point  int8 [rows, groups]: what stands for 0

Checked against what torchao 0.18 saves. Its other tensors (int4 for some kernel, float8)
are laid out otherwise.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from pipeload.errors import CheckpointError
from pipeload.formats.codes.coded_weight import (
    FLOATS,
    MIDDLE,
    CodedWeight,
    Codes,
    ZeroCodes,
    group_columns,
    not_taken_over,
    part,
    stems,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeload.checkpoint.headers import TensorEntry

# Inputs are not quantised, also where these say so.
_INT8: Final = ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig")
_INTX: Final = ("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig")
_BITS: Final = {"int4": 4, "int8": 8}
_UNPACKED: Final = "UNPACKED_TO_INT8"


class TorchAo:
    """A `CodesFormat`."""

    method = "torchao"
    title = "torchao"

    def find(
        self, config: Mapping[str, Any], stored: Mapping[str, TensorEntry]
    ) -> list[CodedWeight]:
        """Find quantised weights. Raises what `CodesFormat.find` does."""
        bits = self._bits(config.get("quant_type"))
        return [_coded(stem, stored, bits) for stem in stems(stored, "_weight_qdata")]

    def _bits(self, said: Any) -> int:
        """Of a code.

        Raises:
            UnsupportedModelError: it is quantised in a way that is not understood.
        """
        one = said.get("default") if isinstance(said, dict) and len(said) == 1 else None
        kind, data = (one.get("_type"), one.get("_data")) if isinstance(one, dict) else (said, None)
        if kind in _INT8:
            return 8
        if kind not in _INTX or not isinstance(data, dict):
            raise not_taken_over(self.method, f"its quant_type {kind!r} is unknown")
        packing, dtype = (_named(data.get(key)) for key in ("intx_packing_format", "weight_dtype"))
        if packing != _UNPACKED:
            raise not_taken_over(self.method, f"its packing format {packing!r} is unknown")
        if dtype not in _BITS:
            raise not_taken_over(self.method, f"its codes are {dtype!r}, and int4 and int8 known")
        return _BITS[dtype]


def _named(value: Any) -> str:
    """What stands for one of a few words."""
    return str(value.get("_data") if isinstance(value, dict) else value)


def _coded(stem: str, stored: Mapping[str, TensorEntry], bits: int) -> CodedWeight:
    name = f"{stem}weight"
    codes = part(stored, f"{stem}_weight_qdata", (None, None), torch.int8)
    rows, columns = codes.shape
    scale = part(stored, f"{stem}_weight_scale", (rows, None), *FLOATS)
    groups = scale.shape[1]
    group_columns(name, columns, groups)
    parts = {
        "codes": codes,
        "scale": scale,
        "zero": part(stored, f"{stem}_weight_zero_point", (rows, groups), torch.int8),
    }
    decode = partial(_decode, name, bits)
    return CodedWeight(name, (rows, columns), bits, groups, parts, decode)


def _decode(name: str, bits: int, tensors: Mapping[str, torch.Tensor]) -> Codes:
    values, middle = tensors["codes"], MIDDLE[bits]
    scale, zero = (tensors[key].float().t() for key in ("scale", "zero"))

    def rows(start: int, stop: int) -> torch.Tensor:
        # Wraps around, so that what is no code is a large one.
        codes = values[start:stop].view(torch.uint8) + middle
        if bits == 4 and bool((codes > 15).any()):
            raise CheckpointError(
                f"{name!r} is said to be of 4 bits and holds other values than -8 to 7. Use the "
                "float checkpoint."
            )
        return codes

    return Codes(rows, ZeroCodes(scale, zero + middle, middle))
