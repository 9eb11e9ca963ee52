"""A read that hangs ends in one clear error; when the disk answers again, so does the model."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import pipeload
from pipeload import OptionError, ReadError
from pipeload.checkpoint import file_reads
from pipeload.entry.options import GivenOptions
from pipeload.entry.request import make_request
from tests.support.experts import save_moe
from tests.support.models import load_plain
from tests.support.streaming import (
    WAIT_SECONDS,
    Reference,
    assert_nothing_held,
    check,
    finish_messages,
    generated,
    load_streamed,
    logits,
    our_threads,
    prefetcher_of,
    reference,
    session_of,
    wait_for_threads,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

SECONDS = 0.4
WORDS = r"reading '.*\.safetensors' at byte \d+ has not returned for \d+\.\d seconds"


class HungDisk:
    """While hung, reads do not return; `only` says how many of them hang, None for all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._works = threading.Event()
        self._works.set()
        self._left: list[None] | None = None
        self._read = os.preadv
        self.hanging: set[threading.Thread] = set()
        monkeypatch.setattr(os, "preadv", self._preadv)

    def hang(self, only: int | None = None) -> None:
        self._left = None if only is None else [None] * only
        self._works.clear()

    def answer(self) -> None:
        self._works.set()

    def _preadv(self, descriptor: int, buffers: Any, offset: int) -> int:
        if not self._works.is_set() and self._is_chosen():
            me = threading.current_thread()
            self.hanging.add(me)
            assert self._works.wait(WAIT_SECONDS)
            self.hanging.discard(me)
        return self._read(descriptor, buffers, offset)

    def _is_chosen(self) -> bool:
        if self._left is None:
            return True
        try:
            self._left.pop()
        except IndexError:
            return False
        return True


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HungDisk]:
    disk = HungDisk(monkeypatch)
    yield disk
    disk.answer()


@pytest.fixture(scope="module")
def expected(tiny: TinyCheckpoint) -> Reference:
    return reference(tiny("llama"))


@pytest.mark.parametrize("only", [None, 1], ids=["all reads", "one read"])
def test_a_disk_that_hangs(
    tiny: TinyCheckpoint,
    disk: HungDisk,
    expected: Reference,
    only: int | None,
) -> None:
    """The pass ends with an error that says what does not answer, every time; then all is well."""
    model = load_streamed(tiny("llama"), read_timeout=SECONDS)
    finish_messages(prefetcher_of(model))
    before = our_threads()
    for _ in range(2):
        disk.hang(only)
        for _ in range(2):  # nothing is read into memory that the hung read may still write to
            with pytest.raises(ReadError, match=rf"block 'model\.layers\.\d': {WORDS}") as caught:
                generated(model)
            assert "to more than 0.4 seconds" in str(caught.value)
        wait_for_threads(before)  # nobody took the hung reader's place
        disk.answer()
        check(model, expected)


def test_a_disk_that_hangs_while_loading(
    tiny: TinyCheckpoint, disk: HungDisk, expected: Reference
) -> None:
    """from_pretrained raises it, too, and leaves no thread behind but the one that hangs."""
    before = our_threads()
    disk.hang(only=1)
    with pytest.raises(ReadError, match=WORDS):
        load_streamed(tiny("llama"), io_mode="buffered", read_timeout=SECONDS)
    (hanging,) = disk.hanging
    wait_for_threads(before | {hanging})
    assert hanging.is_alive()
    disk.answer()
    hanging.join(WAIT_SECONDS)
    assert not hanging.is_alive()
    check(load_streamed(tiny("llama")), expected)


@pytest.mark.parametrize("spare", [1_000, 100_000_000], ids=["they pass", "they stay"])
def test_experts_that_hang(tmp_path: Path, disk: HungDisk, spare: int) -> None:
    """One read is waited for, not one after the other."""
    folder = save_moe(tmp_path)
    wanted = logits(load_plain(folder))
    model = load_streamed(folder, spare=spare, read_timeout=SECONDS)
    logits(model, torch.tensor([[3]]))  # units are all there from now on
    disk.hang()
    began = time.monotonic()
    with pytest.raises(ReadError, match=rf"block 'model\.layers\.\d\S*': {WORDS}"):
        logits(model)
    assert time.monotonic() - began < WAIT_SECONDS / 2
    disk.answer()
    assert torch.equal(logits(model), wanted)
    assert_nothing_held(model)


