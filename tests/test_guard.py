"""No count of what a pass costs has moved without being accepted: see `tests/guard.py`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests import guard
from tests.guard import Measured, changes, measure, moved, read_baseline, update

if TYPE_CHECKING:
    from pathlib import Path


def test_counts_are_those_of_the_baseline() -> None:
    found = measure()
    lines = changes(found, read_baseline())
    for name, seconds in found.seconds.items():
        print(f"{name}: {seconds * 1e3:.2f} ms a pass here")
    if lines:
        pytest.fail(
            "\n  ".join(["counts have moved:", *lines])
            + "\nIf that is meant, accept it with: python tests/guard.py --update"
        )


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
