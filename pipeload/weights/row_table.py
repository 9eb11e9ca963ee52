"""A table of which only the rows that are asked for are in memory, read from its file on demand."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from pipeload.checkpoint.reader_threads import run_jobs
from pipeload.system.pages import PAGE, ceil_page, floor_page
from pipeload.weights.arena import Arena
from pipeload.weights.nan_arena import NanArena
from pipeload.weights.placement import read_repacked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipeload.checkpoint.file_reads import FileSet
    from pipeload.weights.arena import Region
    from pipeload.weights.layout import Weight

# Reading 8 kB too many takes less time than another call.
_GAP_PAGES = (8 << 10) // PAGE
# Large enough for the disk's full rate with several at once, small enough to share the work out.
_RUN_PAGES = (256 << 10) // PAGE
# Starting threads takes as long as a few reads.
_FEW_RUNS = 32
_READERS = 8


class RowTable:
    """The full-size view of a stored matrix and the pages of it that are present.

    Rows that were not fetched read as NaN (as zeros or as they were last where the system cannot do
    that). Used by one thread at a time.
    """

    def __init__(self, weight: Weight, files: FileSet, keep_bytes: int) -> None:
        """Reserve address space for `weight`; nothing is read.

        `keep_bytes` may stay in memory while no row is in use. `files` must have the weight's file
        open.

        Raises:
            ValueError: the weight is not a matrix whose rows can be read one by one.
            MemoryError: the system refuses the address space.
        """
        if not weight.rows_alone or len(weight.shape) != 2:
            raise ValueError(f"{weight.name} is not a matrix that can be read by rows")
        (source,) = weight.sources
        self._weight = weight
        self._files = files
        self._keep_bytes = keep_bytes
        self._path = source.file
        self._first = floor_page(source.start)
        self._lead = source.start - self._first if weight.raw else 0
        self._rows = weight.shape[0]
        self._row_bytes = weight.nbytes // max(1, self._rows)
        # Every row keeps its place in the page: see [Note: why a weight keeps its place in the
        # page] in layout.py.
        self._arena = NanArena(self._lead + weight.nbytes)
        self.view = self._arena.tensor(self._lead, weight.dtype, weight.shape, weight.nbytes)
        """`[rows, columns]`. Shares the memory; only rows in use hold their values."""
        self._present: set[int] = set()
        self._in_use = False

    @property
    def held_bytes(self) -> int:
        """Memory of the pages that are present."""
        return len(self._present) * PAGE

    def most_bytes(self, rows: int) -> int:
        """The most that is held while `rows` rows are in use, wherever they lie."""
        pages = (self._row_bytes + PAGE - 2) // PAGE + 1 + _GAP_PAGES
        return min(self._arena.nbytes, self._keep_bytes + rows * pages * PAGE)

    def fetch(self, ids: torch.Tensor) -> int:
        """Have the rows `ids` (any shape) present until `release`; returns the bytes read.

        Rows of an earlier fetch are not in use any more. Ids that name no row, and tensors that
        cannot be ids, are left to the lookup itself, which refuses them.

        Raises:
            ReadError: the disk failed. Nothing is held then; a later fetch reads again.
        """
        self.release()
        self._in_use = True
        missing = self._pages(ids) - self._present
        if not missing:
            return 0
        runs = _runs(missing)
        try:
            nbytes = self._read(runs)
            # Only here, in the caller's thread and in one step: readers that an interrupt has left
            # behind may still fill pages after they were dropped.
            self._present.update(*runs)
        except BaseException:
            self.drop()
            raise
        return nbytes

    def release(self) -> None:
        """Note that no row is in use any more, and trim."""
        self._in_use = False
        self.trim()

    def trim(self) -> None:
        """Drop all pages if more than `keep_bytes` are present; none while rows are in use."""
        if not self._in_use and self.held_bytes > self._keep_bytes:
            self.drop()

    def drop(self) -> None:
        """Give all memory back. Rows in use are lost, too."""
        self._in_use = False
        self._present.clear()
        self._arena.drop()

    def _pages(self, ids: torch.Tensor) -> set[int]:
        """Numbers of the pages that hold the rows `ids`."""
        pages: set[int] = set()
        if ids.dtype not in (torch.int64, torch.int32) or not self._row_bytes:
            return pages
        size, lead = self._row_bytes, self._lead
        for row in set(ids.reshape(-1).tolist()):
            if 0 <= row < self._rows:
                start = lead + row * size
                pages.update(range(start // PAGE, ceil_page(start + size) // PAGE))
        return pages

    def _read(self, runs: list[range]) -> int:
        # Never in the caller's own thread, which could not tell that a read hangs.
        readers = 1 if len(runs) <= _FEW_RUNS else _READERS
        left = deque(runs)

        def read_some(_scratch: Region | None) -> int:
            return sum(map(self._read_run, _drain(left)))

        try:
            return run_jobs([read_some] * readers, [None] * readers, self._files.stalls).nbytes
        finally:
            left.clear()  # after an interrupt the readers must not go on

    def _read_run(self, run: range) -> int:
        if self._weight.repacked is not None:
            return self._make_run(self._weight, run)
        first, stop = run.start * PAGE, run.stop * PAGE
        into = self._arena.buffer(first, stop - first)
        return self._files.read_pages(self._path, self._first + first, self._first + stop, into)

    def _make_run(self, weight: Weight, run: range) -> int:
        """Unpack the rows of a run of pages, and keep of the first and last what lies in them."""
        first, stop = run.start * PAGE, min(run.stop * PAGE, weight.nbytes)
        rows = range(first // self._row_bytes, -(-stop // self._row_bytes))
        made = torch.empty((len(rows), weight.shape[1]), dtype=self.view.dtype)
        nbytes = len(rows) * (weight.read_bytes // self._rows) + 2 * PAGE
        stored = Arena(nbytes, device=torch.device("cpu"), huge=False)
        count = read_repacked(weight, rows, made, self._files, stored.take(nbytes))
        skipped = first - rows.start * self._row_bytes
        into = torch.frombuffer(self._arena.buffer(first, stop - first), dtype=torch.uint8)
        into.copy_(made.view(torch.uint8).view(-1)[skipped : skipped + stop - first])
        return count


def _drain(left: deque[range]) -> Iterable[range]:
    """Take what is left, one by one, beside other threads that do the same."""
    while True:
        try:
            run = left.popleft()
        except IndexError:
            return
        yield run


def _runs(pages: Iterable[int]) -> list[range]:
    """Page numbers as ranges in rising order; neighbours are joined, across small gaps, too."""
    runs: list[range] = []
    for page in sorted(pages):
        last = runs[-1] if runs else None
        if last is not None and page - last.stop <= _GAP_PAGES and page - last.start < _RUN_PAGES:
            runs[-1] = range(last.start, page + 1)
        else:
            runs.append(range(page, page + 1))
    return runs
