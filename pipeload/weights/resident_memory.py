"""Gives weights that stay their memory: anonymous pages, or the mapped file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipeload.weights.arena import Arena, Region
from pipeload.weights.layout import lay_out
from pipeload.weights.mapped import MappedFiles, MappedPlacement, can_map
from pipeload.weights.placement import Placement

if TYPE_CHECKING:
    from pathlib import Path

    from pipeload.checkpoint.file_reads import FileSet
    from pipeload.weights.layout import Layout, Weight
    from pipeload.weights.placement import Convert, Place

_CPU = torch.device("cpu")


class ResidentMemory:
    """Makes memory for what stays: each layout gets its own, so that it can go by itself.

    Ranges of rows lie where they would in the whole weight, so that all of them together are it.
    """

    def __init__(
        self, files: FileSet, convert: Convert, wholes: list[Weight], mapped: list[Path] | None
    ) -> None:
        """`wholes` are weights that are cut by rows; `mapped` are the files to show, if any."""
        self._files, self._convert = files, convert
        self._mapped = (
            MappedFiles({path: files.reopen_name(path) for path in mapped}, files.stalls)
            if mapped is not None
            else None
        )
        self._wholes = {weight.name: weight for weight in wholes}
        self._arenas: dict[str, Arena] = {}

    def make(self, layout: Layout) -> Place:
        """Make memory for a layout: one piece of a unit, or everything that is pinned."""
        if self._mapped is not None and can_map(layout):
            return MappedPlacement(layout, self._mapped)
        return Placement(layout, self._region(layout), self._files, self._convert)

    def whole(self, weight: Weight) -> torch.Tensor:
        """Show a weight that is cut by rows, whose ranges are all there."""
        if self._mapped is not None:
            return MappedPlacement(lay_out([weight]), self._mapped).views[weight.name]
        offset = _offset(lay_out([weight]))
        return self._arena(weight.name).tensor(offset, weight.dtype, weight.shape, weight.nbytes)

    def _region(self, layout: Layout) -> Region:
        first = layout.weights[0] if layout.nbytes else None
        if first is None or first.whole is None:
            # Sparse: many small ones must not take a huge page each.
            arena = Arena(layout.nbytes, device=_CPU, huge=False, sparse=True)
            return arena.take(layout.nbytes)
        arena, whole = self._arena(first.whole), self._wholes[first.whole]
        rows_at = first.first_row * (whole.nbytes // whole.shape[0])
        # A page border where it is read as it is: both offsets are the file's, modulo the page.
        start = _offset(lay_out([whole])) + rows_at - _offset(layout)
        return Region(arena, start, layout.nbytes)

    def _arena(self, name: str) -> Arena:
        if name not in self._arenas:
            nbytes = lay_out([self._wholes[name]]).nbytes
            self._arenas[name] = Arena(nbytes, device=_CPU, huge=False)
        return self._arenas[name]


def whole_tensor(weight: Weight) -> torch.Tensor:
    """Make memory of its own for a weight, which lies as a plain load has it lie."""
    layout = lay_out([weight])
    arena = Arena(layout.nbytes, device=_CPU, huge=False)
    return arena.tensor(_offset(layout), weight.dtype, weight.shape, weight.nbytes)


def _offset(layout: Layout) -> int:
    """Where the one weight of a layout lies in it."""
    return layout.raw[0][1] if layout.raw else layout.casts[0].offset
