"""Bytes of packed weights in another order than the file's, as they are read, in pieces."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

WHOLE_TILES: Final = 64
"""Rows: whole tiles in every order that is known."""
_CHUNK_BYTES = 1 << 20


class Repack(abc.ABC):
    """Puts bytes from one order into another. Equal ones do the same."""

    unpacks: ClassVar[bool] = False
    quick: ClassVar[bool] = True

    @staticmethod
    def rows(width: int) -> int:
        """How many rows of `width` bytes to take at once: whole tiles of any kind, about 1 MB."""
        return max(1, _CHUNK_BYTES // (width * WHOLE_TILES)) * WHOLE_TILES

    def steps(self, rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
        """Say which of so many rows to take at once: whole tiles."""
        step = self.rows(row_bytes)
        for start in range(0, rows, step):
            yield start, min(start + step, rows)

    def part(self, start: int, stop: int) -> tuple[range, Repack]:
        """Say that the rows come of the same stored rows."""
        return range(start, stop), self

    @abc.abstractmethod
    def fill(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out` with `stored`, both of the same dtype and [rows, width], in the other order.

        Args:
            stored: rows of a weight, the first of them at a multiple of `rows`.
            out: as many.
        """


@dataclass(frozen=True, slots=True)
class Moved(Repack):
    """Keeps the order: for what only has to lie elsewhere than in the file."""

    def fill(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Copy `stored` to `out`."""
        out.copy_(stored)


AS_IT_IS: Final = Moved()
