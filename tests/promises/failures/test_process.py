"""What befalls a process: forks, memory that is refused, threads that are killed, an early exit.

Each ends in one clear error at most, never in a hang; then this process, or the next, is right.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import itertools
import multiprocessing
import os
import pickle
import subprocess
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import pipeload
from pipeload import ReadError, UnsupportedOperationError
from pipeload.budget.shared_limit import ACCOUNTANT
from pipeload.checkpoint.file_reads import FileSet
from pipeload.checkpoint.hung_reads import Stalls
from pipeload.checkpoint.reader_threads import run_jobs
from pipeload.weights import arena
from tests.promises.limit.test_lifetime import descriptors, threads_of
from tests.support.children import in_fork
from tests.support.models import load_plain
from tests.support.streaming import (
    IDS,
    WAIT_SECONDS,
    ReadGate,
    Reference,
    assert_nothing_held,
    check,
    generated,
    in_thread,
    load_streamed,
    logits,
    our_threads,
    prefetcher_of,
    reference,
    session_of,
    smallest_limit,
    steady_floor,
    wait_for_threads,
)
from tests.support.sweeps import few
from tests.support.warm import warm_python

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import TinyCheckpoint

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def folder(tiny: TinyCheckpoint) -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Reference:
    return reference(folder)


# -- other processes -------------------------------------------------------------------------------


class Computed(Dataset[torch.Tensor]):
    """Items that a worker computes with the model it was forked with."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return logits(self.model, IDS + index)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_that_use_the_model(folder: Path, expected: Reference) -> None:
    """A data loader hands on what they are told, and the parent goes on."""
    model = load_streamed(folder)
    check(model, expected)
    loader = DataLoader(Computed(model), num_workers=2, multiprocessing_context="fork")
    with pytest.raises(UnsupportedOperationError, match=r"forked .*'spawn'"):
        list(loader)
    check(model, expected)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("spare", [0, 10_000_000])
def test_a_fork_while_another_thread_holds_the_locks(
    folder: Path, expected: Reference, spare: int
) -> None:
    """The child does not wait for a thread that it does not have."""
    model = load_streamed(folder, spare=spare)
    check(model, expected)
    torch.set_num_threads(1)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with ACCOUNTANT.lock, session_of(model).passes._gate._lock:
            held.set()
            assert done.wait(2 * WAIT_SECONDS)

    holder = in_thread(hold)
    assert held.wait(WAIT_SECONDS)
    try:
        message = in_fork(lambda: logits(model))
    finally:
        done.set()
    holder.result(WAIT_SECONDS)
    assert ("forked" in message) if spare == 0 else (message == "")
    check(model, expected)


def _use(model: Any) -> None:
    logits(model)


@pytest.mark.parametrize("spare", [0, pytest.param(10_000_000, id="everything in memory")])
def test_a_model_cannot_be_sent_to_another_process(
    folder: Path, expected: Reference, spare: int
) -> None:
    """Neither it nor a part of it: its weights are on disk, or may be after the next pass."""
    model = load_streamed(folder, spare=spare)
    check(model, expected)
    child = multiprocessing.get_context("spawn").Process(target=_use, args=(model,))
    with pytest.raises(UnsupportedOperationError, match="cannot be pickled"):
        child.start()
    parts = [model, model.model, model.model.layers, model.model.layers[2]]
    parts += [model.model.layers[2].mlp, model.model.layers[2].mlp.up_proj, model.lm_head]
    for part in parts:
        with pytest.raises(UnsupportedOperationError, match=r"pickled|on disk"):
            pickle.dumps(part)
    check(model, expected)
    model.pipeload.remove()
    assert torch.equal(logits(pickle.loads(pickle.dumps(model))), expected[0])


# -- the end of the process ------------------------------------------------------------------------

