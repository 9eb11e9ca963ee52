"""`pipeload batch --ranks`: rank 0 has the files, and a rank that was killed costs no answer."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.promises.exact.test_ranks import one_thread
from tests.support.commands import invoke, start
from tests.support.models import save_random
from tests.support.ranks import free_port
from tests.support.talking import add_letters

if TYPE_CHECKING:
    from pathlib import Path
    from subprocess import Popen

pytestmark = pytest.mark.slow
SECONDS = 120.0
LINES = 12
OPTIONS: list[object] = ["--memory-limit", "4GB", "--at-once", 3]


def write_requests(file: Path) -> None:
    """Greedy and sampled ones, with an end of their own, and one that is no request."""
    ways: list[dict[str, Any]] = [{}, {"temperature": 1.5, "seed": 3}, {"stop": ["e", "a"]}]
    with file.open("w") as lines:
        for number in range(LINES):
            body = {"prompt": "Say " * (number % 4 + 1), "max_tokens": 30, **ways[number % 3]}
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions"}
            lines.write(json.dumps(line | {"body": body if number != 4 else {"n": -1}}) + "\n")


def answers(file: Path) -> dict[str, Any]:
    """What was answered, or refused, by the request's name."""
    found = {}
    for text in file.read_text().splitlines():
        line = json.loads(text)
        assert line["custom_id"] not in found
        body = line["response"]["body"]
        found[line["custom_id"]] = body.get("choices", body.get("error"))
    return found


def test_a_rank_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of those left says so in a line; the same commands go on, with the answers of one."""
    model, lines, results = (tmp_path / name for name in ("model", "lines", "results"))
    save_random("llama", model, "fp32", seed=1)
    add_letters(model)
    write_requests(lines)
    with one_thread():
        assert invoke("batch", model, lines, tmp_path / "alone", *OPTIONS).exit_code == 0
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def both() -> list[Popen[str]]:
        group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        found = []
        for rank in ("0", "1"):
            for name, value in {**group, "RANK": rank}.items():
                monkeypatch.setenv(name, value)
            # Rank 1 needs neither file.
            files = [lines, results] if rank == "0" else ["nowhere", "nothing"]
            found.append(start("batch", model, *files, *OPTIONS, "--ranks", "auto"))
        return found

    first, other = both()
    until = time.monotonic() + SECONDS
    while not (results.exists() and results.stat().st_size):
        assert time.monotonic() < until
        assert first.poll() is None, first.communicate()
        time.sleep(0.005)
    os.kill(other.pid, signal.SIGKILL)
    other.communicate()
    _, errors = first.communicate(timeout=SECONDS)
    kept = answers(results)
    assert first.returncode == 1, errors
    assert "error: rank 1 (" in errors
    assert "is lost" in errors
    assert len(kept) < LINES
    again = both()
    texts = [rank.communicate(timeout=SECONDS) for rank in again]
    assert [rank.returncode for rank in again] == [0, 0], texts
    assert f"{len(kept)} of {LINES} requests are answered already" in texts[0][1]
    wanted = answers(tmp_path / "alone")
    assert len(wanted) == LINES
    assert answers(results) == wanted
    assert not (tmp_path / "nothing").exists()
