"""Products of many rows with an integer weight: made into floats, a block at a time.

The kernels for integers take each row of input by itself. They are the fastest for the few of
decoding; a prompt is faster as a product of floats, making those included. Blocks bound what that
takes: never a whole weight.

[Note: how many rows are many] AMD EPYC with AVX512-BF16, one thread, torch 2.13, in ms for a weight
of 11008 x 4096, kernel / floats in blocks of 256. A weight of 4096 x 4096 crosses at the same rows.

    rows                                8         12         16         20         24        256
    int8 in bf16                  12 / 16    18 / 16    24 / 18    29 / 20    35 / 21  384 / 123
    int4 in bf16                   9 / 15    13 / 17    17 / 19    21 / 20    25 / 22  270 / 120
    int8, as if AVX2 were all     14 / 22    22 / 28    29 / 30    36 / 33    42 / 36  450 / 259
    int4, the same                14 / 23    20 / 26    27 / 30    33 / 32    40 / 36  420 / 271

Our own kernels beside floats, on an Intel Xeon with AVX512-VNNI and AVX512-BF16 and without AMX, a
weight of 5504 x 4096, in ms of processor time, medians. AVX2 alone multiplies floats in fp32.

    rows                               20         28         44         60        256
    int8 in bf16                   8 / 21    10 / 27    15 / 35              100 / 145
    int4 in bf16                  10 / 21    13 / 27    20 / 34              123 / 148
    int8, as if AVX2 were all     14 / 26    19 / 28    29 / 33    38 / 38  171 / 108
    int4, the same                14 / 25    20 / 26    31 / 33    41 / 38  188 / 106

Floats in fp32 cross ours by VNNI there at 256 rows (int8) and 128 (int4). AMD's processors
multiply bf16 much faster: there ours are taken for 20 rows.

Where the widest vectors have 256 bits, our own are as fast as a product of floats that are there
already (see many_rows.h), so they are taken however many rows there are. An AMD EPYC with AVX2
alone, a weight of 5504 x 4096, in ms of processor time, the least of one run:

    rows                               16         32         64        256
    int8 by our kernel                9.7         19         34        129
    int4 by our kernel                9.8         18         36        148
    int4 as floats in blocks           41         66         97        276
    the product of floats alone        23         33         51        147

With AMX, tiles are taken for all others (see tile_product.py). An Intel Xeon that has it, weights
of 5504 x 4096 and, in the last rows, 768 x 2048, in ms of processor time, medians of one run:

    rows                               8         12         20         64        256       1024
    int8 by our kernel               3.7        5.0        7.8       23.9        105
    int8 by tiles                    4.1        4.1        4.2        5.8       15.8       58.4
    int8 as floats in blocks        12.6       12.4       13.3       16.5       27.0       68.0
    int4 by our kernel               4.3        6.3       10.5       33.1        152
    int4 by tiles                    4.6        4.7        5.0        6.3       16.9       62.8
    int4 as floats in blocks        12.0       12.5       13.8       16.4       27.8       72.2
    a bf16 weight, by the library    4.0        4.0        4.7        6.8       16.3       56.0
    small int8, ours / tiles   0.30/0.31  0.41/0.32  0.60/0.34  1.73/0.46  7.00/1.21
    small int4, ours / tiles   0.38/0.31  0.52/0.34  0.85/0.37  2.55/0.51  9.50/1.22

Where torch's own operations unpack int4, it takes ten times as long as it does compiled, and pays
from some 190 rows on. For fp32 and fp16 there are no such kernels but plain loops (4096 x 4096:
int8 14 to 17 ms a row, int4 28 to 31; floats 3), so floats are always faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from pipeload.formats.integers import byte_product, product, tile_product
from pipeload.formats.integers.unpack import compiled

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_BY_KERNEL = {torch.bfloat16: {8: 12, 4: 16}, torch.float32: {8: 20, 4: 20}}
"""Rows of bf16, by what floats are multiplied in and by the bits of the weight."""
_MOST_ROUNDED = {torch.bfloat16: {8: 20, 4: 20}, torch.float32: {8: 52, 4: 48}}
"""The same of our own kernels, and whatever the dtype of the input."""
_MOST_ROUNDED_BY_VNNI = {torch.bfloat16: {8: 256, 4: 256}, torch.float32: {8: 192, 4: 112}}
"""The same where floats of bf16 are slow."""
_MOST_BESIDE_TILES = 8
"""The same where tiles take over."""
_ANY_NUMBER = 1 << 62
"""The same where vectors have 256 bits."""
_MOST_BY_KERNEL_IF_UNCOMPILED = 192
_OUT_ROWS = 256  # of a weight at once: whole tiles of int4
_ROWS = 256  # of input at once, where they are cast


class WeightBlock(NamedTuple):
    """Some rows of a weight as floats, transposed."""

    values: torch.Tensor
    """[in, rows]."""
    scale: torch.Tensor | None
    """[rows]: what products are to be multiplied by."""


MakeBlock = Callable[[int, int, torch.Tensor], WeightBlock]
"""Of the first row, the one after the last, and memory for the values."""


class Sizes(NamedTuple):
    """What the needs of a product depend on."""

    out_features: int
    in_features: int
    bits: int
    dtype: torch.dtype
    """Of the input."""
    reordered: bool = False
    """Whether columns of the input are put into another order first."""
    rounded: bool = False
    """Whether few rows of input are rounded for our own kernel."""
    tiled: bool = False
    """Whether many are multiplied by tiles."""

    def of(self, rows: int) -> int:
        """Bytes that a product of so many rows of input holds beside its tensors."""
        copied = rows * self.in_features * self.dtype.itemsize if self.reordered else 0
        return copied + temporary_bytes(rows, self)


def most_by_kernel(bits: int, dtype: torch.dtype, *, rounded: bool, tiled: bool = False) -> int:
    """Rows of input up to which a kernel is taken: see [Note: how many rows are many].

    Args:
        bits: of the weight.
        dtype: of the input.
        rounded: whether it is our own kernel; 0 where that cannot be taken.
        tiled: whether more rows are multiplied by tiles.
    """
    if rounded:
        return _most_rounded(bits, dtype, tiled=tiled)
    if dtype != torch.bfloat16:
        return 0
    if bits == 4 and compiled() is None:
        return _MOST_BY_KERNEL_IF_UNCOMPILED
    return _MOST_BY_KERNEL[product_dtype(dtype)][bits]


def _most_rounded(bits: int, dtype: torch.dtype, *, tiled: bool) -> int:
    own = byte_product if bits == 8 else product
    if dtype == torch.float64 or own.compiled() is None:  # as a pickle from elsewhere
        return 0
    if tiled:
        return _MOST_BESIDE_TILES
    if not _has_wide_vectors():
        return _ANY_NUMBER
    most = _MOST_ROUNDED_BY_VNNI if _has_slow_floats() else _MOST_ROUNDED
    return most[product_dtype(dtype)][bits]


def multiply(rows: torch.Tensor, out_features: int, block: MakeBlock) -> torch.Tensor:
    """[n, out] of `rows`, [n, in].

    What is added up in which order depends on the sizes and the processor alone, so the bits do.

    Args:
        rows: contiguous, at an address that is a multiple of 64.
        out_features: rows of the weight.
        block: makes its rows from the first number to before the second.
    """
    count, columns = rows.shape
    dtype = product_dtype(rows.dtype)
    made = torch.empty((count, out_features), dtype=rows.dtype)
    # Fresh memory for each block would take longer than filling it.
    values = torch.empty(min(_OUT_ROWS, out_features) * columns, dtype=dtype)
    parts = rows.split(count if dtype == rows.dtype else _ROWS)
    for start in range(0, out_features, _OUT_ROWS):
        stop = min(start + _OUT_ROWS, out_features)
        one = block(start, stop, values[: (stop - start) * columns])
        _multiply(parts, one, made[:, start:stop])
    return made


def _multiply(parts: Sequence[torch.Tensor], block: WeightBlock, out: torch.Tensor) -> None:
    for part, into in zip(parts, out.split(len(parts[0])), strict=True):
        made = part.to(block.values.dtype) @ block.values
        into.copy_(made if block.scale is None else made.mul_(block.scale))
        del made  # before the next one is made


def temporary_bytes(rows: int, weight: Sizes) -> int:
    """The most that a product of so many rows of input holds beside those and what it returns."""
    rounded, tiled = weight.rounded, weight.tiled
    if rows <= most_by_kernel(weight.bits, weight.dtype, rounded=rounded, tiled=tiled):
        if not weight.rounded:
            return 0
        own = byte_product if weight.bits == 8 else product
        held: int = own.temporary_bytes(rows, weight.in_features)
        return held
    return wide_bytes(rows, weight)


def wide_bytes(rows: int, weight: Sizes) -> int:
    """The same of a product by tiles or of floats, however few rows there are."""
    if weight.tiled:
        return tile_product.temporary_bytes(rows, weight.out_features, weight.in_features)
    dtype = product_dtype(weight.dtype)
    count = min(weight.out_features, _OUT_ROWS)
    part = rows if dtype == weight.dtype else min(rows, _ROWS)
    # The library may put both factors into an order of its own.
    items = (2 * count + part * (dtype != weight.dtype)) * weight.in_features + part * count
    nbytes: float = items * dtype.itemsize
    if weight.bits == 4 and compiled() is None:
        # Integers, exact floats, and scales and zeros of groups of 32 as those.
        exact = torch.float32.itemsize * (dtype != torch.float32)
        nbytes += count * weight.in_features * (2.5 + exact)
    return int(nbytes)


@functools.cache
def _has_wide_vectors() -> bool:
    """Whether floats are multiplied by vectors of 512 bits, whatever torch was told to use."""
    return bool(torch.cpu.get_capabilities().get("avx512_f"))


@functools.cache
def _has_slow_floats() -> bool:
    """Whether products of integers by VNNI are as fast as those of floats: see the note."""
    known = torch.cpu.get_capabilities()
    fast = known.get("amx_bf16") or "Intel" not in str(known.get("cpu_name"))
    return bool(known.get("avx512_vnni") and not fast)


@functools.cache
def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """What to multiply in: bf16 only where the processor does, fp32 is several times as fast."""
    known = torch.cpu.get_capabilities()
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")  # nobody has forbidden it
    native = known.get("bf16") or (wide and known.get("avx512_bf16"))
    return dtype if dtype == torch.bfloat16 and native else torch.float32
