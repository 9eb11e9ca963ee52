"""Puts a whole weight's codes into the order of our kernels: compiled where there is a compiler.

`repack.c` takes a second to make, once for a process. Without it torch's own operations do the
same, a block of rows at a time, and take many times as long.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from pipeload.formats.codes.coded_weight import MIDDLE, Lay
from pipeload.formats.compiler import compile_library
from pipeload.formats.integers.order import BLOCK_ROWS, BY_ROWS, pack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeload.formats.codes.coded_weight import Codes

_SOURCE = Path(__file__).with_name("repack.c")
_FLIP: Final = {4: 0, 8: 0x80808080}
"""Of 8 bits our kernel takes values: codes less 128."""
_SIGNED: Final = 0x88888888
"""Makes codes of 4 bits of values."""
BLOCK_CODES: Final = 1 << 20
"""At once, where they are not put in order by the compiled kernel; at least some whole rows."""
_WITHOUT = (
    "integers of other programs are put in order by torch's own operations, which takes long in "
    "every pass: there is no C compiler that works. Install one, or run `pipeload convert` once."
)


def repack(codes: Codes, bits: int, order: str, out: torch.Tensor) -> None:
    """Fill a weight of our kernels with codes.

    Args:
        codes: of all its rows.
        bits: of a code.
        order: of 4 bits, one of `order.STORED`.
        out: uint8 of [rows, columns / 2] of 4 bits, int8 of [rows, columns] of 8; contiguous.
    """
    library = compiled() if codes.stored is not None else None
    if library is None or (bits == 4 and order != BY_ROWS):
        _by_blocks(codes, bits, order, out)
        return
    assert codes.stored is not None  # noqa: S101 - see above
    lay, words, stored_bits, places, signed = codes.stored
    words = words.contiguous()
    rows, count = out.shape[0], out.shape[1] * out.element_size() // 4
    flip = _SIGNED if signed else _FLIP[bits]
    moved = None if codes.columns is None else codes.columns.contiguous()
    columns = None if moved is None else moved.data_ptr()
    if lay == Lay.ACROSS:
        numbers = (ctypes.c_int32 * len(places))(*places)
        library.across(words.data_ptr(), numbers, out.data_ptr(), rows, count, flip)
        return
    fill = library.down if lay == Lay.DOWN else library.along
    fill(words.data_ptr(), columns, out.data_ptr(), rows, count, flip, stored_bits)


def fill_floats(codes: Codes, out: torch.Tensor) -> None:
    """Fill `out`, of [rows, columns], with the numbers that codes stand for, rounded once."""
    for start, stop in _blocks(*out.shape):
        out[start:stop].copy_(float_rows(codes, start, stop))


def float_rows(codes: Codes, start: int, stop: int) -> torch.Tensor:
    """Make fp32 of some rows, in the order of the inputs."""
    numbers = codes.grid.numbers(codes.rows(start, stop), start)
    if codes.columns is None:
        return numbers
    return torch.empty_like(numbers).index_copy_(1, codes.columns.long(), numbers)


def packed_rows(codes: Codes, bits: int, order: str, start: int, stop: int) -> torch.Tensor:
    """Put some rows, from a multiple of 64 on, in the order of our kernels: see `repack`."""
    block = codes.rows(start, stop)
    return pack(block, order) if bits == 4 else (block ^ MIDDLE[8]).view(torch.int8)


def _by_blocks(codes: Codes, bits: int, order: str, out: torch.Tensor) -> None:
    for start, stop in _blocks(len(out), out.shape[1] * 8 // bits):
        out[start:stop].copy_(packed_rows(codes, bits, order, start, stop))


def _blocks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows: whole tiles, then what is left."""
    step = max(1, BLOCK_CODES // columns // BLOCK_ROWS) * BLOCK_ROWS
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """Compile the kernel; None without a compiler, or if that goes wrong: says so, once."""
    library = compile_library(_SOURCE, without=_WITHOUT)
    if library is not None:
        addresses, sizes = [ctypes.c_void_p] * 3, [ctypes.c_int64] * 2
        for one in (library.down, library.along):
            one.argtypes = [*addresses, *sizes, ctypes.c_uint32, ctypes.c_int]
        library.across.argtypes = [*addresses, *sizes, ctypes.c_uint32]
        library.down.restype = library.along.restype = library.across.restype = None
    return library
