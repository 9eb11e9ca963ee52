"""Follows what the process's control groups leave it, for `pressure="auto"`.

A container may be squeezed from outside: its limit is lowered, or a neighbour takes what was free.
The kernel ends a process only when nothing can be reclaimed any more, so there is time to give
residents back. Room in the groups is measured; stalls for memory (PSI, Weiner 2018) tell of a
squeeze that no figure shows.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING

from pipeload.system.memory import memory_stall, room_bytes, rss_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

_POLL_SECONDS = 0.25
# Kept free in a group that somebody else is filling, until the next look.
_MARGIN_BYTES = 32_000_000
_STALLED = 0.1
# Given back for each look at a process that waits for memory a tenth of its time.
_STEP = 1 / 32


class PressureGauge:
    """How much this process may hold now. A figure is good for a quarter of a second."""

    def __init__(self, limit: int) -> None:
        """`limit` is the most, in bytes, whatever the groups leave."""
        self.limit = limit
        self._allowed = limit
        self._read_at = 0.0

    def allowed_bytes(self) -> int:
        """The limit, or less while a control group has less room."""
        now = time.monotonic()
        if now - self._read_at > _POLL_SECONDS:
            self._read_at = now
            self._allowed = self._measure()
        return min(self._allowed, self.limit)

    def _measure(self) -> int:
        held = rss_bytes()
        allowed = held + room_bytes() - _MARGIN_BYTES
        if memory_stall() > _STALLED:
            allowed = min(allowed, held - int(held * _STEP))
        return allowed


def watch(look: Callable[[], None]) -> None:
    """Call the bound method `look` every quarter of a second, as long as its object lives."""
    reference = weakref.WeakMethod(look)
    threading.Thread(
        target=_watch, args=(reference,), name="pipeload-pressure", daemon=True
    ).start()


def _watch(reference: weakref.WeakMethod[Callable[[], None]]) -> None:
    while (look := reference()) is not None:
        look()
        del look
        time.sleep(_POLL_SECONDS)