def test_rows_that_hang(
    tiny: TinyCheckpoint, disk: HungDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a table are read while the model waits, a few of them by one thread."""
    from pipeload.budget import cut, host_memory

    monkeypatch.setattr(cut, "_TABLE_BYTES", 0)  # a tiny model's table is read by rows, too
    monkeypatch.setattr(host_memory, "TABLE_KEEP_BYTES", 0)
    expected = logits(load_plain(tiny("llama")))
    model = load_streamed(tiny("llama"), read_timeout=SECONDS)
    assert session_of(model).streamer.tables
    assert torch.equal(logits(model), expected)
    while any(unit.state.name == "LOADING" for unit in prefetcher_of(model).units):
        finish_messages(prefetcher_of(model))
    disk.hang()
    with pytest.raises(ReadError, match=rf"^{WORDS}"):
        logits(model)
    disk.answer()
    assert torch.equal(logits(model), expected)


def test_a_hung_model_can_be_removed(
    tiny: TinyCheckpoint, disk: HungDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way back does not wait for the disk for ever either; what was read late harms nobody."""
    monkeypatch.setattr("pipeload.prefetch.reads_in_flight._JOIN_SECONDS", 0.1)
    expected = logits(load_plain(tiny("llama")))
    model = load_streamed(tiny("llama"), read_timeout=SECONDS)
    disk.hang(only=1)
    with pytest.raises(ReadError, match=WORDS):
        generated(model)
    model.pipeload.remove()
    assert torch.equal(logits(model), expected)
    (hanging,) = disk.hanging
    disk.answer()
    hanging.join(WAIT_SECONDS)
    assert not hanging.is_alive()
    assert torch.equal(logits(model), expected)


def test_a_slow_disk_is_no_hung_one(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, expected: Reference
) -> None:
    """Reads that come one by one, each in time, are waited for however long all of them take."""
    original, turn = os.preadv, threading.Lock()

    def slow(descriptor: int, buffers: Any, offset: int) -> int:
        with turn:
            time.sleep(0.01)
            return original(descriptor, [buffers[0][:4096]], offset)

    model = load_streamed(tiny("llama"), read_timeout=0.5, readers=1)
    monkeypatch.setattr(os, "preadv", slow)
    assert torch.equal(logits(model), expected[0])


def test_without_a_limit(tiny: TinyCheckpoint, disk: HungDisk) -> None:
    """None waits until the disk answers."""
    model = load_streamed(tiny("llama"), read_timeout=None)
    disk.hang()
    timer = threading.Timer(3 * SECONDS, disk.answer)
    timer.start()
    logits(model)
    timer.join()


@pytest.mark.parametrize(
    ("option", "variable", "seconds"),
    [
        ("auto", None, 120.0),
        ("auto", " 7.5 ", 7.5),
        ("auto", "0", None),
        (3, "7", 3.0),
        (0, "7", None),
        (None, "7", None),
    ],
)
def test_who_says_how_long(
    monkeypatch: pytest.MonkeyPatch, option: Any, variable: str | None, seconds: float | None
) -> None:
    """The option, else the environment, else two minutes."""
    monkeypatch.delenv("PIPELOAD_READ_TIMEOUT", raising=False)
    if variable is not None:
        monkeypatch.setenv("PIPELOAD_READ_TIMEOUT", variable)
    assert make_request(GivenOptions(1, read_timeout=option)).options.read_timeout == seconds


@pytest.mark.parametrize("option", [-1, float("nan"), float("inf"), "soon", True, [1]])
def test_a_time_that_is_none(option: Any) -> None:
    with pytest.raises(OptionError, match=r"read_timeout=.* must be seconds, 0 or more"):
        make_request(GivenOptions(1, read_timeout=option))


def test_a_variable_that_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELOAD_READ_TIMEOUT", "soon")
    with pytest.raises(OptionError, match="PIPELOAD_READ_TIMEOUT='soon' must be seconds"):
        make_request(GivenOptions(1))


def test_a_network_mount_that_stops_answering(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There even asking for a file's size may hang; it is asked in a thread of its own."""
    works, original = threading.Event(), os.fstat
    works.set()

    def fstat(descriptor: int) -> os.stat_result:
        assert works.wait(WAIT_SECONDS)
        return original(descriptor)

    monkeypatch.setattr(file_reads, "warn_of_network", lambda _files: True)
    model = load_streamed(tiny("llama"), read_timeout=SECONDS)
    expected = logits(model)
    monkeypatch.setattr(os, "fstat", fstat)
    works.clear()
    with pytest.raises(pipeload.ReadError, match=WORDS):
        logits(model)
    works.set()
    assert torch.equal(logits(model), expected)
