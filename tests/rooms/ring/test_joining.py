"""What ranks tell each other of themselves: how fast a disk is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pipeload.ring import joining

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("first", "pieces"), [(1e6, 16), (1e8, 38), (1e12, 192)])
def test_a_disk_is_measured_without_a_break(
    first: float, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes first tells how much is read for most of a second, and counts no more."""
    asked: list[tuple[int, ...]] = []
    rates = iter([first, 5e7])

    def probe(_files: list[Path], *sizes: int) -> float:
        asked.append(sizes)
        return next(rates)

    monkeypatch.setattr(joining, "probe", probe)
    files: list[Any] = []
    assert joining.disk_rate(files) == 5e7
    assert asked == [(16, 2 << 20, 4), (pieces, 2 << 20, 4)]
