#!/usr/bin/env python3
"""How much faster several machines are: ranks on this one, each with its own disk rate and limit.

    python -m tests.tools.ring_speed MODEL --limit 900MB --rate 400MB

Root alone, with control groups of version 1: each rank is in a memory group at its limit and reads
at its rate at most. With --namespaces each has a network of its own, joined by a bridge. Prints a
line for each number of ranks; ends with 1 where tokens differ, or a rank went over its limit.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeload._sizes import format_size, parse_size
from tests.support.cgroups import drop_caches, memory_cgroup
from tests.support.ranks import free_port
from tests.tools.many_at_once import BLKIO

if TYPE_CHECKING:
    from collections.abc import Iterator

_NUMBERS = itertools.count()
_RANK = """
import json, logging, sys, time
import torch
torch.set_num_threads(1)
import transformers
import pipeload
from tests.support.cgroups import peak_rss_bytes

folder, limit, new = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
logging.basicConfig(level=logging.INFO, format="%(message)s")
stamps = []
class Tick(transformers.StoppingCriteria):
    def __call__(self, ids, scores, **_options):
        stamps.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)
model = pipeload.from_pretrained(
    folder, memory_limit=limit, dtype="auto", io_mode="direct", ranks="auto"
)
ids = torch.arange(20, 36)[None]
options = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
model.generate(ids, max_new_tokens=2, **options)
out = model.generate(ids, max_new_tokens=new, stopping_criteria=[Tick()], **options)
steps = sorted(b - a for a, b in zip(stamps, stamps[1:]))
print(json.dumps({
    "seconds": steps[len(steps) // 2],
    "read": model.pipeload.plan.bytes_per_pass,
    "units": len(model.pipeload.plan.units),
    "peak": peak_rss_bytes(),
    "tokens": out[0, 16:].tolist(),
}))
"""


@contextlib.contextmanager
def disk_group(folder: Path, rate: int, name: str) -> Iterator[Path]:
    """A group whose processes read at most `rate` bytes per second from the folder's disk."""
    group = BLKIO / f"pipeload-{os.getpid()}-{name}"
    group.mkdir()
    device = folder.resolve().stat().st_dev
    limit = f"{os.major(device)}:{os.minor(device)} {rate}"
    (group / "blkio.throttle.read_bps_device").write_text(limit)
    try:
        yield group
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """The kernel tells nobody when the last process has gone."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and group.exists():
        with contextlib.suppress(OSError):
            group.rmdir()
        time.sleep(0.01)


@contextlib.contextmanager
def networks(count: int) -> Iterator[list[list[str]]]:
    """A namespace for each rank, on one bridge: what to put before a command in it."""
    # Names of at most 15 letters; those of before go only after a while.
    stamp = f"{os.getpid() % 10000}x{next(_NUMBERS)}"
    names, bridge = [f"plr{stamp}n{rank}" for rank in range(count)], f"plb{stamp}"
    with contextlib.ExitStack() as stack:
        stack.callback(_ip, "link", "del", bridge, check=False)
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for rank, name in enumerate(names):
            stack.callback(_ip, "netns", "del", name, check=False)
            cable = f"plv{stamp}n{rank}"
            _ip("netns", "add", name)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "e0", "netns", name)
            _ip("link", "set", cable, "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "e0")
            for link in ("e0", "lo"):
                _ip("-n", name, "link", "set", link, "up")
        yield [["ip", "netns", "exec", name] for name in names]


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=not check)


def measure(
    folder: Path,
    limits: list[int],
    rates: list[int],
    *words: object,
    apart: bool,
    script: str = _RANK,
) -> list[dict[str, Any]]:
    """What each rank says of itself: `script` is given the folder, its limit, and the `words`."""
    root = Path(__file__).resolve().parents[2]
    count, port = len(limits), str(free_port())
    with contextlib.ExitStack() as stack:
        before = stack.enter_context(networks(count)) if apart else [[] for _ in limits]
        children = []
        for rank, (limit, rate) in enumerate(zip(limits, rates, strict=True)):
            memory = stack.enter_context(memory_cgroup(limit))
            disk = stack.enter_context(disk_group(folder, rate, str(rank)))
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "MASTER_PORT": port,
                "MASTER_ADDR": "10.77.0.1" if apart else "127.0.0.1",
                **({"GLOO_SOCKET_IFNAME": "e0"} if apart else {}),
                "OMP_WAIT_POLICY": "passive",
                "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": f"{root}:{root / 'hooks'}",
            }
            join = ["/bin/sh", "-c", f'echo $$ > {disk}/cgroup.procs; exec "$@"', "sh"]
            rank_command = [sys.executable, "-W", "ignore", "-c", script, str(folder), str(limit)]
            command = [*join, *before[rank], *rank_command, *map(str, words)]
            children.append(
                memory.popen(command, env=environment, cwd=root, stdout=subprocess.PIPE)
            )
        outputs = [child.communicate(timeout=1800)[0] for child in children]
        if any(child.returncode for child in children):
            raise SystemExit(f"ended with {[child.returncode for child in children]}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main() -> int:
    """Print a line for one rank, two, and so on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--limit", nargs="+", default=["900MB"], help="of each rank, or of all")
    parser.add_argument("--rate", nargs="+", default=["400MB"], help="of each rank, or of all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--namespaces", action="store_true")
    asked = parser.parse_args()
    limits = [parse_size(text, name="--limit") for text in asked.limit]
    rates = [parse_size(text, name="--rate") for text in asked.rate]
    first: dict[str, Any] = {}
    bad = False
    for count in asked.ranks:
        drop_caches(asked.model)
        mine = [limits[rank % len(limits)] for rank in range(count)]
        disks = [rates[rank % len(rates)] for rank in range(count)]
        found = measure(asked.model, mine, disks, asked.new_tokens, apart=asked.namespaces)
        slowest = max(one["read"] / rate for one, rate in zip(found, disks, strict=True))
        seconds = max(one["seconds"] for one in found)
        first = first or found[0]
        over = any(one["peak"] > limit for one, limit in zip(found, mine, strict=True))
        bad |= over or any(one["tokens"] != first["tokens"] for one in found)
        together = sum(one["read"] / rate for one, rate in zip(found, disks, strict=True))
        read = ", ".join(format_size(one["read"]) for one in found)
        peak = ", ".join(format_size(one["peak"]) for one in found)
        told = [
            f"{count} rank(s): {seconds:.3f} s/token, {first['seconds'] / seconds:.2f} x one",
            f"{together / seconds:.2f} x if they read one after the other",
            f"read {read}; disks alone {slowest:.3f} s; peak {peak}",
            *(["OVER THE LIMIT"] if over else []),
        ]
        print(", ".join(told), flush=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
