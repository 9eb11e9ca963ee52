#!/usr/bin/env python3
"""How close streaming to the card comes to what disk, link and card allow; and others beside it.

    python tests/gpu/speed.py --scratch FOLDER [--seconds 330] [--models 1.1b 7b]

Makes random LLaMAs in the folder, then prints a table for each: device limits of 0.3 and 0.7 of the
model, with as much host memory as there is and with hardly any. Then accelerate's maps of the same
size, layers in host memory and on disk. Steps that would begin after so many seconds are left out,
and said to be.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "hooks"))

from tests.gpu.card import REHEARSED, Card, find_card
from tests.make_llama import PRESETS, LlamaShape, make_llama

SHARES = (0.3, 0.7)
SMALL = LlamaShape(512, 1408, 8, 8, 4, vocab=512)
TOKENS = {"1.1b": 4, "7b": 1}
"""Timed in each run: the larger one takes seconds for each, with hardly any host memory."""

_ACCELERATE = r"""
import json, sys, time, torch, transformers
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer
transformers.utils.logging.disable_progress_bar()
folder, limit, host, offload, tokens = sys.argv[1:]
times = []
class Stamp(BaseStreamer):
    def put(self, value): times.append(time.perf_counter())
    def end(self): pass
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map="auto",
    offload_folder=offload, max_memory={0: int(limit), "cpu": int(host)})
prompt = torch.arange(16)[None].to(model.device) + 5
model.generate(prompt, max_new_tokens=int(tokens) + 2, do_sample=False, pad_token_id=0,
    streamer=Stamp())
places = [str(place) for place in set(model.hf_device_map.values())]
print(json.dumps({"seconds": (times[-1] - times[2]) / (len(times) - 3), "places": places,
    "reserved": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0}))
"""


class Clock:
    """What there is still time for."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def allows(self, what: str) -> bool:
        """Whether a step may begin; says so if not."""
        left = self._end - time.monotonic()
        if left < 0:
            print(f"left out for lack of time: {what}", flush=True)
        return left >= 0


def model_bytes(folder: Path) -> int:
    """Of its files."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def smallest(card: Card, folder: Path) -> int:
    """The smallest limit of the device that works: head and embeddings of a small model in NF4
    take more than 0.3 of it.
    """
    import pipeload

    plan = pipeload.plan(folder, memory_limit=1 << 40, device=card.name, dtype="auto")
    return plan.smallest_limit + (4 << 20)


def scarce_host(card: Card, folder: Path, limit: int) -> int:
    """Hardly more than the smallest limit of the host that works in a process that has run."""
    import pipeload

    options: dict[str, Any] = {"memory_limit": limit, "device": card.name, "dtype": "auto"}
    try:
        pipeload.plan(folder, host_memory_limit=1, **options)
    except pipeload.MemoryLimitError as error:
        return error.smallest_limit + (600 << 20)
    raise AssertionError("one byte was enough")


def measure(card: Card, folder: Path, new_tokens: int) -> None:
    """Our table."""
    from pipeload import bench
    from pipeload.errors import PipeloadError

    least = smallest(card, folder)
    limits = [max(least, int(share * model_bytes(folder))) for share in SHARES]
    if REHEARSED:  # the measured processes know nothing of a device that stands in
        limits = [600 << 20, 700 << 20]
        hosts: list[str | int | None] = [None]
    else:
        hosts = [scarce_host(card, folder, limits[0]), None]
    try:
        bench.run(
            model=str(folder),
            limits=limits,
            new_tokens=new_tokens,
            rounds=1,
            device="cpu" if REHEARSED else card.name,
            host_memory_limits=hosts,
            progress=print,
        )
    except PipeloadError as error:
        print(f"not measured: {error}", flush=True)


def measure_nf4(card: Card, folder: Path, new_tokens: int) -> None:
    """The same model at a quarter of the bytes."""
    import pipeload

    target = folder.with_name(f"{folder.name}-nf4")
    started = time.perf_counter()
    pipeload.quantize(folder, target, method="nf4")
    seconds = time.perf_counter() - started
    print(f"\nNF4: {model_bytes(target) / 1e9:.2f} GB, made in {seconds:.0f} s", flush=True)
    measure(card, target, new_tokens)
    shutil.rmtree(target)


def measure_accelerate(folder: Path, share: float, *, disk: bool) -> None:
    """Layers that do not fit the share are in host memory, or on disk."""
    limit = int(share * model_bytes(folder))
    offload = folder.parent / "offload"
    host = 0 if disk else 1 << 40
    command = [sys.executable, "-c", _ACCELERATE, str(folder), str(limit), str(host), str(offload)]
    done = subprocess.run([*command, "3"], capture_output=True, text=True, check=False)
    what = (
        f"accelerate, {share} of the model on the card, the rest {'on disk' if disk else 'in RAM'}"
    )
    if done.returncode:
        print(f"{what}: {done.stderr.strip().splitlines()[-1][:300]}", flush=True)
        return
    result = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{what}: {result['seconds'] * 1000:.0f} ms per token, "
        f"{result['reserved'] / 1e9:.2f} GB reserved, layers on {', '.join(result['places'])}",
        flush=True,
    )


def main() -> int:
    """Print it all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=330.0)
    parser.add_argument("--models", nargs="+", default=["1.1b", "7b"])
    options = parser.parse_args()
    card, clock = find_card(options.scratch), Clock(options.seconds)
    if card is None:
        print("no accelerator here: nothing was measured")
        return 0
    if not REHEARSED:
        from pipeload._open_device import open_device

        device = open_device(card.name)
        assert device is not None
        print(f"link: {device.link_rate() / 1e9:.1f} GB/s", flush=True)
    for name in options.models:
        if not clock.allows(name):
            continue
        started = time.perf_counter()
        shape = SMALL if REHEARSED else PRESETS[name]
        folder = make_llama(shape, options.scratch / name)
        seconds = time.perf_counter() - started
        print(f"\n{name}: {model_bytes(folder) / 1e9:.2f} GB, made in {seconds:.0f} s", flush=True)
        measure(card, folder, TOKENS[name])
        if find_spec("bitsandbytes") and clock.allows(f"{name} in NF4"):
            measure_nf4(card, folder, TOKENS[name])
        for disk in (False, True):
            for share in SHARES:
                if clock.allows(f"accelerate at {share}, {'disk' if disk else 'RAM'}"):
                    measure_accelerate(folder, share, disk=disk)
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
