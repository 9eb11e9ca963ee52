"""Makes floats of GGUF's blocks: compiled where there is a compiler, else by the package gguf.

The compiled one (`kernel.c`) needs AVX2 and a `cc`. It takes a second to make, once for a process,
and knows the common types; the package knows all that a plain load does, takes about ten times
as long, and is what a plain load calls: the bits are its own in both cases.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from pipeload.checkpoint.gguf import BLOCKS
from pipeload.formats.compiler import compile_library

if TYPE_CHECKING:
    from collections.abc import Sequence

_SOURCE = Path(__file__).with_name("kernel.c")
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types whose values are floats already, each a block of its own."""
COMPILED: Final = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_NL": 20,
}
"""What the kernel knows, with the numbers that it has for them: the format's own."""
_CHUNK_VALUES = 1 << 16  # of which the package's temporaries, several times as large, stay small
_log = logging.getLogger("pipeload")


def unpack(
    stored: torch.Tensor, kind: str, out: torch.Tensor, order: Sequence[int] | None = None
) -> None:
    """Fill `out` with the floats of stored rows, as a plain load rounds them.

    Args:
        stored: uint8 of [rows, bytes of a row], contiguous.
        kind: their type, a key of `BLOCKS`.
        out: of [rows, values of a row], in fp32, bf16 or fp16; contiguous.
        order: which stored row each row of `out` is; None: the same.
    """
    if kind in FLOATS:
        values = stored.view(FLOATS[kind])
        out.copy_(values if order is None else values[torch.tensor(order)])
        return
    library = compiled() if kind in COMPILED and out.dtype in _KINDS else None
    if library is None:
        unpack_by_package(stored, kind, out, order)
        return
    block = BLOCKS[kind]
    places = None if order is None else torch.tensor(order, dtype=torch.int64)
    blocks = out.shape[1] // block.values
    sizes = out.shape[0], blocks, block.nbytes, block.values
    addresses = stored.data_ptr(), out.data_ptr(), None if places is None else places.data_ptr()
    library.fill(*addresses, *sizes, COMPILED[kind], _KINDS[out.dtype])


def unpack_by_package(
    stored: torch.Tensor, kind: str, out: torch.Tensor, order: Sequence[int] | None = None
) -> None:
    """Do the same as `unpack` with the package that a plain load calls, for types of blocks."""
    import gguf

    step = max(1, _CHUNK_VALUES // out.shape[1])
    number = gguf.GGMLQuantizationType[kind]
    for start in range(0, out.shape[0], step):
        stop = min(start + step, out.shape[0])
        some = stored[start:stop] if order is None else stored[torch.tensor(order[start:stop])]
        made = gguf.quants.dequantize(some.numpy(), number)
        out[start:stop].copy_(torch.from_numpy(made))


@functools.cache
def can_unpack(kind: str) -> bool:
    """Whether a type is known here, or to the package that is installed; says if it takes long."""
    if is_quick(kind):
        return True
    try:
        block = BLOCKS[kind]
        unpack_by_package(
            torch.zeros((1, block.nbytes), dtype=torch.uint8), kind, torch.empty((1, block.values))
        )
    except (ImportError, KeyError, NotImplementedError):
        return False
    lacks = ": there is no C compiler that works, or the processor lacks AVX2"
    why = lacks if kind in COMPILED else ""
    _log.info("GGUF's %s is unpacked by the package gguf, which takes long%s", kind, why)
    return True


def is_quick(kind: str) -> bool:
    """Whether a type is unpacked by the compiled kernel, or is floats already."""
    return kind in FLOATS or (kind in COMPILED and compiled() is not None)


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """Compile the kernel; None without a compiler, on other processors, or if that goes wrong."""
    library = compile_library(_SOURCE)
    if library is not None:
        sizes = [ctypes.c_int64] * 4
        library.fill.argtypes = [*[ctypes.c_void_p] * 3, *sizes, ctypes.c_int, ctypes.c_int]
        library.fill.restype = ctypes.c_int
    return library
