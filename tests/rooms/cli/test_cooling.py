"""`--max-temperature`: passes wait for a processor that is too hot, on a made-up `/sys`."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pipeload.cli import cooling
from pipeload.cli.cooling import Cooling
from pipeload.errors import OptionError
from pipeload.system.temperature import Sensors
from tests.support.commands import invoke

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

MEASURED = torch.zeros(2, 5, dtype=torch.int64)


class Board:
    """A tree like `/sys` with two zones and two processors."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for number in range(2):
            (root / f"class/thermal/thermal_zone{number}").mkdir(parents=True)
            (root / f"devices/system/cpu/cpu{number}/cpufreq").mkdir(parents=True)
        (root / "class/thermal/cooling_device0").mkdir()
        self.heat(40, 50)
        self.run_at(1800, 1800)

    def heat(self, *degrees: float) -> None:
        for number, celsius in enumerate(degrees):
            zone = self.root / f"class/thermal/thermal_zone{number}/temp"
            zone.write_text(f"{celsius * 1000:.0f}\n")

    def run_at(self, *megahertz: int) -> None:
        for number, now in enumerate(megahertz):
            folder = self.root / f"devices/system/cpu/cpu{number}/cpufreq"
            (folder / "scaling_cur_freq").write_text(f"{now}000\n")
            (folder / "cpuinfo_max_freq").write_text("1800000\n")


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch, board: Board) -> list[float]:
    """What is slept, each a degree cooler than before."""
    slept: list[float] = []

    over = threading.Event()

    def wait(seconds: float) -> bool:
        slept.append(seconds)
        board.heat(40, 83 - len(slept))
        return over.is_set()

    made = SimpleNamespace(wait=wait, set=over.set)
    monkeypatch.setattr(cooling, "_Event", lambda: made)
    return slept


def test_the_hottest_zone_and_the_fastest_processor_count(board: Board) -> None:
    """A zone that is off gives no number."""
    board.run_at(600, 1350)
    sensors = Sensors(board.root)
    assert (sensors.celsius(), sensors.speed()) == (50.0, 0.75)
    (board.root / "class/thermal/thermal_zone1/temp").write_text("off\n")
    assert sensors.celsius() == 40.0
    assert Sensors(board.root / "class").speed() is None


def test_it_waits_until_it_is_cooler_by_some(board: Board, naps: list[float]) -> None:
    """At the most itself it goes on; above, until two degrees below; no answer ends by it."""
    waits = Cooling(80, board.root)
    board.heat(40, 80)
    assert not waits(MEASURED, None).any()
    assert naps == []
    board.heat(40, 83)
    assert not waits(MEASURED, None).any()
    assert len(naps) == 5
    assert waits.hottest == 83.0
    assert [row.name for row in waits.rows()] == ["waited to cool"]


def test_a_processor_that_slowed_down_is_told(board: Board, naps: list[float]) -> None:
    """As it was right after a pass, before the wait made it idle."""
    waits = Cooling(80, board.root)
    board.heat(40, 81)
    board.run_at(600, 900)
    waits(MEASURED, None)
    board.run_at(1800, 1800)
    waits(MEASURED, None)
    assert naps
    assert waits.as_dict()["lowest_frequency"] == 0.5
    assert "50%" in waits.rows()[1].value


def test_nobody_tells(tmp_path: Path) -> None:
    """Then the option could do nothing."""
    with pytest.raises(OptionError, match="no thermal zone"):
        Cooling(80, tmp_path)


def told(
    monkeypatch: pytest.MonkeyPatch, board: Board, *words: Any
) -> tuple[dict[str, Any], list[bool]]:
    """What a command prints as JSON on that board, and whether a pass ran at each look."""
    from pipeload.engine.pass_life import PassLife
    from pipeload.engine.pass_state import Running

    lives: list[PassLife] = []
    busy: list[bool] = []
    make, look = PassLife.__init__, Cooling._wait

    def made(self: PassLife, **options: Any) -> None:
        make(self, **options)
        lives.append(self)

    def looked(self: Cooling) -> None:
        states = [life.convoy.state_of_thread() for life in lives]
        busy.extend(s.running is not Running.NOTHING or bool(s.held) for s in states)
        look(self)

    monkeypatch.setattr(cooling, "Sensors", lambda: Sensors(board.root))
    monkeypatch.setattr(PassLife, "__init__", made)
    monkeypatch.setattr(Cooling, "_wait", looked)
    done = invoke(*words, "--memory-limit", "2GB", "--max-temperature", 80, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout), busy


@pytest.mark.slow
def test_a_run_waits_between_passes(
    smollm2_bf16: Path, board: Board, naps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never inside one."""
    board.heat(40, 83)
    words = ("run", smollm2_bf16, "Hello", "--max-new-tokens", 2)
    figures, busy = told(monkeypatch, board, *words)
    assert figures["hottest_celsius"] == 83.0
    assert len(naps) == 5
    assert busy == [False, False]


@pytest.mark.slow
def test_a_batch_waits_between_passes(
    smollm2_bf16: Path,
    board: Board,
    naps: list[float],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Also one whose requests end at a text of their own."""
    board.heat(40, 83)
    said = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    lines = [
        {
            "custom_id": str(more),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": said | more,
        }
        for more in ({}, {"stop": "xyz"})
    ]
    requests = tmp_path / "requests.jsonl"
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("batch", smollm2_bf16, requests, tmp_path / "results.jsonl")
    figures, busy = told(monkeypatch, board, *words)
    assert figures["answered"] == 2
    assert len(naps) == 5
    assert len(busy) == 4
    assert not any(busy)


def test_nobody_waits_for_ever(board: Board, naps: list[float]) -> None:
    """When all is to end it ends, however hot it is; one that was idle is not called slow."""
    waits = Cooling(80, board.root)
    board.heat(40, 95)
    waits.end()
    board.run_at(1800, 1800)
    waits(MEASURED, None)
    assert len(naps) == 1
    board.heat(40, 50)
    board.run_at(600, 600)
    waits(MEASURED, None)
    assert waits.slowest == 1.0


def test_a_temperature_is_above_zero(tiny: TinyCheckpoint) -> None:
    """Nothing runs below."""
    done = invoke("run", tiny("llama"), "x", "--max-temperature", "-5")
    assert done.exit_code == 2
    assert "'--max-temperature'" in done.stderr
