#!/usr/bin/env python3
"""`pipeload quantize` or `convert` under a kernel memory cap, killed and begun again each time.

    python tests/tools/quantising.py SOURCE DESTINATION --method int4 --cap 1.5GB --kills 2
    python tests/tools/quantising.py SOURCE DESTINATION --convert --cap 0.6GB --kills 0

Each run but the last is killed once it has kept more: a shard, or what a text told (`--calibrate
builtin`). The next one must find that and keep it. A model without a tokenizer gets one that makes
a token of each byte. Prints the time of each run, and the processor's. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeload._sizes import format_size, parse_size
from pipeload.quantiser.resumable_shards import SUMS_FILE
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


def kept(destination: Path) -> int:
    """How many shards are finished, and whether what a text told is kept."""
    sums = destination.parent.glob(f"*{destination.name}*/{SUMS_FILE}")
    return len(shards(destination)) + len(list(sums))


def until_killed(group: MemoryCgroup, command: list[str], destination: Path, more: int) -> str:
    """Kill the run once it has kept so much more than is there."""
    goal = kept(destination) + more
    with group.popen(command) as process:
        while process.poll() is None:
            if kept(destination) >= goal:
                time.sleep(0.5)  # into the next one
                process.kill()
            time.sleep(0.05)
    return f"ended with {process.returncode}, {len(shards(destination))} shards finished"


def give_tokenizer(folder: Path) -> None:
    """Have a token for each byte, where there is no tokenizer."""
    known = ("tokenizer*", "vocab*", "merges*", "*.model")
    if any(found for pattern in known for found in folder.glob(pattern)):
        return
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    letters = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    made = Tokenizer(BPE(letters, []))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.save(str(folder / "tokenizer.json"))
    told = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    (folder / "tokenizer_config.json").write_text(told, encoding="utf-8")


def processor_seconds() -> float:
    """Of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Print a line for each run; 1 when the last one failed or a finished shard was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--convert", action="store_true", help="integers that are there")
    parser.add_argument("--cap", default="1.5GB")
    parser.add_argument("--kills", type=int, default=2)
    options, others = parser.parse_known_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    cap = parse_size(options.cap)
    verb = "convert" if options.convert else "quantize"
    command = [sys.executable, "-c", _CHILD, verb, str(options.source)]
    command += [str(options.destination), "--memory-limit", str(cap), *others]
    if "--calibrate" in others:
        give_tokenizer(options.source)
    drop_caches()
    first = time.perf_counter()
    for _ in range(options.kills):
        with memory_cgroup(cap) as group:
            told = until_killed(group, command, options.destination, 1)
        took = f"{time.perf_counter() - first:.0f} s, {processor_seconds():.0f} of the processor"
        print(f"{told}; {took} until now", flush=True)
    found_before = {path.name: time for path, time in shards(options.destination).items()}
    started = time.perf_counter()
    with memory_cgroup(cap) as group:
        done = group.run(command, timeout=7200)
        kills = group.oom_kills()
    found = {path.name: time for path, time in shards(options.destination).items()}
    lost = sum(found.get(name) != time for name, time in found_before.items())
    seconds = time.perf_counter() - started
    peak = [int(line.split()[1]) for line in done.stdout.splitlines() if "VmHWM" in line]
    shown = format_size(peak[0]) if peak else "unknown"
    print(
        f"ended with {done.returncode} after {seconds:.0f} s; peak {shown} of {options.cap}; ",
        end="",
    )
    print(f"{kills} kills by the kernel; {lost} of {len(found_before)} finished shards made again")
    total = time.perf_counter() - first
    print(f"all runs together {total:.0f} s, {processor_seconds():.0f} of the processor")
    if done.returncode:
        print(done.stderr)
    return 1 if done.returncode or kills or lost else 0


if __name__ == "__main__":
    sys.exit(main())
