"""4-bit weights in the order that torch's CPU kernel reads, which depends on the processor.

`torch.ops.aten._weight_int4pack_mm_for_cpu` wants the rows of a weight in tiles: one column of a
tile after the other, two rows in a byte. How many rows make a tile, and which two share a byte, is
settled when the kernel is compiled: 64 rows on AVX512, 32 on AVX2 and on plain x86, fewer on ARM.
Bytes made for one and computed with by another are garbage without any error. So a checkpoint says
in which order it is, what runs here is found out by trying, and where both differ bytes are put
into the other order as they are read. Seen in torch 2.13.

One order depends on no processor, `BY_ROWS`: it is that of our own kernel (see `product`), and what
is quantised or converted now. Where that kernel does not run, those are put into torch's order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from pipeload.errors import UnsupportedModelError
from pipeload.formats.repack import WHOLE_TILES, Repack

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK_ROWS = WHOLE_TILES
"""Whole tiles in every order."""
KERNEL_ROWS = 16
"""The kernel takes whole multiples of so many rows."""


class Order(NamedTuple):
    """How rows of a weight are put together in bytes."""

    tile: int
    """Rows of a tile. What is left of a weight is a last, smaller one, of pairs."""
    halves: bool
    """A byte holds rows r (low half) and r + tile / 2; otherwise rows 2 r and 2 r + 1."""


ORDERS = {
    "halves-64": Order(64, halves=True),  # AVX512
    "halves-32": Order(32, halves=True),  # AVX2
    "pairs-64": Order(64, halves=False),
    "pairs-32": Order(32, halves=False),  # x86 without either
    "pairs-16": Order(16, halves=False),  # vectors of 128 bits, as on ARM
}
"""Those of torch, by name."""
BY_ROWS = "rows"
"""One row after the other; a byte holds columns 2 c (low half) and 2 c + 1."""
STORED = (BY_ROWS, *ORDERS)
"""Those that checkpoints may be in."""


def pack(values: torch.Tensor, name: str) -> torch.Tensor:
    """Put together a weight, or some of its rows from a multiple of 64 on.

    Args:
        values: uint8 of [rows, columns], each below 16; rows a multiple of 16.
        name: the wanted order, one of `STORED`.

    Returns:
        uint8 of [rows, columns / 2].
    """
    if name == BY_ROWS:
        return values[:, 1::2].bitwise_left_shift(4).bitwise_or_(values[:, ::2])
    rows, columns = values.shape
    packed = torch.empty((rows, columns // 2), dtype=torch.uint8)
    for start, stop, count in _blocks(rows):
        block = values[start:stop].view(-1, count, columns).transpose(1, 2)
        _pack_blocks(block, packed[start:stop].view(-1, count * columns // 2), ORDERS[name])
    return packed


def unpack(packed: torch.Tensor, name: str) -> torch.Tensor:
    """Undo `pack`: values as uint8 of [rows, columns] of uint8 [rows, columns / 2]."""
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    values = torch.empty((rows, columns), dtype=torch.uint8)
    if name == BY_ROWS:
        torch.bitwise_and(packed, 0xF, out=values[:, ::2])
        torch.bitwise_right_shift(packed, 4, out=values[:, 1::2])
        return values
    for start, stop, count in _blocks(rows):
        stored = packed[start:stop].view(-1, count * columns // 2)
        block = _unpack_blocks(stored, count, ORDERS[name])
        values[start:stop].view(-1, count, columns).copy_(block.transpose(1, 2))
    return values


def unpack_transposed(packed: torch.Tensor, name: str) -> torch.Tensor:
    """Undo `pack` to uint8 of [columns, rows], which takes less time: so they lie in a tile."""
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    if name == BY_ROWS:
        return unpack(packed, name).T.contiguous()
    values = torch.empty((columns, rows), dtype=torch.uint8)
    for start, stop, count in _blocks(rows):
        stored = packed[start:stop].view(-1, count * columns // 2)
        block = values[:, start:stop].view(columns, -1, count).transpose(0, 1)
        _unpack_into(stored, block, ORDERS[name])
    return values


def reorder(stored: torch.Tensor, out: torch.Tensor, source: str, target: str) -> None:
    """Fill `out` with the rows of `stored`, from the order `source` into the order `target`.

    Both are uint8 of [rows, columns / 2], a weight or some of its rows from a multiple of 64 on.
    """
    rows, width = stored.shape
    if BY_ROWS in (source, target):
        out.copy_(pack(unpack(stored, source), target))
        return
    for start, stop, count in _blocks(rows):
        block = _unpack_blocks(stored[start:stop].view(-1, count * width), count, ORDERS[source])
        _pack_blocks(block, out[start:stop].view(-1, count * width), ORDERS[target])


@dataclass(frozen=True, slots=True)
class Reordered(Repack):
    """Rows of a checkpoint that was made on another kind of processor."""

    source: str
    target: str

    def fill(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out` with `stored` in the order `target`."""
        reorder(stored, out, self.source, self.target)


