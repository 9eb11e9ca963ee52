"""Blocks in host memory, between disk and device: read once, copied in each pass."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

import pipeload
from pipeload.budget.device_in_plan import worth_hosting
from pipeload.budget.shared_limit import ACCOUNTANT
from pipeload.devices import host_tier
from pipeload.devices.host_tier import choose_hosted
from pipeload.weights.arena import Arena
from tests.promises.exact.test_device import (
    PART,
    assert_ordered,
    load,
    plan_for,
    reference,
    smallest,
)
from tests.support.fake_device import FakeDevice, lend
from tests.support.measuring import given
from tests.support.streaming import check, logits, session_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pipeload.budget.plan import Plan
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
        monkeypatch.setattr(
            host_tier, "choose_hosted", lambda units, budget: choose(units, budget, part)
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
    from tests.support.streaming import finish_messages

    prefetcher = session_of(model).prefetcher
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
    assert model.pipeload.stats().locked
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
    governor: Any = session_of(model).governor
    room = governor.ledger.host.room
    monkeypatch.setattr(governor.ledger.host, "room", lambda _limit: 700_000)
    check(model, expected)
    plan = model.pipeload.plan
    assert 0 < plan.hosted_bytes <= 700_000
    _finish(model)
    assert governor.ledger.hosting.held_bytes <= 700_000
    monkeypatch.setattr(governor.ledger.host, "room", lambda _limit: -5)
    check(model, expected)
    assert model.pipeload.plan.hosted_bytes == 0
    monkeypatch.setattr(governor.ledger.host, "room", room)
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
    with (
        steady_process(1 << 30),
        pytest.raises(pipeload.MemoryLimitError, match="host_memory_limit=1000 bytes") as refused,
    ):
        ACCOUNTANT.set_limit(1000)
    with steady_process(1 << 30):
        ACCOUNTANT.set_limit(refused.value.smallest_limit)
        with pytest.raises(pipeload.MemoryLimitError):
            ACCOUNTANT.set_limit(refused.value.smallest_limit - 1_000)
    check(model, expected)


def test_what_libraries_and_conversions_take_stays_free(
    tiny: TinyCheckpoint, device: FakeDevice
) -> None:
    """In the plan, and when a pass looks how much may stay in host memory."""
    folder = tiny("llama")
    model = load(folder)
    governor: Any = session_of(model).governor
    with steady_process(100 << 20):  # less than the floor, which counts then
        room = governor.ledger.host.room(8 << 30)
        free = {"host_slack_bytes": 3_000_000, "host_conversion_bytes": 5_000_000}
        share = dataclasses.replace(governor.plan.device_share, **free)
        governor.plan = dataclasses.replace(governor.plan, device_share=share)
        assert governor.ledger.host.room(8 << 30) == room - 8_000_000
    del model, governor
    gc.collect()
    limit = smallest(folder)
    with steady_process(1 << 30):
        before = plan_for(folder, memory_limit=limit)
        device.host_slack_bytes = 7_000_000
        after = plan_for(folder, memory_limit=limit)
    shares = [plan.device_share for plan in (before, after)]
    smallest_limits = [share.host_smallest_limit for share in shares if share is not None]
    assert smallest_limits[1] - smallest_limits[0] == pytest.approx(7e6, rel=0.01)


@contextlib.contextmanager
def steady_process(nbytes: int) -> Iterator[None]:
    """As if this process held so much."""
    with (
        mock.patch("pipeload.budget.shared_limit.rss_bytes", return_value=nbytes),
        given(held_bytes=nbytes),
    ):
        yield


def test_the_system_refuses_memory_for_them(
    tiny: TinyCheckpoint, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that got none are read in each pass; the others stay, and the output is the same."""
    folder = tiny("llama")
    expected = reference(folder)
    made: list[Arena] = []

    def refuse(nbytes: int, **options: Any) -> Arena:
        if len(made) == 3:
            raise MemoryError("the system refuses")
        made.append(Arena(nbytes, **options))
        return made[-1]

    monkeypatch.setattr(host_tier, "Arena", refuse)
    model = load(folder)
    for _ in range(3):
        check(model, expected)
    hosting = session_of(model).governor.ledger.hosting  # type: ignore[attr-defined]
    assert 0 < hosting.held_bytes < model.pipeload.plan.hosted_bytes


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
    """It says how much host memory is enough; what is kept there is as when the model is loaded."""
    folder = tiny("llama")
    least = smallest(folder)

    def plan(**rates: float) -> Plan:
        device.rate, device.product_rate = rates["link"], rates["products"]
        return plan_for(folder, memory_limit=least, disk_rate=1e9)

    unknown = plan_for(folder, memory_limit=least)
    assert unknown.enough_hosted_bytes is unknown.seconds_per_pass is None
    copied = unknown.link_bytes_per_pass
    for rates, enough, seconds in (
        ({"link": 1e9, "products": 1e12}, 0, copied / 1e9),  # no faster than the disk
        ({"link": 50e9, "products": 1e12}, copied * 49 // 50, copied / 50e9),
        ({"link": 50e9, "products": 0.5e9}, 0, (unknown.resident + copied) / 0.5e9),
    ):
        made = plan(**rates)
        assert made.hosted_bytes == unknown.hosted_bytes > 0
        assert made.enough_hosted_bytes == pytest.approx(enough, abs=2)
        assert made.seconds_per_pass == pytest.approx(seconds)
        assert made.device_share is not None
        assert made.device_share.link_rate == rates["link"]
        assert ("would do" in made.table()) is (enough < made.hosted_bytes)


def test_units_that_stay_are_spread(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """Half of the blocks: no more than two next to each other."""
    plan = plan_for(tiny("llama"), memory_limit=smallest(tiny("llama")))
    streamed = sum(unit.streamed.nbytes for unit in plan.units)
    chosen = choose_hosted(plan.units, streamed // 2)
    assert len(chosen) == len(plan.units) // 2
    row = "".join("H" if unit.name in chosen else "D" for unit in plan.units)
    assert "HHH" not in row
    assert "DDD" not in row
