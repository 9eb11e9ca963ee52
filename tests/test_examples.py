"""Each example runs as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# What the output must hold.
EXPECTED = {"chat.py": ["Paris", "Rome"]}


def test_every_example_is_tested() -> None:
    """A new example needs a line above and one in the table that users read."""
    found = {path.name for path in EXAMPLES.glob("*.py")}
    assert found == set(EXPECTED)
    assert all(name in (EXAMPLES / "README.md").read_text() for name in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_example_runs(name: str, smollm2_bf16: Path) -> None:
    """On the demo's model, without a terminal."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, smollm2_bf16],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for words in EXPECTED[name]:
        assert words in done.stdout
