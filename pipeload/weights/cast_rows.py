"""Floats of a matrix that are stored in another dtype than the model has them in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pipeload.weights.arena import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_STEP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CastRows:
    """Casts rows as they are read, each by itself. A `Repacking`."""

    unpacks: ClassVar[bool] = True
    quick: ClassVar[bool] = True

    dtype: str
    """What is stored, as a safetensors code."""
    row_bytes: int
    """Of a stored row."""

    def steps(self, rows: int, _row_bytes: int) -> Iterator[tuple[int, int]]:
        """Say which rows to take at once: about 1 MB."""
        step = max(1, _STEP_BYTES // self.row_bytes)
        for start in range(0, rows, step):
            yield start, min(start + step, rows)

    def part(self, start: int, stop: int) -> tuple[range, CastRows]:
        """Say that the rows come of the same stored rows."""
        return range(start, stop), self

    def fill(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out` with the floats of `stored`, which is bytes, as the library casts them."""
        out.copy_(stored.view(DTYPES[self.dtype]))
