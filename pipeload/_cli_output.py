"""What the command line says beside its result, on stderr: log lines, progress, errors."""

from __future__ import annotations

import contextlib
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
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it says the same at every product
    transformers.logging.disable_progress_bar()
    if sys.stderr.isatty() and log.isEnabledFor(logging.INFO):
        enable_progress_bars()


@contextlib.contextmanager
def first_pass(model: Any) -> Iterator[FirstPass]:
    """Show how many blocks of the first pass are done; ends with it, or at the first token."""
    shown = FirstPass(0)
    with _counting_blocks(model, shown) as hooks:
        shown.on_stop = hooks
        yield shown


@contextlib.contextmanager
def all_passes(model: Any, name: str, tokens: int) -> Iterator[AllPasses]:
    """Show how many of `tokens` are done, counted by blocks, and how long the rest will take."""
    shown = AllPasses(name, tokens)
    with _counting_blocks(model, shown):
        yield shown


@contextlib.contextmanager
def _counting_blocks(model: Any, shown: FirstPass | AllPasses) -> Iterator[list[Any]]:
    from pipeload_hooks import find_blocks  # late: it loads torch

    blocks = find_blocks(model)
    shown.blocks = len(blocks)
    hooks = [block.module.register_forward_hook(shown.block_done) for block in blocks]
    try:
        yield hooks
    finally:
        shown.stop()
        while hooks:
            hooks.pop().remove()


class FirstPass:
    """The blocks of one pass."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.on_stop: list[Any] = []
        self._done = 0
        self._shown = _Progress("first pass", "layers", time_left=False)

    def block_done(self, *_: object) -> None:
        """Forward hook of every block."""
        self._done += 1
        self._shown.update(self._done, self.blocks)

    def stop(self) -> None:
        """Wipe the bar away and take the hooks off. May be called again."""
        while self.on_stop:
            self.on_stop.pop().remove()
        self._shown.stop()


class AllPasses:
    """The tokens of many passes; inside one, each block is worth an equal part of its tokens."""

    def __init__(self, name: str, tokens: int) -> None:
        self.blocks = 0
        self._tokens = tokens
        self._before = self._coming = self._blocks_done = 0
        self._shown = _Progress(name, "tokens", time_left=True)

    def pass_begins(self, done: int, coming: int) -> None:
        """Tokens that are done, and those of the pass that comes now."""
        self._before, self._coming, self._blocks_done = done, coming, 0

    def block_done(self, *_: object) -> None:
        """Forward hook of every block."""
        self._blocks_done += 1
        share = min(1.0, self._blocks_done / self.blocks)
        self._shown.update(self._before + int(self._coming * share), self._tokens)

    def stop(self) -> None:
        """Wipe the bar away. May be called again."""
        self._shown.stop()


class _Progress:
    """A bar on a terminal, now and then a line elsewhere, nothing when quiet."""

    def __init__(self, name: str, unit: str, *, time_left: bool) -> None:
        self._name, self._unit, self._time_left = name, unit, time_left
        self._began = time.monotonic()
        self._line_at = self._began + _SECONDS_BETWEEN_LINES
        wanted = log.isEnabledFor(logging.INFO) and sys.stderr.isatty()
        self._bar = _make_bar(unit, time_left=time_left) if wanted else None
        if self._bar is not None:
            self._task = self._bar.add_task(name, total=None)
            self._bar.start()

    def update(self, done: int, total: int) -> None:
        """So many of so many."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif now >= self._line_at:
            self._line_at = now + _SECONDS_BETWEEN_LINES
            seconds = (now - self._began) / max(1, done) * (total - done)
            left = f", about {_duration(seconds)} left" if self._time_left else ""
            log.info("%s: %d of %d %s%s", self._name, done, total, self._unit, left)

    def stop(self) -> None:
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
