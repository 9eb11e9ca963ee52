"""The seconds in which a command loads libraries: a line on a terminal, and Ctrl-C."""

from __future__ import annotations

import builtins
import io
import signal
import sys
from typing import TYPE_CHECKING

import pytest
import torch
import typer

import pipeload
from pipeload import __main__ as entry
from pipeload.cli.exit_status import interrupt_taken, load, reported
from pipeload.errors import CheckpointError
from tests.support.commands import invoke

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any


@pytest.fixture(autouse=True)
def _interrupts_arrive() -> Iterator[None]:
    """Also where the tests themselves were started with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("quiet", [False, True])
def test_a_line_on_a_terminal(quiet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is wiped away when what follows can be shown."""
    shown = Terminal()
    seen: list[str] = []
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(
        pipeload, "__getattr__", lambda _name: seen.append(shown.getvalue()), raising=False
    )
    with reported(debug=False, quiet=quiet):
        load("no_such_name")
    line = "" if quiet else "loading libraries ..."
    assert seen == [line]
    assert shown.getvalue() == (f"{line}\r{' ' * len(line)}\r" if line else "")


def test_no_line_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    """Into a file or a pipe nothing is written."""
    with reported(debug=False, quiet=False):
        load("plan")
    assert capsys.readouterr() == ("", "")


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_that_becomes_another_error() -> None:
    """A module that was left half imported fails in its own way."""
    before = signal.getsignal(signal.SIGINT)

    def fail() -> None:
        try:
            interrupt()
        except KeyboardInterrupt:
            raise ModuleNotFoundError("Could not import module 'PreTrainedModel'") from None

    with pytest.raises(typer.Exit) as ended, reported(debug=False, quiet=False):
        fail()
    assert ended.value.exit_code == 130
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_that_is_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """While libraries load, it ends the command all the same."""

    def swallow(_name: str) -> None:
        with pytest.raises(KeyboardInterrupt):
            interrupt()

    monkeypatch.setattr(pipeload, "__getattr__", swallow)
    with pytest.raises(typer.Exit) as ended, reported(debug=False, quiet=False):
        load("no_such_name")
    assert ended.value.exit_code == 130


def test_an_error_after_an_interrupt_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ended an answer, and later something else goes wrong: that is told."""

    def stopped_then_full() -> None:
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        interrupt_taken()
        raise OSError(28, "No space left on device")

    with pytest.raises(typer.Exit) as ended, reported(debug=False, quiet=False):
        stopped_then_full()
    assert ended.value.exit_code == 1
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (torch.OutOfMemoryError("none left. Tried much"), "limit is full: none left. Raise --mem"),
        (torch.AcceleratorError("assert\nmore"), "computes no more in this process: assert. Run"),
    ],
)
def test_what_a_device_says(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with what to do."""
    with pytest.raises(typer.Exit) as ended, reported(debug=False, quiet=False):
        raise error
    assert ended.value.exit_code == 1
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("error: the device")
    assert line in told


def test_an_error_without_an_interrupt() -> None:
    """It stays what it is, also after an interrupt of an earlier command."""
    with pytest.raises(typer.Exit), reported(debug=False, quiet=False):
        interrupt()
    with pytest.raises(ModuleNotFoundError), reported(debug=False, quiet=False):
        raise ModuleNotFoundError("its own")


def test_an_interrupt_while_the_command_line_itself_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is there yet."""

    def stop(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "pipeload.cli" and args[2:3] and args[2] == ("commands",):
            raise KeyboardInterrupt
        return real(name, *args, **kwargs)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", stop)
    with pytest.raises(SystemExit) as ended:
        entry.command()
    assert ended.value.code == 130


@pytest.mark.parametrize("command", ["run", "plan"])
def test_no_folder_with_a_slash(command: str) -> None:
    """No hub id ends with one: the hub is not asked."""
    words = [command, "nosuch/", *(["hello"] if command == "run" else [])]
    result = invoke(*words)
    assert result.exit_code == 1
    assert result.stderr == "error: there is no folder 'nosuch/'. Check the path.\n"


@pytest.mark.parametrize("command", ["run", "plan", "eval", "quantize", "batch", "chat", "bench"])
def test_no_folder_is_told_before_libraries_load(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take seconds, on a small board many."""

    def loads(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(pipeload, "__getattr__", loads)
    more = {"run": ("hello",), "eval": ("--text", "t"), "quantize": ("new",), "batch": ("a", "b")}
    result = invoke(command, tmp_path / "none", *more.get(command, ()))
    assert result.exit_code == 1
    assert result.stderr == f"error: there is no folder '{tmp_path / 'none'}'. Check the path.\n"


def test_no_folder_with_a_slash_in_a_program() -> None:
    """The same of the functions."""
    with pytest.raises(CheckpointError, match="'nosuch' is not a folder"):
        pipeload.plan("nosuch/", memory_limit="4GB")
