"""One run of an experts module: its experts are computed with as they come.

[Note: two ways through a layer] Experts that are there are computed with at once; the others are
read meanwhile, as far as the products allow it: see [Note: one expert at a time] in the lower
layer's _experts.py. Those that stay have room in the cache. Those that do not, which in a prompt
are most, pass through a window of a few matrices: each is read ahead of its product, and given back
behind it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, NoReturn

from pipeload.engine.expert_reads import ExpertReads, Slice
from pipeload.errors import UnsupportedOperationError
from pipeload_hooks import COUNTS, ServeExperts

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from pipeload.engine.expert_parameters import ExpertSeat


class ExpertLayer:
    """One run of an experts module of which not all experts are there: a `Service`."""

    def __init__(
        self,
        seat: ExpertSeat,
        hits: Collection[int],
        kept: Sequence[int],
        passing: Sequence[int],
        *,
        window: int,
        reads: ExpertReads,
    ) -> None:
        """`hits` are there, `kept` are to be read and stay, `passing` go behind their products.

        `window`: how many slices of those that go may be there at once.
        """
        self.seat, self._window, self._reads = seat, window, reads
        self._hits, self.kept = frozenset(hits), frozenset(kept)
        """By number: what is there, and what is read and stays."""
        self._serving: ServeExperts | None = None
        """Holds this object: let go of at the end, so that no cycle is left."""
        misses = [*kept, *passing]
        self._chosen = self._hits.union(misses)
        if seat.sweeps:  # only where all have slices of the same parameters
            pairs = [(name, e) for name in seat.names(0) for e in misses]
        else:
            pairs = [(name, e) for e in sorted(misses) for name in seat.names(e)]
        self._order: deque[Slice] = deque(Slice(seat.layer, *pair) for pair in pairs)
        """What is still to be read, in the order in which it is likely to be used."""
        self._coming: set[Slice] = set()
        """What was asked for and stays."""
        self._passing: dict[Slice, None] = {}
        """What is in the window."""
        self._used: list[Slice] = []
        """What may be computed with: all slices that were needed of the latest expert."""

    def begin(self) -> None:
        """Have the first reads begin, and be asked while the module runs."""
        self._fill()
        self._serving = ServeExperts(self.seat.parameters, self, self.seat.owners)
        self._serving.begin()

    def order(self, _name: str, experts: Sequence[int]) -> Sequence[int]:
        """What is there first, then what stays, as it was asked for in this order."""
        return sorted(experts, key=lambda e: (e not in self._hits, e not in self.kept, e))

    def need(self, name: str, expert: int) -> None:
        """Return once a slice is there; in the window, those of the expert before it go.

        Raises:
            ReadError: the disk failed.
        """
        expert += self.seat.experts if expert < 0 else 0
        if expert in self._hits or not 0 <= expert < self.seat.experts:
            return
        if self.seat.told_by == COUNTS and expert not in self._chosen:
            return  # no row is multiplied with it
        wanted = Slice(self.seat.layer, name, expert)
        if wanted in self._used:
            return
        if self._used and self._used[0].expert != expert:
            for part in self._used:
                self._give_back(part)
            self._used.clear()
        if wanted not in self._coming and wanted not in self._passing:
            with contextlib.suppress(ValueError):  # it is needed once more
                self._order.remove(wanted)
            while expert not in self.kept and len(self._passing) >= self._window:
                self._give_back(next(p for p in self._passing if p not in self._used))
            self._ask(wanted)
        self._fill()
        self._reads.wait(wanted, self.seat.name)
        self._used.append(wanted)

    def together(self, name: str, experts: Sequence[int]) -> Iterator[Sequence[int]]:
        """What is there first; then what stays, as it comes; what does not is alone."""
        if there := [expert for expert in experts if expert in self._hits]:
            yield there
        staying = [expert for expert in experts if expert in self.kept]
        while staying:
            self.need(name, staying[0])
            come = [staying[0], *(e for e in staying[1:] if self._has_come(name, e))]
            for expert in come[1:]:
                self.need(name, expert)  # or say what has failed
            yield come
            staying = [expert for expert in staying if expert not in come]
        for expert in experts:
            if expert not in self._hits and expert not in self.kept:
                self.need(name, expert)
                yield [expert]

    def _has_come(self, name: str, expert: int) -> bool:
        part = Slice(self.seat.layer, name, expert)
        return part in self._coming and self._reads.is_over(part)

    def finish(self) -> list[int]:
        """The module has run: give back what does not stay; experts that are there from now on."""
        layer, names = self.seat.layer, self.seat.names
        parts = {e: [Slice(layer, name, e) for name in names(e)] for e in self.kept}
        there = [
            expert
            for expert, slices in parts.items()
            if all(part in self._coming and self._reads.came(part) for part in slices)
        ]
        self._end(self.kept.difference(there))
        return there

    def give_up(self) -> None:
        """The module has died: nothing of what was read is there."""
        self._end(self.kept)

    def _end(self, lost: Iterable[int]) -> None:
        if self._serving is not None:
            self._serving.discard()
            self._serving = None
        self._reads.cancel()  # nothing comes any more: what is given back stays so
        for part in [*self._passing]:
            self._give_back(part)
        for expert in lost:
            self.seat.drop(expert)

    def refuse(self, function: str, name: str) -> NoReturn:
        """Say which function cannot be served.

        Raises:
            UnsupportedOperationError: always.
        """
        raise UnsupportedOperationError(
            f"the experts of {self.seat.name!r} are read as they are routed to, and "
            f"{function}() takes all of {name!r} at once. Choose one of the library's own ways "
            '(model.set_experts_implementation("grouped_mm"), "batched_mm" or "eager"), or load '
            "the model without pipeload."
        )

    def _fill(self) -> None:
        """Ask for as much as there is room for, in order."""
        while self._order:
            if self._order[0].expert not in self.kept and len(self._passing) >= self._window:
                return
            self._ask(self._order.popleft())

    def _ask(self, part: Slice) -> None:
        stays = part.expert in self.kept
        if not stays:
            self._passing[part] = None
        self._reads.submit(part, self.seat.memory.read_jobs(part.name, part.expert))
        if stays:
            self._coming.add(part)  # only now: what was not asked for never comes

    def _give_back(self, part: Slice) -> None:
        if part in self._passing:
            del self._passing[part]
            self._reads.came(part)  # else it would come back after it went
            self.seat.memory.drop(part.name, part.expert)