@functools.cache
def kernel_order() -> str:
    """The name of the order that the kernel reads on this processor, found by packing a weight.

    Raises:
        UnsupportedModelError: it is none that is known here.
    """
    rows = torch.arange(BLOCK_ROWS + KERNEL_ROWS)  # a whole tile of any order, and a last one
    columns = torch.arange(32)
    values = (rows[:, None] * 5 + columns * 3 + rows[:, None] // 16 * columns) % 16
    convert = getattr(torch.ops.aten, "_convert_weight_to_int4pack_for_cpu", None)
    if convert is not None:
        packed = convert(values.to(torch.int32), 1)
        for name in ORDERS:
            if torch.equal(packed, pack(values.to(torch.uint8), name)):
                return name
    raise UnsupportedModelError(
        f"torch {torch.__version__} keeps 4-bit weights on this processor "
        f"({torch.backends.cpu.get_cpu_capability()}) in an order that pipeload does not know. "
        "Use an int8 checkpoint, or another version of torch."
    )


def _blocks(rows: int) -> Iterator[tuple[int, int, int]]:
    """(first row, last row + 1, rows of a block): whole blocks, then what is left."""
    whole = rows - rows % BLOCK_ROWS
    if whole:
        yield 0, whole, BLOCK_ROWS
    if whole < rows:
        yield whole, rows, rows - whole


def _tiles(rows: int, order: Order) -> Iterator[tuple[int, slice, slice]]:
    """Bytes of a column before each tile of a block, and which rows are in low and high halves."""
    for start in range(0, rows, order.tile):
        stop = min(start + order.tile, rows)
        if order.halves and stop - start == order.tile:
            middle = (start + stop) // 2
            yield start, slice(start, middle), slice(middle, stop)
        else:
            yield start, slice(start, stop, 2), slice(start + 1, stop, 2)


def _unpack_blocks(stored: torch.Tensor, rows: int, order: Order) -> torch.Tensor:
    """Values as [blocks, columns, rows] of bytes as [blocks, rows * columns / 2]."""
    columns = 2 * stored.shape[1] // rows
    block = torch.empty((stored.shape[0], columns, rows), dtype=torch.uint8)
    _unpack_into(stored, block, order)
    return block


def _unpack_into(stored: torch.Tensor, block: torch.Tensor, order: Order) -> None:
    columns, rows = block.shape[1:]
    for start, low, high in _tiles(rows, order):
        count = min(order.tile, rows - start)
        tile = _tile(stored, start, count, columns)
        torch.bitwise_and(tile, 0xF, out=block[..., low])
        torch.bitwise_right_shift(tile, 4, out=block[..., high])


def _pack_blocks(block: torch.Tensor, out: torch.Tensor, order: Order) -> None:
    columns, rows = block.shape[1:]
    for start, low, high in _tiles(rows, order):
        count = min(order.tile, rows - start)
        tile = _tile(out, start, count, columns)
        torch.bitwise_or(block[..., low], block[..., high] << 4, out=tile)


def _tile(stored: torch.Tensor, start: int, count: int, columns: int) -> torch.Tensor:
    first, nbytes = start * columns // 2, count * columns // 2
    return stored[:, first : first + nbytes].view(-1, columns, count // 2)
