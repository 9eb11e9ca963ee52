"""Programs in a process of their own: what they print."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def printed_by(code: str, *arguments: object, **environment: str) -> str:
    """All that it prints, which must end well; our packages and the tests can be imported."""
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'hooks'}", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | paths | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
