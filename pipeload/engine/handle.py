"""What a user holds on to: statistics, the plan, and the way back to a plain model."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeload.engine.stats import Stats
from pipeload.engine.trace import Trace
from pipeload.errors import UnsupportedOperationError
from pipeload.system.memory import PeakSince, peak_rss_bytes

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from types import TracebackType

    from torch import nn
    from typing_extensions import Self

    from pipeload.budget.plan import Plan
    from pipeload.engine.session import Session

LISTENERS: list[Callable[[nn.Module, Handle], None]] = []
"""Called with each model that is streamed, and its handle."""


class Handle:
    """Controls one streaming model. `pipeload.handle(model)` and `model.pipeload` give it.

    As a context manager it calls `remove` at the end.
    """

    def __init__(
        self, model: nn.Module, session: Session, restore: Callable[[nn.Module], None]
    ) -> None:
        """`restore` puts real weights into the model."""
        self._plan = session.governor.plan
        session.governor.peak = PeakSince()  # what loading took is no part of it
        self._model = weakref.ref(model)
        # None once removed: they hold the memory that streaming took.
        self._session: Session | None = session
        self._restore: Callable[[nn.Module], None] | None = restore
        self._last_stats: Stats | None = None
        for listen in LISTENERS:
            listen(model, self)

    @property
    def plan(self) -> Plan:
        """What the limit buys now. Frozen; all sizes in bytes.

        Another one takes its place when residents yield to a longer cache or come back after it.
        """
        return self._plan if self._session is None else self._session.governor.plan

    @property
    def session(self) -> Session:
        """The parts that stream the model.

        Raises:
            UnsupportedOperationError: it is not streamed any more.
        """
        if self._session is None:
            raise UnsupportedOperationError(
                "the model is a plain one since remove(). Load it again to have it streamed."
            )
        return self._session

    def set_memory_limit(
        self, memory_limit: int | str, *, host_memory_limit: int | str | None = None
    ) -> None:
        """Change the limit of this process, for this model and all others that stream in it.

        Of a model on a device it is the device's limit.

        What has to be given back is given back before this returns; if a pass is running, before
        its next block. What may be held in addition is read as it streams by.

        Args:
            memory_limit: bytes, "3GB", "50%" or "auto", as for `pipeload.from_pretrained`.
            host_memory_limit: the same of the process, for a model on a device; None: as it is.

        Raises:
            MemoryLimitError: it is too small; nothing changes. Says the smallest that works.
            OptionError: it is no size.
            UnsupportedOperationError: the model is not streamed any more.
        """
        if self._session is None:
            raise UnsupportedOperationError(
                "set_memory_limit() after remove(): the model is a plain one. Load it again."
            )
        self._session.governor.ledger.set_limit(memory_limit, host_memory_limit)

    def pass_bytes(self, *args: Any, **kwargs: Any) -> int | None:
        """Bytes that a call of the model with these arguments would stream now.

        From disk to memory; of a model on a device, from there or host memory to the device.
        Tensors may be on the meta device: only their shapes count. None where such a pass does not
        fit the limit; 0 once the model is not streamed any more.
        """
        return 0 if self._session is None else self._session.governor.pass_bytes(args, kwargs)

    def trace(self, file: str | os.PathLike[str]) -> Trace:
        """Write down what happens inside `with`, for Perfetto or chrome://tracing.

        Reads, waits, computing and what goes, of every block and range of rows.

        Raises:
            UnsupportedOperationError: the model is not streamed any more.
        """
        return Trace(self.session, Path(file))

    def stats(self) -> Stats:
        """A frozen snapshot of the work so far."""
        if self._last_stats is not None:
            return self._last_stats
        session = self._session
        assert session is not None  # noqa: S101 - there until the last statistics are
        log, counters, pinned = session.passes.log, session.prefetcher.counters, session.pinned_read
        rows = sum(table.bytes_read for table in session.streamer.tables)
        stalled = session.streamer.stall_seconds + session.experts.reads.stall_seconds
        return Stats(
            passes=log.passes,
            tokens=log.tokens,
            bytes_read=pinned.nbytes + rows + counters.bytes_read + counters.expert_bytes_read,
            reads=pinned.reads + counters.reads,
            read_seconds=pinned.seconds + counters.read_seconds + counters.expert_read_seconds,
            stall_seconds=stalled,
            compute_seconds=max(0.0, log.pass_seconds - stalled),
            hits=counters.hits,
            misses=counters.misses,
            expert_hits=counters.expert_hits,
            expert_misses=counters.expert_misses,
            expert_bytes_read=counters.expert_bytes_read,
            expert_bytes=counters.expert_bytes,
            resident_bytes=self.plan.resident,
            buffer_bytes=self.plan.buffers,
            peak_rss_bytes=peak_rss_bytes(),
            peak_since_load_bytes=session.governor.peak.nbytes,
            memory_limit=self.plan.memory_limit,
            io_mode=self.plan.io_mode,
            **session.governor.ledger.figures(),
        )

    @property
    def removed(self) -> bool:
        """Whether `remove` has been called."""
        return self._session is None

    def remove(self) -> None:
        """Give the plain model back: no hooks, no threads, weights mapped where the file has them.

        May be called again. The model then takes the memory it takes without pipeload.

        Raises:
            MemoryLimitError: weights that were cast or converted do not fit the limit all at once.
            CheckpointChangedError: a file was changed, and the weights in it would be others.
            UnsupportedOperationError: a forward pass is running.
        """
        model, session, restore = self._model(), self._session, self._restore
        if model is None or session is None or restore is None:
            return
        if self._last_stats is None:
            restore(model)
            self._last_stats, self._plan = self.stats(), self.plan
        try:
            session.close()
        finally:
            if session.close.is_done:  # else an interrupt came in between: it goes on next time
                self._session = self._restore = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = "removed" if self.removed else f"limit {self.plan.memory_limit} bytes"
        return f"<pipeload.Handle: {len(self.plan.units)} units, {state}>"
