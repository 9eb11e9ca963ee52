"""Tables read by rows: what is looked up is what the file holds, and little of it is in memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from pipeload.checkpoint.file_reads import FileSet
from pipeload.checkpoint.headers import TensorEntry
from pipeload.checkpoint.io_mode import resolve_io_mode
from pipeload.errors import OptionError, ReadError
from pipeload.system.pages import PAGE
from pipeload.weights.arena import DTYPES
from pipeload.weights.layout import Weight
from pipeload.weights.row_table import RowTable
from tests.support.examples import examples

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[3]
MODES = ("direct", "buffered")


class Stored:
    """A file with random bytes and a matrix somewhere in it."""

    def __init__(
        self, path: Path, rows: int, columns: int, *, dtype: str = "F32", start: int = 1237
    ) -> None:
        item = DTYPES[dtype].itemsize
        self.path = path
        self.row_bytes = columns * item
        stop = start + rows * self.row_bytes
        data = bytearray(os.urandom(stop + 77))
        path.write_bytes(data)
        entry = TensorEntry("table", path, dtype, (rows, columns), start, stop)
        self.weight = Weight("table", dtype, (rows, columns), stop - start, (entry,))
        whole = torch.frombuffer(data, dtype=torch.uint8)[start:stop].clone()
        self.values = whole.view(DTYPES[dtype]).view(rows, columns)

    def pages(self, ids: list[int]) -> int:
        """How many pages of the file hold any of these rows."""
        start = self.weight.sources[0].start
        return len(
            {
                page
                for row in ids
                for page in range(
                    (start + row * self.row_bytes) // PAGE,
                    (start + (row + 1) * self.row_bytes - 1) // PAGE + 1,
                )
            }
        )


class Disk(FileSet):
    """Does `before` at the start of every read."""

    before: Callable[[int], None] = staticmethod(lambda _first: None)

    def read_pages(self, path: Path, first: int, stop: int, into: memoryview) -> int:
        self.before(first)
        return super().read_pages(path, first, stop, into)


def bits(values: torch.Tensor) -> torch.Tensor:
    """Random bytes hold NaN, too, which equals nothing."""
    return values.contiguous().view(torch.uint8)


def open_file(path: Path, mode: str) -> Disk:
    try:
        resolve_io_mode(mode, [path], fits_cache=False)
    except OptionError as refusal:
        pytest.skip(str(refusal))
    return Disk([path], mode)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@st.composite
def lookups(draw: st.DrawFn) -> tuple[int, list[torch.Tensor]]:
    """A number of rows and ids of one to three calls, of any shape."""
    rows = draw(st.integers(1, 300))
    shapes = st.sampled_from([(), (0,), (1,), (7,), (2, 3), (1, 40), (90,)])
    calls = []
    for shape in draw(st.lists(shapes, min_size=1, max_size=3)):
        count = torch.Size(shape).numel()
        ids = draw(st.lists(st.integers(0, rows - 1), min_size=count, max_size=count))
        dtype = draw(st.sampled_from([torch.int64, torch.int32]))
        calls.append(torch.tensor(ids, dtype=dtype).view(shape))
    return rows, calls


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=examples(60), deadline=None)
@given(
    lookups=lookups(),
    columns=st.one_of(st.integers(1, 40), st.integers(900, 1100), st.sampled_from([2048, 5001])),
    dtype=st.sampled_from(["F32", "BF16", "F16"]),
    start=st.integers(0, 3 * PAGE),
    keep=st.sampled_from([0, 3 * PAGE, 1 << 30]),
)
def test_looked_up_rows_are_the_files(
    folder: Path,
    *,
    mode: str,
    lookups: tuple[int, list[torch.Tensor]],
    columns: int,
    dtype: str,
    start: int,
    keep: int,
) -> None:
    """Any shape, dtype, place in the file and ids: same bits, within what is announced."""
    rows, calls = lookups
    stored = Stored(folder / "table", rows, columns, dtype=dtype, start=start)
    files = open_file(stored.path, mode)
    table = RowTable(stored.weight, files, keep)
    assert table.view.data_ptr() % PAGE == start % PAGE
    for ids in calls:
        table.fetch(ids)
        table.trim()
        got = functional.embedding(ids, table.view)
        assert torch.equal(bits(got), bits(functional.embedding(ids, stored.values)))
        assert table.held_bytes <= table.most_bytes(len(set(ids.reshape(-1).tolist())))
        table.release()
        assert table.held_bytes <= keep
    files.close()


@pytest.fixture(params=MODES)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Stored, Disk]:
    """5000 rows of 6000 bytes: most lie in two pages of their own and share no other."""
    made = Stored(tmp_path / "table", 5000, 1500)
    return made, open_file(made.path, request.param)


def check(table: RowTable, values: torch.Tensor, ids: list[int]) -> int:
    """Fetch, compare; returns the bytes read."""
    nbytes = table.fetch(torch.tensor(ids))
    assert torch.equal(bits(table.view[ids]), bits(values[ids]))
    return nbytes


def test_only_missing_pages_are_read(stored: tuple[Stored, Disk]) -> None:
    """A row once read is not read again; a far one takes its own pages."""
    made, files = stored
    table = RowTable(made.weight, files, 1 << 30)
    assert table.held_bytes == 0
    assert check(table, made.values, [7]) == made.pages([7]) * PAGE == table.held_bytes
    assert check(table, made.values, [7, 7]) == 0
    assert check(table, made.values, [7, 4000]) == made.pages([4000]) * PAGE
    assert table.held_bytes == made.pages([7, 4000]) * PAGE
    table.drop()
    assert table.held_bytes == 0
    assert check(table, made.values, [7]) == made.pages([7]) * PAGE


def test_neighbours_are_read_in_one_call(stored: tuple[Stored, Disk]) -> None:
    """Rows side by side, or a page apart, take one call; distant ones take one each."""
    made, files = stored
    reads: list[int] = []
    files.before = reads.append
    table = RowTable(made.weight, files, 1 << 30)
    check(table, made.values, [10, 11, 12, 14])
    assert len(reads) == 1
    check(table, made.values, [100, 200, 300])
    assert len(reads) == 4


def test_many_rows_are_read_by_several_threads(stored: tuple[Stored, Disk]) -> None:
    """Each page once, never by the caller, who could not give up on a read; a few by one thread."""
    made, files = stored
    threads: set[int] = set()
    files.before = lambda _first: threads.add(threading.get_ident())
    table = RowTable(made.weight, files, 1 << 30)
    check(table, made.values, [1, 2, 3000])
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    threads.clear()
    both, invited = threading.Barrier(2), [1, 2]

    def meet(_first: int) -> None:
        threads.add(threading.get_ident())
        with suppress(IndexError):
            invited.pop()
            both.wait(60)

    files.before = meet
    ids = list(range(0, 5000, 50))
    nbytes = check(table, made.values, ids)
    assert not both.broken
    assert len(threads) > 1
    assert threading.get_ident() not in threads
    assert nbytes == (made.pages([1, 2, 3000, *ids]) - made.pages([1, 2, 3000])) * PAGE
    assert check(table, made.values, list(range(5000))) > 0  # the whole table, in long runs
    assert table.held_bytes == made.pages(list(range(5000))) * PAGE


def test_ids_that_name_no_row(stored: tuple[Stored, Disk]) -> None:
    """They are left to the library, which names them; the others are there."""
    made, files = stored
    table = RowTable(made.weight, files, 0)
    for wrong in (5000, -1, 2**40, -(2**40)):
        ids = torch.tensor([3, wrong])
        assert table.fetch(ids) == made.pages([3]) * PAGE
        with pytest.raises(IndexError):
            functional.embedding(ids, table.view)
        table.release()
    assert table.fetch(torch.tensor([1.5])) == 0
    assert table.fetch(torch.tensor([[]], dtype=torch.int64)) == 0


def test_unread_rows_are_nan(stored: tuple[Stored, Disk]) -> None:
    """Before they are fetched and after they were dropped: never zeros, never stale."""
    made, files = stored
    table = RowTable(made.weight, files, 0)
    assert table.view[2000].isnan().all()
    table.fetch(torch.tensor([2000]))
    assert table.view[2100].isnan().all()
    table.release()
    assert table.view[2000].isnan().all()


def test_trimming_spares_rows_in_use(stored: tuple[Stored, Disk]) -> None:
    """Under pressure for many rounds, memory stays within bounds and rows stay right."""
    made, files = stored
    keep = 20 * PAGE
    table = RowTable(made.weight, files, keep)
    for start in range(0, 4900, 70):
        ids = list(range(start, start + 30))
        check(table, made.values, ids)
        assert table.held_bytes <= table.most_bytes(30)
        table.trim()
        assert torch.equal(bits(table.view[ids]), bits(made.values[ids]))
        table.release()
        assert table.held_bytes <= keep
    # A fetch that nobody ended, as after an interrupt, does not add up with the next.
    check(table, made.values, list(range(500)))
    check(table, made.values, [4000])
    assert table.held_bytes <= table.most_bytes(1)


def test_few_rows_stay_between_calls(stored: tuple[Stored, Disk]) -> None:
    """What fits in `keep_bytes` is not read again."""
    made, files = stored
    table = RowTable(made.weight, files, 10 * PAGE)
    check(table, made.values, [1, 900])
    table.release()
    assert check(table, made.values, [1, 900]) == 0


@pytest.mark.parametrize("count", [20, 200], ids=["thread", "threads"])
def test_a_read_that_fails(stored: tuple[Stored, Disk], count: int) -> None:
    """It is told, nothing half-read counts as read, and later all is well again."""
    made, files = stored
    bad = [True]

    def fail(first: int) -> None:
        if bad and first > 20_000_000:
            raise ReadError("no such sector")

    files.before = fail
    table = RowTable(made.weight, files, 1 << 30)
    ids = list(range(0, 5000, 5000 // count))
    check(table, made.values, [5])
    with pytest.raises(ReadError, match="no such sector"):
        table.fetch(torch.tensor(ids))
    assert table.held_bytes == 0
    assert table.view[4999].isnan().all()
    assert check(table, made.values, [5]) == made.pages([5]) * PAGE
    bad.clear()
    check(table, made.values, ids)


def test_a_file_cut_short(tmp_path: Path) -> None:
    """The error names the file."""
    made = Stored(tmp_path / "table", 5000, 1500)
    files = open_file(made.path, "buffered")
    table = RowTable(made.weight, files, 0)
    os.truncate(made.path, 1_000_000)
    check(table, made.values, [3])
    with pytest.raises(ReadError, match="cut short"):
        table.fetch(torch.tensor([4999]))


@pytest.mark.parametrize("count", [20, 200], ids=["thread", "threads"])
def test_an_interrupt_in_a_read(
    request: pytest.FixtureRequest, stored: tuple[Stored, Disk], count: int
) -> None:
    """Ctrl-C comes through, and readers left behind do not make pages count as read."""
    made, files = stored
    main = threading.get_ident()
    once = [KeyboardInterrupt]

    def raise_once(*_: object) -> None:
        if once:
            raise once.pop()

    before = signal.signal(signal.SIGINT, raise_once)
    request.addfinalizer(partial(signal.signal, signal.SIGINT, before))
    dropped = threading.Event()
    waiting: list[threading.Thread] = []
    reads: list[int] = []

    def interrupt(first: int) -> None:
        if first > 20_000_000:
            signal.pthread_kill(main, signal.SIGINT)
            if threading.get_ident() != main:
                waiting.append(threading.current_thread())
                # Again and again: one that comes just before the caller waits does not wake it.
                while not dropped.wait(0.02):
                    signal.pthread_kill(main, signal.SIGINT)

    files.before = interrupt
    table = RowTable(made.weight, files, 1 << 30)
    ids = list(range(0, 5000, 5000 // count))
    with pytest.raises(KeyboardInterrupt):
        table.fetch(torch.tensor(ids))
    files.before = reads.append
    assert table.held_bytes == 0
    dropped.set()
    for thread in waiting:
        thread.join(60)
    assert reads == []  # they end the read they are at, and no more
    assert table.held_bytes == 0
    check(table, made.values, [0, 4999])
    assert table.held_bytes == made.pages([0, 4999]) * PAGE
    check(table, made.values, ids)
    assert waiting


def test_weights_that_cannot_be_read_by_rows(tmp_path: Path) -> None:
    """Vectors and weights that are converted are refused."""
    made = Stored(tmp_path / "table", 4, 4)
    files = open_file(made.path, "buffered")
    entry = made.weight.sources[0]
    for weight in (
        Weight("cast", "BF16", (4, 4), 32, (entry,)),
        Weight("vector", "F32", (16,), 64, (entry,)),
        Weight("made", "F32", (4, 4), 64, (entry,), "made"),
    ):
        with pytest.raises(ValueError, match=weight.name):
            RowTable(weight, files, 0)


CHILD = """
import os, random, sys
from pathlib import Path
import torch
from torch.nn import functional
from pipeload.checkpoint.headers import TensorEntry
from pipeload.weights.layout import Weight
from pipeload.checkpoint.file_reads import FileSet
from pipeload.weights.row_table import RowTable

