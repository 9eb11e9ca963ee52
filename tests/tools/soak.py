#!/usr/bin/env python3
"""Half an hour of mixed work under a kernel memory cap equal to the limit: nothing wrong, no kill.

    python tests/tools/soak.py MODEL_FOLDER --minutes 30 --cap 700MB

Two threads share one streamed model. They generate and score prompts of many lengths and batches,
break off by exceptions and by stopping criteria, and move the limit up and down. Everything that
ends is compared with what plain transformers gave beforehand. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeload._sizes import format_size, parse_size
from tests.support.cgroups import drop_caches, memory_cgroup

ROOT = Path(__file__).resolve().parents[2]
# Cases: batch, prompt length, new tokens; 0 new tokens: logits.
_CASES = [
    (1, 5, 6),
    (1, 64, 4),
    (3, 20, 4),
    (1, 150, 3),
    (2, 90, 2),
    (4, 9, 5),
    (1, 48, 0),
    (2, 30, 0),
]

_COMMON = r"""
import hashlib, json, sys
import pipeload
if sys.argv[2] != "plain":
    pipeload.from_pretrained  # as a user's script does: before it imports transformers itself
import torch, transformers
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)
folder, cases = sys.argv[1], json.loads(sys.argv[3])

def prompt(batch, length):
    return (torch.arange(length * batch).view(batch, length) * 37 + length) % 500 + 5

def work(model, batch, length, new, **options):
    ids = prompt(batch, length)
    if new:
        out = model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0, **options)
        return out[:, length:].tolist()
    with torch.no_grad():
        return hashlib.sha256(model(ids).logits.float().numpy().tobytes()).hexdigest()
"""

_PLAIN = (
    _COMMON
    + r"""
from pipeload.entry.prepare_process import call_vector_functions
call_vector_functions()  # as a streamed model's process has
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
model.generation_config.eos_token_id = None
print(json.dumps([work(model, *case) for case in cases]))
"""
)

_SOAK = (
    _COMMON
    + r"""
import random, threading, time
from collections import Counter
from pipeload.system.memory import peak_rss_bytes, rss_bytes
limit, wanted = int(sys.argv[2]), json.loads(sys.argv[4])
seconds, seed = float(sys.argv[5]), int(sys.argv[6])
model = pipeload.from_pretrained(folder, memory_limit=limit, tokens=160, batch=2, dtype="auto")
model.generation_config.eos_token_id = None
handle, smallest = model.pipeload, model.pipeload.plan.smallest_limit
counts, wrong, done = Counter(), [], threading.Event()
blocks = model.get_decoder().layers
deadline = time.monotonic() + seconds

class Broken(Exception):
    pass

class After(transformers.StoppingCriteria):
    def __init__(self, steps, error):
        self.steps, self.error = steps, error
    def __call__(self, ids, scores, **_):
        self.steps -= 1
        if self.steps <= 0 and self.error is not None:
            raise self.error("on purpose")
        return torch.full((ids.shape[0],), self.steps <= 0, dtype=torch.bool)

def whole(rng, index):
    got = work(model, *cases[index])
    counts["whole"] += 1
    if got != wanted[index]:
        wrong.append([cases[index], "other output"])

def stopped(rng, index):
    batch, length, new = cases[index]
    steps = rng.randint(1, max(1, new))
    if new:
        got = work(model, batch, length, new, stopping_criteria=[After(steps, None)])
        counts["stopped"] += 1
        if got != [row[:steps] for row in wanted[index]]:
            wrong.append([cases[index], "other output when stopped"])

def criterion_raises(rng, index):
    batch, length, new = cases[index]
    error = rng.choice([Broken, KeyboardInterrupt])
    if new:
        try:
            work(model, batch, length, new, stopping_criteria=[After(rng.randint(1, new), error)])
        except error:
            counts["broken by a criterion"] += 1

