#!/usr/bin/env python3
"""Ranks that are killed, stopped or cut off at random moments: the others name them, and go on.

    python -m tests.tools.ring_kills --kills 100
    python -m tests.tools.ring_kills --kills 10 --ways cut

Three ranks, forked from this process, answer with a tiny random model until one is killed
(SIGKILL), stopped (SIGSTOP) or its network is taken down (`cut`, which needs root: each rank then
has a network of its own). Each of the others must raise one GroupError with its rank, within two
seconds or within the patience and two, and answer again as a group of two; after a kill, no thread
may be left by then. What waits for a rank that hangs, ends with its connection. Ends with 1 if not.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    os.environ |= {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}

import torch

import pipeload
from tests.support import known_models
from tests.support.measuring import steady
from tests.support.models import save_random
from tests.support.ranks import Ranks, free_port
from tests.tools.ring_speed import networks

if TYPE_CHECKING:
    from collections.abc import Sequence

PATIENCE = 3.0
WAYS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "cut": None}
SECONDS = 120.0
_FLOOR_BYTES = 1_000_000_000
"""What a process is said to hold: measuring it takes as long as loading."""
_NEW_NETWORK = 0x40000000
"""The number that `setns` has for networks."""


def attempt(folder: Path, way: str, gone: int, wait: float) -> list[str]:
    """What was wrong with one; nothing if all was as it should be."""
    left = [rank for rank in range(3) if rank != gone]
    with contextlib.ExitStack() as stack:
        there = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        apart = stack.enter_context(networks(3)) if way == "cut" else []
        names = [before[-1] for before in apart]
        second = free_port()

        def act(rank: int) -> dict[str, Any]:
            if names:
                _enter(names[rank])
            return _survive(folder, rank, left, second, there)

        ranks = Ranks(3, act, seconds=SECONDS)
        stack.callback(ranks.end)
        deadline = time.monotonic() + SECONDS
        while len(list(there.iterdir())) < len(ranks.pids):
            if time.monotonic() > deadline:
                return ["they never answered"]
            time.sleep(0.01)
        time.sleep(wait)
        began = time.time()
        if (number := WAYS[way]) is not None:
            os.kill(ranks.pids[gone], number)
        else:
            subprocess.run([*apart[gone], "ip", "link", "set", "e0", "down"], check=True)
        most = 2.0 if way == "kill" else PATIENCE + 2.0
        return [
            f"rank {rank}: {wrong}"
            for rank in left
            for wrong in _wrong(ranks.result(rank), gone, began, most, threads=way == "kill")
        ]


def _survive(
    folder: Path, rank: int, left: Sequence[int], second: int, there: Path
) -> dict[str, Any]:
    """Answer until a rank is lost; then as a group of those that are `left`, at another port."""
    os.environ["PIPELOAD_RANK_PATIENCE"] = str(PATIENCE)
    model = _load(folder, "auto")
    wanted = _answer(model, 6)
    (there / str(rank)).touch()
    try:
        while True:
            _answer(model, 40)
    except pipeload.GroupError as error:
        told, when = [error.rank, error.host, str(error)], time.time()
    model.pipeload.remove()
    place: dict[str, object] = {
        "RANK": left.index(rank),
        "WORLD_SIZE": len(left),
        "MASTER_PORT": second,
    }
    if "GLOO_SOCKET_IFNAME" in os.environ:
        place["MASTER_ADDR"] = _address(left[0])
    os.environ |= {name: str(value) for name, value in place.items()}
    model = _load(folder, len(left))
    again = _answer(model, 6) == wanted
    model.pipeload.remove()
    threads = sorted(t.name for t in threading.enumerate() if t.name.startswith("pipeload"))
    return {"told": told, "when": when, "again": again, "threads": threads}


def _load(folder: Path, ranks: int | str | None) -> Any:
    return pipeload.from_pretrained(folder, memory_limit="2GB", dtype="auto", ranks=ranks)


def _answer(model: Any, tokens: int) -> list[int]:
    ids = torch.arange(3, 20)[None]
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found: list[int] = model.generate(ids, max_new_tokens=tokens, **options)[0].tolist()
    return found


def _enter(network: str) -> None:
    """Have this process be in one of `networks`, whose first rank is the master."""
    system = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{network}").open("rb") as file:
        if system.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {network}")
    os.environ |= {"MASTER_ADDR": _address(0), "GLOO_SOCKET_IFNAME": "e0"}


def _address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def _wrong(told: Any, gone: int, began: float, most: float, *, threads: bool) -> list[str]:
    if not isinstance(told, dict):  # an error, or the number of a signal
        return ["it hangs" if told == signal.SIGALRM else f"it ended with {told}"]
    found = []
    if told["told"][0] != gone or not told["told"][1]:
        found.append(f"it named {told['told']}")
    if told["when"] - began > most:
        found.append(f"it took {told['when'] - began:.1f} s")
    if not told["again"]:
        found.append("it answered otherwise afterwards")
    if threads and told["threads"]:
        found.append(f"it left {told['threads']}")
    return found


def main() -> int:
    """Kill as often as asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["kill", "stop"])
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    chance, failed = random.Random(asked.seed), 0
    torch.set_num_threads(1)  # forked ranks have no others
    with tempfile.TemporaryDirectory() as folder, steady(_FLOOR_BYTES):
        save_random("llama", Path(folder), "fp32", seed=8)
        known_models.remember()  # and forked ranks know what this process knows
        model = _load(Path(folder), None)
        _answer(model, 2)
        model.pipeload.remove()
        for number in range(asked.kills):
            way = asked.ways[number % len(asked.ways)]
            gone, wait, began = chance.randrange(3), chance.random(), time.monotonic()
            wrong = attempt(Path(folder), way, gone, wait)
            failed += bool(wrong)
            said = f"{'; '.join(wrong) or 'ok'} ({time.monotonic() - began:.0f} s)"
            print(f"{number + 1}: {way} rank {gone} after {wait:.2f} s: {said}", flush=True)
    print(f"{asked.kills} times, {failed} not as it should be")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
