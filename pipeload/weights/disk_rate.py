"""How fast the disk reads a checkpoint past the page cache: from a few pieces spread over it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipeload.checkpoint.file_reads import FileSet
from pipeload.checkpoint.io_mode import resolve_io_mode
from pipeload.checkpoint.reader_threads import run_jobs
from pipeload.system.pages import PAGE
from pipeload.weights.arena import Arena, Region, Work

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PROBE_PIECES = 16
PROBE_PIECE_BYTES = 8 << 20
"""Enough for a rate, little enough to be quick."""
PROBE_READERS = 8


def probe(
    files: Sequence[Path],
    pieces: int = PROBE_PIECES,
    piece_bytes: int = PROBE_PIECE_BYTES,
    readers: int = PROBE_READERS,
) -> float:
    """Bytes per second past the page cache, from a few pieces spread over `files`.

    Takes `readers * piece_bytes` of memory while it reads.

    Raises:
        ReadError: the disk failed.
    """
    opened = FileSet(files, resolve_io_mode("auto", files, fits_cache=False))
    arena = Arena(readers * piece_bytes, device=torch.device("cpu"), huge=True)
    scratch = [arena.take(piece_bytes) for _ in range(readers)]
    # Memory that was never written costs time at first touch, which is not the disk's.
    arena.tensor(0, "U8", (arena.nbytes,), arena.nbytes).zero_()

    def job(path: Path, first: int, stop: int) -> Work:
        def read(region: Region | None) -> int:
            assert region is not None  # noqa: S101 - every reader above has one
            return opened.read_pages(path, first, stop, region.buffer(0, stop - first))

        return read

    try:
        spread = _spread(files, pieces, piece_bytes)
        return run_jobs([job(*piece) for piece in spread], scratch, opened.stalls).rate
    finally:
        opened.close()


def _spread(files: Sequence[Path], count: int, piece_bytes: int) -> list[tuple[Path, int, int]]:
    """Pieces at even distances over all bytes of all files; each lies within one file."""
    pieces = [
        (path, first, min(first + piece_bytes, -(-path.stat().st_size // PAGE) * PAGE))
        for path in files
        for first in range(0, path.stat().st_size, piece_bytes)
    ]
    step = max(1.0, len(pieces) / count)
    return [pieces[int(index * step)] for index in range(min(len(pieces), count))]
