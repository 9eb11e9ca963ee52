"""Fills tensors with dequantised 4-bit values: compiled where there is a compiler, else with torch.

The compiled one (`kernel.c`) needs AVX2 and a `cc` that knows OpenMP. It takes half a second to
make, once for a process.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from pathlib import Path
from typing import Protocol

import torch

from pipeload.formats.compiler import compile_library

_SOURCE = Path(__file__).with_name("kernel.c")
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FILLED_DTYPES = frozenset(_KINDS)
"""What can be filled."""
BLOCK_STEP = 16
"""Values of a block come in multiples of this many."""
_CHUNK = 1 << 18  # values whose indices and products stay in a processor's cache
_FEW_THREADS = 4  # with more of them the library's own is as fast as one thread with tables


class ThreadMemory(threading.local):
    """Memory that each thread keeps: fresh pages take longer than their filling."""

    def __init__(self) -> None:
        """Keep nothing at first."""
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> torch.Tensor:
        """Give uint8 of [nbytes], which are the caller's until the next call."""
        if self._bytes.numel() < nbytes:
            with torch.inference_mode(False):  # else it could not be written to outside of it
                self._bytes = torch.empty(nbytes, dtype=torch.uint8)
        return self._bytes[:nbytes]


_NUMBERS, _PRODUCTS = ThreadMemory(), ThreadMemory()
_FLOAT = torch.float32


class Fill(Protocol):
    """Dequantises values into a tensor."""

    def __call__(self, packed: torch.Tensor, absmax: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out`: contiguous, of one of `FILLED_DTYPES`.

        Args:
            packed: uint8 [n / 2], contiguous; the first value of each byte is in its high half.
            absmax: fp32 [n / block size], contiguous.
            out: n values, whole blocks.
        """


def make_fill(codes: torch.Tensor, blocksize: int) -> Fill | None:
    """Make the fastest `Fill` there is here; None if none would be faster than the library's.

    Args:
        codes: fp32 [16], what the numbers stand for.
        blocksize: how many values share a factor; a multiple of `BLOCK_STEP`.
    """
    library = compiled()
    if library is not None:
        return compiled_fill(library, codes, blocksize)
    return torch_fill(codes, blocksize) if torch.get_num_threads() <= _FEW_THREADS else None


def compiled_fill(library: ctypes.CDLL, codes: torch.Tensor, blocksize: int) -> Fill:
    """Make a `Fill` that calls the kernel that `compiled` has made."""
    codes = codes.clone()

    def fill(packed: torch.Tensor, absmax: torch.Tensor, out: torch.Tensor) -> None:
        addresses = [tensor.data_ptr() for tensor in (packed, absmax, codes, out)]
        library.fill(*addresses, out.numel() // blocksize, blocksize, _KINDS[out.dtype])

    return fill


def torch_fill(codes: torch.Tensor, blocksize: int) -> Fill:
    """Make a `Fill` with a table of the two values that a byte stands for, moved as 8 bytes.

    Only a lookup of such in one dimension is quick: 0.5 ns each, on one thread; other forms of it
    take three times as long.
    """
    pairs = torch.cartesian_prod(codes, codes).view(torch.int64).view(-1)
    chunk = max(1, _CHUNK // blocksize) * blocksize

    def fill(packed: torch.Tensor, absmax: torch.Tensor, out: torch.Tensor) -> None:
        flat, total = out.view(-1), out.numel()
        size = min(chunk, total)
        numbers = _NUMBERS.take(2 * size).view(torch.int32)
        products = flat[:0] if out.dtype == torch.float32 else _PRODUCTS.take(4 * size).view(_FLOAT)
        for start in range(0, total, chunk):
            stop = min(total, start + chunk)
            made = flat[start:stop]
            values = made if out.dtype == torch.float32 else products[: stop - start]
            index = numbers[: (stop - start) // 2]
            index.copy_(packed[start // 2 : stop // 2])
            torch.index_select(pairs, 0, index, out=values.view(torch.int64))
            scale = absmax[start // blocksize : stop // blocksize]
            values.view(-1, blocksize).mul_(scale[:, None])
            if values is not made:
                made.copy_(values)

    return fill


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """Compile the kernel; None without a compiler, on other processors, or if that goes wrong."""
    library = compile_library(_SOURCE)
    if library is not None:
        library.fill.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 2, ctypes.c_int]
        library.fill.restype = None
    return library
