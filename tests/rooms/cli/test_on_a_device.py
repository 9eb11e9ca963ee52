"""The command line and the benchmark on a device: options handed on, bounds of three terms."""

from __future__ import annotations

import gc
import json
import math
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import typer
from typer.testing import CliRunner

import pipeload
from pipeload.bench import measure as bench_measure
from pipeload.bench import worker
from pipeload.bench.report import table
from pipeload.cli import commands as cli_commands
from pipeload.cli import evaluate
from pipeload.cli import plan as cli_plan
from pipeload.cli.exit_status import reported
from pipeload.evaluate.perplexity import Losses, measure
from pipeload.evaluate.text_windows import slide
from tests.promises.exact.test_device import freshly_allocated, plan_for, smallest
from tests.rooms.evaluate.test_perplexity import plain_nats
from tests.rooms.evaluate.test_perplexity import text as text  # noqa: PLC0414 - a fixture
from tests.support.commands import WORDS, save_tokenizer
from tests.support.commands import loud_libraries as loud_libraries  # noqa: PLC0414 - a fixture
from tests.support.fake_device import FakeDevice, lend
from tests.support.models import save_random, tiny_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

# What is typed but for the model, which stands behind the first word.
COMMANDS = [["run", "w3 w4"], ["plan"], ["bench"], ["eval", "--text", "TEXT"], ["demo"]]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """The one that `--device fake` names."""
    yield from lend(monkeypatch)


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random fp32 model with a tokenizer."""
    folder = tmp_path_factory.mktemp("speaker")
    save_random("llama", folder, "fp32", seed=3)
    save_tokenizer(folder)
    (folder / "TEXT").write_text(" ".join(WORDS))
    return folder


def invoke(words: list[str], model: Path, monkeypatch: pytest.MonkeyPatch, *options: object) -> Any:
    """Run one of the commands with the model, in its folder; the demo takes it for its own."""
    monkeypatch.setattr(cli_plan, "make_demo_model", lambda _folder: str(model))
    monkeypatch.chdir(model)
    gc.collect()  # a command has a process to itself
    named = [] if words[0] == "demo" else [str(model)]
    return CliRunner().invoke(cli_commands.app, [words[0], *named, *words[1:], *map(str, options)])


def test_plan_on_a_device(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """Both limits, the link's bytes and rate; as JSON and as a table."""
    folder = tiny("llama")
    limit = smallest(folder)
    words = ["plan", str(folder), "--device", "fake", "--memory-limit", str(limit)]
    words += ["--host-memory-limit", "4GB", "--disk-rate", "1GB"]
    result = CliRunner().invoke(cli_commands.app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    plan = plan_for(folder, memory_limit=limit, host_memory_limit="4GB", disk_rate=1e9)
    assert figures["device"] == "cpu"
    assert figures["host_memory_limit"] == 4_000_000_000
    assert figures["link_bytes_per_pass"] == plan.link_bytes_per_pass
    assert figures["link_bytes_per_second"] == device.rate
    assert figures["hosted_bytes"] == plan.hosted_bytes
    table = CliRunner().invoke(cli_commands.app, words)
    assert "host limit" in table.stdout


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_host_limit_that_is_no_size(words: list[str]) -> None:
    """The option is named."""
    result = CliRunner().invoke(cli_commands.app, [*words, "--host-memory-limit", "much"])
    assert result.exit_code == 2
    assert "--host-memory-limit='much'" in result.output


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host-memory-limit", "4GB"], "host_memory_limit='4GB' is for models on another device"),
        (["--device", "toaster"], "device='toaster'"),
    ],
)
def test_what_is_refused(
    words: list[str],
    options: list[str],
    message: str,
    speaker: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By every command alike, in one line."""
    refused(message, invoke(words, speaker, monkeypatch, *options))


@pytest.mark.parametrize(
    "words", [words for words in COMMANDS if words[0] != "bench"], ids=lambda words: words[0]
)
def test_limits_that_are_too_small(
    words: list[str], speaker: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each says which one it is. (What bench measures runs in another process.)"""
    options = ("--device", "fake", "--memory-limit")
    result = invoke(words, speaker, monkeypatch, *options, "1GB", "--host-memory-limit", "1MB")
    refused("host_memory_limit=1000000 bytes", result)
    result = invoke(words, speaker, monkeypatch, *options, "1MB")
    refused("memory_limit=1000000 bytes (1.00 MB) of cpu", result)


def refused(message: str, result: Any) -> None:
    """The last line on stderr, nothing on stdout, exit status 1."""
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


# -- eval ------------------------------------------------------------------------------------------


def perplexity(folder: Path, text: Path, *options: object) -> dict[str, Any]:
    """What `eval --device fake --json` says of one model."""
    words = ["eval", folder, "--text", text, "--device", "fake", "--json", *options]
    result = CliRunner().invoke(cli_commands.app, list(map(str, words)))
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["models"]
    return cast("dict[str, Any]", row)


def test_eval_on_a_device(speaker: Path, text: Path, device: FakeDevice) -> None:
    """The plain model's perplexity, bit for bit, at the smallest limit; both limits and peaks."""
    limit = smallest(speaker, tokens=40)
    options = ("--memory-limit", limit, "--host-memory-limit", "4GB", "--window", 16)
    row = perplexity(speaker, text, *options, "--batch", 2)
    ids = torch.tensor([int(word[1:]) for word in WORDS])
    plain = freshly_allocated(speaker)
    handle: Any = SimpleNamespace()
    windows = slide(len(ids), window=16, stride=8)
    wanted = measure(plain, handle, ids, windows, batch=2, pass_begins=lambda *_: None)
    assert row["perplexity"] == wanted.perplexity
    nats, count = plain_nats(plain, ids, 16, 8)
    assert row["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-6)
    assert row["device"] == "cpu"
    assert (row["memory_limit"], row["host_memory_limit"]) == (limit, 4_000_000_000)
    assert 0 < row["peak_device_bytes"] == device.peak <= limit
    # All blocks are in host memory: copying is what several windows in a pass save.
    assert perplexity(speaker, text, *options)["windows_per_pass"] > 1
    row = perplexity(speaker, text, "--memory-limit", "1GB", "--window", 16)
    assert row["windows_per_pass"] == 1  # where everything is on the device nothing is saved


def test_eval_plans_for_the_device_it_computes_on(
    speaker: Path, text: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantised weights take another form, and other kernels, than on the processor."""
    asked: list[object] = []
    for name in ("peek", "needs_of"):
        original = getattr(evaluate, name)

        def note(first: Any, where: Any = None, original: Any = original) -> Any:
            asked.append(where)
            return original(first, where)

        monkeypatch.setattr(evaluate, name, note)
    perplexity(speaker, text, "--memory-limit", "1GB", "--window", 16)
    assert asked == [device, device]


@pytest.mark.slow
def test_models_are_measured_at_the_same_limits(
    speaker: Path, text: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever "auto" means by then: somebody else may have taken memory of the device."""

    def measure_and_take(*args: Any, **options: Any) -> Losses:
        losses = measure(*args, **options)
        device.nbytes -= 1 << 30
        return losses

    monkeypatch.setattr("pipeload.cli.evaluate.measure", measure_and_take)
    words = ["eval", speaker, speaker, "--text", text, "--device", "fake"]
    result = CliRunner().invoke(cli_commands.app, [*map(str, words), "--json"])
    one, other = json.loads(result.stdout)["models"]
    for name in ("memory_limit", "host_memory_limit", "perplexity", "device"):
        assert one[name] == other[name]
    result = CliRunner().invoke(cli_commands.app, list(map(str, words)))
    assert result.stderr.count(" of cpu, ") == result.stderr.count(" of host memory, ") == 2


def test_what_no_device_takes_is_refused_first(
    speaker: Path, text: Path, tmp_path: Path, device: FakeDevice
) -> None:
    """Before the model in front of it is measured."""
    made = pipeload.quantize(speaker, tmp_path / "int8", method="int8")
    words = ["eval", speaker, made, "--text", text, "--device", "fake", "--quiet"]
    result = CliRunner().invoke(cli_commands.app, list(map(str, words)))
    refused("quantised by 'pipeload', which is streamed to the CPU alone", result)


# -- demo ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_demo_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It picks a limit that holds a part, answers as the CPU does, and says where it ran."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
    config = tiny_config("llama", num_key_value_heads=4, num_hidden_layers=6, **sizes)
    model = save_random(config, tmp_path, "bf16", seed=3)
    save_tokenizer(model)
    on_the_cpu = json.loads(invoke(["demo"], model, monkeypatch, "--json").stdout)
    assert (on_the_cpu["device"], on_the_cpu["host_memory_limit"]) == ("cpu", 0)
    with contextmanager(lend)(monkeypatch) as device:
        options = ("--device", "fake", "--host-memory-limit", "4GB", "--json")
        figures = json.loads(invoke(["demo"], model, monkeypatch, *options).stdout)
        assert 0 < figures["peak_device_bytes"] == device.peak <= figures["memory_limit"]
    assert figures["text"] == on_the_cpu["text"]
    assert (figures["device"], figures["host_memory_limit"]) == ("cpu", 4_000_000_000)
    assert figures["copied_bytes"] > figures["passes"] * 1_000_000


def test_demo_shows_where_it_runs(
    speaker: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device and both limits, before the answer and after."""
    limits = ("--memory-limit", smallest(speaker), "--host-memory-limit", "4GB")
    shown = invoke(["demo"], speaker, monkeypatch, "--device", "fake", *limits).stderr
    assert " of cpu, 4.00 GB of host memory: " in shown
    assert "% of the layers' weights stay on the device" in shown
    rows = {line[:16].strip(): line[16:] for line in shown.splitlines()}
    assert (rows["computed on"], rows["host limit"]) == ("cpu", "4.00 GB")
    assert {"device limit", "peak on cpu", "copied to cpu"} < set(rows)
    assert "memory limit" not in rows


def test_demo_shows_one_limit_on_the_cpu(speaker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is only one memory."""
    shown = invoke(["demo"], speaker, monkeypatch, "--memory-limit", "20GB").stderr
    rows = {line[:16].strip(): line[16:] for line in shown.splitlines()}
    assert (rows["computed on"], rows["memory limit"]) == ("cpu", "20.0 GB")
    assert not {"host limit", "device limit", "copied to cpu"} & set(rows)


# -- bench -----------------------------------------------------------------------------------------


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
        "expert_cache": 0,
        "expert_bytes": 0,
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
    row = bench_measure._row([sample(**others)])
    assert row.least_seconds == pytest.approx(least)
    assert row.rho == pytest.approx(least / 10.0)


def test_one_process_measures_all_limits(
    tiny: TinyCheckpoint,
    device: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each load drops the model before, whose limit would be in the way."""
    monkeypatch.setattr(worker, "open_device", lambda _name: device)
    folder = tiny("llama")
    # Where the fake is, the worker's own process looks for no other.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    limits = [plan_for(folder, memory_limit=1 << 30).smallest_limit + more for more in (0, 100_000)]
    lines = [{"load": limit, "host": "4GB"} for limit in limits] + [{"load": 1 << 50, "host": "-"}]
    commands = [json.dumps(each) for line in lines for each in (line, {"decode": 2})]
    monkeypatch.setattr("sys.stdin", commands)
    worker.main([str(folder), "4", "2", "auto", "fake"])
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["memory_limit"] for answer in answers[::2]] == [*limits, 1 << 50]
    assert [answer["tokens"] for answer in answers[1::2]] == [2, 2, 2]
    assert answers[1]["copied"] > answers[5]["copied"] == 0


def test_progress_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Where somebody listens."""
    told: list[str] = []
    progress = bench_measure._Progress(told.append, 2)
    for seconds in (0.5, 0.25):
        progress.tell({"memory_limit": 10**9, "seconds": seconds})
    bench_measure._Progress(None, 1).tell({})
    assert told == ["1 of 2: 1.00 GB, 0.5 s per token", "2 of 2: 1.00 GB, 0.25 s per token"]
    assert capsys.readouterr().out == ""


def test_the_table_has_the_devices_columns() -> None:
    """Only where a device was measured."""
    row = bench_measure._row([sample()])
    assert "L GB/s" in table([row])
    cpu = {name: v for name, v in sample().items() if name not in {"device", "link_rate"}}
    assert "L GB/s" not in table([bench_measure._row([cpu])])


@pytest.mark.parametrize("debug", [False, True])
def test_a_device_whose_limit_is_full(debug: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """What the allocator refuses is one line; any other error of torch's is a fault of ours."""
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5 MiB. GPU 0 has less.")
    wanted = torch.OutOfMemoryError if debug else typer.Exit
    with pytest.raises(wanted), reported(debug=debug, quiet=False):
        raise full
    error = capsys.readouterr().err
    assert ("the device's limit is full: CUDA out of memory. Raise --memory" in error) is not debug
    with pytest.raises(RuntimeError, match="other"), reported(debug=debug, quiet=False):
        raise RuntimeError("other")
