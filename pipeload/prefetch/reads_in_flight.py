"""The reads that are in flight: which threads do them, and for how long there were any."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pipeload.checkpoint.reader_threads import ReaderPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipeload.budget.read_counters import Counters
    from pipeload.checkpoint.reader_threads import Outcome
    from pipeload.prefetch.unit import Load
    from pipeload.weights.arena import Region, Work
    from pipeload.weights.placement import Place

_MIN_CHUNK_BYTES = 1 << 20
_JOIN_SECONDS = 5.0


class Reads:
    """Hands jobs to reader threads, and counts them. Only the dispatcher's thread uses it."""

    def __init__(
        self,
        counters: Counters,
        scratch: Sequence[Region | None],
        chunk_bytes: int,
    ) -> None:
        """`scratch` has one entry for each reader; one read call asks for `chunk_bytes` at most."""
        self._counters = counters
        self._scratch, self._chunk_bytes = scratch, chunk_bytes
        self._pool: ReaderPool[Region | None] | None = None
        self._jobs = self._reading = 0
        """In flight, and how many of them read: others make weights of what was read."""
        self._counted_to = 0.0
        """Up to when the time of the jobs in flight is in `read_seconds`."""

    def open(self, report: Callable[[Outcome], None]) -> None:
        """Start the readers. They alone hold `report`, which they call with each job's outcome."""
        self._pool = ReaderPool(report, self._scratch)

    def close(self) -> None:
        """Have the readers end after the jobs they are at. Does not wait."""
        assert self._pool is not None  # noqa: S101 - only what is open is closed
        self._pool.close()

    def join(self) -> None:
        """Wait a while for the readers to end; what they were at is counted no more."""
        assert self._pool is not None  # noqa: S101 - only what is open is closed
        self._pool.join(_JOIN_SECONDS)
        self._jobs = self._reading = 0

    def jobs_of(self, placements: Sequence[Place]) -> list[Work]:
        """What has to be read for these places."""
        return [job for place in placements for job in place.read_jobs(self._chunk(place))]

    def _chunk(self, place: Place) -> int:
        """Bytes of one read: few enough that every reader has a part, and worth a call."""
        share = place.nbytes // len(self._scratch)
        share += -share % _MIN_CHUNK_BYTES
        return max(_MIN_CHUNK_BYTES, min(self._chunk_bytes, share))

    def submit(self, load: Load, jobs: Sequence[Work]) -> None:
        """Have the readers do these jobs of a load."""
        if not self._jobs:
            self._counted_to = time.perf_counter()
        self._jobs += len(jobs)
        if load.converting:
            self._counters.made_bytes += sum(place.nbytes for place in load.placements)
        else:
            self._reading += len(jobs)
        load.pending = len(jobs)
        assert self._pool is not None  # noqa: S101 - nothing is read before `open`
        for job in jobs:
            self._pool.submit(load, job)

    def count(self, load: Load, outcome: Outcome) -> None:
        """Take one job of a load that has ended into the running totals."""
        read = self._reading > 0
        self._jobs -= 1
        self._reading -= not load.converting
        self._counters.reads += outcome.nbytes > 0
        self._counters.bytes_read += outcome.nbytes
        if outcome.finished > self._counted_to:  # readers may report out of order
            seconds = outcome.finished - self._counted_to
            if read:
                self._counters.read_seconds += seconds
            else:
                self._counters.make_seconds += seconds
            self._counted_to = outcome.finished
