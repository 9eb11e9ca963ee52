#!/usr/bin/env python3
"""Generation under a kernel memory cap equal to the limit, for many limits, prompts and batches.

    python tests/tools/limits.py MODEL_FOLDER
    python tests/tools/limits.py MODEL_FOLDER --limit x1 --limit +0.5 --prompt 16 --batch 4
    python tests/tools/limits.py MODEL_FOLDER --limit 768MB --prompt 16 --new 8 --hint 32

A limit is a size, "x1.25" (of the smallest that works) or "+0.5" (that share of the model above the
process's floor). For each the child must live, keep VmHWM at or under the limit and give what plain
gives; a pass that cannot fit must be refused by MemoryLimitError. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeload._sizes import format_size, parse_size
from tests.support.cgroups import drop_caches, memory_cgroup
from tests.support.warm import warm_python

if TYPE_CHECKING:
    from collections.abc import Sequence

_CHILD = r"""
import hashlib, json, re, sys
import pipeload
if sys.argv[2] != "plain":
    pipeload.from_pretrained  # as a user's script does: before it imports transformers itself
import torch, transformers
transformers.utils.logging.disable_progress_bar()
folder, limit, prompt, batch, new, hint = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7])
ids = (torch.arange(prompt * batch).view(batch, prompt) * 37) % 30000 + 5
options = {"tokens": hint, "batch": batch, "dtype": "auto"}
result = {}
if limit == "sizes":
    result = []
    for batch, hint in json.loads(sys.argv[7]):
        options |= {"tokens": hint, "batch": batch}
        plan = pipeload.plan(folder, memory_limit=1 << 40, **options)
        floor = plan.floor_bytes + plan.reserve_bytes - (1 << 40) // 512  # a terabyte's page tables
        sizes = {"smallest": plan.smallest_limit, "floor": floor, "model": plan.resident}
        result.append(sizes)
elif limit == "plain":
    from pipeload.entry.prepare_process import call_vector_functions
    call_vector_functions()  # as a streamed model's process has
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
else:
    model = pipeload.from_pretrained(folder, memory_limit=int(limit), **options)
    plan = model.pipeload.plan
    result = {"predicted": plan.memory_limit - plan.unused, "units": len(plan.units),
        "per_pass": plan.bytes_per_pass}
if limit != "sizes":
    model.generation_config.eos_token_id = None
    import time
    started = time.perf_counter()
    try:
        out = model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0)
        with torch.no_grad():
            logits = model(ids[:, :16]).logits
        digest = hashlib.sha256(logits.float().numpy().tobytes()).hexdigest()
        result |= {"tokens": out[:, prompt:].tolist(), "logits": digest}
    except pipeload.MemoryLimitError as error:
        result["refused"] = str(error)
        model.generate(ids[:1, :4], max_new_tokens=2, do_sample=False, pad_token_id=0)
        advice = re.search(r"prefill_chunk_size=(\d+) in generate", str(error))
        if advice:
            model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0,
                prefill_chunk_size=int(advice[1]))
            result["chunk"] = int(advice[1])
    result["seconds"] = time.perf_counter() - started
    from pipeload.system.memory import peak_rss_bytes
    result["peak"] = peak_rss_bytes()
    if limit != "plain":
        stats = model.pipeload.stats()
        result |= {"misses": stats.misses, "passes": stats.passes, "resident": stats.resident_bytes}
print(json.dumps(result))
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. Sizes in tokens."""

    folder: Path
    prompt: int
    batch: int
    new: int
    hint: int

    def command(self, limit: str, python: Sequence[str] = (sys.executable,)) -> list[str]:
        """The child's command line; `limit` in bytes, "plain" or "sizes"."""
        shape = map(str, (self.prompt, self.batch, self.new, self.hint))
        return [*python, "-c", _CHILD, str(self.folder), limit, *shape]

    def free(self, limit: str) -> dict[str, Any]:
        """Run it without a cap."""
        done = subprocess.run(
            self.command(limit, warm_python()), capture_output=True, text=True, check=True
        )
        return _result(done)

    def bytes_of(self, limit: str) -> int:
        """A limit as the command line takes it, in bytes."""
        return parse_size(limit) if limit[0] not in "x+" else bytes_of_all([(self, limit)])[0]

    def capped(self, nbytes: int) -> dict[str, Any]:
        """Run it under a cap of `nbytes`, which is its limit, too."""
        drop_caches()  # pages that another group has read would be charged to that group
        with memory_cgroup(nbytes) as group:
            done = group.run(self.command(str(nbytes)), timeout=3600)
            kills = group.oom_kills()
        if done.returncode or kills:
            last = ["", *done.stderr.strip().splitlines()][-1]
            return {"died": done.returncode, "kills": kills, "last": last}
        return _result(done)


def bytes_of_all(cells: Sequence[tuple[Cell, str]]) -> list[int]:
    """Limits like "x1.25" and "+0.5" of cells of one model, in bytes: by one child for all."""
    shapes = json.dumps([(cell.batch, cell.hint) for cell, _ in cells])
    command = [*cells[0][0].command("sizes"), shapes]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [
        int(sizes["smallest"] * float(limit[1:]))
        if limit[0] == "x"
        else int(sizes["floor"] + sizes["model"] * float(limit[1:]))
        for (_, limit), sizes in zip(cells, json.loads(done.stdout.splitlines()[-1]), strict=True)
    ]


def _result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def fault(result: dict[str, Any], plain: dict[str, Any], limit: int) -> str:
    """What is wrong with a run, "" if nothing is."""
    if "died" in result:
        return f"died with {result['died']}, {result['kills']} kills: {result['last']}"
    if result["peak"] > limit:
        return f"VmHWM {format_size(result['peak'])} over the limit"
    if "refused" in result:
        return ""
    same = all(result[name] == plain[name] for name in ("tokens", "logits"))
    return "" if same else "other output than plain"


def main() -> int:
    """Print one line for each cell; 1 when any has a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--limit", action="append")
    parser.add_argument("--prompt", action="append", type=int)
    parser.add_argument("--batch", action="append", type=int)
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--hint", type=int, help="tokens= for the plan; prompt and answer if unset")
    parser.add_argument("--no-plain", action="store_true", help="compare with nothing")
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    faults = 0
    for prompt in options.prompt or [16, 512]:
        for batch in options.batch or [1, 4]:
            hint = options.hint or prompt + options.new
            cell = Cell(options.model, prompt, batch, options.new, hint)
            plain = {} if options.no_plain else cell.free("plain")
            for name in options.limit or ["x1", "x1.25", "x2", "+0.5", "+0.95"]:
                limit = cell.bytes_of(name)
                result = cell.capped(limit)
                if options.no_plain and "died" not in result:
                    plain = result
                wrong = fault(result, plain, limit)
                faults += bool(wrong)
                print(f"{prompt:>5} x {batch}  {name:>6} = {format_size(limit):>8}: ", end="")
                print(wrong or _line(result, limit), flush=True)
    return 1 if faults else 0


def _line(result: dict[str, Any], limit: int) -> str:
    outcome = "refused, and alive" if "refused" in result else "equal to plain"
    shares = f"peak {result['peak'] / limit:.1%} of the limit"
    predicted = f"{result['peak'] / result['predicted']:.1%} of the prediction"
    reading = f"{format_size(result['per_pass'])} per pass, {result['units']} units"
    speed = f"{result['seconds'] / max(1, result['passes']):.2f} s per pass"
    return f"{outcome}; {shares}, {predicted}; {reading}; {speed}; misses {result['misses']}"


if __name__ == "__main__":
    sys.exit(main())
