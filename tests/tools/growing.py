#!/usr/bin/env python3
"""A context that grows while a model streams: residents yield to the cache, and come back after it.

    python tests/tools/growing.py MODEL_FOLDER --limit 520MB --tokens 3900 --batch 1

Runs in a control group as large as the limit. Prints resident bytes and speed along the way, and
whether the tokens are those of plain. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeload._sizes import format_size, parse_size
from tests.support.cgroups import drop_caches, memory_cgroup
from tests.support.warm import warm_python

_CHILD = r"""
import gc, json, sys, time
import pipeload
if sys.argv[2] != "plain":
    pipeload.from_pretrained
import torch, transformers
from transformers.generation.streamers import BaseStreamer
transformers.utils.logging.disable_progress_bar()
folder, limit, new, batch, event = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5]), sys.argv[5]
hint = int(sys.argv[6])
step = max(10, min(100, new // 10))
ids = (torch.arange(100 * batch).view(batch, 100) * 37) % 30000 + 5
if limit == "plain":
    from pipeload.entry.prepare_process import call_vector_functions
    call_vector_functions()  # as a streamed model's process has
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
else:
    model = pipeload.from_pretrained(folder, memory_limit=int(limit), tokens=hint, batch=batch,
        dtype="auto")
model.generation_config.eos_token_id = None
samples, users = [], []

class Watch(BaseStreamer):
    count = -1  # the first is the prompt
    started = time.perf_counter()
    def put(self, value):
        self.count += 1
        if self.count % step == 0 and limit != "plain":
            now = time.perf_counter()
            stats = model.pipeload.stats()
            samples.append((self.count, stats.resident_bytes, (now - self.started) / step))
            self.started = now
        if event == "halve" and limit != "plain" and self.count in (new // 4, new // 2):
            small = int(limit) - int(model.pipeload.plan.resident * 0.5)
            model.pipeload.set_memory_limit(small if self.count == new // 4 else int(limit))
        if event == "list" and self.count % 2 == 0 and self.count >= new // 4:
            if len(users) < 30:
                users.append(bytearray(b"x" * 10_000_000))
    def end(self): pass

kwargs = dict(max_new_tokens=new, do_sample=False, pad_token_id=0)
if batch > 1:  # streamers take one sequence: a criterion sees every step instead
    watch = Watch()
    class Every(transformers.StoppingCriteria):
        def __call__(self, ids, scores, **_):
            watch.put(None)
            return torch.zeros(ids.shape[0], dtype=torch.bool)
    kwargs["stopping_criteria"] = transformers.StoppingCriteriaList([Every()])
else:
    kwargs["streamer"] = Watch()
tokens = model.generate(ids, **kwargs)[:, 100:].tolist()
result = {"tokens": tokens, "samples": samples}
if limit != "plain":
    from pipeload.system.memory import peak_rss_bytes
    result["first"] = samples[0][1]
    users.clear()
    gc.collect()
    model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    result |= {"after": model.pipeload.stats().resident_bytes, "peak": peak_rss_bytes()}
print(json.dumps(result))
"""


def run(
    folder: Path, limit: int | None, new: int, batch: int, event: str = "", *, hint: int = 256
) -> dict[str, Any]:
    """`new` tokens after 100, under a cap of `limit` bytes, or in plain transformers if None.

    `event`: "halve" takes half of the residents' memory away in mid-run and gives it back, "list"
    has the user's own code take 300 MB. Returns {"died": status} when the child did not live.
    """
    name = "plain" if limit is None else str(limit)
    command = [sys.executable, "-c", _CHILD, str(folder), name, str(new), str(batch), event]
    command.append(str(hint))
    if limit is None:
        command = [*warm_python(), *command[1:]]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    else:
        drop_caches()
        with memory_cgroup(limit) as group:
            done = group.run(command, timeout=7200)
        if done.returncode:
            return {"died": done.returncode, "errors": done.stderr[-2000:]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    """Print what happened; 1 when something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--limit", required=True, type=parse_size)
    parser.add_argument("--tokens", type=int, default=3900)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--event", choices=["halve", "list"], default="")
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    shape = options.tokens, options.batch, options.event
    ours = run(options.model, options.limit, *shape)
    if "died" in ours:
        print(ours)
        return 1
    for count, resident, seconds in ours["samples"]:
        print(f"{100 + count:>6} tokens  {format_size(resident):>8} resident  {1 / seconds:.1f}/s")
    print(f"after: {format_size(ours['after'])} resident, at first {format_size(ours['first'])}")
    print(f"peak {format_size(ours['peak'])} of {format_size(options.limit)}")
    same = ours["tokens"] == run(options.model, None, *shape)["tokens"]
    print("equal to plain" if same else "OTHER TOKENS THAN PLAIN")
    return 0 if same and ours["peak"] <= options.limit else 1


if __name__ == "__main__":
    sys.exit(main())
