"""The command line and the benchmark on a device: options handed on, bounds of three terms."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from pipeload import _bench_worker, bench, cli
from tests.fake_device import FakeDevice, lend
from tests.test_device import plan_for, smallest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import TinyCheckpoint


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """The one that `--device fake` names."""
    yield from lend(monkeypatch)


def test_plan_on_a_device(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """Both limits, the link's bytes and rate; as JSON and as a table."""
    folder = tiny("llama")
    limit = smallest(folder)
    words = ["plan", str(folder), "--device", "fake", "--memory-limit", str(limit)]
    words += ["--host-memory-limit", "4GB", "--disk-rate", "1GB"]
    result = CliRunner().invoke(cli.app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    plan = plan_for(folder, memory_limit=limit, host_memory_limit="4GB", disk_rate=1e9)
    assert figures["device"] == "cpu"
    assert figures["host_memory_limit"] == 4_000_000_000
    assert figures["link_bytes_per_pass"] == plan.link_bytes_per_pass
    assert figures["link_bytes_per_second"] == device.rate
    assert figures["hosted_bytes"] == plan.hosted_bytes
    table = CliRunner().invoke(cli.app, words)
    assert "host limit" in table.stdout


def test_a_host_limit_that_is_no_size() -> None:
    """The option is named."""
    result = CliRunner().invoke(cli.app, ["plan", "x", "--host-memory-limit", "much"])
    assert result.exit_code == 2
    assert "--host-memory-limit='much'" in result.output


def sample(**others: Any) -> dict[str, Any]:
    """What a measured process says of a model of 1000 bytes in blocks of 100."""
    return {
        "memory_limit": 700,
        "floor": 100,
        "reserve": 50,
        "held": 250,
        "pinned": 50,
        "blocks": 1000,
        "smallest_unit": 100,
        "needed_per_pass": 1050,
        "bytes_per_pass": 400,
        "device": "cuda:0",
        "host_memory_limit": 2000,
        "host_room": 500,
        "hosted": 300,
        "link_rate": 100.0,
        "seconds": 10.0,
        "disk_rate": 50.0,
        "busy_disk_rate": 50.0,
        "resident_seconds": 1.0,
        "read_rate": 50.0,
        "stall": 0.0,
        "bytes": 400,
        "reads": 4,
        "misses": 0,
        "peak_rss": 1,
        "copied": 700,
        "peak_device": 600,
        "io_mode": "direct",
    } | others


@pytest.mark.parametrize(
    ("others", "least"),
    [
        # 700 - 100 - 50 - 50 are for blocks, less two buffers: 300 stay, 700 go over the link.
        ({}, 8.0),  # of these 500 - 200 are in host memory: 400 come from disk
        ({"host_room": 0}, 14.0),  # then all 700 do
        ({"host_room": 2000}, 7.0),  # none does: the link
        ({"disk_rate": 1e6, "link_rate": 10.0}, 70.0),
        ({"resident_seconds": 20.0}, 20.0),
    ],
)
def test_the_bound_has_three_terms(others: dict[str, Any], least: float) -> None:
    """T* = max(disk bytes / B, link bytes / L, C)."""
    row = bench._row([sample(**others)])
    assert row.least_seconds == pytest.approx(least)
    assert row.rho == pytest.approx(least / 10.0)


def test_one_process_measures_all_limits(
    tiny: TinyCheckpoint,
    device: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each load drops the model before, whose limit would be in the way."""
    monkeypatch.setattr(_bench_worker, "open_device", lambda _name: device)
    folder = tiny("llama")
    # Where the fake is, the worker's own process looks for no other.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    limits = [plan_for(folder, memory_limit=1 << 30).smallest_limit + more for more in (0, 100_000)]
    lines = [{"load": limit, "host": "4GB"} for limit in limits] + [{"load": 1 << 50, "host": "-"}]
    commands = [json.dumps(each) for line in lines for each in (line, {"decode": 2})]
    monkeypatch.setattr("sys.stdin", commands)
    _bench_worker.main([str(folder), "4", "2", "auto", "fake"])
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["memory_limit"] for answer in answers[::2]] == [*limits, 1 << 50]
    assert [answer["tokens"] for answer in answers[1::2]] == [2, 2, 2]
    assert answers[1]["copied"] > answers[5]["copied"] == 0


def test_progress_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Where somebody listens."""
    told: list[str] = []
    progress = bench._Progress(told.append, 2)
    for seconds in (0.5, 0.25):
        progress.tell({"memory_limit": 10**9, "seconds": seconds})
    bench._Progress(None, 1).tell({})
    assert told == ["1 of 2: 1.00 GB, 0.5 s per token", "2 of 2: 1.00 GB, 0.25 s per token"]
    assert capsys.readouterr().out == ""


def test_the_table_has_the_devices_columns() -> None:
    """Only where a device was measured."""
    row = bench._row([sample()])
    assert "L GB/s" in bench.table([row])
    cpu = {name: v for name, v in sample().items() if name not in {"device", "link_rate"}}
    assert "L GB/s" not in bench.table([bench._row([cpu])])
