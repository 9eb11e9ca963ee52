"""`torchrun` starts a batch again whose rank was killed: it goes on, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.rooms.cli.test_commands import talker as talker  # noqa: PLC0414 - a fixture
from tests.tools.batch_kills import start_ranks

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = 240.0
LINES = 40


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell of POSIX")
def test_a_rank_is_killed(talker: Path, tmp_path: Path) -> None:
    """Each has a part of the file, and a file of its own."""
    with (tmp_path / "requests").open("w") as file:
        for number in range(LINES):
            body = {"prompt": f"Number {number} is", "max_tokens": 9}
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps(line | {"body": body}) + "\n")
    log, options = tmp_path / "log", ("--memory-limit", "2GB", "--at-once", 1)
    child = start_ranks(tmp_path, 2, 3, *options, talker, "requests", log=log)
    try:
        until = time.monotonic() + SECONDS
        results = tmp_path / "results.1"
        while not (results.exists() and results.stat().st_size):
            assert child.poll() is None, log.read_text()
            assert time.monotonic() < until
            time.sleep(0.001)
        os.kill(int((tmp_path / "pid.1").read_text()), signal.SIGKILL)
        kept = results.read_bytes()
        assert child.wait(SECONDS) == 0, log.read_text()
    finally:
        child.kill()
        child.wait()
    assert len((tmp_path / "pid.1").read_text().split()) == 2
    assert 0 < kept.count(b"\n") < LINES // 2
    found = []
    for rank in range(2):
        lines = (tmp_path / f"results.{rank}").read_bytes().splitlines(keepends=True)
        assert all(line.endswith(b"\n") for line in lines)
        found += [json.loads(line)["id"] for line in lines]
    assert sorted(found) == sorted(f"batch_req_{number}" for number in range(1, LINES + 1))
