"""Products with int8 weights, of inputs rounded to int16.

Compiled (`byte_product.c`) where there is a `cc`, for processors with AVX2. A weight is read as it
is stored, row after row, and once for all rows of input. torch's kernel, whose inputs are exact, is
fast for bf16 alone.

A number of the result has the same bits in whichever company it is computed, and on every
processor: `tests/rooms/formats/integers/test_byte_product.py` says which in torch's operations.

[Note: groups of inputs] 128 columns share a scale, as many as a group of int4 has at most. int16
leaves 2e-5 of the products' size as an error, a hundredth of what bf16 rounds them by.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Final

import torch

from pipeload.formats.compiler import compile_library
from pipeload.formats.integers.unpack import KINDS

_SOURCE = Path(__file__).with_name("byte_product.c")
GROUP: Final = 128
"""Columns of input that share a scale; the last ones may be fewer."""
AT_ONCE: Final = 512
"""Rows of input that are rounded at once: a prompt takes no more memory than these."""
_STEP = 32  # columns that codes are padded to
_WITHOUT = (
    "int8 weights are multiplied by torch's kernel: there is no C compiler that works, or the "
    "processor lacks AVX2"
)


def multiply(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, vnni: bool = True
) -> torch.Tensor:
    """[n, out] of `rows`, [n, in], and int8 of [out, in]; there must be a kernel.

    Args:
        rows: contiguous, in bf16, fp16 or fp32; what is returned is in the same. `in` is a multiple
            of 16.
        weight: contiguous, at any address.
        scale: of each row of the weight, [out], contiguous, in any of those dtypes.
        vnni: whether to use what AVX512-VNNI adds, where it is; bits are the same.
    """
    library = compiled()
    assert library is not None  # noqa: S101 - whoever multiplies so has asked
    (count, columns), out = rows.shape, len(weight)
    memory = torch.empty(temporary_bytes(count, columns), dtype=torch.uint8)
    made = torch.empty((count, out), dtype=rows.dtype)
    torch.get_num_threads()  # a new thread of Python has no number yet, and would take all
    for start in range(0, count, AT_ONCE):
        some = rows[start : start + AT_ONCE]
        library.product(
            *(some.data_ptr(), weight.data_ptr(), scale.data_ptr()),
            *(memory.data_ptr(), made[start:].data_ptr(), len(some), out, columns),
            *(KINDS[scale.dtype], KINDS[rows.dtype], vnni),
        )
    return made


def temporary_bytes(rows: int, columns: int) -> int:
    """What so many rows of input are held in, rounded."""
    return min(rows, AT_ONCE) * (2 * _STEP * -(-columns // _STEP) + 4 * -(-columns // GROUP))


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """Compile the kernel; None without a compiler, on other processors, or if that goes wrong."""
    library = compile_library(_SOURCE, without=_WITHOUT)
    if library is not None:
        addresses, sizes, kinds = [ctypes.c_void_p] * 5, [ctypes.c_int64] * 3, [ctypes.c_int] * 3
        library.product.argtypes, library.product.restype = [*addresses, *sizes, *kinds], None
    return library
