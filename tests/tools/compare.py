#!/usr/bin/env python3
"""Decode and first-token times of several ways to run one model under kernel memory caps.

    python tests/tools/compare.py MODEL_FOLDER --cap 2.2GB --with plain --tokens 3
    python tests/tools/compare.py MODEL_FOLDER --cap 1.2GB --with accelerate --tokens 6

    python tests/tools/compare.py INT4_FOLDER --cap 3GB --with llama.cpp --gguf FILE --python PYTHON

`--python` is an interpreter that has llama-cpp-python; `tests/tools/make_gguf.py` makes the file.
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
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeload._sizes import parse_size
from tests.support.cgroups import drop_caches, memory_cgroup

_CHILD = r"""
import json, sys, time, torch, transformers
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama
from transformers.generation.streamers import BaseStreamer
import transformers.generation, accelerate, pipeload, pipeload.entry.api
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

# Its own files as they are, mapped: without weights in another order, which are copies.
_LLAMA = r"""
import json, sys, time, ctypes, llama_cpp
kind, path, limit, tokens, extra = sys.argv[1:]
quiet = llama_cpp.llama_log_callback(lambda *_: None)
llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
started = time.perf_counter()
llama_cpp.llama_backend_init()
settings = llama_cpp.llama_model_default_params()
settings.use_extra_bufts, settings.use_mmap = False, True
model = llama_cpp.llama_model_load_from_file(path.encode(), settings)
shape = llama_cpp.llama_context_default_params()
shape.n_ctx, shape.n_batch, shape.n_threads, shape.n_threads_batch = 256, 64, 2, 2
context = llama_cpp.llama_init_from_model(model, shape)
times = []
def run(ids):
    array = (llama_cpp.llama_token * len(ids))(*ids)
    assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(ids))) == 0
    llama_cpp.llama_get_logits(context)[0]
    times.append(time.perf_counter())
run(range(5, 21))
for number in range(int(tokens) - 1):
    run([number + 30])
steps = [b - a for a, b in zip(times[:-1], times[1:])]
print(json.dumps({"first": times[0] - started, "step": sum(steps) / len(steps)}))
"""


def measure(
    kind: str,
    folder: Path,
    cap: int,
    tokens: int,
    extra: str = "",
    *,
    python: str = sys.executable,
) -> dict[str, float]:
    """One run in a group of `cap` bytes (0: no cap); {"killed": 1} when the kernel ended it."""
    drop_caches()
    command = [
        python,
        "-c",
        _LLAMA if kind == "llama.cpp" else _CHILD,
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


OTHERS = ("plain", "accelerate", "llama.cpp")


def main() -> None:
    """Print every run and the median ratio of the pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--cap", default="0")
    parser.add_argument("--with", dest="other", choices=OTHERS, default="plain")
    parser.add_argument("--gguf", type=Path, help="llama.cpp's file")
    parser.add_argument("--python", default=sys.executable, help="has llama-cpp-python")
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--options", default="{}", help="JSON for pipeload.from_pretrained")
    options = parser.parse_args()
    path = options.gguf if options.other == "llama.cpp" else options.model
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    cap = 0 if options.cap == "0" else parse_size(options.cap)
    with tempfile.TemporaryDirectory(dir=options.model.parent) as offload:
        extra = ""
        if options.other == "accelerate":
            extra = best_share(options.model, cap, options.tokens, offload)
        pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for _ in range(options.rounds):
            ours = measure("pipeload", options.model, cap, options.tokens, options.options)
            theirs = measure(options.other, path, cap, options.tokens, extra, python=options.python)
            print(f"pipeload {ours}  {options.other} {theirs}", flush=True)
            pairs.append((ours, theirs))
    for figure in ("first", "step"):
        ratios = [theirs[figure] / ours[figure] for ours, theirs in pairs if figure in theirs]
        if ratios:
            print(f"{options.other} / pipeload, {figure}: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
