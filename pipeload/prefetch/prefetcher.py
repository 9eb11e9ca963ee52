"""Reads the next blocks while this one computes: what the model's thread sees of it."""

from __future__ import annotations

import atexit
import copy
import math
import os
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING

from pipeload.errors import ReadError, UnsupportedOperationError
from pipeload.prefetch.dispatcher import Dispatcher, dispatch
from pipeload.prefetch.fault_messages import name_block
from pipeload.prefetch.read_order import LastSeen
from pipeload.prefetch.unit import Split, Ticket
from pipeload.weights.placement import Placement, UnpackedPlacement

if TYPE_CHECKING:
    import queue
    from collections.abc import Callable, Sequence

    from pipeload.budget.plan import UnitPlan
    from pipeload.budget.read_counters import Counters
    from pipeload.checkpoint.file_reads import FileSet
    from pipeload.prefetch.buffers import Buffer
    from pipeload.prefetch.dispatcher import MakePlace
    from pipeload.prefetch.read_order import Order
    from pipeload.prefetch.unit import Unit
    from pipeload.weights.arena import Region
    from pipeload.weights.placement import Convert, Place


_THREAD_PREFIX = "pipeload-"
_END_SECONDS = 10.0
_ENDING: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Dispatchers that were told to end where nobody could wait for them."""


def _end(inbox: queue.SimpleQueue[Callable[[], None] | None], thread: threading.Thread) -> None:
    """End the dispatcher and its readers, and wait for them.

    Waiting frees their memory now, and at exit it keeps a reader from being torn out of torch,
    which aborts the process.
    """
    inbox.put(None)
    if not thread.is_alive():  # in a forked child it is not there
        return
    if threading.current_thread().name.startswith(_THREAD_PREFIX):
        _ENDING.add(thread)  # a thread of ours cannot wait for itself
    else:
        thread.join(_END_SECONDS)


@atexit.register
def _wait_for_ending() -> None:
    for thread in [*_ENDING]:
        thread.join(_END_SECONDS)


def place_streamed(unit: Unit, region: Region, files: FileSet, convert: Convert) -> Place:
    """A unit's streamed part in a buffer."""
    streamed, kept = unit.plan.streamed, unit.kept
    if unit.plan.stored:
        return UnpackedPlacement(streamed, region, files, convert, lambda: kept.stored)
    return Placement(streamed, region, files, convert)


