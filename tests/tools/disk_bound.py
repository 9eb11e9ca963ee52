#!/usr/bin/env python3
"""How near a token comes to what reading its bytes takes, under a kernel memory cap at the limit.

    python tests/tools/disk_bound.py MODEL --limit 1.5GB --disk-rate 400MB

MODEL is a folder or a GGUF file. The disk gives no more than so many bytes per second (needs root
and cgroups of version 1), so that it binds wherever this runs. Prints what a pass reads, what it
takes, and their ratio: rho, the time that the bytes take at that rate in the time of a token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import itertools

import pipeload
from pipeload._sizes import format_size, parse_size
from pipeload.entry.sources import source_of
from tests.support.cgroups import drop_caches, memory_cgroup, peak_rss_bytes
from tests.tools.many_at_once import slow_disk


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each pass of one token, after the first."""
    folder, named = source_of(str(given.model))
    ends = []
    with slow_disk(Path(folder), given.disk_rate):
        model = pipeload.from_pretrained(
            folder, memory_limit=given.limit, dtype="bfloat16", io_mode="direct", **named
        )
        prompt = torch.arange(10, 18)[None]
        model.register_forward_hook(lambda *_: ends.append(time.perf_counter()))
        before = 0
        for new in (2, given.new_tokens):  # the first ones read what stays
            before = model.pipeload.stats().bytes_read
            ends.clear()
            model.generate(prompt, max_new_tokens=new, min_new_tokens=new, pad_token_id=0)
        read = (model.pipeload.stats().bytes_read - before) / new
    seconds = [after - start for start, after in itertools.pairwise(ends)]
    return {"read": read, "seconds": seconds, "peak": peak_rss_bytes()}


def main() -> int:
    """Print a line; 1 where the cap was broken, or the token took more than --least allows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--limit", type=parse_size, required=True)
    parser.add_argument("--disk-rate", type=parse_size, required=True)
    parser.add_argument("--new-tokens", type=int, default=6)
    parser.add_argument("--least", type=float, default=0.85)
    parser.add_argument("--child", action="store_true")
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measured(given)))
        return 0
    drop_caches()
    with memory_cgroup(given.limit) as group:
        done = group.run([sys.executable, __file__, *sys.argv[1:], "--child"], timeout=7200)
        kills = group.oom_kills()
    if done.returncode or kills:
        print(f"died with {done.returncode}, {kills} kills: {done.stderr[-2000:]}")
        return 1
    found = json.loads(done.stdout.splitlines()[-1])
    token = statistics.median(found["seconds"])
    rho = found["read"] / given.disk_rate / token
    print(
        f"{format_size(round(found['read']))} a token in {token:.2f} s, at most "
        f"{format_size(found['peak'])} held: rho {rho:.2f}"
    )
    return 0 if found["peak"] <= given.limit and rho >= given.least else 1


if __name__ == "__main__":
    sys.exit(main())
