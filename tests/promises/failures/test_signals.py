"""Ctrl-C and SIGTERM at a few random moments; `tests/tools/signals.py` strikes at a hundred."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from tests.support.sweeps import few
from tests.tools.signals import ROOT, environment


@pytest.mark.slow
@pytest.mark.parametrize("command", few(["generate", "run", "quantize"], ["run"]))
def test_struck_at_random(command: str) -> None:
    """Each time at others: what fails says after how many seconds."""
    seed = random.SystemRandom().randrange(1_000_000)
    moments = "5" if command == "generate" else "2"
    words = ["--moments", moments, "--command", command, "--seed", str(seed)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/tools/signals.py"), *words],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "faults=0" in done.stdout
