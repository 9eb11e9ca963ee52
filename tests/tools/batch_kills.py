#!/usr/bin/env python3
"""Kills `pipeload batch` at random moments until it is done: no result is lost, doubled or torn.

    python -m tests.tools.batch_kills MODEL --requests 50 --most-kills 100
    python -m tests.tools.batch_kills MODEL --requests 50 --most-kills 20 --ranks 2

MODEL is a folder with a tokenizer. Each kill is a SIGKILL after a result, or in the middle of one.
With `--ranks`, `torchrun --max-restarts` has each compute a part, and starts all again when one is
killed. Ends with 1 if the results are not one whole line for each request, or differ from those of
a run that nobody kills.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAIT_SECONDS = 300.0
ROOT = Path(__file__).resolve().parents[2]
# torchrun fills in names of its own, and halves "$$".
_RANK = """
echo $$$$ >> pid.$RANK
exec "$@" results.$RANK --shard $((RANK + 1))/$WORLD_SIZE --quiet
"""


def start_ranks(
    folder: Path, count: int, restarts: int, *words: object, log: Path
) -> subprocess.Popen[bytes]:
    """Have torchrun start `pipeload batch` with these words on so many ranks, in `folder`.

    Each writes its results to `results.RANK`, and appends its number to `pid.RANK` as it starts.
    """
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    run += ["--max-restarts", str(restarts), "--monitor-interval", "0.1"]
    run += ["--no-python", "bash", "-c", _RANK, "rank", sys.executable, "-m", "pipeload", "batch"]
    with log.open("w") as file:
        return subprocess.Popen(
            [sys.executable, *run, *map(str, words)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'hooks'}"},
            stdout=file,
            stderr=file,
        )


def kill_ranks(model: Path, folder: Path, count: int, most: int, chance: random.Random) -> int:
    """Run it on ranks, and kill one after a result until it is done; how often that was."""
    log = folder / "log"
    process = start_ranks(folder, count, most, model, "requests.jsonl", log=log)
    results = [folder / f"results.{rank}" for rank in range(count)]
    kills = 0
    try:
        while kills < most:
            size = sum(map(_size, results))
            deadline = time.monotonic() + WAIT_SECONDS
            while process.poll() is None and sum(map(_size, results)) == size:
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.001)
            time.sleep(chance.random() * 0.05)
            if process.poll() is not None:
                break
            try:
                os.kill(int(chance.choice(_started(folder, count))[-1]), signal.SIGKILL)
            except ProcessLookupError:  # its part is done
                continue
            before = kills + 1  # starts of each
            while process.poll() is None and min(map(len, _started(folder, count))) <= before:
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.01)
            # Else it had ended, and nobody has waited for it yet.
            kills += min(map(len, _started(folder, count))) > before
        assert process.wait(WAIT_SECONDS) == 0, log.read_text()
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)
    with (folder / "killed").open("wb") as file:
        file.writelines(part.read_bytes() for part in results)
    return kills


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


def _started(folder: Path, count: int) -> list[list[str]]:
    """The numbers of each rank's processes, the last one that of now."""
    files = [folder / f"pid.{rank}" for rank in range(count)]
    return [file.read_text().split() if file.exists() else [] for file in files]


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
    parser.add_argument("--ranks", type=int, default=1)
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
        model, most = given.model.resolve(), given.most_kills
        if given.ranks > 1:
            os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it
            kills = kill_ranks(model, Path(folder), given.ranks, most, chance)
        else:
            while kills < most and kill_once(model, killed, chance):
                kills += 1
            assert start(model, killed).wait(WAIT_SECONDS) == 0
        assert start(model, whole).wait(WAIT_SECONDS) == 0
        check_results(killed, wanted=given.requests)
        same = _answers(killed[1]) == _answers(whole[1])
        print(f"{kills} kills, {given.requests} results, {'equal' if same else 'NOT EQUAL'}")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
