#!/usr/bin/env python3
"""Ranks that are killed, stopped or cut off at random moments: the others name them, and go on.

    python -m tests.tools.ring_kills --kills 100
    python -m tests.tools.ring_kills --kills 10 --ways cut

Three ranks answer with a tiny random model until one is killed (SIGKILL), stopped (SIGSTOP) or its
network is taken down (`cut`, which needs root: each rank then has a network of its own). Each of
the others must raise one GroupError with its rank, within two seconds or within the patience and
two, and answer again as a group of two; after a kill, no thread may be left by then. What waits for
a rank that hangs, ends with its connection. Ends with 1 if not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.models import save_random
from tests.support.ranks import free_port
from tests.tools.ring_speed import networks

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 3.0
WAYS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "cut": None}

_RANK = """
import json, os, sys, threading, time
import torch
torch.set_num_threads(1)
import pipeload
folder, gone, port, address = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
rank = int(os.environ["RANK"])
ids = torch.arange(3, 20)[None]
def answer(model, tokens):
    return model.generate(
        ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0].tolist()
model = pipeload.from_pretrained(folder, memory_limit="2GB", dtype="auto", ranks="auto")
wanted = answer(model, 6)
print("ready", flush=True)
try:
    while True:
        answer(model, 40)
except pipeload.GroupError as error:
    told, when = [error.rank, error.host, str(error)], time.time()
model.pipeload.remove()
left = [n for n in range(3) if n != gone]
os.environ.update(RANK=str(left.index(rank)), WORLD_SIZE="2", MASTER_PORT=port, MASTER_ADDR=address)
model = pipeload.from_pretrained(folder, memory_limit="2GB", dtype="auto", ranks=2)
again = answer(model, 6) == wanted
model.pipeload.remove()
names = sorted(t.name for t in threading.enumerate() if t.name.startswith("pipeload"))
print(json.dumps({"told": told, "when": when, "again": again, "threads": names}), flush=True)
os._exit(0)
"""


def attempt(folder: Path, way: str, gone: int, wait: float) -> list[str]:
    """What was wrong with one; nothing if all was as it should be."""
    port, other = str(free_port()), str(free_port())
    apart = way == "cut"
    left = [rank for rank in range(3) if rank != gone]
    with contextlib.ExitStack() as stack:
        before = stack.enter_context(networks(3)) if apart else [[]] * 3
        first = f"10.77.0.{left[0] + 1}" if apart else "127.0.0.1"
        children = [
            _start(folder, rank, [*before[rank]], (str(gone), other, first), port, apart=apart)
            for rank in range(3)
        ]
        stack.callback(_end, children)
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline().strip() == "ready"
        time.sleep(wait)
        began = time.time()
        if (number := WAYS[way]) is not None:
            children[gone].send_signal(number)
        else:
            subprocess.run([*before[gone], "ip", "link", "set", "e0", "down"], check=True)
        most = 2.0 if way == "kill" else PATIENCE + 2.0
        return [
            f"rank {rank}: {wrong}"
            for rank in left
            for wrong in _wrong(children[rank], gone, began, most, threads=way == "kill")
        ]


def _start(
    folder: Path, rank: int, before: Sequence[str], words: Sequence[str], port: str, *, apart: bool
) -> subprocess.Popen[str]:
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "10.77.0.1" if apart else "127.0.0.1",
        "MASTER_PORT": port,
        "PIPELOAD_RANK_PATIENCE": str(PATIENCE),
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TORCH_CPP_LOG_LEVEL": "FATAL",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'hooks'}",
        **({"GLOO_SOCKET_IFNAME": "e0"} if apart else {}),
    }
    command = [*before, sys.executable, "-W", "ignore", "-c", _RANK, str(folder), *words]
    return subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _wrong(
    child: subprocess.Popen[str], gone: int, began: float, most: float, *, threads: bool
) -> list[str]:
    try:
        output, _ = child.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        return ["it hangs"]
    if child.returncode or not output:
        return [f"it ended with {child.returncode}"]
    told: dict[str, Any] = json.loads(output.splitlines()[-1])
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


def _end(children: Sequence[subprocess.Popen[str]]) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
            child.wait()


def main() -> int:
    """Kill as often as asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["kill", "stop"])
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    chance, failed = random.Random(asked.seed), 0
    with tempfile.TemporaryDirectory() as folder:
        save_random("llama", Path(folder), "fp32", seed=8)
        for number in range(asked.kills):
            way = asked.ways[number % len(asked.ways)]
            gone, wait = chance.randrange(3), chance.random()
            wrong = attempt(Path(folder), way, gone, wait)
            failed += bool(wrong)
            said = "; ".join(wrong) or "ok"
            print(f"{number + 1}: {way} rank {gone} after {wait:.2f} s: {said}", flush=True)
    print(f"{asked.kills} times, {failed} not as it should be")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
