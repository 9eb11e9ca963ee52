"""`torchrun` starts a batch again whose rank was killed: it goes on, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.rooms.cli.test_commands import talker as talker  # noqa: PLC0414 - a fixture
from tests.support.commands import ROOT

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = 240.0
LINES = 40
# torchrun fills in names of its own, and halves "$$".
RANK = """
echo $$$$ >> pid.$RANK
exec "$@" results.$RANK --shard $((RANK + 1))/$WORLD_SIZE --memory-limit 2GB --at-once 1 --quiet
"""


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell of POSIX")
def test_a_rank_is_killed(talker: Path, tmp_path: Path) -> None:
    """Each has a part of the file, and a file of its own."""
    with (tmp_path / "requests").open("w") as file:
        for number in range(LINES):
            body = {"prompt": f"Number {number} is", "max_tokens": 9}
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps(line | {"body": body}) + "\n")
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    start += ["--max-restarts", "3", "--no-python", "bash", "-c", RANK, "rank"]
    batch = ["-m", "pipeload", "batch", str(talker), "requests"]
    with (tmp_path / "log").open("w") as log:
        child = subprocess.Popen(
            [sys.executable, *start, sys.executable, *batch],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'hooks'}"},
            stdout=log,
            stderr=log,
        )
        try:
            until = time.monotonic() + SECONDS
            results = tmp_path / "results.1"
            while not (results.exists() and results.stat().st_size):
                assert child.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < until
                time.sleep(0.001)
            os.kill(int((tmp_path / "pid.1").read_text()), signal.SIGKILL)
            kept = results.read_bytes()
            assert child.wait(SECONDS) == 0, (tmp_path / "log").read_text()
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