class Prefetcher:
    """What the model's thread sees: acquire, release, reset, close."""

    def __init__(
        self,
        units: list[Unit],
        *,
        slots: Sequence[Buffer],
        files: FileSet,
        convert: Convert,
        scratch: Sequence[Region | None],
        chunk_bytes: int,
        place: MakePlace = place_streamed,
        order: Order | None = None,
    ) -> None:
        """Start the threads and read the first units at once.

        Args:
            units: in the order of the model.
            slots: buffers, each large enough for any unit's streamed part.
            files: the open checkpoint.
            convert: runs the library's conversions.
            scratch: one entry per reader thread.
            chunk_bytes: the most that one read call asks for.
            place: puts a unit into a buffer.
            order: says which units are likely next; None: as the model runs them, and as it ran
                them last.
        """
        dispatcher = Dispatcher(
            units,
            slots=slots,
            place=place,
            files=files,
            convert=convert,
            scratch=scratch,
            chunk_bytes=chunk_bytes,
            order=LastSeen(len(units)) if order is None else order,
        )
        self._dispatcher = dispatcher
        self._stalls = files.stalls
        self._inbox = dispatcher.inbox
        self.units: Sequence[Unit] = units
        """In the order of the model; only the dispatcher changes them."""
        self.held: set[int] = set()
        """Units that were acquired and are not released yet."""
        self._taken: int | None = None
        """A ready unit that was acquired: told when it is released, or before anything is asked.

        To wake the dispatcher for each would cost a fast block a good part of its own time.
        """
        self._thread = threading.Thread()
        self._closer = weakref.finalize(self, _end, self._inbox, self._thread)
        self._closer.detach()  # there is nothing to end yet
        self.start()

    def start(self) -> None:
        """Start the threads; after `close`, they go on where they were. Read the next units.

        Does nothing while they run.

        Raises:
            RuntimeError: the system gives no thread.
            UnsupportedOperationError: a thread was ended by an error before.
        """
        self._check_fault()
        # An interrupt may have come between the two of these before: there is only one dispatcher.
        if not self._thread.is_alive():
            self._thread = threading.Thread(
                target=dispatch, args=(self._dispatcher,), name="pipeload-dispatcher", daemon=True
            )
            self._pid = os.getpid()
            self._dispatcher.open()
            try:
                self._thread.start()
            except RuntimeError:  # no memory for its stack
                self._dispatcher.close()
                raise
            self._inbox.put(lambda: None)
        # The threads know the dispatcher only: when nobody holds this object any more, they end.
        if not self._closer.alive:
            self._closer = weakref.finalize(self, _end, self._inbox, self._thread)

    @property
    def dispatcher(self) -> Dispatcher:
        """The one writer of the units' states."""
        return self._dispatcher

    @property
    def counters(self) -> Counters:
        """Running totals of what was read."""
        return self._dispatcher.counters

    def acquire(self, index: int) -> float:
        """Return once the unit's bytes are there; the seconds that were waited.

        Raises:
            ReadError: the disk failed, or does not answer.
            UnsupportedModelError: more blocks run inside each other than there are buffers.
            UnsupportedOperationError: in a forked child, or after `close`.
        """
        self.held.add(index)
        if self.units[index].ready and self._dispatcher.fault is None:
            self._tell()
            self._taken = index
            return 0.0
        started = time.perf_counter()
        ticket = Ticket(index)
        try:
            self._ask(ticket, partial(self._dispatcher.wanted, ticket))
        except ReadError as error:
            if ticket.told:
                raise
            raise name_block(error, self.units[index].plan.name) from None  # nobody settled it
        return time.perf_counter() - started

    def release(self, index: int) -> None:
        """The block has run; its slot may be taken."""
        unit = self.units[index]
        if unit.streams:
            # Before anybody may overwrite it: see [Note: the ready flag] in dispatcher.py.
            unit.ready = False
        message = self._dispatcher.released
        if self._taken == index:
            # Nobody hears of it if an interrupt comes behind this: the pass is dead then, and
            # `reset` follows.
            self._taken = None
            message = self._dispatcher.ran
        self._inbox.put(partial(message, index))
        self.held.discard(index)

    def _tell(self) -> None:
        index, self._taken = self._taken, None
        if index is not None:
            self._inbox.put(partial(self._dispatcher.entered, index))

    def reset(self) -> None:
        """Give back whatever a pass that died was holding."""
        self.held.clear()
        if self._dispatcher.fault is not None:
            return  # there is no next pass, but a way back to the plain model
        ticket = Ticket(-1)
        self._ask(ticket, partial(self._dispatcher.reset, ticket))

    def resplit(self, plans: Sequence[UnitPlan], slot_bytes: int) -> None:
        """Have units keep and stream other parts; returns once memory has been given back.

        Units in use keep what they have. To be called from the thread of the running pass, or while
        no pass runs.
        """
        ticket = Ticket(-1)
        split = Split(plans, slot_bytes, ticket)
        self._ask(ticket, partial(self._dispatcher.resplit, split))

    def abandon(self) -> None:
        """In a forked child, where the threads are not: give all memory back."""
        self._dispatcher.abandon()

    def _alive(self) -> bool:
        self._check_fault()
        return self._thread.is_alive()

    def _check_fault(self) -> None:
        if (fault := self._dispatcher.fault) is not None:
            raise copy.copy(fault)  # without the frames that the first one has seen

    def check_reading(self) -> None:
        """To be called by whoever wants to know whether reading works. In any thread.

        Raises:
            ReadError: a read hangs.
            UnsupportedOperationError: a thread was ended by an error.
        """
        self._check_fault()
        self._stalls.check(-math.inf)

    def close(self) -> None:
        """End all threads. May be called again, and `start` after it."""
        self._taken = None
        self._closer()

    def _ask(self, ticket: Ticket, message: Callable[[], None]) -> None:
        if os.getpid() != self._pid:
            raise UnsupportedOperationError(
                "this process was forked from the one that loaded the model, and reader threads "
                "do not survive a fork. Load the model in the child process, after "
                "torch.set_num_threads(1) if the parent has computed (torch's threads do not "
                "survive either), or start children with the 'spawn' method."
            )
        if not self._closer.alive:
            raise UnsupportedOperationError("streaming has ended for this model. Load it again.")
        self._check_fault()
        self._tell()
        self._inbox.put(message)
        ticket.wait(self._alive, self._stalls)
