"""Weights that somebody gives other values while they stream: left to them, or refused by name.

What is written to an evicted weight is refused at once: see [Note: kinds of parameters] in the
lower layer's _evicted.py. One that is there may be changed as on a plain model. It is not the
checkpoint's from then on, so it is not evicted any more: its memory counts as the user's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from pipeload.errors import UnsupportedOperationError
from pipeload.weights.arena import DTYPES
from pipeload.weights.same_weights import differing, no_conversion
from pipeload_hooks import is_placeholder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeload.checkpoint.file_reads import FileSet
    from pipeload.engine.evictable import Evictable
    from pipeload.engine.expert_parameters import ExpertSeat
    from pipeload.engine.site_parameters import Seat
    from pipeload.engine.table_parameters import TableSeat
    from pipeload.prefetch.unit import Unit
    from pipeload.weights.layout import Weight

_version = vars(torch._C.TensorBase)["_version"].__get__  # noqa: SLF001 - no instructions of Python


class Edits:
    """Knows, of all weights that are evicted now and then, how often each was changed."""

    def __init__(
        self,
        seats: Sequence[Seat],
        tables: Sequence[TableSeat | ExpertSeat],
        weights: Mapping[int, Weight],
        files: FileSet,
    ) -> None:
        """Watch all these.

        Args:
            seats: of sites.
            tables: what is read in part: tables, and experts.
            weights: those of the checkpoint's `files`, by the `id` of their parameter.
            files: the checkpoint's.
        """
        owners: list[Evictable] = [*seats, *tables]
        self._seats, self._tables, self._weights, self._files = seats, tables, weights, files
        self._parameters = {
            id(p): (name, p) for owner in owners for name, p in owner.parameters.items()
        }
        self._owners = owners
        self._watched: list[nn.Parameter] = []
        self._known: list[int] = []

    def arm(self) -> None:
        """Have changes be seen from now on."""
        for owner in self._owners:
            owner.arm()
        self._watched = [parameter for _, parameter in self._parameters.values()]
        self._known = self._versions()

    def hand_over(self, units: Sequence[Unit], *, last: bool = False) -> bool:
        """Leave what was changed to whoever did; to be called while no weight is in use.

        Returns whether there was anything. `last`: streaming ends, so nothing is refused.

        Raises:
            UnsupportedOperationError: what was written to a weight is gone, or cannot be left.
            ReadError: what a weight was before could not be read.
        """
        now = self._versions()
        if now == self._known:
            return False
        for index, parameter in enumerate(self._watched):
            if now[index] != self._known[index]:
                name, _ = self._parameters[id(parameter)]
                if not self._is_stored(parameter):
                    if last and self._is_lost(name, parameter):
                        continue  # known no more than before: it may yet stream on
                    self._leave(name, parameter, units)
                self._known[index] = now[index]
        return True

    def disarm(self) -> None:
        """Look for nothing any more; all parameters are plain ones, whatever they hold."""
        self._watched, self._known = [], []
        for owner in self._owners:
            owner.disarm()

    def overlook(self) -> None:
        """What was done to weights until now is no edit: modules that were added do such things."""
        self._known = self._versions()

    def _is_stored(self, parameter: nn.Parameter) -> bool:
        """Whether it holds what the checkpoint does: it may have been copied onto itself."""
        weight = self._weights[id(parameter)]
        if type(parameter) is nn.Parameter:
            return False  # somebody has taken it: see [Note: kinds of parameters]
        if is_placeholder(parameter) or weight.group is not None or weight.guarded:
            return False
        shown = {weight.name: parameter.detach()}
        if parameter.shape != weight.shape or parameter.dtype != DTYPES[weight.dtype]:
            return False
        found = differing({weight.name: weight}, shown, no_conversion, self._files)
        return next(found, None) is None

    def _versions(self) -> list[int]:
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - evicted ones would be asked one by one
            return [*map(_version, self._watched)]

    def _is_lost(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether it is not there, or cannot be left to anybody."""
        return is_placeholder(parameter) or any(
            seat.packed(name) for seat in self._seats if name in seat.parameters
        )

    def _leave(self, name: str, parameter: nn.Parameter, units: Sequence[Unit]) -> None:
        if self._is_lost(name, parameter):
            raise UnsupportedOperationError(
                f"the weight {name!r} was given other values while it streamed, and they are not "
                "kept. Call handle.remove() to get the plain model back (pipeload.handle(model)"
                ".remove()), change it there, and stream it again with pipeload.wrap(model, "
                "memory_limit, spill_dir=FOLDER)."
            )
        for seat in self._seats:
            if name in seat.parameters:
                seat.let_go(name, units)
        for table in self._tables:
            if name in table.parameters:
                table.let_go(name)