path, mode = Path(sys.argv[1]), sys.argv[2]
ROWS, COLUMNS, START = 131_072, 4096, 1234

def rss(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024

def table(rows):
    size = rows * COLUMNS * 2
    entry = TensorEntry("t", path, "BF16", (rows, COLUMNS), START, START + size)
    weight = Weight("t", "BF16", (rows, COLUMNS), size, (entry,))
    return RowTable(weight, FileSet([path], mode), 1 << 20)

def use(rows, rounds):
    made, rng = table(rows), random.Random(rounds)
    for _ in range(rounds):
        marked = rng.randrange(1 + (rows - 1) // 1024) * 1024
        ids = torch.tensor([marked] + [rng.randrange(rows) for _ in range(39)])
        made.fetch(ids)
        got = functional.embedding(ids, made.view)
        assert got[0, 0] == marked // 1024 + 1 and not got.isnan().any()
        made.release()

with path.open("wb") as file:
    for row in range(0, ROWS, 1024):
        file.seek(START + row * COLUMNS * 2)
        file.write(torch.tensor([row // 1024 + 1.0]).bfloat16().view(torch.uint8).numpy().tobytes())
    file.truncate(START + ROWS * COLUMNS * 2)
use(1024, 20)  # whatever torch and Python allocate at first use
Path("/proc/self/clear_refs").write_text("5")
before = rss("VmRSS:")
use(ROWS, 200)
print(rss("VmHWM:") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("mode", MODES)
def test_a_large_table_costs_little(tmp_path: Path, mode: str) -> None:
    """Eight thousand rows of a table of 1 GiB, and the peak of memory grew by less than 4 MB."""
    path = tmp_path / "table"
    path.write_bytes(bytes(PAGE))
    open_file(path, mode).close()  # or skip
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), mode],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'hooks'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 4_000_000
