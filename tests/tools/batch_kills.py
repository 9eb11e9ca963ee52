#!/usr/bin/env python3
"""Kills `pipeload batch` at random moments until it is done: no result is lost, doubled or torn.

    python -m tests.tools.batch_kills MODEL --requests 50 --most-kills 100

MODEL is a folder with a tokenizer. Each kill is a SIGKILL after a result, or in the middle of one.
Ends with 1 if the results are not one whole line for each request, or differ from those of a run
that nobody kills.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAIT_SECONDS = 300.0


def kill_once(model: Path, files: tuple[Path, Path], chance: random.Random, *options: str) -> bool:
    """Run it, and kill it once it has written something; whether that came before its end."""
    process, size = start(model, files, *options), _size(files[1])
    deadline = time.monotonic() + WAIT_SECONDS
    while process.poll() is None and _size(files[1]) == size:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(chance.random() * 0.05)
    process.send_signal(signal.SIGKILL)
    return process.wait(WAIT_SECONDS) != 0


def check_results(files: tuple[Path, Path], *, wanted: int) -> None:
    """One whole line for each of so many requests."""
    lines = files[1].read_bytes().splitlines(keepends=True)
    assert all(line.endswith(b"\n") for line in lines)
    found = sorted(int(json.loads(line)["id"].removeprefix("batch_req_")) for line in lines)
    assert found == list(range(1, wanted + 1)), found


def start(model: Path, files: tuple[Path, Path], *options: str) -> subprocess.Popen[bytes]:
    """Run it in a process of its own."""
    command = [sys.executable, "-c", "import pipeload.cli.commands as c; c.main()"]
    return subprocess.Popen([*command, "batch", str(model), *map(str, files), "--quiet", *options])


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _answers(file: Path) -> dict[str, object]:
    found = (json.loads(line) for line in file.read_text().splitlines())
    return {one["custom_id"]: one["response"]["body"]["choices"] for one in found}


def main() -> int:
    """Kill it. Returns 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--most-kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        requests = Path(folder) / "requests.jsonl"
        with requests.open("w") as file:
            for number in range(given.requests):
                body = {"prompt": f"Number {number} is", "max_tokens": 2 + number % 7}
                if number % 2:
                    body["seed"] = number
                line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions"}
                file.write(json.dumps(line | {"body": body}) + "\n")
        killed, whole = (requests, Path(folder) / "killed"), (requests, Path(folder) / "whole")
        chance, kills = random.Random(given.seed), 0
        while kills < given.most_kills and kill_once(given.model, killed, chance):
            kills += 1
        for files in (killed, whole):
            assert start(given.model, files).wait(WAIT_SECONDS) == 0
        check_results(killed, wanted=given.requests)
        same = _answers(killed[1]) == _answers(whole[1])
        print(f"{kills} kills, {given.requests} results, {'equal' if same else 'NOT EQUAL'}")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
