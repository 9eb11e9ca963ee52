"""Integers with scales and offsets for groups of a row, as Apple's MLX makes them.

    weight   uint32 [rows, columns / 8]
    scales   [rows, groups]
    biases   [rows, groups]: what code 0 stands for; `qbiases` where transformers has made them

Embeddings are quantised as well.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pipeload.formats.codes.coded_weight import (
    FLOATS,
    MIDDLE,
    CodedWeight,
    Codes,
    Lay,
    Offsets,
    Words,
    group_columns,
    not_taken_over,
    part,
    stems,
)
from pipeload.formats.codes.gptq import bits_of
from pipeload.formats.codes.words import codes_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeload.checkpoint.headers import TensorEntry


class Mlx:
    """A `CodesFormat`."""

    title = "MLX"

    def __init__(self, method: str) -> None:
        """`method`: "mlx", or "metal" as transformers calls it."""
        self.method = method

    def find(
        self, config: Mapping[str, Any], stored: Mapping[str, TensorEntry]
    ) -> list[CodedWeight]:
        """Find quantised weights. Raises what `CodesFormat.find` does."""
        mode = config.get("mode", "affine")
        if mode != "affine":
            raise not_taken_over(self.method, f"its mode {mode!r} is unknown")
        bits = bits_of(self.method, config)
        for name, value in config.items():
            if isinstance(value, dict) and value.get("bits", bits) != bits:
                why = f"{name!r} has {value['bits']!r} bits, and others {bits}"
                raise not_taken_over(self.method, why)
        found = stems(stored, "scales")
        return [_coded(stem, stored, bits) for stem in found if f"{stem}weight" in stored]


def _coded(stem: str, stored: Mapping[str, TensorEntry], bits: int) -> CodedWeight:
    name = f"{stem}weight"
    words = part(stored, name, (None, None), torch.uint32)
    rows, columns = words.shape[0], words.shape[1] * 32 // bits
    scale = part(stored, f"{stem}scales", (rows, None), *FLOATS)
    groups = scale.shape[1]
    group_columns(name, columns, groups)
    biases = "qbiases" if f"{stem}qbiases" in stored else "biases"
    parts = {
        "words": words,
        "scale": scale,
        "offset": part(stored, f"{stem}{biases}", scale.shape, *FLOATS),
    }
    return CodedWeight(name, (rows, columns), bits, groups, parts, partial(_decode, bits))


def _decode(bits: int, tensors: Mapping[str, torch.Tensor]) -> Codes:
    words = tensors["words"]
    scale, offset = (tensors[name].float().t() for name in ("scale", "offset"))

    def rows(start: int, stop: int) -> torch.Tensor:
        return codes_of(words[start:stop], bits)

    return Codes(rows, Offsets(scale, offset, MIDDLE[bits]), stored=Words(Lay.ALONG, words))