def block_raises(rng, index):
    error, me = rng.choice([Broken, KeyboardInterrupt]), threading.get_ident()
    def die(*_):
        if threading.get_ident() == me:
            raise error("on purpose")
    hook = rng.choice(list(blocks)).mlp.register_forward_pre_hook(die)
    try:
        work(model, *cases[index])
    except error:
        counts["broken in a block"] += 1
    finally:
        hook.remove()

def limit_moves(rng, index):
    try:
        handle.set_memory_limit(rng.randint(smallest, limit))
        counts["limit moved"] += 1
    except pipeload.MemoryLimitError:
        counts["limit refused"] += 1

KINDS = [whole] * 6 + [stopped, criterion_raises, block_raises, limit_moves, limit_moves]

def soak(number):
    rng = random.Random(seed * 100 + number)
    while time.monotonic() < deadline:
        kind, index = rng.choice(KINDS), rng.randrange(len(cases))
        try:
            kind(rng, index)
        except pipeload.MemoryLimitError:
            counts["pass refused"] += 1
        except BaseException as error:
            wrong.append([kind.__name__, cases[index], f"{type(error).__name__}: {error}"])

threads = [threading.Thread(target=soak, args=(number,)) for number in range(2)]
started = rss_bytes()
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(seconds + 300)
    if thread.is_alive():
        wrong.append(["hang"])
handle.set_memory_limit(limit)
for index in range(len(cases)):
    whole(random, index)
stats = handle.stats()
print(json.dumps({"counts": counts, "wrong": wrong[:10], "wrongs": len(wrong),
    "peak": peak_rss_bytes(), "rss": rss_bytes(), "passes": stats.passes, "read": stats.bytes_read,
    "per_pass": handle.plan.bytes_per_pass}))
sys.stdout.flush()
import os
os._exit(0) if wrong and wrong[-1] == ["hang"] else None
"""
)


def environment() -> dict[str, str]:
    """One thread each for computing: the same bits with and without streaming."""
    return os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'hooks'}",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
    }


def soak(folder: Path, cap: int, seconds: float, *, seed: int = 0) -> dict[str, Any]:
    """Work for so long under a cap of `cap` bytes; what happened, with the kernel's `kills`."""
    cases = json.dumps(_CASES)
    plain = subprocess.run(
        [sys.executable, "-c", _PLAIN, str(folder), "plain", cases],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
    )
    wanted = plain.stdout.splitlines()[-1]
    drop_caches(folder)  # pages that another group has read would be charged to that group
    with memory_cgroup(cap) as group, tempfile.TemporaryDirectory() as scratch:
        words = [str(folder), str(cap), cases, wanted, str(seconds), str(seed)]
        done = group.run(
            [sys.executable, "-c", _SOAK, *words],
            timeout=seconds + 600,
            env=environment(),
            cwd=scratch,
        )
        kills = group.oom_kills()
        left = [path.name for path in Path(scratch).iterdir()]
    if done.returncode:
        last = done.stderr[-2000:]
        return {"died": done.returncode, "kills": kills, "wrongs": 1, "wrong": [last], "left": left}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result | {"kills": kills, "left": left}


def main() -> int:
    """Print what happened; 1 when anything was wrong, or the kernel killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--cap", type=parse_size, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    result = soak(options.model.absolute(), options.cap, options.minutes * 60, seed=options.seed)
    for fault in result["wrong"]:
        print("  ", fault)
    if "died" not in result:
        print(", ".join(f"{count} {name}" for name, count in sorted(result["counts"].items())))
        read = format_size(result["read"])
        print(f"{result['passes']} passes, {read} read, peak {format_size(result['peak'])}")
    print(f"wrong={result['wrongs']} kills={result['kills']}")
    over = "died" in result or result["peak"] > options.cap
    return 1 if over or result["wrongs"] or result["kills"] or result["left"] else 0


if __name__ == "__main__":
    sys.exit(main())
