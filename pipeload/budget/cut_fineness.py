"""The ways in which a model can be cut into units, from the coarsest to the finest."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pipeload.budget import cut
from pipeload.budget.cut import Grain

if TYPE_CHECKING:
    from pipeload.budget.cut import Divider, Touched
    from pipeload.budget.model_parts import Parts


class Cutting(NamedTuple):
    """A model cut at one grain."""

    grain: Grain
    parts: Parts


class Cuttings:
    """What planning chooses from. Cutting tries products of rows, so the rarer ways wait."""

    def __init__(self, divider: Divider, touched: Touched | None, *, finely: bool = True) -> None:
        """Cut the model in the ways that every plan looks at.

        Args:
            divider: cuts it.
            touched: weights that are used while the module that owns them does not run; None when
                that cannot be known, so that blocks stay whole.
            finely: whether there is more than one size of ranges, and modules may be units.
        """
        self._divider = divider
        self._touched = touched or divider.unknown()
        chunks = [size for size in cut.CHUNKS if size <= divider.largest_block] or cut.CHUNKS[-1:]
        coarse = [Grain(modules=False, chunk_bytes=size) for size in chunks]
        fine = [Grain(modules=True, chunk_bytes=size) for size in chunks]
        if not finely:
            coarse, fine = [Grain(modules=False, chunk_bytes=cut.CHUNKS[0])], []
        self.coarse = [self._cut(grain) for grain in coarse]
        """Blocks are whole."""
        self._fine = fine if touched is not None else []
        self.finest = self._cut(self._fine[-1]) if self._fine else self.coarse[-1]
        """Modules and the smallest ranges of rows are units, where they may be."""

    def fine(self) -> list[Cutting]:
        """Modules are units; the last one is `finest`. Empty where blocks have to stay whole."""
        return [*map(self._cut, self._fine[:-1]), self.finest] if self._fine else []

    def anyhow(self) -> Cutting | None:
        """Rows are cut even where products of ranges are slow; None where nothing else is whole."""
        if not self.finest.parts.uncut:
            return None
        return self._cut(self.finest.grain._replace(anyhow=True))

    def _cut(self, grain: Grain) -> Cutting:
        return Cutting(grain, self._divider.divide(grain, self._touched))
