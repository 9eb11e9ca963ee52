"""How fast a disk is said to be, from a few pieces of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeload.weights.disk_rate import _spread, probe

if TYPE_CHECKING:
    from pathlib import Path


def test_probe_pieces_are_spread_and_bounded(tmp_path: Path) -> None:
    """However large the files, the probe reads 128 MB at most, from all over them."""
    files = []
    for name in ("a", "b"):
        files.append(tmp_path / name)
        with files[-1].open("wb") as file:
            file.truncate(10**9 + 5)
    pieces = _spread(files, 16, 8 << 20)
    assert sum(stop - first for _, first, stop in pieces) <= 128 << 20
    assert {path for path, _, _ in pieces} == set(files)
    assert len(set(pieces)) == len(pieces)
    assert all(first % 4096 == 0 == stop % 4096 for _, first, stop in pieces)


def test_a_rate(tmp_path: Path) -> None:
    """Bytes per second, of a file smaller than one piece as well."""
    file = tmp_path / "a"
    file.write_bytes(bytes(100_000))
    assert probe([file], pieces=2, piece_bytes=1 << 20, readers=2) > 0
