"""`pipeload quantize`: makes the checkpoint, and says how far it is."""

from __future__ import annotations

import json as json_text
import logging
import sys
import time
from typing import TYPE_CHECKING, Any

import typer

from pipeload._sizes import format_size
from pipeload.cli.model import check_model
from pipeload.cli.screen import log, silence_libraries
from pipeload.entry.texts import first_line
from pipeload.errors import CheckpointError, PipeloadError
from pipeload.quantiser.quantise import make

if TYPE_CHECKING:
    from pathlib import Path

    from rich.progress import Progress

_SECONDS_BETWEEN_LINES = 5.0


def run(source: str, target: Path, *, json: bool, debug: bool, **options: Any) -> None:
    """Quantise; the result is one line, or one JSON object, on stdout.

    Raises:
        PipeloadError: as `pipeload.quantize`, and for a source that the library cannot load.
    """
    silence_libraries(debug=debug)
    check_model(source)
    read, shown = _Shown("calibrating", counted_in_bytes=False), _Shown("quantising")
    try:
        made = make(
            source,
            target,
            progress=shown,
            calibrating=read,
            trust_remote_code=False,
            **options,
        )
    except PipeloadError:
        raise
    except Exception as error:  # a configuration can make the library raise nearly anything
        raise CheckpointError(
            f"cannot quantise {source!r}: {first_line(error)}. Check the checkpoint; --debug shows "
            "where it failed."
        ) from error
    finally:
        read.stop()
        shown.stop()
    folder, floats = made
    nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if json:
        figures = {"folder": str(folder), "bytes": nbytes, "float_share": floats.share}
        typer.echo(json_text.dumps(figures))
    else:
        typer.echo(f"{folder}: {format_size(nbytes)}; {floats.described()} stayed floats")


class _Shown:
    """A bar with the time left on a terminal, now and then a line elsewhere, nothing if quiet."""

    def __init__(self, doing: str, *, counted_in_bytes: bool = True) -> None:
        self._doing, self._in_bytes = doing, counted_in_bytes
        self._began = self._line_at = 0.0
        self._found = 0
        self._bar: Progress | None = None

    def __call__(self, done: int, total: int) -> None:
        """So much is done, of so much."""
        now = time.monotonic()
        if not self._began:
            self._began, self._found = now, done
            self._line_at = now + _SECONDS_BETWEEN_LINES
            if log.isEnabledFor(logging.INFO) and sys.stderr.isatty():
                self._bar = _make_bar(in_bytes=self._in_bytes)
                self._task = self._bar.add_task(self._doing, total=total)
                self._bar.start()
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
            if done == total:
                self.stop()  # another bar may follow
        elif now >= self._line_at:
            self._line_at = now + _SECONDS_BETWEEN_LINES
            sizes = f", {format_size(done)} of {format_size(total)}" if self._in_bytes else ""
            left = _time_left(done - self._found, done, total, now - self._began)
            log.info("%s: %.0f%%%s%s", self._doing, 100 * done / max(1, total), sizes, left)

    def stop(self) -> None:
        """Wipe the bar away. May be called again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _time_left(new: int, done: int, total: int, seconds: float) -> str:
    """The end of a line; only what is `new` in this run tells how fast it is."""
    if new > 0 and seconds > 0:
        return f", {_duration(seconds * (total - done) / new)} left"
    return ""


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _make_bar(*, in_bytes: bool) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *([DownloadColumn()] if in_bytes else []),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=Console(stderr=True),
        transient=True,
    )
