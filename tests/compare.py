#!/usr/bin/env python3
"""Decode and first-token times of several ways to run one model under kernel memory caps.

    python tests/compare.py MODEL_FOLDER --cap 2.2GB --with plain --tokens 3
    python tests/compare.py MODEL_FOLDER --cap 1.2GB --with accelerate --tokens 6

Contenders run in turn (A B A B ...), each in a process of its own in a control group of that size,
with the page cache dropped before each. Needs root. accelerate gets the best of several
`max_memory`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipeload._sizes import parse_size
from tests.cgroups import drop_caches, memory_cgroup

_CHILD = r"""
import json, sys, time, torch, transformers
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama
from transformers.generation.streamers import BaseStreamer
import transformers.generation, accelerate, pipeload, pipeload._api
transformers.utils.logging.disable_progress_bar()
kind, folder, limit, tokens, extra = sys.argv[1:]
limit, tokens = int(limit), int(tokens)
times = []
class Stamp(BaseStreamer):
    def put(self, value): times.append(time.perf_counter())
    def end(self): pass
started = time.perf_counter()
if kind == "plain":
    model = AutoModelForCausalLM.from_pretrained(folder)
elif kind == "accelerate":
    share, offload = extra.split(":", 1)
    model = AutoModelForCausalLM.from_pretrained(folder, device_map="auto", offload_folder=offload,
        max_memory={"cpu": int(share)})
else:
    options = {"memory_limit": limit} | json.loads(extra or "{}")
    model = pipeload.from_pretrained(folder, **options)
prompt = torch.arange(16)[None] + 5
model.generate(prompt, max_new_tokens=tokens, do_sample=False, pad_token_id=0, streamer=Stamp())
steps = [b - a for a, b in zip(times[1:-1], times[2:])]
print(json.dumps({"first": times[1] - started, "step": sum(steps) / len(steps)}))
"""


def measure(kind: str, folder: Path, cap: int, tokens: int, extra: str = "") -> dict[str, float]:
    """One run in a group of `cap` bytes (0: no cap); {"killed": 1} when the kernel ended it."""
    drop_caches()
    command = [
        sys.executable,
        "-c",
        _CHILD,
        kind,
        str(folder),
        str(cap or 1 << 50),
        str(tokens),
        extra,
    ]
    with memory_cgroup(cap or 1 << 40) as group:
        done = group.run(command, timeout=3000)
    if done.returncode:
        print(done.stderr[-500:], file=sys.stderr)
        return {"killed": 1.0}
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def best_share(folder: Path, cap: int, tokens: int, offload: str) -> str:
    """The `max_memory` that accelerate decodes fastest with under this cap."""
    found: list[tuple[float, str]] = []
    for part in (0.2, 0.35, 0.5, 0.6, 0.7):
        extra = f"{int(cap * part)}:{offload}"
        result = measure("accelerate", folder, cap, tokens, extra)
        print(f"accelerate max_memory {part:.0%} of the cap: {result}")
        if "step" in result:
            found.append((result["step"], extra))
    return min(found)[1]


def main() -> None:
    """Print every run and the median ratio of the pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--cap", default="0")
    parser.add_argument("--with", dest="other", choices=["plain", "accelerate"], default="plain")
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--options", default="{}", help="JSON for pipeload.from_pretrained")
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    cap = 0 if options.cap == "0" else parse_size(options.cap)
    with tempfile.TemporaryDirectory(dir=options.model.parent) as offload:
        extra = ""
        if options.other == "accelerate":
            extra = best_share(options.model, cap, options.tokens, offload)
        pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for _ in range(options.rounds):
            ours = measure("pipeload", options.model, cap, options.tokens, options.options)
            theirs = measure(options.other, options.model, cap, options.tokens, extra)
            print(f"pipeload {ours}  {options.other} {theirs}", flush=True)
            pairs.append((ours, theirs))
    for figure in ("first", "step"):
        ratios = [theirs[figure] / ours[figure] for ours, theirs in pairs if figure in theirs]
        if ratios:
            print(f"{options.other} / pipeload, {figure}: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
