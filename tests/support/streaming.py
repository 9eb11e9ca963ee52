"""Small streamed models for the tests: how to load one, break it, and look inside."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

import pipeload
from pipeload.budget import cut, residency
from pipeload.budget.shared_limit import ACCOUNTANT
from pipeload.checkpoint.file_reads import FileSet
from pipeload.entry import loading
from pipeload.prefetch.unit import UnitState
from pipeload.system import pages
from pipeload.weights import row_cuts
from tests.support.measuring import steady
from tests.support.models import load_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pytest
    from torch import nn

    from pipeload.engine.session import Session
    from pipeload.prefetch.prefetcher import Prefetcher

WAIT_SECONDS = 30.0
"""Long enough for any machine: reached only by a test that fails."""
# More than any test process holds: plans then do not depend on what ran before.
FLOOR_BYTES = 8_000_000_000
IDS = torch.arange(3, 20)[None]


def _not_probed(_model: object) -> None:
    """Not a mock's: that would remember the model."""


@contextlib.contextmanager
def steady_floor(*, modules: bool = False) -> Iterator[None]:
    """Plans made inside all start from the same process size, and share it with no other model.

    They stream whole blocks, unless with `modules` these may be cut where they do not fit.
    """
    ACCOUNTANT.forget_all()
    with (
        steady(FLOOR_BYTES),
        contextlib.nullcontext()
        if modules
        else mock.patch.object(loading, "probe_usage", _not_probed),
    ):
        yield


def smallest_limit(folder: Path, **options: Any) -> int:
    """What the error for a limit of one byte says."""
    try:
        pipeload.plan(folder, memory_limit=1, **options)
    except pipeload.MemoryLimitError as error:
        return error.smallest_limit
    raise AssertionError("one byte was enough")


def load_streamed(folder: Path, *, spare: int = 0, modules: bool = False, **options: Any) -> Any:
    """A model with `spare` bytes over the smallest limit; everything fits with 10_000_000."""
    options = {"dtype": "auto"} | options
    with steady_floor(modules=modules):
        planned = {name: value for name, value in options.items() if name != "read_timeout"}
        key = (_state_of(folder), modules, repr(sorted(planned.items())))
        known = _LIMITS.get(key)
        if known is not None:
            try:
                return pipeload.from_pretrained(folder, memory_limit=known + spare, **options)
            except pipeload.MemoryLimitError:
                pass  # perhaps a test has replaced something that takes more
        _LIMITS[key] = limit = smallest_limit(folder, **planned)
        return pipeload.from_pretrained(folder, memory_limit=limit + spare, **options)


_LIMITS: dict[tuple[object, ...], int] = {}
"""The smallest ones: to find one takes as long as to load."""


def _state_of(folder: Path) -> tuple[object, ...]:
    """What a plan depends on beside its options: the files, and what tests replace."""
    files = sorted((file.name, file.stat().st_size) for file in folder.iterdir())
    replaced = (cut.CHUNKS, cut._TABLE_BYTES, residency._TINY_BYTES, row_cuts.ranges_are_exact)
    return folder, *files, *replaced, pages.PAGE, torch.get_num_threads()


def logits(model: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    """One pass."""
    with torch.no_grad():
        result: torch.Tensor = model(ids).logits
    return result


def generated(model: Any, ids: torch.Tensor = IDS) -> list[int]:
    """Six greedy tokens."""
    tokens: list[int] = model.generate(ids, max_new_tokens=6, do_sample=False)[0].tolist()
    return tokens


def session_of(model: nn.Module) -> Session:
    session = pipeload.handle(model)._session
    assert session is not None, "removed"
    return session


def prefetcher_of(model: nn.Module) -> Prefetcher:
    return session_of(model).prefetcher


def hooked_sites(model: nn.Module) -> int:
    """Sites that still carry hooks."""
    return len(session_of(model).passes._hooks.sites())


def our_threads() -> set[threading.Thread]:
    """Those of pipeload alone: the library's loading threads end when they like."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("pipeload-")}


def our_threads_of_passes() -> set[threading.Thread]:
    """The same without one that stays with the model, and is exchanged now and then (with AMX)."""
    return {thread for thread in our_threads() if not thread.name.startswith("pipeload-attention")}


def wait_for_threads(
    before: set[threading.Thread],
    ours: Callable[[], set[threading.Thread]] = our_threads,
) -> None:
    """Return once none of `ours` runs that was not there `before`: ending takes some a moment."""
    deadline = time.monotonic() + WAIT_SECONDS
    while left := ours() - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.001)


def finish_messages(prefetcher: Prefetcher) -> None:
    """Return once the dispatcher has handled everything that was sent so far."""
    if not prefetcher._closer.alive:
        return  # a model that fits has let it go
    done = threading.Event()
    prefetcher._inbox.put(done.set)
    assert done.wait(WAIT_SECONDS)


def finish_reads(prefetcher: Prefetcher) -> None:
    """Return once nothing is being read ahead any more."""
    deadline = time.monotonic() + WAIT_SECONDS
    finish_messages(prefetcher)
    while any(unit.state is UnitState.LOADING for unit in prefetcher.units):
        assert time.monotonic() < deadline
        time.sleep(0.001)
        finish_messages(prefetcher)


def assert_nothing_held(model: nn.Module) -> None:
    """No pass is open, no unit in use, no two units in one slot."""
    session = session_of(model)
    assert not session.passes.busy
    prefetcher = session.prefetcher
    assert prefetcher.held == session.streamer.inside == set()
    assert session.experts._running is None
    finish_messages(prefetcher)
    assert prefetcher._dispatcher._tickets == {}
    assert prefetcher._taken is None
    assert all(unit.state is not UnitState.IN_USE for unit in prefetcher.units)
    slots = [unit.slot for unit in prefetcher.units if unit.slot is not None]
    assert len(slots) == len(set(slots))
    assert all(not seat._passing for seat in session.streamer.seats)


def in_thread(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Run it in a thread of its own; the future has the value or the BaseException."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class ReadGate:
    """Holds every read of every file until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        original = FileSet.read_pages

        def read_pages(files: FileSet, *args: Any) -> int:
            self.entered.set()
            assert self.opened.wait(WAIT_SECONDS)
            return original(files, *args)

        monkeypatch.setattr(FileSet, "read_pages", read_pages)


Reference = tuple[torch.Tensor, list[int]]
"""Logits and generated tokens of a plain model."""


def reference(folder: Path) -> Reference:
    """What a model is to give."""
    plain = load_plain(folder)
    return logits(plain), generated(plain)


def check(model: Any, expected: Reference) -> None:
    """A streamed model gives that, and then holds nothing."""
    assert torch.equal(logits(model), expected[0])
    assert generated(model) == expected[1]
    assert_nothing_held(model)
