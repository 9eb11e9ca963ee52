"""GPTQ's integers, as AutoGPTQ and gptqmodel store them; AutoRound's in the same packing.

    qweight  int32 [columns * bits / 32, rows]: words have one row's codes, one behind the other
    qzeros   int32 [groups, rows * bits / 32]: codes that stand for 0; in version 1 one less
    scales   [groups, rows]
    g_idx    int32 [columns]: the group of each

With `desc_act` columns were taken by importance, and g_idx is not sorted. Files are known to say
otherwise in their settings, so g_idx alone is believed. In the version "gptq_p", which alone has
5, 6 and 7 bits, codes lie in planes: see `codes_of_planes`. Layouts checked against what gptqmodel
7.7 packs.

[Note: one less] gptqmodel takes 1 from each zero of a word by one subtraction, and a zero of 0
borrows from the next. So it is added in the same way: code by code, the next one would be wrong.
Where words do not hold whole codes, it takes 1 from each by itself, and that of 0 is the largest.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

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
    held_in,
    moved_up,
    not_taken_over,
    part,
    stems,
)
from pipeload.formats.codes.words import codes_of, codes_of_planes
from pipeload.formats.format import setting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeload.checkpoint.headers import TensorEntry

_PLANES: Final = "gptq_p"
_VERSIONS: Final = {"gptq": 1, "gptq_v2": 0, _PLANES: 0, None: 1}
"""What is to be added to stored zeros, by `checkpoint_format`: see [Note: one less]."""
_ONES: Final = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""A word of codes that are 1, by their bits."""
BITS: Final = (2, 3, 4, 8)
"""Of codes one behind the other."""


class Packing(NamedTuple):
    """How a checkpoint is packed."""

    bits: int
    """Of a code."""
    added: int
    """To stored zeros."""
    symmetric: bool
    """Whether the settings say that zeros are in the middle."""
    planes: bool = False
    """Whether codes lie in planes of bits."""
    mixed: Sequence[int] = ()
    """Bits that a weight's own codes may have, where settings of modules differ."""


class Gptq:
    """A `CodesFormat`."""

    method = "gptq"
    title = "GPTQ"

    def find(
        self, config: Mapping[str, Any], stored: Mapping[str, TensorEntry]
    ) -> list[CodedWeight]:
        """Find the weights of quantised Linears. Raises what `CodesFormat.find` does."""
        version = config.get("checkpoint_format") or config.get("format")
        if version not in _VERSIONS:
            raise not_taken_over(self.method, f"its checkpoint_format {version!r} is unknown")
        packed_in = setting(config, "pack_dtype", "int32")
        if packed_in != "int32":
            raise not_taken_over(self.method, f"its codes lie in words of {packed_in!r}")
        planes = version == _PLANES
        known = range(2, 9) if planes else BITS
        bits = bits_of(self.method, config, known)
        how = packing(config, "dynamic", bits, _VERSIONS[version], known, planes=planes)
        return [coded(stem, stored, how) for stem in stems(stored, "qweight")]


def packing(
    config: Mapping[str, Any],
    own: str,
    bits: int,
    added: int,
    known: Sequence[int],
    *,
    planes: bool = False,
) -> Packing:
    """How a checkpoint is packed. `own`: where it has settings of single modules, if it has any."""
    if config.get(own):
        return Packing(bits, added, symmetric=False, planes=planes, mixed=known)
    return Packing(bits, added, bool(config.get("sym", False)), planes)


def bits_of(method: str, config: Mapping[str, Any], known: Sequence[int]) -> int:
    """The bits of a code.

    Raises:
        UnsupportedModelError: they are none of those known.
    """
    bits = config.get("bits", config.get("w_bit"))
    if bits not in known:
        listed = ", ".join(map(str, known))
        raise not_taken_over(method, f"its codes have {bits!r} bits, and {listed} are known")
    assert isinstance(bits, int)  # noqa: S101 - see above
    return bits


def coded(stem: str, stored: Mapping[str, TensorEntry], how: Packing) -> CodedWeight:
    """One weight.

    Args:
        stem: what names of its tensors begin with, dot and all.
        stored: tensors of the checkpoint by name.
        how: it is packed.

    Raises:
        CheckpointError: tensors do not fit each other.
    """
    words = part(stored, f"{stem}qweight", (None, None), torch.int32)
    how = how._replace(bits=_own_bits(stem, stored, how, words.shape[1]))
    bits, rows, columns = how.bits, words.shape[1], words.shape[0] * 32 // how.bits
    if bits not in _ONES and (words.shape[0] % bits or rows % 32):
        raise CheckpointError(
            f"the {words.shape[0]} words of {rows} rows of '{stem}qweight' are no whole number of "
            f"32 codes of {bits} bits. Download the checkpoint again."
        )
    scales = part(stored, f"{stem}scales", (None, rows), *FLOATS)
    groups = scales.shape[0]
    group_columns(f"{stem}weight", columns, groups)
    parts = {
        "qweight": words,
        "scales": scales,
        "qzeros": part(stored, f"{stem}qzeros", (groups, -(-rows * bits // 32)), torch.int32),
    }
    if f"{stem}g_idx" in stored:
        parts[GROUP_OF] = part(stored, f"{stem}g_idx", (columns,), torch.int32, torch.int64)
    name = f"{stem}weight"
    decode = partial(_decode, name, how)
    return CodedWeight(name, (rows, columns), held_in(bits), groups, parts, decode)


def _own_bits(stem: str, stored: Mapping[str, TensorEntry], how: Packing, rows: int) -> int:
    """The bits of one weight's codes: settings of modules go by patterns, and zeros tell."""
    if not how.mixed or not rows:
        return how.bits
    zeros = part(stored, f"{stem}qzeros", (None, None), torch.int32)
    bits = zeros.shape[1] * 32 // rows
    return bits if bits in how.mixed else how.bits


def _decode(name: str, how: Packing, tensors: Mapping[str, torch.Tensor]) -> Codes:
    bits, added, symmetric, planes, _ = how
    scale, up = tensors["scales"].float(), moved_up(bits)
    unpack = codes_of_planes if planes else codes_of
    zero = unpack(tensors["qzeros"] + added * _ONES.get(bits, 0), bits)[:, : scale.shape[1]]
    if bits not in _ONES:
        zero = zero + added & (1 << bits) - 1
    grid = ZeroCodes(scale, zero.float() + up, MIDDLE[held_in(bits)])
    if symmetric and not grid.is_symmetric:
        raise CheckpointError(
            f"{name!r} is said to be symmetric, and its zeros are not in the middle: they are "
            "stored in another version of the format than its settings say. Set checkpoint_format "
            "in config.json to the right one, or use the float checkpoint."
        )
    group_of = tensors.get(GROUP_OF)
    order = None if group_of is None else columns_by_group(name, group_of, len(scale))
    words = tensors["qweight"]

    def rows(start: int, stop: int) -> torch.Tensor:
        codes = unpack(words[:, start:stop].t(), bits) + up
        return codes if order is None else codes[:, order]

    side_by_side = bits in _ONES or not planes
    return Codes(rows, grid, order, Words(Lay.DOWN, words, bits) if side_by_side else None)
