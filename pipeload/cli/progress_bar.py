"""Progress: a bar on a terminal, now and then a line elsewhere, nothing when quiet."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from typing import TYPE_CHECKING, Any

from pipeload._sizes import format_size
from pipeload.cli.log_lines import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Progress, ProgressColumn

    from pipeload.engine.first_pass_progress import FirstPass

_SECONDS_BETWEEN_LINES = 5.0


@contextlib.contextmanager
def first_pass(model: Any) -> Iterator[FirstPass]:
    """Show how many blocks of the first pass are done, and how long the rest takes.

    Ends with it, or at the first token.
    """
    from pipeload.engine.first_pass_progress import FirstPass  # late: it loads torch

    shown = FirstPass(model, ProgressBar("first pass", "layers", time_left=True))
    try:
        yield shown
    finally:
        shown.stop()


class ProgressBar:
    """Shows how many of all are done."""

    def __init__(self, name: str, unit: str, *, time_left: bool = False) -> None:
        """`unit`: what is counted; `time_left`: show how long the rest takes, too."""
        self._name, self._unit, self._time_left = name, unit, time_left
        self._began = time.monotonic()
        self._line_at = self._began + _SECONDS_BETWEEN_LINES
        self._bar: Progress | None = None
        if log.isEnabledFor(logging.INFO) and sys.stderr.isatty():
            self._bar = _make_bar(self._columns())
            self._task = self._bar.add_task(name, total=None)
            self._bar.start()

    def show(self, done: int, total: int) -> None:
        """So many of all are done."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif now >= self._line_at:
            self._line_at = now + _SECONDS_BETWEEN_LINES
            log.info("%s: %s", self._name, self._describe(done, total, now - self._began))

    def close(self) -> None:
        """Wipe the bar away. May be called again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _describe(self, done: int, total: int, seconds: float) -> str:
        """What a line says after so many seconds."""
        text = f"{done} of {total} {self._unit}"
        left = seconds * (total - done) / max(1, done)
        return f"{text}, about {_duration(left)} left" if self._time_left else text

    def _columns(self) -> list[ProgressColumn]:
        """What stands behind the bar."""
        from rich.progress import (
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        clock = TimeRemainingColumn() if self._time_left else TimeElapsedColumn()
        return [MofNCompleteColumn(), TextColumn(self._unit), clock]


class BytesBar(ProgressBar):
    """Shows how many bytes are done, and how long the rest takes.

    What the first call tells was there before, as from a run that was interrupted: it took no time.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, "bytes", time_left=True)
        self._found: int | None = None

    def show(self, done: int, total: int) -> None:
        """So many bytes of all are done."""
        if self._found is None:
            self._found, self._began = done, time.monotonic()
        super().show(done, total)

    def _describe(self, done: int, total: int, seconds: float) -> str:
        text = f"{done / max(1, total):.0%}, {format_size(done)} of {format_size(total)}"
        new = done - (self._found or 0)
        left = seconds * (total - done) / max(1, new)
        return f"{text}, about {_duration(left)} left" if new > 0 else text

    def _columns(self) -> list[ProgressColumn]:
        from rich.progress import DownloadColumn, TextColumn, TimeRemainingColumn

        return [DownloadColumn(), TimeRemainingColumn(), TextColumn("left")]


class LateBar:
    """A bar that is there from its first figure to its last: a terminal has room for one."""

    def __init__(self, make: Callable[[], ProgressBar]) -> None:
        self._make = make
        self._bar: ProgressBar | None = None

    def show(self, done: int, total: int) -> None:
        """So many of all are done."""
        if self._bar is None:
            self._bar = self._make()
        self._bar.show(done, total)
        if done == total:
            self._bar.close()

    def close(self) -> None:
        """Wipe it away, if it is there. May be called again."""
        if self._bar is not None:
            self._bar.close()


def _duration(seconds: float) -> str:
    """As "35 s", "12 min" or "2.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _make_bar(columns: list[ProgressColumn]) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        console=Console(stderr=True),
        transient=True,  # the text that follows takes its place
    )
