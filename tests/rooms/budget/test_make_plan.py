"""Which of several ways to cut a model is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from pipeload.budget.make_plan import _cheapest
from pipeload.budget.residency import Choice


@dataclass
class Cut:
    """One that takes so long, and reads so much."""

    seconds: float
    read_bytes: int
    packs: bool
    fixed: int = 0

    @property
    def residency(self) -> Any:
        return self

    def choose(self, budget: int) -> Choice | None:
        return Choice((), 1, self.seconds, self.read_bytes) if budget > 0 else None


@pytest.mark.parametrize(
    ("packs", "wanted"),
    [(True, 2), (False, 0)],
)
def test_what_hardly_takes_longer(packs: bool, wanted: int) -> None:
    """Where blocks are unpacked, reading less counts among those; else time alone."""
    cuts: Any = [
        Cut(1.0, 900, packs),
        Cut(1.01, 800, packs),
        Cut(1.015, 700, packs),
        Cut(1.5, 100, packs),
    ]
    found = _cheapest(cuts, 1)
    assert found is not None
    assert found[0] is cuts[wanted]
    assert _cheapest(cuts, 0) is None
