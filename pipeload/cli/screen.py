"""What the command line says beside its result, on stderr: log lines, progress, errors."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperGroup

import pipeload
from pipeload.errors import PipeloadError, escape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.progress import Progress

    from pipeload.engine.first_pass import FirstPass

log = logging.getLogger("pipeload")

_INTERRUPTED = 128 + 2  # as a shell reports SIGINT
_BROKEN_PIPE = 128 + 13
_SECONDS_BETWEEN_LINES = 5.0
# How refusals of a limit name, to programs, what makes a pass smaller.
_FEWER_AT_ONCE = " (tokens=, batch=)"
# What was typed is wrong. The library it comes from has moved between versions of typer.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class Commands(TyperGroup):
    """The commands; what was typed wrongly is told in one line, as every other error."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run what was typed.

        Raises:
            SystemExit: with 2 if it was wrong, else with the command's status.
        """
        standalone_mode = extra.pop("standalone_mode", True)
        try:
            status = super().main(*args, **{**extra, "standalone_mode": False})
        except _UsageError as error:
            if not standalone_mode:
                raise
            _say_usage(error)
            sys.exit(2)
        except typer.Abort:
            if not standalone_mode:
                raise
            sys.exit(1)
        if standalone_mode:
            sys.exit(status if isinstance(status, int) else 0)
        return status


def _say_usage(error: Any) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":  # nothing was typed
        error.show()
        return
    message = " ".join(error.format_message().split()).rstrip(".") + "."
    place = "" if error.ctx is None else f" See {error.ctx.command_path} --help."
    typer.echo(f"error: {message}{place}", err=True)


@contextlib.contextmanager
def reported(*, debug: bool, quiet: bool, smaller_pass: Sequence[str] = ()) -> Iterator[None]:
    """Run a command: its log lines go to stderr, its errors become one line and an exit status.

    `smaller_pass` are those of its own options that make a pass smaller, if it has any.
    """
    handler = logging.StreamHandler()  # takes sys.stderr as it is now
    handler.setFormatter(_Printable())
    log.addHandler(handler)
    level, propagate = log.level, log.propagate
    log.setLevel(logging.DEBUG if debug else logging.ERROR if quiet else logging.INFO)
    log.propagate = False
    try:
        with _Interrupts():
            yield
            sys.stdout.flush()
    except PipeloadError as error:
        if debug:
            raise
        own = f" ({', '.join(smaller_pass)})" if smaller_pass else ""
        typer.echo(f"error: {str(error).replace(_FEWER_AT_ONCE, own)}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    except BrokenPipeError:
        _drop_output()  # whoever read it has gone
        raise typer.Exit(_BROKEN_PIPE) from None
    except (OSError, MemoryError) as error:
        if debug:
            raise
        _drop_output()  # it may be what could not be written
        typer.echo(f"error: {_cause(error)}. --debug shows where it failed.", err=True)
        raise typer.Exit(1) from None
    except RuntimeError as error:
        # By its name: torch may not have been imported.
        if debug or type(error).__name__ != "OutOfMemoryError":
            raise
        cause = str(error).split(". ")[0]
        typer.echo(
            f"error: the device's limit is full: {cause}. Raise --memory-limit, or ask for fewer "
            "tokens at once.",
            err=True,
        )
        raise typer.Exit(1) from None
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


class _Interrupts:
    """Inside, what a Ctrl-C ends in is a KeyboardInterrupt, whatever is made of that on its way.

    Modules that are being imported catch it, leave something out, and fail otherwise.
    """

    _came = False

    def __enter__(self) -> None:
        _Interrupts._came = False
        self._before = signal.getsignal(signal.SIGINT)
        main = threading.current_thread() is threading.main_thread()
        self._noting = main and self._before is signal.default_int_handler
        if self._noting:
            signal.signal(signal.SIGINT, self._note)

    @staticmethod
    def _note(_number: int, _frame: object) -> NoReturn:
        _Interrupts._came = True
        raise KeyboardInterrupt

    @staticmethod
    def check() -> None:
        """Raise one that somebody has swallowed."""
        if _Interrupts._came:
            raise KeyboardInterrupt

    def __exit__(self, kind: object, error: BaseException | None, _trace: object) -> None:
        if self._noting:
            signal.signal(signal.SIGINT, self._before)
        if error is not None and _Interrupts._came:
            raise KeyboardInterrupt from error


def load(name: str) -> None:
    """Import what one of pipeload's functions needs: seconds, in which a terminal shows a line."""
    shown = (
        "loading libraries ..." if log.isEnabledFor(logging.INFO) and sys.stderr.isatty() else ""
    )
    sys.stderr.write(shown)
    sys.stderr.flush()
    try:
        getattr(pipeload, name)
        _Interrupts.check()
    finally:
        if shown:
            sys.stderr.write(f"\r{' ' * len(shown)}\r")


class _Printable(logging.Formatter):
    """A log line may name what a checkpoint has named."""

    def format(self, record: logging.LogRecord) -> str:
        return escape(super().format(record))


def _drop_output() -> None:
    """Python flushes once more at exit; give it a place."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _cause(error: OSError | MemoryError) -> str:
    """What the system says, in one line."""
    text = " ".join(str(error).split()) or "out of memory"
    return text.rstrip(".")


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

    from pipeload.formats import registry

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    huggingface_hub.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    for package in registry.packages():  # they may say the same at every product
        logging.getLogger(package).setLevel(logging.ERROR)
    transformers.logging.disable_progress_bar()
    if sys.stderr.isatty() and log.isEnabledFor(logging.INFO):
        enable_progress_bars()


@contextlib.contextmanager
def first_pass(model: Any) -> Iterator[FirstPass]:
    """Show how many blocks of the first pass are done; ends with it, or at the first token."""
    from pipeload.engine.first_pass import FirstPass  # late: it loads torch

    shown = FirstPass(model, Screen("first pass", "layers"))
    try:
        yield shown
    finally:
        shown.stop()


class Screen:
    """A bar on a terminal, now and then a line elsewhere, nothing when quiet."""

    def __init__(self, name: str, unit: str, *, time_left: bool = False) -> None:
        self._name, self._unit, self._time_left = name, unit, time_left
        self._began = time.monotonic()
        self._line_at = self._began + _SECONDS_BETWEEN_LINES
        wanted = log.isEnabledFor(logging.INFO) and sys.stderr.isatty()
        self._bar = _make_bar(unit, time_left=time_left) if wanted else None
        if self._bar is not None:
            self._task = self._bar.add_task(name, total=None)
            self._bar.start()

    def show(self, done: int, total: int) -> None:
        """So many of all are done."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif now >= self._line_at:
            self._line_at = now + _SECONDS_BETWEEN_LINES
            seconds = (now - self._began) / max(1, done) * (total - done)
            left = f", about {_duration(seconds)} left" if self._time_left else ""
            log.info("%s: %d of %d %s%s", self._name, done, total, self._unit, left)

    def close(self) -> None:
        """Wipe the bar away. May be called again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _duration(seconds: float) -> str:
    """As "35 s", "12 min" or "2.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _make_bar(unit: str, *, time_left: bool) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn() if time_left else TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,  # the text that follows takes its place
    )
