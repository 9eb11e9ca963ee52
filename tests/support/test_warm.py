"""A process that is warm runs words as `python` does, and ends as it does."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.streaming import WAIT_SECONDS
from tests.support.warm import warm_python

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow
CODE = """
import os, sys
if __name__ == "__main__":
    print(sys.argv, sys.path[0], os.getcwd(), os.environ["SAID"], sys.stdin.read())
    print("to stderr", file=sys.stderr)
"""


def ends(words: list[str], folder: Path) -> list[tuple[int, str, list[str]]]:
    """Status, output and last line of what went to stderr: of `python`, and of the warm one."""
    done = [
        subprocess.run(
            [*python, *words],
            cwd=folder,
            env=os.environ | {"SAID": "something"},
            input="given",
            capture_output=True,
            text=True,
            check=False,
        )
        for python in ([sys.executable], warm_python())
    ]
    return [(one.returncode, one.stdout, one.stderr.splitlines()[-1:]) for one in done]


@pytest.mark.parametrize(
    "words",
    [
        ["-c", CODE, "a", "-b"],
        ["-W", "ignore", "-c", f"import warnings; warnings.warn('no'){CODE}"],
        ["script.py", "a"],
        ["-m", "script", "a"],
        ["-c", "raise SystemExit(3)"],
        ["-c", "raise LookupError('mine')"],
        ["-c", "import os; os.kill(os.getpid(), 9)"],
        ["-c", "import atexit; atexit.register(print, 'end')"],
    ],
    ids=["code", "without warnings", "script", "module", "status", "error", "killed", "at exit"],
)
def test_as_python(words: list[str], tmp_path: Path) -> None:
    """Arguments, folder, environment, streams, and how it ends."""
    (tmp_path / "script.py").write_text(CODE)
    cold, warm = ends(words, tmp_path)
    assert warm == cold


_WAITS = """
import os, time
print(os.getpid(), flush=True)
while True:
    time.sleep(1)
"""


def waiting() -> tuple[subprocess.Popen[str], int]:
    asker: Any = subprocess.Popen(
        [*warm_python(), "-c", _WAITS],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return asker, int(asker.stdout.readline())


def test_the_libraries_are_there() -> None:
    """Imported before: that is what it is for."""
    code = (
        "import sys; print({'torch', 'transformers', 'pipeload.entry.loading'} <= {*sys.modules})"
    )
    done = subprocess.run([*warm_python(), "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_signals_are_handed_on() -> None:
    """An interrupt ends it, and who asked ends by the same."""
    asker, _ = waiting()
    with asker:
        asker.send_signal(signal.SIGINT)
        assert asker.wait(WAIT_SECONDS) == -signal.SIGINT


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux only")
def test_who_asked_is_killed() -> None:
    """What ran for it is killed, too."""
    asker, pid = waiting()
    with asker:
        running = os.pidfd_open(pid)
        asker.kill()
    try:  # it can be read from once the process has ended
        assert select.select([running], [], [], WAIT_SECONDS)[0]
    finally:
        os.close(running)
