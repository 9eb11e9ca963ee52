"""What products with bitsandbytes' weights hold beside their input and what they return.

Read from bitsandbytes 0.50: `MatMul8bitLt` and the kernels of its "default", "cpu" and "cuda"
backends for LLM.int8 (Dettmers et al., 2022), and `Linear4bit`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_FP16, _FP32 = 2, 4


class HeldBytes(NamedTuple):
    """Bytes at one moment of a product."""

    fixed: int
    per_row: int
    """For each row of the input."""

    def of(self, rows: int) -> int:
        """Bytes with so many rows of input."""
        return self.fixed + rows * self.per_row


def held_by_8bit(out_features: int, in_features: int, where: torch.device) -> list[HeldBytes]:
    """List what an LLM.int8 product holds at each moment that may be its peak."""
    if where.type != "cpu":
        return [
            # The input in fp16, its magnitudes, where they are outliers, and in int8.
            HeldBytes(0, (2 * _FP16 + 2) * in_features),
            # That, int32 products, the same in fp16, and in the dtype of the input with outliers.
            HeldBytes(0, in_features + (_FP32 + 2 * _FP16) * out_features),
        ]
    held = [
        # The input in fp16 and where it has outliers; scaled in fp32, and rounded.
        HeldBytes(0, (_FP16 + 1 + 2 * _FP32) * in_features),
        # The input in int8, int32 products, the same scaled by one factor and by two.
        HeldBytes(0, in_features + 3 * _FP32 * out_features),
    ]
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        # Without an int8 product, both sides are taken in fp32.
        weight = _FP32 * out_features * in_features
        held.append(HeldBytes(weight, (1 + _FP32) * in_features + _FP32 * out_features))
    return held


def held_by_4bit(
    out_features: int, in_features: int, unpacked: int, computed: torch.dtype, item: torch.dtype
) -> HeldBytes:
    """Say what a 4-bit product holds at its peak.

    Args:
        out_features: rows of the weight.
        in_features: its columns.
        unpacked: bytes of the weight as it is multiplied.
        computed: the dtype that is computed in.
        item: the input's.
    """
    cast = 0 if computed == item else computed.itemsize
    return HeldBytes(unpacked, cast * (out_features + in_features))
