"""One block on its way between disk and memory, and who waits for it.

States of a unit:

            prefetch/acquire        read ok              acquire
  ON_DISK ------------------> LOADING -----> RESIDENT <----------> IN_USE
     ^                          |               |       release
     |        read failed       |    evict      |
     `--------------------------+---------------'
"""

from __future__ import annotations

import enum
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pipeload.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipeload.budget.plan import UnitPlan
    from pipeload.checkpoint.hung_reads import Stalls
    from pipeload.weights.kept_pieces import KeptPieces
    from pipeload.weights.placement import Place


class UnitState(enum.Enum):
    """Where the bytes of a unit are, and who needs them."""

    ON_DISK = enum.auto()  # nothing held but its resident part
    LOADING = enum.auto()  # a slot is taken and reads are in flight
    RESIDENT = enum.auto()  # all bytes there; evictable if it has been used
    IN_USE = enum.auto()  # bound to the module; never evicted


@dataclass(slots=True)
class Unit:
    """One block. Only the dispatcher writes it; the model's thread reads `ready` and `slot`."""

    plan: UnitPlan
    kept: KeptPieces
    """Where the part that is not evicted lies."""
    slots: dict[int, Place] = field(default_factory=dict)
    state: UnitState = UnitState.ON_DISK
    slot: int | None = None
    used: bool = False
    """It has run since it was read, or is not expected to come next: its slot may be taken."""
    ready: bool = False
    failed: bool = False
    """The last read ahead failed; only an acquire tries again."""

    rows: tuple[int, int] = (0, 0)
    """First row and last row + 1, for a unit that is a range of rows."""

    @property
    def streams(self) -> bool:
        """Whether a part of it is evicted, so that it needs a slot to run."""
        return self.plan.streamed.nbytes > 0

    def give_back(self) -> None:
        """Nobody computes with it any more: it stays until its slot is needed."""
        self.state, self.used, self.ready = UnitState.RESIDENT, True, not self.streams

    def adopt(self, plan: UnitPlan) -> None:
        """Keep and stream other parts from now on. It holds no slot and is not in use."""
        self.plan = plan
        self.kept.keep(plan.resident, plan.stored)
        self.slots.clear()
        there = not self.streams and not self.kept.unread
        self.state = UnitState.RESIDENT if there else UnitState.ON_DISK
        self.ready, self.used, self.failed = there, there, False


class Ticket:
    """One wait of the model's thread for one unit."""

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.error: BaseException | None = None
        self.told = False
        """Whether `wait` has raised what it was settled with."""
        self._done = threading.Lock()
        self._done.acquire()

    def answer(self, error: BaseException | None = None) -> None:
        """Let the waiting thread go on, or raise `error` there."""
        self.error = error
        self._done.release()

    def wait(self, alive: Callable[[], bool], stalls: Stalls) -> None:
        """Return once it is settled, or raise what it was settled with.

        Raises:
            UnsupportedOperationError: `alive` says that nobody is there any more to settle it.
            ReadError: the disk does not answer. It may still be settled later.
        """
        since = time.monotonic()
        while not self._done.acquire(timeout=stalls.tick):
            stalls.check(since)
            if not alive():
                raise UnsupportedOperationError(
                    "the thread that dispatches reads has ended. Load the model again."
                )
        error, self.error = self.error, None
        if error is not None:
            self.told = True
            try:
                raise error
            finally:
                # In a cycle with its traceback it would keep all that the pass holds for long.
                del error


class Split(NamedTuple):
    """What every unit is to keep and to stream from now on."""

    plans: Sequence[UnitPlan]
    slot_bytes: int
    """What a buffer has to hold."""
    ticket: Ticket
    """Settled once memory that is not to be kept has been given back."""


@dataclass(slots=True)
class Load:
    """The reads of one unit that are in flight."""

    unit: int
    placements: list[Place]
    pending: int = 0
    converting: bool = False
    error: BaseException | None = None
