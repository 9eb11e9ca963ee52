"""Processes of their own: what a program prints there, and how an action ends in a fork."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.warm import warm_python

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
WAIT_SECONDS = 30
"""After so long the system ends a fork that hangs."""


def printed_by(code: str, *arguments: object, **environment: str) -> str:
    """All that it prints, which must end well; our packages and the tests can be imported."""
    return _printed([sys.executable], code, arguments, environment)


def printed_warmly(code: str, *arguments: object) -> str:
    """The same, where what it shows is not of importing."""
    return _printed(warm_python(), code, arguments, {})


def _printed(
    python: list[str], code: str, arguments: tuple[object, ...], environment: dict[str, str]
) -> str:
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'hooks'}", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [*python, "-W", "ignore", "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | paths | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def in_fork(action: Callable[[], object]) -> str:
    """What `action` raised in a forked child; the empty string when it returned."""
    message, signalled = _forked(action)
    assert not signalled, message
    return message


def killed_in_fork(action: Callable[[], object]) -> None:
    """Have `action` run in a forked child, until it kills itself."""
    message, signalled = _forked(action)
    assert signalled == signal.SIGKILL, message or "it ended by itself"


def _forked(action: Callable[[], object]) -> tuple[str, int]:
    """What it raised, and the signal that ended it."""
    import torch

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(WAIT_SECONDS)  # a child that hangs is ended by the system
        message = ""
        try:
            torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
            action()
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        os.write(writing, message.encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        message = answer.read().decode()
    return message, os.waitpid(child, 0)[1]
