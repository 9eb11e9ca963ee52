"""Products of more than a few bf16 rows with int8 and int4 weights, by AMX.

Compiled (`tile_product.c`) where there is a `cc` that knows AMX and a processor that has it. Inputs
are exact. Weights are made bf16 beside the product, in the order that its instruction wants: no
library puts them into an order of its own, which takes longer than the product of a few dozen rows.

A row of the result has the same bits in whichever company it is computed.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from pipeload.formats.compiler import compile_library
from pipeload.formats.integers.unpack import KINDS

_SOURCE = Path(__file__).with_name("tile_product.c")
_BLOCK = 128  # rows of a weight that a thread takes at once, if there are enough for all threads
_PAIR = 32  # the least, and rows of input that are taken at once
_COLUMNS = 2048  # as in the C file
_MOST_ROWS = 512  # the same
_ALIGNMENT = 64
_WITHOUT = (
    "many rows are multiplied with int8 and int4 weights as floats: there is no C compiler that "
    "knows AMX, or the processor lacks it"
)


def takes(dtype: torch.dtype, columns: int) -> bool:
    """Whether rows of that dtype and so many columns can be multiplied here.

    The user may forbid torch to use the processor's bf16: then this is forbidden, too.
    """
    return dtype == torch.bfloat16 and columns % _PAIR == 0 and _is_there()


def multiply(rows: torch.Tensor, weight: torch.Tensor, statistics: torch.Tensor) -> torch.Tensor:
    """[n, out] in bf16 of `rows`, bf16 of [n, in]; there must be a kernel that `takes` them.

    Args:
        rows: contiguous.
        weight: int8 of [out, in], or uint8 of [out, in / 2], row after row: contiguous.
        statistics: scales of an int8 weight, [out], or scales and zeros of one of int4,
            [groups, out, 2]: contiguous, in any dtype of `KINDS`.
    """
    library = compiled()
    assert library is not None  # noqa: S101 - see above
    (count, columns), out = rows.shape, len(weight)
    group = 0 if statistics.dim() == 1 else columns // len(statistics)
    made = torch.empty((count, out), dtype=rows.dtype)
    threads = torch.get_num_threads()
    block, own = _block(out, threads), _own_bytes(count, out, columns, threads)
    memory = torch.empty(threads * own + _ALIGNMENT, dtype=torch.uint8)
    start = memory.data_ptr() + -memory.data_ptr() % _ALIGNMENT
    library.product(
        *(rows.data_ptr(), weight.data_ptr(), statistics.data_ptr(), start, made.data_ptr()),
        *(count, out, columns, group, block, own, threads, KINDS[statistics.dtype]),
    )
    return made


def temporary_bytes(rows: int, out: int, columns: int) -> int:
    """The most that such a product holds beside its tensors."""
    threads = torch.get_num_threads()
    return threads * _own_bytes(rows, out, columns, threads) + _ALIGNMENT


def _block(out: int, threads: int) -> int:
    block = _BLOCK
    while block > _PAIR and out < 2 * threads * block:
        block //= 2
    return block


def _own_bytes(rows: int, out: int, columns: int, threads: int) -> int:
    """What a thread holds: some of the weight in bf16, and sums in fp32."""
    held = min(-(-rows // _PAIR) * _PAIR, _MOST_ROWS)
    return _block(out, threads) * (2 * min(columns, _COLUMNS) + 4 * held)


@functools.cache
def _is_there() -> bool:
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return wide and compiled() is not None


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """Compile the kernel; None without a compiler, on other processors, or if that goes wrong."""
    library = compile_library(_SOURCE, without=_WITHOUT)
    if library is not None:
        addresses, sizes = [ctypes.c_void_p] * 5, [ctypes.c_int64] * 7
        library.product.argtypes = [*addresses, *sizes, ctypes.c_int]
        library.product.restype = None
    return library
