"""One run of one model in one way, in a process that `forks.py` has made for it."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

import pipeload
from pipeload.system.memory import peak_rss_bytes
from tests.results import whole_layers

KINDS = {"bert": "AutoModel", "vit": "AutoModel"}
"""The class that loads a model, by the beginning of its name; of others AutoModelForCausalLM."""


class _Stamps(BaseStreamer):
    """When the prompt came, and each token."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.memory: list[int] = []

    def put(self, value: object) -> None:
        del value
        self.times.append(time.perf_counter())
        self.memory.append(resident_bytes())

    def end(self) -> None:
        pass


def resident_bytes() -> int:
    """Of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def read_bytes() -> int:
    """What this process has had from disks so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Load the model and run it once; seconds, bytes, and a digest of what came out.

    Args:
        job: "way": "plain", "layers" (with "loaders" and "keep") or "pipeload" (with "limit" in
            bytes), or "limit": the one that has room for "share" of the weights; "folder"; "new":
            tokens to generate, of models that do, others run twice; "prompt": tokens; "trace": a
            file to write what happens to.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    folder = Path(job["folder"])
    kind = getattr(transformers, KINDS.get(folder.name[:4].rstrip("-"), "AutoModelForCausalLM"))
    if job["way"] == "limit":
        return {"limit": limit_of(folder, kind, job)}
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    floor, before, began = resident_bytes(), read_bytes(), time.perf_counter()
    model = _load(job, kind, folder)
    result: dict[str, Any] = {"floor": floor, "load": time.perf_counter() - began}
    tracing = model.pipeload.trace(job["trace"]) if "trace" in job else contextlib.nullcontext()
    with tracing:
        result |= _use(model, job)
    result["seconds"] = result.pop("ended") - began
    result |= {"peak": peak_rss_bytes(), "read": read_bytes() - before}
    if job["way"] == "pipeload":
        plan = model.pipeload.plan
        result |= {"per_pass": plan.bytes_per_pass, "held": plan.resident, "limit": job["limit"]}
    return result


def limit_of(folder: Path, kind: Any, job: dict[str, Any]) -> int:
    """Bytes that leave room for that share of the weights, or the smallest that works."""
    tokens = job.get("prompt", 16) + job.get("new", 1)
    ample = 1 << 40
    plan = pipeload.plan(
        str(folder), memory_limit=ample, auto_class=kind, dtype="auto", tokens=tokens
    )
    floor = plan.floor_bytes + plan.reserve_bytes - ample // 512  # page tables of a terabyte
    weights = plan.resident + (plan.experts.total_bytes if plan.experts else 0)
    return int(max(floor + job["share"] * weights, plan.smallest_limit * 1.02))


def _load(job: dict[str, Any], kind: Any, folder: Path) -> Any:
    if job["way"] == "plain":
        return kind.from_pretrained(folder, dtype="auto")
    if job["way"] == "layers":
        return whole_layers.load(kind, folder, loaders=job["loaders"], keep=job.get("keep", False))
    return pipeload.from_pretrained(
        str(folder),
        memory_limit=job["limit"],
        auto_class=kind,
        dtype="auto",
        tokens=job.get("prompt", 16) + job.get("new", 1),
        **job.get("options", {}),
    )


def _use(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Run it on inputs that are always the same."""
    if "Causal" not in type(model).__name__ and "LMHead" not in type(model).__name__:
        if hasattr(model.config, "image_size"):
            size = model.config.image_size
            inputs = {"pixel_values": torch.linspace(-1, 1, 3 * size**2).view(1, 3, size, size)}
        else:
            inputs = {"input_ids": (torch.arange(128) * 37 % 30000 + 5)[None]}
        ended = []
        for _ in range(2):
            with torch.no_grad():
                out = model(**inputs).last_hidden_state
            ended.append(time.perf_counter())
        return {"ended": ended[0], "steps": [ended[1] - ended[0]], "digest": _digest(out)}
    stamps = _Stamps()
    ids = (torch.arange(job.get("prompt", 16)) * 37 % 30000 + 5)[None]
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "streamer": stamps}
    started = read_bytes()
    out = model.generate(ids, max_new_tokens=job["new"], **options)
    return {
        "ended": stamps.times[-1],
        "first": stamps.times[1] - stamps.times[0],
        "steps": [later - earlier for earlier, later in pairwise(stamps.times[1:])],
        "memory": stamps.memory,
        "read_per_token": (read_bytes() - started) / job["new"],
        "digest": _digest(out),
    }


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.float().numpy().tobytes()).hexdigest()[:16]