EXIT = """
import sys, threading
from pathlib import Path
from pipeload.prefetch import prefetcher
from pipeload.checkpoint.file_reads import FileSet
from tests.support.streaming import load_streamed, logits
prefetcher._END_SECONDS = 2.0
model = load_streamed(Path(sys.argv[1]))
logits(model)
entered, original = threading.Event(), FileSet.read_pages
def slow(*args):
    entered.set()
    threading.Event().wait(float(sys.argv[2]))
    return original(*args)
# When the head has run, the first block of the next pass is read in its place.
model.lm_head.register_forward_hook(lambda *_: setattr(FileSet, "read_pages", slow))
logits(model)
assert entered.wait(30)
if sys.argv[3] == "pass":
    threading.Thread(target=logits, args=(model,), daemon=True).start()
print("done", flush=True)
"""


@pytest.mark.parametrize(
    ("seconds", "where"), few([(0.2, "pass"), (1000, "ahead")], [(1000, "ahead")])
)
def test_the_interpreter_ends_while_reading(folder: Path, seconds: float, where: str) -> None:
    """Ahead or within a pass of another thread, and though a read never returns."""
    done = subprocess.run(
        [*warm_python(), "-c", EXIT, str(folder), str(seconds), where],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        capture_output=True,
        text=True,
        timeout=4 * WAIT_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    noise = [line for line in done.stderr.splitlines() if "Loading weights" not in line]
    # A thread of the user's own that was waiting is told why.
    assert noise == [] or (where == "pass" and "UnsupportedOperationError" in noise[-1])


def test_a_model_is_forgotten_while_it_reads_ahead(
    folder: Path, monkeypatch: pytest.MonkeyPatch, expected: Reference
) -> None:
    """The read under way ends; then threads, memory and descriptors are gone."""
    gc.collect()
    threads, files = our_threads(), descriptors()
    model = load_streamed(folder)
    check(model, expected)
    with monkeypatch.context() as patch:
        # When the head has run, the first block of the next pass is read in its place.
        gates: list[ReadGate] = []
        model.lm_head.register_forward_hook(lambda *_: gates.append(ReadGate(patch)))
        logits(model)
        (gate,) = gates
        assert gate.entered.wait(WAIT_SECONDS)
        handle, kept = model.pipeload, weakref.ref(prefetcher_of(model)._dispatcher)
        closer = prefetcher_of(model)._closer

        def open_later() -> None:
            while closer.alive:
                time.sleep(0.001)
            gate.opened.set()

        opening = in_thread(open_later)
        del model
        gc.collect()  # what `generate` left behind may have held it
        assert handle.stats().passes > 0  # and it keeps the threads until it goes, too
        assert closer.alive
        del handle
        opening.result(WAIT_SECONDS)
    gc.collect()
    for thread in our_threads() - threads:
        thread.join(WAIT_SECONDS)
    gc.collect()
    assert kept() is None
    wait_for_threads(threads)
    assert descriptors() <= files  # those of an earlier test's models may have gone meanwhile


# -- memory that is refused ------------------------------------------------------------------------

STARVED = """
import resource, sys
from pathlib import Path
import torch
import pipeload
from tests.support.models import load_plain
from tests.support.streaming import assert_nothing_held, load_streamed, logits, our_threads
folder, where = Path(sys.argv[1]), sys.argv[2]
expected = logits(load_plain(folder))
model = None if where == "load" else load_streamed(folder)
if model is not None:
    logits(model)
_, hard = resource.getrlimit(resource.RLIMIT_AS)
def starve(*_):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + 300_000, hard))
def eat(*_):
    starve()
    torch.empty(50_000_000)
def act():
    if where == "load":
        starve()
        load_streamed(folder)
    else:
        hook = model.model.layers[3].mlp.register_forward_pre_hook(eat)
        try:
            logits(model)
        finally:
            hook.remove()
try:
    act()
except (MemoryError, RuntimeError, pipeload.PipeloadError) as error:
    print(type(error).__name__, error)
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
if where == "load":
    for thread in our_threads():
        thread.join(30)
        assert not thread.is_alive(), thread
    model = load_streamed(folder)
for _ in range(2):
    assert torch.equal(logits(model), expected)
assert_nothing_held(model)
"""


@pytest.mark.parametrize("where", ["load", "pass"])
def test_no_address_space_left(folder: Path, where: str) -> None:
    """Loading, or in a pass: an error that speaks of memory; with memory, all is right."""
    pytest.importorskip("resource")
    done = subprocess.run(
        [*warm_python(), "-c", STARVED, str(folder), where],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        capture_output=True,
        text=True,
        timeout=4 * WAIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    words = ("memory", "address space", "thread")
    assert any(word in done.stdout.lower() for word in words), done.stdout


class NoMappings:
    """The system refuses the nth piece of anonymous memory from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        self._original = arena._anonymous
        monkeypatch.setattr(arena, "_anonymous", self)

    def __call__(self, size: int, **options: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return self._original(size, **options)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> NoMappings:
    return NoMappings(monkeypatch)


def test_mappings_that_are_refused_while_loading(
    folder: Path, refusing: NoMappings, expected: Reference
) -> None:
    """Whichever it is: one error, nothing left, and the next try works."""
    gc.collect()
    threads, files = our_threads(), descriptors()
    with steady_floor():
        limit = smallest_limit(folder) + 300_000
    for count in itertools.count(1):
        refusing.left = count
        try:
            with steady_floor():
                model = pipeload.from_pretrained(folder, memory_limit=limit, dtype="auto")
        except MemoryError as error:
            said = str(error)
        else:
            refusing.left = -1
            break
        assert "address space for weights" in said
        gc.collect()
        for thread in our_threads() - threads:
            thread.join(WAIT_SECONDS)  # told to end, but not waited for
            assert not thread.is_alive()
        assert descriptors() == files
    assert count > 2, count
    check(model, expected)


def test_a_mapping_that_is_refused_to_a_thread(
    folder: Path, refusing: NoMappings, expected: Reference
) -> None:
    """More is to be kept, and cannot: refused from then on with the reason; a new one works."""
    before = our_threads()
    model = load_streamed(folder, spare=700_000)
    limit = model.pipeload.plan.memory_limit
    model.pipeload.set_memory_limit(limit - 700_000)
    check(model, expected)
    refusing.left = 1
    refusal = "dispatches reads has ended: MemoryError.*address space.*Load the model again"
    with pytest.raises(UnsupportedOperationError, match=refusal):
        model.pipeload.set_memory_limit(limit)
    for _ in range(2):
        with pytest.raises(UnsupportedOperationError, match=refusal):
            logits(model)
    wait_for_threads(before)
    model.pipeload.remove()
    assert torch.equal(logits(model), expected[0])
    check(load_streamed(folder), expected)


# -- threads that are killed -----------------------------------------------------------------------


def throw_into(thread: threading.Thread, error: type[BaseException]) -> None:
    """Have `error` come up in a thread, as some tools do that stop all threads."""
    assert thread.ident is not None
    thrown = ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(error)
    )
    assert thrown == 1


def check_refused(model: Any, folder: Path, expected: Reference) -> None:
    """Passes are refused at once and threads are gone; the plain model and new ones are right."""
    for _ in range(2):
        with pytest.raises(UnsupportedOperationError, match="Load the model again"):
            logits(model)
    for thread in threads_of(model):
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
    model.pipeload.remove()
    assert torch.equal(logits(model), expected[0])
    check(load_streamed(folder), expected)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("which", ["dispatcher", "one reader", "all readers"])
def test_a_thread_is_killed(
    folder: Path,
    expected: Reference,
    error: type[BaseException],
    which: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between passes. The next one that needs it is told; nobody waits for ever."""
    model = load_streamed(folder)
    check(model, expected)
    original = FileSet.read_pages

    def slowly(files: FileSet, *args: Any) -> int:
        time.sleep(0.001)  # else one reader may do all, and the others never wake
        return original(files, *args)

    monkeypatch.setattr(FileSet, "read_pages", slowly)
    dispatcher, *readers = threads_of(model)
    for thread in {
        "dispatcher": [dispatcher],
        "one reader": readers[:1],
        "all readers": readers,
    }[which]:
        throw_into(thread, error)

    def passes() -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:  # the other reader may be quicker many times
            logits(model)

    with pytest.raises((UnsupportedOperationError, ReadError), match=error.__name__) as caught:
        passes()
    told: BaseException = caught.value
    if isinstance(told, ReadError):  # it struck within a read: that failed, and the model goes on,
        try:
            for _ in range(50):  # to where the others are struck, if they were not in the same one
                with contextlib.suppress(ReadError):
                    logits(model)
        except UnsupportedOperationError as error_of_another:
            told = error_of_another
    if isinstance(told, ReadError):
        check(model, expected)
    else:
        check_refused(model, folder, expected)


def test_a_reader_is_killed_while_it_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch, expected: Reference
) -> None:
    """Within the read it is one that failed: the model goes on."""
    model = load_streamed(folder)
    check(model, expected)
    original, left, said = FileSet.read_pages, 0, ""

    def read_pages(files: FileSet, *args: Any) -> int:
        nonlocal left
        left -= 1
        if left == 0:
            raise SystemExit("killed")
        return original(files, *args)

    for left in (1, 3, 8):
        with monkeypatch.context() as patch:
            patch.setattr(FileSet, "read_pages", read_pages)
            try:
                for _ in range(3):  # a failed read ahead is no error
                    logits(model)
            except ReadError as error:
                said = str(error)
            assert left <= 0
        assert said == "" or "SystemExit: killed" in said
        check(model, expected)


@pytest.mark.parametrize("within", [True, False])
def test_a_reader_is_killed_while_loading(within: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a read or between two: whoever waits for the reads is told, and does not exit."""
    clock, dead = time.perf_counter, set[str]()

    def read(_scratch: object) -> int:
        if within:
            raise SystemExit
        return 0

    def die() -> float:
        thread = threading.current_thread().name
        if thread.startswith("pipeload-reader") and thread not in dead:
            dead.add(thread)
            raise SystemExit
        return clock()

    if not within:
        monkeypatch.setattr("pipeload.checkpoint.reader_threads.time.perf_counter", die)
    waiting = in_thread(run_jobs, [read] * 4, [None, None], Stalls(None))
    with pytest.raises(UnsupportedOperationError, match=r"SystemExit.*Load the model again"):
        waiting.result(WAIT_SECONDS)


# -- many at once ----------------------------------------------------------------------------------


@pytest.fixture
def pair(folder: Path, tiny: TinyCheckpoint) -> Iterator[tuple[list[Any], list[Any]]]:
    """Two streamed models that share one limit, and their plain ones."""
    folders = [folder, tiny("qwen3")]
    with steady_floor():
        limit = sum(smallest_limit(each) for each in folders) - smallest_limit(folder) + 1_500_000
        models = [
            pipeload.from_pretrained(each, memory_limit=limit, dtype="auto") for each in folders
        ]
    yield models, [load_plain(each) for each in folders]
    ACCOUNTANT.forget_all()


def test_two_models_and_four_threads(pair: tuple[list[Any], list[Any]]) -> None:
    """Each thread gets what plain ones give it, whoever else runs."""
    models, plains = pair
    starts = [IDS + 11 * number for number in range(4)]
    wanted = [[generated(plain, start) for start in starts] for plain in plains]

    def work(number: int) -> list[list[int]]:
        return [generated(models[(number + turn) % 2], starts[number]) for turn in range(4)]

    futures = [in_thread(work, number) for number in range(4)]
    for number, future in enumerate(futures):
        got = future.result(WAIT_SECONDS)
        assert got == [wanted[(number + turn) % 2][number] for turn in range(4)]
    for model in models:
        assert_nothing_held(model)


def test_vector_functions_are_called_in_one_thread_first(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any pass: the first large call with two threads is not always right."""
    sizes: list[int] = []
    cos = torch.cos

    def counted(value: torch.Tensor) -> torch.Tensor:
        sizes.append(value.numel())
        return cos(value)

    monkeypatch.setattr(torch, "cos", counted)
    load_streamed(tiny("llama"), spare=0)
    assert set(sizes) == {1}
