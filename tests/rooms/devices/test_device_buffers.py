"""Buffers of a device that runs behind: no thread of the program waits for its computing.

Models cannot run on such a device without one, so a block is a check of its weights here, which the
device makes when its turn comes. Every order of events is the real one: reads, copies, computing.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeload.budget.plan import UnitPlan
from pipeload.checkpoint.reader_threads import ReaderPool
from pipeload.devices.device_buffers import DevicePlacement, DeviceSlot, SlotSize
from pipeload.devices.device_residents import DevicePlace
from pipeload.devices.host_tier import Hosting
from pipeload.devices.weights_on_device import copies
from pipeload.prefetch.prefetcher import Prefetcher
from pipeload.prefetch.unit import Unit
from pipeload.weights.arena import Arena, Region
from pipeload.weights.device_interface import aligned
from pipeload.weights.kept_pieces import KeptPieces
from pipeload.weights.layout import lay_out
from pipeload.weights.placement import SCRATCH_BYTES, scratch_bytes
from tests.support.examples import examples
from tests.support.fake_device import FakeDevice, FakeEvent
from tests.support.fake_disk import RESIDENT, STREAMED, FakeFiles, convert, weight
from tests.support.streaming import finish_messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pipeload.checkpoint.file_reads import FileSet
    from pipeload.weights.device_interface import Event
    from pipeload.weights.layout import Layout

_CPU = torch.device("cpu")


class BehindDevice(FakeDevice):
    """Computing runs in a thread of its own, behind what it waits for."""

    def __init__(self, seed: int = 0, *, slow: float = 0.002) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._most = slow
        self.wrong: list[str] = []

    @property
    def slow(self) -> float:
        """Another time for each copy."""
        return self._random.random() * self._most

    @slow.setter
    def slow(self, _seconds: float) -> None:
        pass

    def wait(self, event: Event) -> None:
        self._computing.work.put(event.synchronize)

    def compute(self, work: Callable[[], None]) -> None:
        self._computing.work.put(work)

    def computed(self) -> Event:
        event = FakeEvent(0)
        self._computing.work.put(event.pass_by)
        return event


class BehindRig:
    """A prefetcher for a device. `kinds`: Streamed, Resident, Both, Hosted or Converted."""

    def __init__(self, kinds: str, *, seed: int = 0, slow: float = 0.002) -> None:
        self.kinds = kinds
        self.files = FakeFiles()
        self.device = device = BehindDevice(seed, slow=slow)
        files = cast("FileSet", self.files)
        plans = []
        for index, kind in enumerate(kinds):
            kept = [weight(index, RESIDENT)] if kind in "RB" else []
            passing = [weight(index, STREAMED, group="g" if kind == "C" else None)]
            streamed = lay_out(passing if kind != "R" else [])
            resident = (lay_out(kept),) if kept else ()
            plans.append(UnitPlan(f"block.{index}", resident, streamed, hosted=kind == "H"))

        def make(layout: Layout) -> DevicePlace:
            return DevicePlace(layout, device, files, convert)

        self.slots = [DeviceSlot(device, SlotSize(plans)) for _ in range(2)]
        arena = Arena(scratch_bytes(2), device=_CPU, huge=False)
        scratch: list[Region | None] = [arena.take(SCRATCH_BYTES) for _ in range(2)]
        self.prefetcher = Prefetcher(
            [Unit(plan, KeptPieces(make, plan.resident)) for plan in plans],
            slots=self.slots,
            place=Hosting(device).place,
            files=files,
            convert=convert,
            scratch=scratch,
            chunk_bytes=1 << 20,
        )

    def run(self, *order: int, busy: float = 0.001) -> None:
        """Enqueue blocks one after the other; the device takes `busy` seconds for each."""
        device = self.device
        for index in order:
            self.prefetcher.acquire(index)
            unit = self.prefetcher.units[index]
            views = dict(unit.kept.views)
            slot = None
            if unit.slot is not None and unit.streams:
                place = unit.slots[unit.slot]
                assert isinstance(place, DevicePlacement)
                slot = place.slot
                assert slot.copied is not None
                device.wait(slot.copied)
                views.update(place.views)

            def look(index: int = index, views: dict[str, torch.Tensor] = views) -> None:
                for moment in ("before", "after"):
                    for name, view in views.items():
                        if set(view.tolist()) != {index + 1}:
                            device.wrong.append(f"{name}, {moment}: {set(view.tolist())}")
                    time.sleep(busy)

            device.compute(look)
            if slot is not None:
                slot.computed = device.computed()
            self.prefetcher.release(index)

    def end(self) -> None:
        finish_messages(self.prefetcher)
        self.device.synchronize()
        self.prefetcher.close()
        self.device.close()
        assert self.device.wrong == []


@pytest.fixture
def rig() -> Iterator[BehindRig]:
    """Six streamed blocks."""
    made = BehindRig("SSSSSS", slow=0.01)
    yield made
    made.end()


@pytest.mark.parametrize("kinds", ["SSSSSS", "SHSHSH", "HHHH", "RSRS", "BBBB", "CSCS", "SRHB"])
def test_each_block_computes_with_its_own_weights(kinds: str) -> None:
    """Four passes are enqueued while the first one runs."""
    rig = BehindRig(kinds)
    for _ in range(4):
        rig.run(*range(len(kinds)))
    rig.end()


@settings(max_examples=examples(15))
@given(st.lists(st.integers(0, 5), min_size=6, max_size=30), st.integers(0, 1000))
def test_any_order_at_any_speed(order: list[int], seed: int) -> None:
    """Surprises evict what was copied ahead, whose copies may not have begun."""
    rig = BehindRig("SSHSBS", seed=seed)
    rig.run(*order, busy=0.0005)
    rig.end()


def test_staging_is_read_into_behind_its_copy(rig: BehindRig) -> None:
    """Nobody has waited for that copy: only its event says that it is over."""
    wait = DeviceSlot.wait_until_free
    waited: list[bool] = []

    def watch(slot: DeviceSlot) -> None:
        copied = slot.copied
        wait(slot)
        if copied is not None:
            assert isinstance(copied, FakeEvent)
            waited.append(copied.passed)

    patch: Any = watch
    DeviceSlot.wait_until_free = patch  # type: ignore[method-assign]
    try:
        rig.run(*range(6), *range(6))
        rig.end()
    finally:
        DeviceSlot.wait_until_free = wait  # type: ignore[method-assign]
    assert len(waited) >= 8
    assert all(waited)


@pytest.mark.parametrize("missing", ["copied", "computed", "staging"])
def test_a_missing_event_is_seen(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests can fail: each of the three orders is needed."""
    rig = BehindRig("SSSSSS", slow=0.02)
    device = rig.device
    if missing == "copied":
        monkeypatch.setattr(device, "wait", lambda _event: None)
    elif missing == "computed":
        copy = device.copy
        monkeypatch.setattr(device, "copy", lambda pairs, _after: copy(pairs, None))
    else:
        monkeypatch.setattr(DeviceSlot, "wait_until_free", lambda _slot: None)
    for _ in range(3):
        rig.run(*range(6), busy=0.01 if missing == "computed" else 0.0)
    with pytest.raises(AssertionError, match=r"(resident|streamed)\.\d"):
        rig.end()


