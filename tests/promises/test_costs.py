"""No count of what a pass costs has moved without being accepted: see `tests/tools/guard.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.tools import guard
from tests.tools.guard import Measured, changes, moved, read_baseline, update

if TYPE_CHECKING:
    import pytest


def test_counts_are_those_of_the_baseline() -> None:
    """In a process of its own: what other tests have left in this one is counted, too."""
    root = Path(__file__).resolve().parents[2]
    for _ in range(2):  # a busy machine orders messages otherwise now and then, not twice
        done = subprocess.run(
            [sys.executable, root / "tests/tools/guard.py"],
            env=os.environ | {"PYTHONPATH": f"{root}:{root / 'hooks'}"},
            capture_output=True,
            text=True,
            check=False,
        )
        print(done.stdout)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_moved_count_is_named() -> None:
    """With what it was and what it is, also when it is new or gone."""
    was = {"reads": 9, "hooks": 2, "blocks of memory made": 20}
    now = {"reads": 10, "messages": 1, "blocks of memory made": 22}
    assert moved(was, was) == []
    assert moved(was, now) == ["reads: 9 -> 10", "messages: none -> 1", "hooks: 2 -> none"]


def test_update_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was counted is the baseline then; counts of other interpreters stay."""
    baseline = tmp_path / "baseline.json"
    baseline.write_text(json.dumps({"counts": {"reads": 1}, "python": {"2.7": {"calls": 5}}}))
    monkeypatch.setattr(guard, "BASELINE", baseline)
    found = Measured({"reads": 2}, {"calls": 7}, {})
    assert changes(found, read_baseline()) == ["reads: 1 -> 2"]
    update(found)
    assert changes(found, read_baseline()) == []
    assert read_baseline()["python"]["2.7"] == {"calls": 5}
    dearer = Measured({"reads": 2}, {"calls": 8}, {})
    assert changes(dearer, read_baseline()) == ["calls: 7 -> 8"]
