"""Integers with scales and offsets for groups of a row, as Apple's MLX makes them.

    weight   uint32 [rows, columns * bits / 32]: the codes of a row one behind the other
    scales   [rows, groups]
    biases   [rows, groups]: what code 0 stands for; `qbiases` where transformers has made them

Embeddings are quantised as well. Settings of a module may stand by its name. Layouts checked
against what mlx 0.32 packs.
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
    Lay,
    Offsets,
    Words,
    group_columns,
    held_in,
    moved_up,
    not_taken_over,
    part,
    stems,
)
from pipeload.formats.codes.words import codes_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeload.checkpoint.headers import TensorEntry

_BITS: Final = (2, 3, 4, 5, 6, 8)


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
        coded = []
        for stem in stems(stored, "scales"):
            if f"{stem}weight" in stored:
                told = config.get(stem.removesuffix("."))
                own = {**config, **told} if isinstance(told, dict) else config
                words = stored[f"{stem}weight"]
                if words.dtype == "U32" and len(words.shape) > 2:
                    why = f"'{stem}weight' is several stacked weights, as experts are"
                    raise not_taken_over(self.method, why)
                coded.append(_coded(stem, stored, self._bits(own)))
        self._bits(config)  # also where nothing is quantised
        return coded

    def _bits(self, told: Mapping[str, Any]) -> int:
        """Of a code.

        Raises:
            UnsupportedModelError: they are packed in a way that is not understood.
        """
        if (mode := told.get("mode", "affine")) != "affine":
            raise not_taken_over(self.method, f"its mode {mode!r} is unknown")
        bits = told.get("bits")
        if bits not in _BITS:
            known = ", ".join(map(str, _BITS))
            raise not_taken_over(
                self.method, f"its codes have {bits!r} bits, and {known} are known"
            )
        assert isinstance(bits, int)  # noqa: S101 - see above
        return bits


def _coded(stem: str, stored: Mapping[str, TensorEntry], bits: int) -> CodedWeight:
    name = f"{stem}weight"
    words = part(stored, name, (None, None), torch.uint32)
    rows, count = words.shape
    if bits not in MIDDLE and 4 * count % bits:
        raise CheckpointError(
            f"the {count} words of a row of {name!r} are no whole number of eight codes of {bits} "
            "bits. Download the checkpoint again."
        )
    columns = count * 32 // bits
    scale = part(stored, f"{stem}scales", (rows, None), *FLOATS)
    groups = scale.shape[1]
    group_columns(name, columns, groups)
    biases = "qbiases" if f"{stem}qbiases" in stored else "biases"
    parts = {
        "words": words,
        "scale": scale,
        "offset": part(stored, f"{stem}{biases}", scale.shape, *FLOATS),
    }
    decode = partial(_decode, bits)
    return CodedWeight(name, (rows, columns), held_in(bits), groups, parts, decode)


def _decode(bits: int, tensors: Mapping[str, torch.Tensor]) -> Codes:
    words, up = tensors["words"], moved_up(bits)
    scale, offset = (tensors[name].float().t() for name in ("scale", "offset"))

    def rows(start: int, stop: int) -> torch.Tensor:
        codes = codes_of(words[start:stop], bits)
        return codes + up if up else codes

    words_of_kernels = Words(Lay.ALONG, words, bits) if bits <= 4 or bits == 8 else None
    grid = Offsets(scale, offset, MIDDLE[held_in(bits)], up)
    return Codes(rows, grid, stored=words_of_kernels)
