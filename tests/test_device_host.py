"""Blocks in host memory, between disk and device: read once, copied in each pass."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest

import pipeload
from pipeload._accountant import ACCOUNTANT
from pipeload._hosting import choose_hosted, worth_hosting
from tests.fake_device import FakeDevice, lend
from tests.streaming import check, logits, streamer_of
from tests.test_device import PART, assert_ordered, load, plan_for, reference, smallest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import TinyCheckpoint


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """The one that `device="fake"` names."""
    yield from lend(monkeypatch)


@pytest.fixture
def share(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Have that share of what is streamed stay in host memory: models here are all too small."""

    def choose(units: Any, budget: int, part: float) -> frozenset[str]:
        streamed = sum(unit.streamed.nbytes for unit in units)
        return choose_hosted(units, min(budget, int(part * streamed)))

    def use(part: float) -> None:
        for user in ("_device_plan", "_device_governor"):
            monkeypatch.setattr(
                f"pipeload.{user}.choose_hosted",
                lambda units, budget: choose(units, budget, part),
            )

    return use


@pytest.mark.parametrize("part", [0.5, 1.0])
@pytest.mark.parametrize("spare", [0, PART])
def test_the_same_output_with_fewer_reads(
    tiny: TinyCheckpoint,
    device: FakeDevice,
    share: Callable[[float], None],
    part: float,
    spare: int,
) -> None:
    """Only what is not there is read in a pass; all is copied."""
    share(part)
    device.slow_computing = 0.004
    folder = tiny("llama")
    expected = reference(folder)
    model = load(folder, spare=spare)
    plan = model.pipeload.plan
    hosted = [unit for unit in plan.units if unit.hosted]
    assert hosted
    assert (plan.bytes_per_pass == 0) is (part == 1.0)
    assert not plan.fits
    for _ in range(2):
        check(model, expected)
    _finish(model)
    read, copies = model.pipeload.stats().bytes_read, _copies(device)
    for _ in range(4):
        logits(model)
    _finish(model)
    streamed = sum(unit.streamed.nbytes > 0 for unit in plan.units)
    assert model.pipeload.stats().bytes_read - read <= 5 * plan.bytes_per_pass
    assert _copies(device) - copies >= 3 * streamed
    assert assert_ordered(device) > 20


def _finish(model: Any) -> None:
    from tests.streaming import finish_messages

    prefetcher = streamer_of(model).prefetcher
    while prefetcher._dispatcher._loading:
        finish_messages(prefetcher)


def _copies(device: FakeDevice) -> int:
    return sum(did.what == "copy" for did in device.log)


def test_staging_is_for_what_is_read_alone(
    tiny: TinyCheckpoint, device: FakeDevice, share: Callable[[float], None]
) -> None:
    """With everything in host memory there is none; each block's memory is locked in its place."""
    share(1.0)
    model = load(tiny("llama"))
    logits(model)
    plan = model.pipeload.plan
    assert plan.staging_bytes == 0
    streamed = sorted(unit.streamed.nbytes for unit in plan.units)
    assert sorted(device.pinned.values()) == streamed
    assert plan.hosted_bytes == sum(streamed)
    del model
    gc.collect()
    assert device.pinned == {}


