"""Reads a stored tensor for somebody who waits for it, whole or piece by piece.

Units of a pass have readers of their own; whoever else wants a tensor of a file has it from here.
A thread of its own reads, so that a disk that hangs can be given up: see [Note: a read that hangs].
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from pipeload.checkpoint.reader_threads import run_jobs
from pipeload.errors import ReadError
from pipeload.system.pages import PAGE
from pipeload.weights.arena import DTYPES, Arena
from pipeload.weights.placement import read_into

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeload.checkpoint.file_reads import FileSet
    from pipeload.checkpoint.headers import TensorEntry
    from pipeload.weights.arena import Region, Work

PIECE_BYTES = 16 << 20
"""The most that is copied at once."""


def run_named(name: str, job: Work, scratch: Region | None, files: FileSet) -> None:
    """Run a read of a tensor of that name in a thread that can be left behind.

    Raises:
        ReadError: the disk failed or does not answer, or the file was cut short. Names the tensor.
    """
    try:
        run_jobs([job], [scratch], files.stalls)
    except ReadError as error:
        raise ReadError(f"tensor {name!r}: {error}") from error


def read_pieces(
    entry: TensorEntry, files: FileSet, nbytes: int = PIECE_BYTES
) -> Iterator[memoryview]:
    """Read a tensor's bytes, at most `nbytes` at a time, in memory that the next piece overwrites.

    Raises:
        ReadError: the disk failed or does not answer, or the file was cut short. Names tensor, file
            and place.
    """
    arena = Arena(min(nbytes, entry.nbytes) + 2 * PAGE, device=torch.device("cpu"), huge=False)
    region = arena.take(arena.nbytes)
    for start in range(0, entry.nbytes, max(1, nbytes)):
        stop = min(start + nbytes, entry.nbytes)
        run_named(entry.name, partial(_read, files, entry, start, stop), region, files)
        yield region.buffer((entry.start + start) % PAGE, stop - start)


def read_whole(entry: TensorEntry, files: FileSet) -> torch.Tensor:
    """Read a stored tensor into memory of its own. Raises what `read_pieces` does."""
    data = torch.empty(entry.nbytes, dtype=torch.uint8)
    for into, piece in zip(data.split(PIECE_BYTES), read_pieces(entry, files), strict=False):
        into.copy_(torch.frombuffer(piece, dtype=torch.uint8))
    return data.view(DTYPES[entry.dtype]).view(entry.shape)


def _read(files: FileSet, entry: TensorEntry, start: int, stop: int, scratch: Region) -> int:
    count, _ = read_into(scratch, files, entry, start, stop)
    return count
