"""Has a site's weights there while it runs: asks the prefetcher for them, and binds their views."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NoReturn, Protocol

from pipeload.engine.pass_refusals import refuse_recording
from pipeload.errors import UnsupportedOperationError
from pipeload.weights.resident_memory import whole_tensor
from pipeload_hooks import computes_linear, restore_split

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    import torch
    from torch import nn

    from pipeload.engine.pass_state import PassState
    from pipeload.engine.replan import Replan
    from pipeload.engine.site_parameters import Seat
    from pipeload.engine.table_parameters import TableSeat
    from pipeload.weights.layout import Weight


class UnitSource(Protocol):
    """Has units there while they are in use."""

    def acquire(self, index: int) -> float:
        """Return once the unit's bytes are there; the seconds that were waited."""

    def release(self, index: int) -> None:
        """The unit is not in use any more."""


class Streamer:
    """Acquires and releases the weights of one model's sites. It knows nothing of passes."""

    def __init__(
        self,
        *,
        seats: Sequence[Seat],
        tables: Sequence[TableSeat],
        replan: Replan,
    ) -> None:
        self.seats, self.tables = seats, tables
        self.now: PassState
        """Where the pass stands whose turn it is: put there by whoever knows of passes."""
        self.source: UnitSource = replan.prefetcher
        """Where units come from: from the disk, or from others who had them before."""
        self.hand_over: Callable[[], None] | None = None
        """Lets others have their turn, where nothing is in use; None where there are none."""
        self.stall_seconds = 0.0
        """How long sites have waited for their weights."""
        self._replan = replan
        self._prefetcher, self._governor = replan.prefetcher, replan.governor
        self._experts = replan.experts

    @property
    def inside(self) -> set[int]:
        """Sites that are running."""
        return self.now.inside

    def acquire(self, site: int) -> bool:
        """Bind the site's weights, waiting for the disk if they are not there yet.

        Returns False for a site whose ranges of rows come one by one, through `chunks`.

        Raises:
            UnsupportedOperationError: others compute some of its rows, and its forward is another.
        """
        seat = self.seats[site]
        self.now.inside.add(site)
        self._replan.look_again()
        source, units = self.source, self._prefetcher.units
        if seat.whole is None:
            for index in seat.chosen:
                self.stall_seconds += source.acquire(index)
                seat.bind(units[index])
            return True
        if seat.partly or any(units[index].streams for index in seat.units):
            if seat.replaced():
                return True  # the weight is another's, and all there
            module = seat.module()
            if module is None or computes_linear(module):
                return False
            if seat.partly:
                raise UnsupportedOperationError(
                    f"the forward of {seat.name!r} was replaced, and it is computed by several "
                    "ranks, some of its rows by each. Take the new forward off, or load the model "
                    "without ranks."
                )
            self._gather(seat, seat.whole)
            return True
        for index in () if seat.settled(units) else seat.units:
            self.stall_seconds += source.acquire(index)
            source.release(index)
        seat.bind_whole(self._replan.whole)
        return True

    def chunks(self, site: int) -> Generator[tuple[int, int, torch.Tensor], None, None]:
        """The chosen ranges of rows of a split weight: (first row, last row + 1, their values)."""
        return self._ranges(self.seats[site].chosen, in_turns=self.now.inside == {site})

    def _ranges(
        self, units: Sequence[int], *, in_turns: bool = False
    ) -> Generator[tuple[int, int, torch.Tensor], None, None]:
        # No `finally`: a generator that an interrupt left behind would run it much later. Whoever
        # stops halfway calls `release`, or the next pass recovers.
        for index in units:
            self.stall_seconds += self.source.acquire(index)
            unit = self._prefetcher.units[index]
            views = unit.kept.views if unit.slot is None else unit.slots[unit.slot].views
            ((_, rows),) = views.items()
            yield (*unit.rows, rows)
            self.source.release(index)
            if in_turns and self.hand_over is not None:
                self.hand_over()

    def by_whole(
        self, site: int, module: nn.Module, given: torch.Tensor, dtype: torch.dtype
    ) -> Callable[[int, torch.Tensor], torch.Tensor] | None:
        """What multiplies where ranges by themselves would give other bits, None where not."""
        products = self.seats[site].products
        return None if products is None else products.by_whole(module, given, dtype)

    def _gather(self, seat: Seat, weight: Weight) -> None:
        """Show all rows at once, for this run: somebody has replaced what the Linear computes."""
        self._governor.make_room(weight.nbytes, seat.name)
        self._replan.catch_up()
        values = whole_tensor(weight)
        for start, stop, rows in self._ranges(seat.units):
            values[start:stop].copy_(rows)
        seat.bind_once(values)

    def release(self, site: int) -> bool:
        """Unbind what is streamed. Returns whether the site was running; else nothing is done."""
        now = self.now
        if site not in now.inside:
            return False
        seat = self.seats[site]
        seat.unbind()
        for index in seat.units:
            if index in now.held:
                self.source.release(index)
        now.inside.discard(site)
        return True

    def refuse_recording(self, site: int) -> NoReturn:
        """Training is not possible: weights are overwritten before backward could use them."""
        refuse_recording(self.seats[site].name)

    @contextlib.contextmanager
    def borrowed(self, index: int) -> Iterator[Mapping[str, torch.Tensor]]:
        """All views of a unit's weights, filled; streamed ones are valid inside only."""
        self._prefetcher.acquire(index)
        try:
            unit = self._prefetcher.units[index]
            streamed = unit.slots[unit.slot].views if unit.slot is not None else {}
            yield {**unit.kept.views, **streamed}
        finally:
            self._prefetcher.release(index)

    def recover(self) -> None:
        """Give back what a pass that died was holding."""
        alone = self.source is self._prefetcher
        # What others hold, whose turn comes again, is theirs.
        for seat in self.seats if alone else [self.seats[site] for site in self.now.inside]:
            seat.unbind()
            if seat.whole is not None and (module := seat.module()) is not None:
                restore_split(module)
        for table in self.tables:
            table.unbind()
        self._experts.recover()
        self.now.inside.clear()
        for index in [] if alone else [*self.now.held]:
            self.source.release(index)
        if alone:
            self._prefetcher.held.clear()
        if alone and not self._replan.settled:
            self._prefetcher.reset()

    def abandon(self) -> None:
        """In a forked child: give the memory of the weights back. All are evicted, for good."""
        for seat in self.seats:
            seat.evict()
        for table in self.tables:
            table.table.drop()
        self._experts.abandon()
        self._prefetcher.abandon()
