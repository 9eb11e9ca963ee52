#!/usr/bin/env python3
"""`pipeload quantize` under a kernel memory cap, killed on the way and begun again each time.

    python tests/tools/quantising.py SOURCE DESTINATION --method int4 --cap 1.5GB --kills 2

Each run but the last is killed once it has finished some more shards, which are what the next one
must find and keep. Needs root.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeload._sizes import format_size, parse_size
from tests.support.cgroups import MemoryCgroup, drop_caches, memory_cgroup

_CHILD = """
import atexit
from pipeload.cli.commands import main
from tests.support.cgroups import peak_rss_bytes
atexit.register(lambda: print("VmHWM", peak_rss_bytes(), flush=True))
main()
"""


def shards(destination: Path) -> dict[Path, int]:
    """Finished shards, also those of a run that is not done, with their times of change."""
    around = destination.parent.glob(f"*{destination.name}*/*.safetensors")
    return {path: path.stat().st_mtime_ns for path in around}


def until_killed(group: MemoryCgroup, command: list[str], destination: Path, more: int) -> str:
    """Kill the run once it has finished `more` shards beyond those that are there."""
    goal = len(shards(destination)) + more
    with group.popen(command) as process:
        while process.poll() is None:
            if len(shards(destination)) >= goal:
                time.sleep(0.5)  # into the next one
                process.kill()
            time.sleep(0.05)
    return f"ended with {process.returncode}, {len(shards(destination))} shards finished"


def main() -> int:
    """Print a line for each run; 1 when the last one failed or a finished shard was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--method", default="int4")
    parser.add_argument("--cap", default="1.5GB")
    parser.add_argument("--kills", type=int, default=2)
    options, others = parser.parse_known_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    cap = parse_size(options.cap)
    command = [sys.executable, "-c", _CHILD, "quantize", str(options.source)]
    command += [str(options.destination), "--method", options.method]
    command += ["--memory-limit", str(cap), *others]
    drop_caches()
    for _ in range(options.kills):
        with memory_cgroup(cap) as group:
            print(until_killed(group, command, options.destination, 1), flush=True)
    kept = {path.name: time for path, time in shards(options.destination).items()}
    started = time.perf_counter()
    with memory_cgroup(cap) as group:
        done = group.run(command, timeout=7200)
        kills = group.oom_kills()
    found = {path.name: time for path, time in shards(options.destination).items()}
    lost = sum(found.get(name) != time for name, time in kept.items())
    seconds = time.perf_counter() - started
    peak = [int(line.split()[1]) for line in done.stdout.splitlines() if "VmHWM" in line]
    shown = format_size(peak[0]) if peak else "unknown"
    print(
        f"ended with {done.returncode} after {seconds:.0f} s; peak {shown} of {options.cap}; ",
        end="",
    )
    print(f"{kills} kills by the kernel; {lost} of {len(kept)} finished shards made again")
    if done.returncode:
        print(done.stderr)
    return 1 if done.returncode or kills or lost else 0


if __name__ == "__main__":
    sys.exit(main())