def test_neighbours_are_copied_in_one() -> None:
    """Those that follow each other on both sides; what arrives is the same."""
    arena = Arena(4 * 4096, device=torch.device("cpu"), huge=False)
    sizes = {"a": 512, "b": 1024, "c": 100, "d": 512, "far": 512}
    starts = {"a": 64, "b": 576, "c": 1600, "d": 1700, "far": 9000}
    views = {name: arena.tensor(starts[name], "U8", (n,), n).random_() for name, n in sizes.items()}
    memory, places, offset = torch.zeros(4096, dtype=torch.uint8), {}, 0
    for name, nbytes in sizes.items():
        places[name] = memory[offset : offset + nbytes]
        offset += aligned(nbytes)
    pairs = copies(places, views, arena)
    # c is padded on the device, so d does not follow it there; far does not follow d in the arena.
    assert [to.numel() for to, _ in pairs] == [512 + 1024 + 100, 512, 512]
    for to, values in pairs:
        to.copy_(values)
    assert all(torch.equal(places[name], views[name]) for name in sizes)


def test_only_what_takes_time_goes_to_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks in host memory are copied by the dispatcher itself, once they were read."""
    rig = BehindRig("HHHH")
    for _ in range(2):
        rig.run(*range(4))
    finish_messages(rig.prefetcher)

    def refuse(*_args: object) -> None:
        raise AssertionError("a reader is asked")

    monkeypatch.setattr(ReaderPool, "submit", refuse)
    copied = sum(did.what == "copy" for did in rig.device.log)
    rig.run(*range(4))
    finish_messages(rig.prefetcher)
    assert sum(did.what == "copy" for did in rig.device.log) == copied + 4
    rig.end()


def test_reset_and_another_pass(rig: BehindRig) -> None:
    """A pass that died in the middle: its work may still run when the next one begins."""
    for stop in (1, 3, 5):
        rig.run(*range(stop))
        rig.prefetcher.acquire(stop)
        rig.prefetcher.reset()
        rig.run(*range(6))
