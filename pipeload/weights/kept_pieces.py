"""Memory for what a unit keeps: one place per piece, made when it is to stay, gone when it is not.

A piece that leaves gives its pages back at once, whoever may still look at its tensors: the limit
comes first, and nothing of pipeload looks at them any more.

[Note: kept as stored] What is unpacked each time it is read may stay as it is stored, which takes a
fraction of the memory: a pass then unpacks it, and reads nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

    from pipeload.weights.layout import Layout
    from pipeload.weights.placement import Place


class _Key(NamedTuple):
    """Which piece it is."""

    name: str
    as_stored: bool


class KeptPieces:
    """The resident pieces of one unit. Only the dispatcher changes it."""

    def __init__(
        self,
        make: Callable[[Layout], Place],
        layouts: Iterable[Layout] = (),
        stored: Iterable[Layout] = (),
    ) -> None:
        """`make` gives a layout its memory; what is kept from the start is as for `keep`."""
        self._make = make
        self._places: dict[_Key, Place] = {}
        self._read: set[_Key] = set()
        self._views: dict[str, torch.Tensor] = {}
        self._left: set[str] = set()
        self.keep(layouts, stored)

    def keep(self, layouts: Iterable[Layout], stored: Iterable[Layout] = ()) -> None:
        """Keep exactly these; memory of what leaves goes back to the system.

        `stored` are bytes that streamed weights are unpacked from: see [Note: kept as stored].
        """
        wanted = {_Key(layout.weights[0].name, False): layout for layout in layouts}
        wanted.update((_Key(layout.weights[0].name, True), layout) for layout in stored)
        for key in [key for key in self._places if key not in wanted]:
            self.drop(self._places.pop(key))
            self._read.discard(key)
        for key, layout in wanted.items():
            if key not in self._places:
                self._places[key] = self._make(layout)
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
        self._views = self._shown(as_stored=False)

    def _shown(self, *, as_stored: bool) -> dict[str, torch.Tensor]:
        return {
            name: view
            for key, place in self._places.items()
            if key.as_stored == as_stored
            for name, view in place.views.items()
        }

    @property
    def views(self) -> Mapping[str, torch.Tensor]:
        """All weights that are kept, by name. They are filled once nothing is unread."""
        return self._views

    @property
    def stored(self) -> Mapping[str, torch.Tensor]:
        """What is kept as it is stored: bytes of [stored rows, bytes], by the weight's name."""
        return self._shown(as_stored=True)

    @property
    def unread(self) -> list[Place]:
        """Places that still have to be filled."""
        return [place for key, place in self._places.items() if key not in self._read]

    @property
    def nbytes(self) -> int:
        """Bytes of the places that have been filled."""
        return sum(place.nbytes for key, place in self._places.items() if key in self._read)

    def mark_read(self) -> None:
        """Note that all that is kept has been filled."""
        self._read.update(self._places)
        self._show()  # some places show nothing before
