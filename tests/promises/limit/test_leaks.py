"""What a process holds does not grow with its work; `tests/tools/leaks.py` is the long form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.tools.leaks import KINDS, run

if TYPE_CHECKING:
    from tests.conftest import TinyCheckpoint


@pytest.mark.parametrize(("kind", "turns"), [("wraps", 15), ("passes", 250), ("aborts", 60)])
def test_flat(kind: str, turns: int, tiny: TinyCheckpoint) -> None:
    """Threads, descriptors, mappings and memory."""
    assert kind in KINDS
    before, after, faults = run(kind, tiny("llama"), turns)
    assert faults == [], (before, after)
