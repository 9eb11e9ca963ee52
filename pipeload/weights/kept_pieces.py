"""Memory for what a unit keeps: one place per piece, made when it is to stay, gone when it is not.

A piece that leaves gives its pages back at once, whoever may still look at its tensors: the limit
comes first, and nothing of pipeload looks at them any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

    from pipeload.weights.layout import Layout
    from pipeload.weights.placement import Place


class KeptPieces:
    """The resident pieces of one unit. Only the dispatcher changes it."""

    def __init__(self, make: Callable[[Layout], Place], layouts: Iterable[Layout] = ()) -> None:
        """`make` gives a layout its memory; `layouts` are kept from the start."""
        self._make = make
        self._places: dict[str, Place] = {}
        self._read: set[str] = set()
        self._views: dict[str, torch.Tensor] = {}
        self._left: set[str] = set()
        self.keep(layouts)

    def keep(self, layouts: Iterable[Layout]) -> None:
        """Keep exactly these; memory of what leaves goes back to the system."""
        wanted = {layout.weights[0].name: layout for layout in layouts}
        for name in [name for name in self._places if name not in wanted]:
            self.drop(self._places.pop(name))
            self._read.discard(name)
        for name, layout in wanted.items():
            if name not in self._places:
                self._places[name] = self._make(layout)
        self._show()

    def leave(self, name: str | None) -> None:
        """Never take the memory of that weight, or of any if None: somebody else shows it, too.

        Called by the model's thread before it has anything dropped.
        """
        self._left |= {*self._views} if name is None else {name}

    def drop(self, place: Place) -> None:
        """Give the memory of a place back, if it is not left to somebody."""
        if self._left.isdisjoint(place.views):
            place.drop()

    def _show(self) -> None:
        self._views = {
            name: view for place in self._places.values() for name, view in place.views.items()
        }

    @property
    def views(self) -> Mapping[str, torch.Tensor]:
        """All weights that are kept, by name. They are filled once nothing is unread."""
        return self._views

    @property
    def unread(self) -> list[Place]:
        """Places that still have to be filled."""
        return [place for name, place in self._places.items() if name not in self._read]

    @property
    def nbytes(self) -> int:
        """Bytes of the places that have been filled."""
        return sum(place.nbytes for name, place in self._places.items() if name in self._read)

    def mark_read(self) -> None:
        """Note that all that is kept has been filled."""
        self._read.update(self._places)
        self._show()  # some places show nothing before
