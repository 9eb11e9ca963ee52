"""Reads that never return: a hung disk, or a network file system whose server has gone.

[Note: a read that hangs] No thread can be called back from the kernel, so a read that hangs is
neither ended nor tried again: whoever waits for it gives up, and says what does not answer. The
memory it reads into stays its own until it returns. When the disk comes back, so does the read,
and what it was for goes on as if it had only been slow.
"""

from __future__ import annotations

import math
import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from pipeload.errors import OptionError, ReadError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEFAULT_SECONDS: Final = 120.0
VARIABLE: Final = "PIPELOAD_READ_TIMEOUT"
"""The environment variable that says what "auto" means."""
_TICK_SECONDS: Final = 1.0


class Stalls:
    """The reads of a set of files that are in flight: each thread has at most one."""

    def __init__(self, seconds: float | None) -> None:
        """Take a read for one that hangs after `seconds`; None: never."""
        self.seconds = seconds
        self.tick = _TICK_SECONDS if seconds is None else min(_TICK_SECONDS, seconds / 2)
        """How often, in seconds, whoever waits is to call `check`."""
        self._in_flight: dict[int, tuple[float, Path, int]] = {}

    @contextmanager
    def reading(self, path: Path, place: int) -> Iterator[None]:
        """Note one call that reads a file at a byte, while inside."""
        me = threading.get_ident()
        self._in_flight[me] = (time.monotonic(), path, place)
        try:
            yield
        finally:
            self._in_flight.pop(me, None)

    def check(self, since: float) -> None:
        """To be called now and then by a thread that has waited since `since` (`time.monotonic()`).

        A slow disk is no reason to give up: only a single call that does not return is.

        Raises:
            ReadError: it waits for too long, and a read hangs. Names the oldest.
        """
        now = time.monotonic()
        if self.seconds is None or now - since < self.seconds or not self._in_flight:
            return
        # A copy, in one step: other threads come and go meanwhile.
        began, path, place = min([*self._in_flight.values()], default=(now, None, 0))
        if path is not None and now - began >= self.seconds:
            raise ReadError(
                f"reading {str(path)!r} at byte {place} has not returned for {now - began:.1f} "
                "seconds: the disk, or the network behind it, does not answer. Check the disk and "
                "its mount, then do the same again: once the disk answers, it goes on. If it is "
                f"only slow, set read_timeout= (where that is no option, {VARIABLE}) to more than "
                f"{self.seconds:g} seconds; 0 waits for ever."
            )


def resolve_timeout(read_timeout: float | str | None) -> float | None:
    """Resolve to seconds, None for no limit; what "auto" means stands in the environment.

    Raises:
        OptionError: it is neither.
    """
    if read_timeout is None:
        return None
    if read_timeout != "auto":
        return _check_timeout(read_timeout, f"read_timeout={read_timeout!r}")
    named = os.environ.get(VARIABLE, "").strip()
    if not named:
        return DEFAULT_SECONDS
    return _check_timeout(named, f"the environment variable {VARIABLE}={named!r}")


def _check_timeout(value: float | str, what: str) -> float | None:
    try:
        seconds = -1.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise OptionError(
            f"{what} must be seconds, 0 or more. Set 120, say; 0 (or None) waits for ever."
        )
    return seconds or None
