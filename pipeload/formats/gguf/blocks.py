"""Rows of blocks as they are read: which stored rows, how many at once, and their floats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from pipeload.formats.gguf.kernel import is_quick, unpack

if TYPE_CHECKING:
    from collections.abc import Iterator

_STEP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Blocks:
    """Makes floats of stored rows. A `Repacking`.

    [Note: rows in another order] llama.cpp has the rows of queries and keys in an order of its own,
    the same for each head. A row is a number of whole blocks, so rows are put back in order packed:
    the library does so with floats. What is cut within a head is made of that whole head.
    """

    unpacks: ClassVar[bool] = True

    kind: str
    """The type of the blocks, or of floats."""
    row_bytes: int
    """Of a stored row."""
    order: tuple[int, ...] = ()
    """Which stored row of each group of so many the rows of it are; none: the same."""
    added: float = 0
    """To each float, in fp32."""
    skipped: int = 0
    """Rows of the first group that are read but not wanted."""

    @property
    def quick(self) -> bool:
        """Whether the compiled kernel makes them."""
        return is_quick(self.kind)

    def steps(self, rows: int, _row_bytes: int) -> Iterator[tuple[int, int]]:
        """Say which rows to take at once: whole groups, about 1 MB."""
        group = len(self.order) or 1
        step = max(1, _STEP_BYTES // (self.row_bytes * group)) * group
        start = 0
        while start < rows:
            stop = min(rows, start + step - (self.skipped + start) % group)
            yield start, stop
            start = stop

    def part(self, start: int, stop: int) -> tuple[range, Blocks]:
        """Say which stored rows, whole groups of them, rows are made of."""
        group = len(self.order) or 1
        start, stop = start + self.skipped, stop + self.skipped
        first = start - start % group
        return range(first, stop + -stop % group), replace(self, skipped=start - first)

    def fill(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out` with the floats of `stored`, which is bytes."""
        places = self.places(out.shape[0])
        if self.added:
            made = out.new_empty(out.shape, dtype=torch.float32)
            unpack(stored, self.kind, made, places)
            out.copy_(made.add_(self.added))
        else:
            unpack(stored, self.kind, out, places)

    def places(self, rows: int) -> list[int] | None:
        """Say which stored row each of the first rows is; None: they are in order."""
        if not self.order:
            return None
        group, wanted = len(self.order), range(self.skipped, self.skipped + rows)
        return [row - row % group + self.order[row % group] for row in wanted]
