"""Decides what is read when: the one writer of all units' states.

[Note: one writer] All state belongs to one dispatcher thread, which handles messages one by one;
readers and the model's thread only send them. A KeyboardInterrupt strikes the main thread between
any two instructions, so a lock it holds, or a state it has half written, could be left behind for
ever. Sending to a SimpleQueue and waiting on a fresh lock that nobody else needs cannot.

[Note: the ready flag] A block that was read ahead is marked `ready`; the model's thread may then
bind it without asking. That is safe because nothing but that thread's own requests ever revokes
the mark, and it clears the mark itself before it says that the block is released.
"""

from __future__ import annotations

import logging
import queue
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeload.budget.read_counters import Counters
from pipeload.checkpoint.reader_threads import READER_DIED, Outcome, forget_frames, reader_died
from pipeload.errors import UnsupportedOperationError
from pipeload.prefetch.buffers import Slots
from pipeload.prefetch.fault_messages import name_block, name_fault, no_buffer
from pipeload.prefetch.reads_in_flight import Reads
from pipeload.prefetch.unit import Load, Split, Ticket, Unit, UnitState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipeload.checkpoint.file_reads import FileSet
    from pipeload.prefetch.buffers import Buffer
    from pipeload.prefetch.read_order import Order
    from pipeload.weights.arena import Region
    from pipeload.weights.placement import Convert, Place

    MakePlace = Callable[[Unit, Any, FileSet, Convert], Place]
    """Puts a unit's streamed part into one of the buffers."""

# Units being read at once: the second keeps the readers busy while the first one's last chunk ends.
_MAX_LOADING = 2
_log = logging.getLogger("pipeload")


