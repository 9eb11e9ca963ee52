"""The command line and the benchmark on a device: options handed on, bounds of three terms."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from pipeload import bench, cli
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


def test_the_table_has_the_devices_columns() -> None:
    """Only where a device was measured."""
    row = bench._row([sample()])
    assert "L GB/s" in bench.table([row])
    cpu = {name: v for name, v in sample().items() if name not in {"device", "link_rate"}}
    assert "L GB/s" not in bench.table([bench._row([cpu])])
