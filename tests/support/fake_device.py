"""An accelerator made of host memory: copies by a thread that is slow, events that come late.

Its tensors are the CPU's, so that a whole model runs. What a real one would do to a program that
orders its work wrongly, this one does as well: copies run in another thread, some time after they
were asked for, and computing counts as done only some time after it was. In that time the memory it
was done with must not change, which is checked at its end.
"""

from __future__ import annotations

import ctypes
import gc
import queue
import threading
import time
import weakref
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pipeload.weights.device_interface import ALIGN
from tests.support.streaming import WAIT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pytest

    from pipeload.weights.device_interface import Event


class FakeEvent:
    """Passed once somebody says so."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._passed = threading.Event()

    @property
    def passed(self) -> bool:
        return self._passed.is_set()

    def pass_by(self) -> None:
        self._passed.set()

    def synchronize(self) -> None:
        assert self._passed.wait(WAIT_SECONDS), "the fake device hangs"


@dataclass
class Did:
    """Something that was asked of the device, in the order in which it was."""

    what: str
    event: FakeEvent
    memory: frozenset[int] = frozenset()
    """Addresses of the allocations that a copy writes to."""
    after: FakeEvent | None = None


@dataclass
class _Queue:
    """A stream: one thing after the other."""

    work: queue.SimpleQueue[Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)

    def run(self) -> None:
        while (work := self.work.get()) is not None:
            work()
            del work


class FakeDevice:
    """A `Device` of so many bytes. `slow`: seconds that a copy, and computing, take."""

    where = torch.device("cpu")
    unified = False
    lacks: frozenset[str] = frozenset()
    caps = True
    fuses = True
    slack_bytes = 0
    host_slack_bytes = 0
    code_bytes = 0

    def __init__(
        self, nbytes: int = 1 << 40, *, slow: float = 0.001, pins: bool = True, workspace: int = 0
    ) -> None:
        self.nbytes = nbytes
        self.slow = self.slow_computing = slow
        self.pins = pins
        self.others = workspace
        """Bytes that somebody else has allocated."""
        self.log: list[Did] = []
        self.torn: list[str] = []
        """What was written to while it was computed with, or copied from while it was written."""
        self.errors: list[BaseException] = []
        """What a copy or computing ended with."""
        self.pinned: dict[int, int] = {}
        self.trims = 0
        self.fragments = 0
        """Bytes that its allocator holds between tensors, as long as any tensor is there."""
        self.closed = False
        self.rate = 10e9
        self.product_rate = 100e9
        self.peak = 0
        self.capped: list[int | None] = []
        self._noise = torch.Generator().manual_seed(0)
        self._lock = threading.Lock()
        self._memory: list[tuple[weakref.ref[_Memory], int, int]] = []
        self._numbers = 0
        self._waited: dict[int, list[FakeEvent]] = {}
        """By thread: what each computes with is its own."""
        self._copies, self._computing = _Queue(), _Queue()
        for stream in (self._copies, self._computing):
            threading.Thread(target=stream.run, name="fake-stream", daemon=True).start()

    def fuses_attention(self, _dtype: torch.dtype) -> bool:
        return self.fuses

    def takes(self, nbytes: int) -> int:
        return nbytes

    def close(self) -> None:
        """Nothing is asked of it any more but by finalizers, which it has nothing to tell."""
        self.closed = True
        for stream in (self._copies, self._computing):
            stream.work.put(None)

    # -- memory --

    def allocate(self, nbytes: int) -> torch.Tensor:
        limit = min(self.nbytes, self.capped[-1] or self.nbytes) if self.capped else self.nbytes
        if self.allocated_bytes() + nbytes > limit:
            raise torch.OutOfMemoryError(f"{nbytes} bytes do not fit the fake device")
        memory = _Memory(nbytes + ALIGN)
        with torch.inference_mode(False):
            whole = torch.frombuffer(memory, dtype=torch.uint8)
            # Never what was there before; the user's own numbers are not touched.
            whole.random_(generator=self._noise)
            shown = whole[-whole.data_ptr() % ALIGN :][:nbytes]
        with self._lock:
            self._memory.append((weakref.ref(memory), shown.data_ptr(), nbytes))
        self.peak = max(self.peak, self.allocated_bytes())
        return shown

    def _there(self) -> list[tuple[_Memory, int, int]]:
        """Allocations that somebody still shows, with their addresses and sizes."""
        with self._lock:
            found = [(ref(), at, nbytes) for ref, at, nbytes in self._memory]
            there = [(memory, at, nbytes) for memory, at, nbytes in found if memory is not None]
            self._memory = [(weakref.ref(memory), at, nbytes) for memory, at, nbytes in there]
        return there

    def allocated_bytes(self) -> int:
        return self.others + sum(nbytes for _, _, nbytes in self._there())

    def reserved_bytes(self) -> int:
        return self.allocated_bytes() + self.fragments

    def peak_bytes(self) -> int:
        return self.peak

    def forget_peak(self) -> None:
        self.peak = self.allocated_bytes()

    def free_bytes(self) -> int:
        return self.nbytes - self.allocated_bytes()

    def link_rate(self) -> float:
        return self.rate

    def compute_rate(self) -> float:
        return self.product_rate

    def trim(self) -> None:
        self.trims += 1

    def cap(self, nbytes: int | None) -> None:
        self.capped.append(nbytes)

    def pin(self, address: int, nbytes: int) -> bool:
        if self.pins:
            assert address not in self.pinned, "locked twice"
            self.pinned[address] = nbytes
        return self.pins

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    # -- order --

    def _event(self) -> FakeEvent:
        with self._lock:
            self._numbers += 1
            return FakeEvent(self._numbers)

    def copy(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Event | None
    ) -> Event:
        assert after is None or isinstance(after, FakeEvent)
        event = self._event()
        pairs = list(pairs)
        memory = frozenset(self._home(to) for to, _ in pairs)
        self.log.append(Did("copy", event, memory, after))

        def work() -> None:
            if after is not None:
                after.synchronize()
            time.sleep(self.slow)
            for to, values in pairs:
                to.copy_(values)
            event.pass_by()

        self._copies.work.put(work)
        return event

    def copy_now(self, to: torch.Tensor, values: torch.Tensor) -> None:
        to.copy_(values)

    def computed(self) -> Event:
        event = self._event()
        with self._lock:
            mine = self._waited.pop(threading.get_ident(), [])
        used = {address for did in self.log if did.event in mine for address in did.memory}
        places = [entry for entry in self._there() if entry[1] in used]
        before = [_sum(address, nbytes) for _, address, nbytes in places]
        self.log.append(Did("computed", event, frozenset(used)))

        def work() -> None:
            time.sleep(self.slow_computing)
            if [_sum(address, nbytes) for _, address, nbytes in places] != before:
                self.torn.append(f"event {event.number}")
            places.clear()
            event.pass_by()

        self._computing.work.put(work)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        self.log.append(Did("wait", event))
        with self._lock:
            self._waited.setdefault(threading.get_ident(), []).append(event)
        event.synchronize()  # its computing is this thread's

    def synchronize(self) -> None:
        for stream in (self._computing, self._copies, self._computing):
            if self.closed:
                return
            event = self._event()
            stream.work.put(event.pass_by)
            event.synchronize()

    def _home(self, place: torch.Tensor) -> int:
        """The address of the allocation that a tensor lies in."""
        at = place.data_ptr()
        return next(start for _, start, nbytes in self._there() if start <= at < start + nbytes)


class _Memory(bytearray):
    """A tensor holds what it shows, and this can be watched."""


def _sum(address: int, nbytes: int) -> int:
    return zlib.crc32(ctypes.string_at(address, nbytes))


def lend(monkeypatch: pytest.MonkeyPatch, *, hosting: bool = True) -> Iterator[FakeDevice]:
    """For a fixture: the one that `device="fake"` names.

    Without `hosting` no block stays in host memory: those of small models all would.
    """
    made = FakeDevice()
    for user in ("entry.request", "cli.plan"):
        monkeypatch.setattr(f"pipeload.{user}.open_device", lambda _name: made)
    if not hosting:
        monkeypatch.setattr("pipeload.devices.host_tier.choose_hosted", lambda *_args: frozenset())
    yield made
    gc.collect()
    made.synchronize()
    made.close()
    assert made.torn == [], "memory was written to while it was computed with"
    assert made.errors == []