class Dispatcher:
    """The one writer. It holds no reference to the model, so a forgotten model can go."""

    def __init__(
        self,
        units: list[Unit],
        *,
        slots: Sequence[Buffer],
        place: MakePlace,
        files: FileSet,
        convert: Convert,
        scratch: Sequence[Region | None],
        chunk_bytes: int,
        order: Order,
    ) -> None:
        self.fault: UnsupportedOperationError | None = None
        """Why no read will be dispatched any more, None while all is well."""
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.counters, self.units = Counters(), units
        self._slots = Slots(
            slots, units, lambda unit, region: place(unit, region, files, convert), self.counters
        )
        self._reads, self._order = Reads(self.counters, scratch, chunk_bytes), order
        self._loading = 0
        self._tickets: dict[int, Ticket] = {}
        self._unread = sum(bool(unit.kept.unread) for unit in units)
        self._split: Split | None = None

    # -- messages; each runs in the dispatcher's thread --

    def entered(self, index: int) -> None:
        """The model's thread took a ready unit, and asks for something else before it has run."""
        self.counters.hits += 1
        self._order.arrive(index)
        unit = self.units[index]
        if unit.state is UnitState.RESIDENT:
            unit.state = UnitState.IN_USE

    def wanted(self, ticket: Ticket) -> None:
        """The model's thread waits for a unit that was not ready."""
        unit = self.units[ticket.unit]
        self._order.arrive(ticket.unit)
        unit.failed = False
        if unit.state in (UnitState.RESIDENT, UnitState.IN_USE):
            unit.state, unit.ready = UnitState.IN_USE, False
            self.counters.hits += 1
            ticket.answer()
            return
        if unit.state is UnitState.LOADING:
            self.counters.hits += 1
        else:
            self.counters.misses += 1
            # Safe here only, while the model's thread waits: see [Note: the ready flag].
            self._slots.doubt()
        self._tickets[ticket.unit] = ticket

    def released(self, index: int) -> None:
        """The model's thread gives a unit back: its block has run."""
        unit = self.units[index]
        if unit.state is UnitState.IN_USE:
            unit.give_back()

    def ran(self, index: int) -> None:
        """The model's thread took a ready unit, and the block has run."""
        self.counters.hits += 1
        self._order.arrive(index)
        unit = self.units[index]
        if unit.state is UnitState.RESIDENT:
            unit.give_back()

    def reset(self, ticket: Ticket) -> None:
        """A pass died: whatever it used or waited for is given back."""
        self._tickets.clear()
        for unit in self.units:
            if unit.state in (UnitState.IN_USE, UnitState.RESIDENT):
                unit.give_back()
        ticket.answer()

    def resplit(self, split: Split) -> None:
        """Units are to keep and stream other parts; done once no read is in flight."""
        self._split = split

    def _finished(self, outcome: Outcome) -> None:
        if outcome.tag is READER_DIED:
            raise reader_died(outcome.error)
        load = outcome.tag
        assert isinstance(load, Load)  # noqa: S101 - only `begin_load` submits
        self._reads.count(load, outcome)
        load.pending -= 1
        load.error = load.error or outcome.error
        if load.pending:
            return
        if load.error is None and not load.converting:
            self._after_reads(load)
        else:
            self.end_load(load)

    def _after_reads(self, load: Load) -> None:
        """Make weights of what a load has read, where the files do not hold them as they are."""
        load.converting = True
        jobs = [job for placement in load.placements for job in placement.convert_jobs()]
        if jobs and not all(placement.quick for placement in load.placements):
            self._reads.submit(load, jobs)
            return
        try:
            for job in jobs:
                job(None)
        except Exception as error:  # whoever waits for the unit is told
            load.error = forget_frames(error)  # they hold the load
        self.end_load(load)

    # -- decisions -------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Start what should be read now: units somebody waits for, then the ones that come next."""
        if self._split is not None:
            if self._loading:
                return
            self._adopt(self._split)
        for index in [*self._tickets]:
            if self.units[index].state is UnitState.ON_DISK:
                self._serve(index)
        while self._loading < _MAX_LOADING and (self._unread or self._slots.free() is not None):
            wanted = self._next_needed()
            # Asked again: what is needed sooner has just been kept, perhaps in that very slot.
            slot = self._slots.free()
            if wanted is None or (slot is None and self.units[wanted].streams):
                return
            self.begin_load(wanted, slot)

    def _serve(self, index: int) -> None:
        """Start a unit that is waited for.

        This may evict what was read ahead, prefetching may not: a slot read ahead is given back
        only after its own block ran, which may be after the one that is waited for here.
        """
        unit = self.units[index]
        slot = self._slots.free() if unit.streams else None
        if unit.streams and slot is None:
            slot = self._slots.evictable()
        if slot is not None or not unit.streams:
            self.begin_load(index, slot)
            return
        holders = [*self._slots.holders()]
        if all(holder.state is UnitState.IN_USE for holder in holders):
            self._tickets.pop(index).answer(no_buffer(unit.plan.name, len(holders)))

    def _adopt(self, split: Split) -> None:
        """Give back first; what stays from now on is read when its unit comes by.

        A unit in use keeps what it has: its memory cannot be taken from under it.
        """
        for unit, plan in zip(self.units, split.plans, strict=True):
            if unit.plan is not plan and unit.state is not UnitState.IN_USE:
                self._slots.leave(unit)
                self.counters.resident_bytes -= unit.kept.nbytes
                unit.adopt(plan)
                self.counters.resident_bytes += unit.kept.nbytes
        self._unread = sum(bool(unit.kept.unread) for unit in self.units)
        self._slots.shrink(split.slot_bytes)
        self._split = None
        split.ticket.answer()

    def _next_needed(self) -> int | None:
        """The first of the units that come next that is not there; those before it are kept."""
        for index in self._order.upcoming():
            unit = self.units[index]
            if unit.state is UnitState.ON_DISK and not unit.failed:
                return index
            if unit.state is UnitState.RESIDENT and unit.used and not unit.ready:
                unit.used, unit.ready = False, True
            elif unit.state is UnitState.LOADING:
                unit.used = False
        return None

    def occupant(self, slot: int) -> int | None:
        """Whose unit is in that buffer, if any is."""
        return self._slots.occupants[slot]

    def begin_load(self, index: int, slot: int | None) -> None:
        """Have a unit read, its streamed part into that buffer."""
        unit = self.units[index]
        unit.state, unit.ready, unit.used = UnitState.LOADING, False, False
        placements: list[Place] = [*unit.kept.unread]
        # Counted before it is there: nobody is to promise the same bytes to somebody else.
        self.counters.resident_bytes += sum(place.nbytes for place in placements)
        if unit.streams and slot is not None:
            placements.append(self._slots.enter(slot, index))
        load = Load(index, placements)
        self._loading += 1
        jobs = self._reads.jobs_of(placements)
        if jobs:
            self._reads.submit(load, jobs)
        else:
            self._after_reads(load)

    def end_load(self, load: Load) -> None:
        """All jobs of a load have ended: the unit is there, or failed."""
        unit = self.units[load.unit]
        self._loading -= 1
        ticket = self._tickets.pop(load.unit, None)
        if load.error is not None:
            self._slots.leave(unit)
            for place in unit.kept.unread:
                unit.kept.drop(place)  # half filled, and not counted any more
                self.counters.resident_bytes -= place.nbytes
            unit.state, unit.failed = UnitState.ON_DISK, True
            if ticket is not None:
                ticket.answer(name_block(load.error, unit.plan.name))
            return
        if unit.kept.unread:
            unit.kept.mark_read()
            self._unread -= 1
        if ticket is None:
            unit.state, unit.ready = UnitState.RESIDENT, not unit.used
        else:
            unit.state = UnitState.IN_USE
            ticket.answer()

    # -- its beginning and its end -----------------------------------------------------------------

    def abandon(self) -> None:
        """In a forked child, where no thread is: give all memory back. Nothing is read again."""
        for unit in self.units:
            unit.kept.keep(())
        self._slots.abandon()

    def open(self) -> None:
        """Start the reader threads; to be called before `dispatch`."""
        self._reads.open(lambda outcome: self.inbox.put(partial(self._finished, outcome)))

    def close(self) -> None:
        """End the readers; tell whoever waits."""
        self._reads.close()
        error = self.fault or UnsupportedOperationError(
            "streaming was removed while a pass waited for weights. Call the model again: it is a "
            "plain one now."
        )
        if self._split is not None:
            self._split.ticket.answer(error)
            self._split = None
        for ticket in self._tickets.values():
            ticket.answer(error)
        self._tickets.clear()
        self._reads.join()
        self._forget_loads()

    def _forget_loads(self) -> None:
        """What was being read counts as never begun: nobody hears of it after the end."""
        for unit in self.units:
            if unit.state is UnitState.LOADING:
                self._slots.leave(unit)
                self.counters.resident_bytes -= sum(place.nbytes for place in unit.kept.unread)
                unit.state = UnitState.ON_DISK
        self._loading = 0


def dispatch(dispatcher: Dispatcher) -> None:
    """Handle messages until a None comes, or until one fails: then states cannot be trusted."""
    try:
        while (message := dispatcher.inbox.get()) is not None:
            message()
            del message
            dispatcher.schedule()
    except BaseException as error:  # no memory, or thrown in from outside
        _log.debug("the dispatcher ends", exc_info=True)
        dispatcher.fault = name_fault(error)
    dispatcher.close()
    # What readers reported meanwhile names the dispatcher: left there, it would keep itself alive.
    while not dispatcher.inbox.empty():
        dispatcher.inbox.get_nowait()
