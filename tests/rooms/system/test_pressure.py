"""What the control group leaves is followed; stalls take a step away; a figure is kept a moment."""

from __future__ import annotations

import gc
import threading

import pytest

from pipeload.errors import OptionError
from pipeload.system import pressure
from pipeload.system.memory import allowed_bytes, parse_limit
from pipeload.system.pressure import PressureGauge, watch

LIMIT = 1_000_000_000
HELD = 600_000_000


class Machine:
    """What the system says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room, self.stall, self.now = LIMIT, 0.0, 100.0
        monkeypatch.setattr(pressure, "rss_bytes", lambda: HELD)
        monkeypatch.setattr(pressure, "room_bytes", lambda: self.room)
        monkeypatch.setattr(pressure, "memory_stall", lambda: self.stall)
        monkeypatch.setattr("pipeload.system.pressure.time.monotonic", lambda: self.now)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_the_limit_is_the_most(machine: Machine) -> None:
    """However much room there is, and after the limit was changed."""
    gauge = PressureGauge(LIMIT)
    assert gauge.allowed_bytes() == LIMIT
    gauge.limit = LIMIT // 2
    assert gauge.allowed_bytes() == LIMIT // 2
    del machine


def test_a_full_group(machine: Machine) -> None:
    """What is held and what is free, less a margin; looked at again after a quarter of a second."""
    gauge = PressureGauge(LIMIT)
    machine.room = 100_000_000
    allowed = gauge.allowed_bytes()
    assert HELD < allowed < HELD + machine.room
    machine.room = 0
    machine.now += 0.1
    assert gauge.allowed_bytes() == allowed
    machine.now += 0.3
    assert gauge.allowed_bytes() < HELD
    machine.room = LIMIT
    machine.now += 0.3
    assert gauge.allowed_bytes() == LIMIT


def test_stalls(machine: Machine) -> None:
    """A process that waits for memory gives some back, whatever the figures say."""
    machine.stall = 0.5
    assert 0.9 * HELD < PressureGauge(LIMIT).allowed_bytes() < HELD


class Looker:
    """Counts looks."""

    def __init__(self) -> None:
        self.seen = threading.Event()

    def look(self) -> None:
        self.seen.set()


def test_a_watch_ends_with_its_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread holds nobody."""
    monkeypatch.setattr(pressure, "_POLL_SECONDS", 0.01)
    before = set(threading.enumerate())
    looker = Looker()
    watch(looker.look)
    (thread,) = set(threading.enumerate()) - before
    assert looker.seen.wait(10)
    del looker
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_limits_as_users_write_them() -> None:
    """A share is one of what the system allows; anything else is a size or an error."""
    assert parse_limit("4GB") == 4_000_000_000
    assert parse_limit("50%") == pytest.approx(allowed_bytes() / 2, rel=0.1)
    assert parse_limit("auto") < parse_limit("100%")
    with pytest.raises(OptionError, match="is no percentage"):
        parse_limit("150%")
