"""Makes floats of int4 codes: compiled, where there is a compiler.

The compiled one (`unpack.c`) needs AVX2 and a `cc`. It takes half a second to make, once for a
process, and 0.2 ns a weight (AMD EPYC, one thread) where torch's own operations take 1.6. Bits are
the same.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Final

import torch

from pipeload.formats.compiler import compile_library
from pipeload.formats.integers.order import BY_ROWS, ORDERS, unpack_transposed

_SOURCE = Path(__file__).with_name("unpack.c")
KINDS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers that our kernels have for dtypes."""


def int4_block(
    packed: torch.Tensor, statistics: torch.Tensor, order: str, values: torch.Tensor
) -> torch.Tensor:
    """Dequantise rows of a weight, from a multiple of 64 on, in fp32; then round once.

    Args:
        packed: uint8 of [rows, columns / 2] in `order`, contiguous.
        statistics: scales and zeros of those rows, [groups, rows, 2]; rows lie side by side.
        order: one of `STORED`.
        values: memory for them, fp32 or bf16 of [columns * rows].

    Returns:
        `values` as [columns, rows]; how they lie depends on the order.
    """
    (rows, width), (groups, _, _) = packed.shape, statistics.shape
    made = values.view(2 * width, rows)
    if order == BY_ROWS:
        made = values.view(rows, 2 * width).T
    known = statistics.dtype in KINDS and _has_instructions(values.dtype)
    library = compiled() if known else None
    if library is None:
        made.copy_(_by_torch(packed, statistics, order))
        return made
    addresses = [tensor.data_ptr() for tensor in (packed, statistics, values)]
    sizes = rows, groups, 2 * width // groups, statistics.stride(0) * statistics.itemsize
    kinds = KINDS[statistics.dtype], KINDS[values.dtype]
    torch.get_num_threads()  # a new thread of Python has no number yet, and would take all
    if order == BY_ROWS:
        library.fill_rows(*addresses, *sizes, *kinds)
    else:
        tile, halves = ORDERS[order]
        library.fill(*addresses, *sizes, tile, int(halves), *kinds)
    return made


@functools.cache
def _has_instructions(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 or bool(torch.cpu.get_capabilities().get("avx512_bf16"))


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """Compile the kernel; None without a compiler, on other processors, or if that goes wrong."""
    library = compile_library(_SOURCE)
    if library is not None:
        addresses, kinds = [ctypes.c_void_p] * 3, [ctypes.c_int] * 2
        library.fill.argtypes = [*addresses, *[ctypes.c_int64] * 5, ctypes.c_int, *kinds]
        library.fill_rows.argtypes = [*addresses, *[ctypes.c_int64] * 4, *kinds]
        library.fill.restype = library.fill_rows.restype = None
    return library


def _by_torch(packed: torch.Tensor, statistics: torch.Tensor, order: str) -> torch.Tensor:
    groups, rows, _ = statistics.shape
    scale, zero = statistics[:, :, None].float().unbind(-1)
    scale, zero = scale.transpose(1, 2), zero.transpose(1, 2)
    values = unpack_transposed(packed, order).float()
    values.view(groups, -1, rows).mul_(scale).add_(zero - 8 * scale)
    return values
