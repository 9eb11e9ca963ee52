#!/usr/bin/env python3
"""How much faster ranks answer several requests at once: as `ring_speed`, of which this is a part.

    python -m tests.tools.ring_many MODEL --limit 900MB --rate 200MB --at-once 1 2 4

Prints, for each number of ranks, a line for each number of requests: what it takes until all are
answered, and how many times as many requests that is as one by one. Ends with 1 where a
request's answers differ, or a rank went over its limit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pipeload._sizes import format_size, parse_size
from tests.support.cgroups import drop_caches
from tests.tools.ring_speed import measure

_RANK = """
import json, sys, time
import torch
torch.set_num_threads(1)
import pipeload
from tests.support.cgroups import peak_rss_bytes

folder, limit, new, *at_once = sys.argv[1], *map(int, sys.argv[2:])
model = pipeload.from_pretrained(
    folder, memory_limit=limit, dtype="auto", io_mode="direct", ranks="auto", batch=max(at_once)
)
found = []
for many in [1, *at_once]:  # the first warms up
    requests = [
        dict(input_ids=torch.arange(20 + 9 * n, 36 + 10 * n)[None], max_new_tokens=new,
             do_sample=n % 2 == 1, seed=n, eos_token_id=None, pad_token_id=0)
        for n in range(many)
    ]
    before, began = model.pipeload.stats().bytes_read, time.perf_counter()
    answers = dict(pipeload.generate_many(model, requests, at_once=many))
    found.append({
        "at_once": many,
        "seconds": time.perf_counter() - began,
        "read": model.pipeload.stats().bytes_read - before,
        "tokens": [answers[n][0].tolist() for n in range(many)],
    })
print(json.dumps({"runs": found[1:], "peak": peak_rss_bytes()}))
"""


def main() -> int:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--limit", default="900MB", help="of each rank")
    parser.add_argument("--rate", default="200MB", help="of each rank's disk")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--new-tokens", type=int, default=6)
    parser.add_argument("--namespaces", action="store_true")
    asked = parser.parse_args()
    asked.at_once = sorted({1, *asked.at_once})  # one by one is what others are compared with
    limit, rate = parse_size(asked.limit, name="--limit"), parse_size(asked.rate, name="--rate")
    first: list[list[int]] = []
    bad = False
    for count in asked.ranks:
        drop_caches(asked.model)
        words = [asked.new_tokens, *asked.at_once]
        limits, rates = [limit] * count, [rate] * count
        found = measure(asked.model, limits, rates, *words, apart=asked.namespaces, script=_RANK)
        over = max(one["peak"] for one in found) > limit
        bad |= over
        one_by_one = 0.0
        for runs in zip(*(one["runs"] for one in found), strict=True):
            many, seconds = runs[0]["at_once"], max(run["seconds"] for run in runs)
            one_by_one = one_by_one or seconds / many
            for run in runs:
                first += run["tokens"][len(first) :]
            same = all(run["tokens"] == first[:many] for run in runs)
            bad |= not same
            told = [
                f"{count} rank(s), {many} at once: {seconds:.2f} s",
                f"{many * one_by_one / seconds:.2f} x one by one",
                f"read {', '.join(format_size(run['read']) for run in runs)}",
                "equal" if same else "OTHER ANSWERS",
                *(["OVER THE LIMIT"] if over else []),
            ]
            print(", ".join(told), flush=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
