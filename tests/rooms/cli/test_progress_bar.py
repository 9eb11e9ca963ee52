"""Bars on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import itertools
import logging
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from pipeload.cli import progress_bar
from pipeload.cli.progress_bar import BytesBar, ProgressBar, _duration
from tests.support.models import load_plain
from tests.support.streaming import logits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import TinyCheckpoint


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _a_second_a_call(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Each look at the clock is one second after the last; a line is due every two."""
    seconds: Iterator[int] = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)))
    monkeypatch.setattr(progress_bar, "time", clock)
    monkeypatch.setattr(progress_bar, "_SECONDS_BETWEEN_LINES", 2.0)
    caplog.set_level(logging.INFO, logger="pipeload")


def test_lines_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    """No more of them than are due, with what is done."""
    bar = ProgressBar("first pass", "layers")
    for done in range(1, 6):
        bar.show(done, 6)
    bar.close()
    bar.close()
    assert caplog.messages == ["first pass: 2 of 6 layers", "first pass: 4 of 6 layers"]


def test_a_first_pass(caplog: pytest.LogCaptureFixture, tiny: TinyCheckpoint) -> None:
    """Says how many blocks are done, and how long the rest takes."""
    model = load_plain(tiny("llama"))
    with progress_bar.first_pass(model):
        logits(model)
    assert caplog.messages == [
        "first pass: 2 of 6 layers, about 4 s left",
        "first pass: 4 of 6 layers, about 2 s left",
        "first pass: 6 of 6 layers, about 0 s left",
    ]


def test_how_long_the_rest_takes(caplog: pytest.LogCaptureFixture) -> None:
    """As long for each as so far."""
    bar = ProgressBar("text", "tokens", time_left=True)
    bar.show(10, 100)
    bar.show(20, 100)
    assert caplog.messages == ["text: 20 of 100 tokens, about 8 s left"]


def test_what_was_there_took_no_time(caplog: pytest.LogCaptureFixture) -> None:
    """Three seconds for 10 bytes, beside 500 that an earlier run has left."""
    bar = BytesBar("quantising")
    for done in (500, 500, 510, 510):
        bar.show(done, 1000)
    assert caplog.messages == [
        "quantising: 50%, 500 B of 1.00 kB",
        "quantising: 51%, 510 B of 1.00 kB, about 2 min left",
    ]


def test_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the name and what is done; lines would be said twice."""
    monkeypatch.undo()  # its own clock
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    caplog.set_level(logging.INFO, logger="pipeload")
    for made in (ProgressBar("first pass", "layers"), BytesBar("quantising")):
        made.show(3, 7)
        made.close()
    for text in ("first pass", "3/7", "layers", "quantising", "3/7 bytes"):
        assert text in shown.getvalue()
    assert caplog.messages == []


def test_nothing_when_quiet(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a bar nor a line."""
    caplog.set_level(logging.ERROR, logger="pipeload")
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    bar = ProgressBar("first pass", "layers")
    for done in range(6):
        bar.show(done, 6)
    bar.close()
    assert (shown.getvalue(), caplog.messages) == ("", [])


@pytest.mark.parametrize(
    ("seconds", "text"), [(35.4, "35 s"), (720, "12 min"), (9000, "2.5 h"), (99, "99 s")]
)
def test_durations(seconds: float, text: str) -> None:
    """In the largest unit that says enough."""
    assert _duration(seconds) == text
