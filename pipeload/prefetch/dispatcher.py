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
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeload.budget.counters import Counters
from pipeload.checkpoint.readers import (
    READER_DIED,
    Outcome,
    ReaderPool,
    forget_frames,
    reader_died,
)
from pipeload.errors import UnsupportedModelError, UnsupportedOperationError
from pipeload.prefetch.read_faults import name_block, name_fault
from pipeload.prefetch.slots import Slots
from pipeload.prefetch.unit import Load, Split, Ticket, Unit, UnitState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipeload.budget.plan import UnitPlan
    from pipeload.checkpoint.files import FileSet
    from pipeload.prefetch.slots import Buffer
    from pipeload.weights.arena import Region, Work
    from pipeload.weights.placement import Convert, Place

    MakePlace = Callable[[UnitPlan, Any, FileSet, Convert], Place]
    """Puts a unit's streamed part into one of the buffers."""

# Units being read at once: the second keeps the readers busy while the first one's last chunk ends.
_MAX_LOADING = 2
_MIN_CHUNK_BYTES = 1 << 20
_JOIN_SECONDS = 5.0
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
    ) -> None:
        self.fault: UnsupportedOperationError | None = None
        """Why no read will be dispatched any more, None while all is well."""
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.counters = Counters()
        self.units = units
        self._slots = Slots(slots, self.counters)
        self._files, self._convert, self._make_place = files, convert, place
        self._pool: ReaderPool[Region | None] | None = None
        self._scratch = scratch
        self._chunk_bytes = chunk_bytes
        self._successor = [(index + 1) % len(units) for index in range(len(units))]
        self._current = len(units) - 1
        self._loading = 0
        self._reading_since = 0.0
        self._jobs = 0
        self._tickets: dict[int, Ticket] = {}
        self._unread = sum(bool(unit.home.unread) for unit in units)
        self._split: Split | None = None

    # -- messages; each runs in the dispatcher's thread --

    def entered(self, index: int) -> None:
        """The model's thread took a ready unit, and asks for something else before it has run."""
        self.counters.hits += 1
        self._arrive(index)
        unit = self.units[index]
        if unit.state is UnitState.RESIDENT:
            unit.state = UnitState.IN_USE

    def wanted(self, ticket: Ticket) -> None:
        """The model's thread waits for a unit that was not ready."""
        unit = self.units[ticket.unit]
        self._arrive(ticket.unit)
        unit.failed = False
        if unit.state in (UnitState.RESIDENT, UnitState.IN_USE):
            unit.state, unit.ready = UnitState.IN_USE, False
            self.counters.hits += 1
            ticket.settle()
            return
        if unit.state is UnitState.LOADING:
            self.counters.hits += 1
        else:
            self.counters.misses += 1
            self._doubt_read_ahead()
        self._tickets[ticket.unit] = ticket

    def released(self, index: int) -> None:
        """The block has run."""
        unit = self.units[index]
        if unit.state is UnitState.IN_USE:
            unit.state, unit.used = UnitState.RESIDENT, True
            unit.ready = not unit.streams

    def ran(self, index: int) -> None:
        """The model's thread took a ready unit, and the block has run."""
        self.counters.hits += 1
        self._arrive(index)
        unit = self.units[index]
        if unit.state is UnitState.RESIDENT:
            unit.used, unit.ready = True, not unit.streams

    def reset(self, ticket: Ticket) -> None:
        """A pass died: whatever it used or waited for is given back."""
        self._tickets.clear()
        for unit in self.units:
            if unit.state in (UnitState.IN_USE, UnitState.RESIDENT):
                unit.state, unit.used = UnitState.RESIDENT, True
                unit.ready = not unit.streams
        ticket.settle()

    def resplit(self, split: Split) -> None:
        """Units are to keep and stream other parts; done once no read is in flight."""
        self._split = split

    def _finished(self, outcome: Outcome) -> None:
        if outcome.tag is READER_DIED:
            raise reader_died(outcome.error)
        load = outcome.tag
        assert isinstance(load, Load)  # noqa: S101 - only `_start` submits
        self._account(outcome)
        load.pending -= 1
        load.error = load.error or outcome.error
        if load.pending:
            return
        if load.error is None and not load.converting:
            self._after_reads(load)
        else:
            self._settle(load)

    def _after_reads(self, load: Load) -> None:
        """Everything was read."""
        load.converting = True
        jobs = [job for placement in load.placements for job in placement.convert_jobs()]
        if jobs and not all(placement.quick for placement in load.placements):
            self._submit(load, jobs)
            return
        try:
            for job in jobs:
                job(None)
        except Exception as error:  # whoever waits for the unit is told
            load.error = forget_frames(error)  # they hold the load
        self._settle(load)

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
        while self._loading < _MAX_LOADING and (self._unread or self._free_slot() is not None):
            wanted = self._next_needed()
            # Asked again: what is needed sooner has just been kept, perhaps in that very slot.
            slot = self._free_slot()
            if wanted is None or (slot is None and self.units[wanted].streams):
                return
            self._start(wanted, slot)

    def _serve(self, index: int) -> None:
        """Start a unit that is waited for.

        This may evict what was read ahead, prefetching may not: a slot read ahead is given back
        only after its own block ran, which may be after the one that is waited for here.
        """
        unit = self.units[index]
        slot = self._free_slot() if unit.streams else None
        if unit.streams and slot is None:
            slot = self._evictable_slot()
        if slot is not None or not unit.streams:
            self._start(index, slot)
            return
        holders = [held for held in self._slots.occupants if held is not None]
        if all(self.units[held].state is UnitState.IN_USE for held in holders):
            self._tickets.pop(index).settle(
                UnsupportedModelError(
                    f"block {unit.plan.name!r} runs inside {len(holders)} other streamed blocks, "
                    "which hold every buffer. Raise memory_limit until the model fits, or load it "
                    "without pipeload."
                )
            )

    def _adopt(self, split: Split) -> None:
        """Give back first; what stays from now on is read when its unit comes by.

        A unit in use keeps what it has: its memory cannot be taken from under it.
        """
        for unit, plan in zip(self.units, split.plans, strict=True):
            if unit.plan is not plan and unit.state is not UnitState.IN_USE:
                self._give_slot_back(unit)
                self.counters.resident_bytes -= unit.home.nbytes
                unit.adopt(plan)
                self.counters.resident_bytes += unit.home.nbytes
        self._unread = sum(bool(unit.home.unread) for unit in self.units)
        for slot, occupant in enumerate(self._slots.occupants):
            used = 0 if occupant is None else self.units[occupant].plan.streamed.nbytes
            self._slots.shrink(slot, max(split.slot_bytes, used))
        self._split = None
        split.ticket.settle()

    def _doubt_read_ahead(self) -> None:
        """After a surprise: what was read ahead counts as used until it is found to come next.

        Safe here only, while the model's thread waits: see [Note: the ready flag].
        """
        for occupant in self._slots.occupants:
            if occupant is not None and self.units[occupant].state is not UnitState.IN_USE:
                self.units[occupant].used, self.units[occupant].ready = True, False

    def _next_needed(self) -> int | None:
        """The first unit after the current one that is not there; used ones before it are kept."""
        index = self._current
        for _ in self.units:
            index = self._successor[index]
            unit = self.units[index]
            if unit.state is UnitState.ON_DISK and not unit.failed:
                return index
            if unit.state is UnitState.RESIDENT and unit.used and not unit.ready:
                unit.used, unit.ready = False, True
            elif unit.state is UnitState.LOADING:
                unit.used = False
            if index == self._current:
                break
        return None

    def _free_slot(self) -> int | None:
        units = self.units
        return self._slots.first(
            lambda held: units[held].state is UnitState.RESIDENT and units[held].used
        )

    def _evictable_slot(self) -> int | None:
        units = self.units
        return self._slots.first(lambda held: units[held].state is UnitState.RESIDENT)

    def _start(self, index: int, slot: int | None) -> None:
        unit = self.units[index]
        unit.state, unit.ready, unit.used = UnitState.LOADING, False, False
        placements: list[Place] = [*unit.home.unread]
        # Counted before it is there: nobody is to promise the same bytes to somebody else.
        self.counters.resident_bytes += sum(place.nbytes for place in placements)
        if unit.streams and slot is not None:
            placements.append(self._place(unit, index, slot))
        load = Load(index, placements)
        self._loading += 1
        jobs = [
            job for placement in placements for job in placement.read_jobs(self._chunk(placement))
        ]
        if jobs:
            self._submit(load, jobs)
        else:
            self._after_reads(load)

    def _place(self, unit: Unit, index: int, slot: int) -> Place:
        previous = self._slots.occupants[slot]
        if previous is not None and previous != index:
            evicted = self.units[previous]
            evicted.state, evicted.slot, evicted.ready = UnitState.ON_DISK, None, False
        self._slots.enter(slot, index, unit.plan.streamed.nbytes)
        unit.slot = slot
        if slot not in unit.slots:
            unit.slots[slot] = self._make_place(
                unit.plan, self._slots.regions[slot], self._files, self._convert
            )
        return unit.slots[slot]

    def _chunk(self, placement: Place) -> int:
        """Small enough that every reader has a part, large enough to be worth a call."""
        share = placement.nbytes // len(self._scratch)
        share += -share % _MIN_CHUNK_BYTES
        return max(_MIN_CHUNK_BYTES, min(self._chunk_bytes, share))

    def _settle(self, load: Load) -> None:
        unit = self.units[load.unit]
        self._loading -= 1
        ticket = self._tickets.pop(load.unit, None)
        if load.error is not None:
            self._give_slot_back(unit)
            for place in unit.home.unread:
                unit.home.drop(place)  # half filled, and not counted any more
                self.counters.resident_bytes -= place.nbytes
            unit.state, unit.failed = UnitState.ON_DISK, True
            if ticket is not None:
                ticket.settle(name_block(load.error, unit.plan.name))
            return
        if unit.home.unread:
            unit.home.mark_read()
            self._unread -= 1
        if ticket is None:
            unit.state, unit.ready = UnitState.RESIDENT, not unit.used
        else:
            unit.state = UnitState.IN_USE
            ticket.settle()

    def _give_slot_back(self, unit: Unit) -> None:
        if unit.slot is not None:
            self._slots.leave(unit.slot)
            unit.slot = None

    def _arrive(self, index: int) -> None:
        # What followed last time is expected to follow again: early exit, repeated blocks, skipped
        # towers.
        self._successor[self._current] = index
        self._current = index

    # -- reads -----------------------------------------------------------------------------------

    def _submit(self, load: Load, jobs: Sequence[Work]) -> None:
        if not self._jobs:
            self._reading_since = time.perf_counter()
        self._jobs += len(jobs)
        load.pending = len(jobs)
        assert self._pool is not None  # noqa: S101 - only `dispatch` calls
        for job in jobs:
            self._pool.submit(load, job)

    def _report(self, outcome: Outcome) -> None:
        self.inbox.put(partial(self._finished, outcome))

    def _account(self, outcome: Outcome) -> None:
        self._jobs -= 1
        self.counters.reads += outcome.nbytes > 0
        self.counters.bytes_read += outcome.nbytes
        if outcome.finished > self._reading_since:  # readers may report out of order
            self.counters.read_seconds += outcome.finished - self._reading_since
            self._reading_since = outcome.finished

    def abandon(self) -> None:
        """In a forked child, where no thread is: give all memory back. Nothing is read again."""
        for unit in self.units:
            unit.home.keep(())
            unit.slots.clear()
        for region in self._slots.regions:
            region.discard()

    def open(self) -> None:
        """Start the readers."""
        self._pool = ReaderPool(self._report, self._scratch)

    def close(self) -> None:
        """End the readers; tell whoever waits."""
        assert self._pool is not None  # noqa: S101 - only `dispatch` calls
        self._pool.close()
        error = self.fault or UnsupportedOperationError(
            "streaming was removed while a pass waited for weights. Call the model again: it is a "
            "plain one now."
        )
        if self._split is not None:
            self._split.ticket.settle(error)
            self._split = None
        for ticket in self._tickets.values():
            ticket.settle(error)
        self._tickets.clear()
        self._pool.join(_JOIN_SECONDS)
        self._forget_loads()

    def _forget_loads(self) -> None:
        """What was being read counts as never begun: nobody hears of it after the end."""
        for unit in self.units:
            if unit.state is UnitState.LOADING:
                self._give_slot_back(unit)
                self.counters.resident_bytes -= sum(place.nbytes for place in unit.home.unread)
                unit.state = UnitState.ON_DISK
        self._loading = self._jobs = 0


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
