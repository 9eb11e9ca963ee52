"""How a command ends: one line on stderr for what went wrong, and its exit status."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperGroup

import pipeload
from pipeload.cli.log_lines import Printable, log
from pipeload.errors import PipeloadError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_RANKS = "Several machines share a model in run and batch alone."
_INTERRUPTED = 128 + 2  # as a shell reports SIGINT
_BROKEN_PIPE = 128 + 13
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
        asked = {*(args[0] if args and args[0] is not None else sys.argv[1:])}
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
        except OSError as error:
            # What commands let through, they are to: it has a traceback. The rest is a full disk.
            if not standalone_mode or asked.isdisjoint({"--help", "--version"}):
                raise
            _drop_output()
            typer.echo(f"error: {_cause(error)}.", err=True)
            sys.exit(1)
        if standalone_mode:
            sys.exit(status if isinstance(status, int) else 0)
        return status


def _say_usage(error: Any) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":  # nothing was typed
        error.show()
        return
    # pydantic names the kind of what a check of ours has raised
    message = " ".join(error.format_message().split()).replace(": Value error, ", ": ")
    message = message.rstrip(".")
    message += "" if message.endswith("?") else "."
    if getattr(error, "option_name", None) == "--ranks":
        message += f" {_RANKS}"
    place = "" if error.ctx is None else f" See {error.ctx.command_path} --help."
    typer.echo(f"error: {message}{place}", err=True)


@contextlib.contextmanager
def reported(*, debug: bool, quiet: bool, smaller_pass: Sequence[str] = ()) -> Iterator[None]:
    """Run a command: its log lines go to stderr, its errors become one line and an exit status.

    `smaller_pass` are those of its own options that make a pass smaller, if it has any.
    """
    handler = logging.StreamHandler()  # takes sys.stderr as it is now
    handler.setFormatter(Printable())
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
        if debug or (told := _DEVICE_ERRORS.get(type(error).__name__)) is None:
            raise
        cause = str(error).split(". ")[0].splitlines()[0].rstrip(".")
        typer.echo(f"error: {told.format(cause)}", err=True)
        raise typer.Exit(1) from None
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


_DEVICE_ERRORS = {
    "OutOfMemoryError": "the device's limit is full: {}. Raise --memory-limit, or ask for fewer "
    "tokens at once.",
    "AcceleratorError": "the device computes no more in this process: {}. Run the command again; "
    "if it fails again, CUDA_LAUNCH_BLOCKING=1 and --debug show where.",
}


class _Interrupts:
    """Inside, what a Ctrl-C ends in is a KeyboardInterrupt, whatever is made of that on its way.

    Modules that are being imported catch it, leave something out, and fail otherwise.
    """

    came = False
    """Whether one has, and nobody has taken it."""

    def __enter__(self) -> None:
        _Interrupts.came = False
        self._before = signal.getsignal(signal.SIGINT)
        main = threading.current_thread() is threading.main_thread()
        self._noting = main and self._before is signal.default_int_handler
        if self._noting:
            signal.signal(signal.SIGINT, self._note)

    @staticmethod
    def _note(_number: int, _frame: object) -> NoReturn:
        _Interrupts.came = True
        raise KeyboardInterrupt

    @staticmethod
    def check() -> None:
        """Raise one that somebody has swallowed."""
        if _Interrupts.came:
            raise KeyboardInterrupt

    def __exit__(self, kind: object, error: BaseException | None, _trace: object) -> None:
        if self._noting:
            signal.signal(signal.SIGINT, self._before)
        if error is not None and _Interrupts.came:
            raise KeyboardInterrupt from error


def interrupt_taken() -> None:
    """Say that a Ctrl-C has done what it was for: what goes wrong later is no part of it."""
    _Interrupts.came = False


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


def _drop_output() -> None:
    """Python flushes once more at exit; give it a place."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _cause(error: OSError | MemoryError) -> str:
    """What the system says, in one line."""
    text = " ".join(str(error).split()) or "out of memory"
    return text.rstrip(".")
