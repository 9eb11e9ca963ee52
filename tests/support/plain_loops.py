"""Has bitsandbytes compute as on a processor with AVX2 alone, on any."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_NARROW = 8
"""Columns. Its vector loops take multiples of 16; the plain ones go over a weight as one row."""
_NAMES = [
    f"cdequantize_blockwise_cpu_{kind}_{dtype}"
    for kind in ("nf4", "fp4")
    for dtype in ("fp32", "bf16", "fp16")
]


def use_plain_loops(put: Callable[[object, str, object], object]) -> None:
    """Patch, by `put(object, name, value)`, what the library asks and what it dequantises with.

    Its file has loops for AVX-512 and plain ones, and chooses by the processor and the columns. So
    a weight is given to it as one of eight columns: the values are the same.
    """
    import bitsandbytes.backends.cpu.ops
    from bitsandbytes.cextension import lib

    use_no_fused_kernel(put)
    put(bitsandbytes.backends.cpu.ops, "_has_avx512", False)
    for name in _NAMES:
        put(lib, name, _narrow(getattr(lib, name)))


def use_no_fused_kernel(put: Callable[[object, str, object], object]) -> None:
    """Have it think that it knows no fused kernel, and leave weights as they are."""
    import bitsandbytes.nn.modules

    put(bitsandbytes.nn.modules, "has_avx512bf16", lambda: False)


def _narrow(whole: Any) -> Callable[..., None]:
    def call(*args: Any) -> None:
        *same, rows, columns = args  # packed, absmax, out, block size
        values = rows.value * columns.value
        assert values % _NARROW == 0
        whole(*same, ctypes.c_longlong(values // _NARROW), ctypes.c_longlong(_NARROW))

    return call
