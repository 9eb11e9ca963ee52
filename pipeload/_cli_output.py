"""What the command line says beside its result, on stderr: log lines, progress, errors."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import time
import warnings
from typing import TYPE_CHECKING

import typer

from pipeload.errors import PipeloadError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from rich.progress import Progress

    from pipeload._first_pass import FirstPass

log = logging.getLogger("pipeload")

_INTERRUPTED = 128 + 2  # as a shell reports SIGINT
_BROKEN_PIPE = 128 + 13
_SECONDS_BETWEEN_LINES = 5.0


@contextlib.contextmanager
def reported(*, debug: bool, quiet: bool) -> Iterator[None]:
    """Run a command: its log lines go to stderr, its errors become one line and an exit status."""
    handler = logging.StreamHandler()  # takes sys.stderr as it is now
    log.addHandler(handler)
    level, propagate = log.level, log.propagate
    log.setLevel(logging.DEBUG if debug else logging.ERROR if quiet else logging.INFO)
    log.propagate = False
    try:
        yield
        sys.stdout.flush()
    except PipeloadError as error:
        if debug:
            raise
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    except BrokenPipeError:
        # Whoever read our output has gone. Python flushes once more at exit; give it a place.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_BROKEN_PIPE) from None
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


def replace_unprintable() -> None:
    """Have letters that the terminal's encoding lacks appear as "?" instead of ending the command.

    Outside UTF-8, as in a pipe on Windows, a model's answer could hold such letters.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def silence_libraries(*, debug: bool) -> None:
    """Keep the libraries' notes and bars off the screen, but for the bars of a download."""
    if debug:
        return
    import huggingface_hub
    import transformers
    from huggingface_hub.utils.tqdm import enable_progress_bars

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    huggingface_hub.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()
    if sys.stderr.isatty() and log.isEnabledFor(logging.INFO):
        enable_progress_bars()


@contextlib.contextmanager
def first_pass(model: Any) -> Iterator[FirstPass]:
    """Show how many blocks of the first pass are done; ends with it, or at the first token."""
    from pipeload._first_pass import FirstPass  # late: it loads torch

    shown = FirstPass(model, _Screen())
    try:
        yield shown
    finally:
        shown.stop()


class _Screen:
    """A bar on a terminal, now and then a line elsewhere, nothing when quiet."""

    def __init__(self) -> None:
        self._line_at = time.monotonic() + _SECONDS_BETWEEN_LINES
        self._bar = _make_bar() if log.isEnabledFor(logging.INFO) and sys.stderr.isatty() else None
        if self._bar is not None:
            self._task = self._bar.add_task("first pass", total=None)
            self._bar.start()

    def show(self, done: int, total: int) -> None:
        """So many of all blocks are done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif time.monotonic() >= self._line_at:
            self._line_at = time.monotonic() + _SECONDS_BETWEEN_LINES
            log.info("first pass: %d of %d layers", done, total)

    def close(self) -> None:
        """Wipe the bar away. May be called again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _make_bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("layers"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,  # the text that follows takes its place
    )