def test_they_yield_to_the_hosts_limit(
    tiny: TinyCheckpoint,
    device: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the process has taken its memory they go, before the next pass; the output stays."""
    folder = tiny("llama")
    expected = reference(folder)
    model = load(folder)
    check(model, expected)
    assert model.pipeload.plan.hosted_bytes > 0
    governor: Any = streamer_of(model).governor
    room = governor._host.room
    monkeypatch.setattr(governor._host, "room", lambda _limit: 700_000)
    check(model, expected)
    plan = model.pipeload.plan
    assert 0 < plan.hosted_bytes <= 700_000
    _finish(model)
    assert governor.hosting.held_bytes <= 700_000
    monkeypatch.setattr(governor._host, "room", lambda _limit: -5)
    check(model, expected)
    assert model.pipeload.plan.hosted_bytes == 0
    monkeypatch.setattr(governor._host, "room", room)
    for _ in range(6):
        check(model, expected)
    assert model.pipeload.plan.hosted_bytes > 0


def test_the_accountant_may_ask_for_them(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """Another limit of the process, or another model that streams in it."""
    folder = tiny("llama")
    expected = reference(folder)
    model = load(folder)
    check(model, expected)
    (host,) = ACCOUNTANT.clients
    assert host.budget > 0
    assert host.least_bytes() < host.promised_bytes()
    assert host.shrink(400_000)
    assert 0 < model.pipeload.plan.hosted_bytes <= 400_000
    check(model, expected)
    assert ACCOUNTANT.limit == model.pipeload.plan.host_memory_limit
    ACCOUNTANT.set_limit(model.pipeload.plan.host_memory_limit + 1_000_000)
    assert model.pipeload.plan.host_memory_limit == ACCOUNTANT.limit
    assert model.pipeload.plan.hosted_bytes > 400_000
    with pytest.raises(pipeload.MemoryLimitError, match="host_memory_limit=1000 bytes"):
        ACCOUNTANT.set_limit(1000)
    check(model, expected)


def test_a_pass_is_running_when_somebody_asks(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """Then nothing is given back."""
    model = load(tiny("llama"))
    (host,) = ACCOUNTANT.clients
    asked: list[bool] = []

    def ask(*_args: object) -> None:
        asked.append(host.shrink(0))

    hook = model.model.layers[2].mlp.register_forward_hook(ask)
    logits(model)
    hook.remove()
    assert asked == [False]
    assert model.pipeload.plan.hosted_bytes > 0


# -- the split -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("disk", "link", "compute", "kept"),
    [
        (None, None, 0.0, 1000),  # nobody measured: the disk is the slowest
        (100.0, None, 0.0, 1000),
        (100.0, 400.0, 0.0, 750),  # reading 250 takes as long as copying 1000
        (400.0, 400.0, 0.0, 0),
        (500.0, 400.0, 0.0, 0),  # the link is slower than the disk
        (100.0, 400.0, 5.0, 500),  # computing hides 500 of reading
        (100.0, 400.0, 20.0, 0),
    ],
)
def test_what_pays(disk: float | None, link: float | None, compute: float, kept: int) -> None:
    """T* = max(disk bytes / B, (disk + host bytes) / L, C): no more than lowers it."""
    assert worth_hosting(1000, disk_rate=disk, link_rate=link, compute_seconds=compute) == kept


def test_the_plan_weighs_measured_rates(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """A link as slow as the disk has nothing stay in host memory; a fast one nearly all."""
    folder = tiny("llama")
    least = smallest(folder)
    device.rate = 1e9
    slow = plan_for(folder, memory_limit=least, disk_rate=1e9)
    assert slow.hosted_bytes == 0
    assert slow.link_rate == 1e9
    device.rate = 50e9
    fast = plan_for(folder, memory_limit=least, disk_rate=1e9)
    assert fast.bytes_per_pass < 0.5 * slow.bytes_per_pass
    assert fast.seconds_per_pass is not None
    assert slow.seconds_per_pass is not None
    assert fast.seconds_per_pass < slow.seconds_per_pass
    assert fast.seconds_per_pass >= fast.link_bytes_per_pass / 50e9


def test_computing_hides_reads(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """Where a device computes slowly, nothing stays in host memory: a pass takes that long."""
    folder = tiny("llama")
    least = smallest(folder)
    device.rate = 50e9
    fast = plan_for(folder, memory_limit=least, disk_rate=1e9)
    assert fast.hosted_bytes > 0
    device.product_rate = 0.5e9
    slow = plan_for(folder, memory_limit=least, disk_rate=1e9)
    assert slow.hosted_bytes == 0
    assert slow.seconds_per_pass is not None
    weights = slow.resident + slow.link_bytes_per_pass
    assert slow.seconds_per_pass == pytest.approx(weights / 0.5e9)


def test_units_that_stay_are_spread(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """Half of the blocks: no more than two next to each other."""
    plan = plan_for(tiny("llama"), memory_limit=smallest(tiny("llama")))
    streamed = sum(unit.streamed.nbytes for unit in plan.units)
    chosen = choose_hosted(plan.units, streamed // 2)
    assert len(chosen) == len(plan.units) // 2
    row = "".join("H" if unit.name in chosen else "D" for unit in plan.units)
    assert "HHH" not in row
    assert "DDD" not in row
