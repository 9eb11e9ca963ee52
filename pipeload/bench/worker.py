"""One measured model in a process of its own, driven by JSON lines.

    python -m pipeload.bench.worker MODEL PROMPT_TOKENS NEW_TOKENS IO_MODE DEVICE

Answers each line it reads: {"load": bytes, "host": limit} with a description of the plan, where "-"
is no limit of the host; {"decode": n} with the times and counts of n decoded tokens; {"duty": n,
"period": s} after decoding n tokens, one every s seconds.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

import pipeload
from pipeload.devices.open_device import open_device
from pipeload.system.memory import peak_rss_bytes
from pipeload_hooks import find_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeload.budget.device_in_plan import DeviceShare
    from pipeload.budget.plan import Plan, UnitPlan
    from pipeload.engine.handle import Handle
    from pipeload.engine.stats import Stats
    from pipeload.weights.device_interface import Device


class _Stamps(BaseStreamer):
    """Remembers when each token came, and the counters at that moment."""

    def __init__(self, handle: Handle, period: float = 0.0) -> None:
        self._handle = handle
        self._period = period
        self.times: list[float] = []
        self.stats: list[Stats] = []

    def put(self, value: torch.Tensor) -> None:
        del value
        if self._period and self.times:
            time.sleep(max(0.0, self.times[-1] + self._period - time.perf_counter()))
        self.times.append(time.perf_counter())
        self.stats.append(self._handle.stats())

    def end(self) -> None:
        pass


def describe(model: Any) -> dict[str, Any]:
    """The plan and the sizes that the lower bound is made of, in bytes."""
    plan = model.pipeload.plan
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is table
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    experts = plan.experts
    if experts is not None:
        total -= experts.total_bytes
    return {
        "expert_cache": 0 if experts is None else experts.cache_bytes,
        **({} if plan.device_share is None else _describe_device(plan, plan.device_share)),
        "memory_limit": plan.memory_limit,
        "floor": plan.floor_bytes,
        "reserve": plan.reserve_bytes,
        "held": plan.resident,
        "buffers": plan.buffers,
        "readers": plan.readers,
        "io_mode": plan.io_mode,
        "bytes_per_pass": plan.bytes_per_pass,
        "smallest_unit": min(_least_buffer(plan.units, block.name) for block in find_blocks(model)),
        # A pass reads rows of the embedding, not the table; a tied head reads all of it.
        "needed_per_pass": total - (0 if tied else table.numel() * table.element_size()),
        "smallest_limit": plan.smallest_limit,
        "files": sorted({str(e.file) for unit in plan.units for e in _extents(unit)}),
    }


def _describe_device(plan: Plan, share: DeviceShare) -> dict[str, Any]:
    """What the terms of the bound are made of, in bytes and bytes per second."""
    device = open_device(share.device)
    link_rate = None if device is None else device.link_rate()
    assert link_rate is not None  # noqa: S101 - measured before the model was there
    host = share.host_memory_limit - share.host_floor_bytes - share.host_reserve_bytes
    return {
        "device": share.device,
        "host_memory_limit": share.host_memory_limit,
        "blocks": sum(unit.weights_bytes for unit in plan.units),
        "pinned": plan.pinned_bytes,
        "host_room": host - share.staging_scratch_bytes,
        "hosted": plan.hosted_bytes,
        "link_rate": link_rate,
    }


def _least_buffer(units: Sequence[UnitPlan], block: str) -> int:
    """Bytes of a block's largest unit, all of it streamed: a block, or a module, or a few rows."""
    mine = [unit for unit in units if f"{unit.name}.".startswith(f"{block}.")]
    return max((unit.weights_bytes for unit in mine), default=0)


def _extents(unit: Any) -> list[Any]:
    return [e for layout in (*unit.resident, unit.streamed) for e in layout.extents]


def decode(
    model: Any, prompt: torch.Tensor, new_tokens: int, period: float = 0.0
) -> dict[str, Any]:
    """Seconds and counts per decoded token; the prompt and the first two tokens are left out."""
    stamps = _Stamps(model.pipeload, period)
    model.generate(
        prompt, max_new_tokens=new_tokens + 2, do_sample=False, streamer=stamps, pad_token_id=0
    )
    # The first put is the prompt, the next two are the tokens that warm up.
    times, first, last = stamps.times, stamps.stats[2], stamps.stats[-1]
    count = len(times) - 3
    steps = sorted(b - a for a, b in pairwise(times[2:]))
    read_seconds = last.read_seconds - first.read_seconds
    return {
        "tokens": count,
        "seconds": (times[-1] - times[2]) / count,
        "median_seconds": steps[len(steps) // 2],
        "bytes": (last.bytes_read - first.bytes_read) / count,
        "expert_bytes": (last.expert_bytes_read - first.expert_bytes_read) / count,
        "reads": (last.reads - first.reads) / count,
        "misses": (last.misses - first.misses) / count,
        "stall": (last.stall_seconds - first.stall_seconds) / count,
        "compute": (last.compute_seconds - first.compute_seconds) / count,
        "read_rate": (last.bytes_read - first.bytes_read) / read_seconds if read_seconds else 0.0,
        "peak_rss": peak_rss_bytes(),
        "copied": (last.copied_bytes - first.copied_bytes) / count,
        "peak_device": last.peak_device_bytes,
    }


def main(arguments: list[str]) -> None:
    """Load the model, then answer until the input ends."""
    name, prompt_tokens, new_tokens, io_mode, device = arguments
    transformers.utils.logging.disable_progress_bar()
    length = int(prompt_tokens) + int(new_tokens) + 2
    if (found := open_device(device)) is not None:
        found.link_rate()  # while there is room to measure it
    model: Any = None
    for line in sys.stdin:
        command = json.loads(line)
        if "load" in command:
            if model is not None:
                del model
                _forget_peaks(found)
            model = pipeload.from_pretrained(
                name,
                memory_limit=int(command["load"]),
                tokens=max(256, length),
                io_mode=io_mode,
                device=device,
                host_memory_limit=None if command["host"] == "-" else command["host"],
            )
            vocabulary = int(model.config.get_text_config().vocab_size)
            prompt = torch.arange(int(prompt_tokens))[None] % (vocabulary - 8) + 4
            prompt = prompt.to(model.device)
            model.generation_config.eos_token_id = None  # a timed run never stops early
            decode(model, prompt, 1)
            _answer(describe(model))
        else:
            count = int(command.get("decode") or command["duty"])
            _answer(decode(model, prompt, count, float(command.get("period", 0.0))))


def _forget_peaks(device: Device | None) -> None:
    """Of a model that was dropped: give back what it held, and count anew."""
    gc.collect()
    if device is not None:
        device.synchronize()
        device.trim()
        device.forget_peak()
    with contextlib.suppress(OSError):  # Linux alone
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _answer(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
