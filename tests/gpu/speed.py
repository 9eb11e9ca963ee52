#!/usr/bin/env python3
"""How close streaming to the card comes to what disk, link and card allow; and others beside it.

    python tests/gpu/speed.py --scratch FOLDER --make
    python tests/gpu/speed.py --scratch FOLDER [--seconds 330]

The first makes random LLaMAs in the folder, and copies of them in NF4. The second prints a table
for each: device limits of 0.3 and 0.7 of the model, with as much host memory as there is and with
hardly any. Then accelerate's maps of the same size, layers in host memory and on disk. Steps that
would begin after so many seconds are left out, and said to be.
"""

from __future__ import annotations

import argparse
import json
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
from tests.tools.make_llama import PRESETS, LlamaShape, make_llama

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
    from pipeload.bench import measure as bench_measure
    from pipeload.errors import PipeloadError

    least = smallest(card, folder)
    limits = [max(least, int(share * model_bytes(folder))) for share in SHARES]
    if REHEARSED:  # the measured processes know nothing of a device that stands in
        limits = [600 << 20, 700 << 20]
        hosts: list[str | int | None] = [None]
    else:
        hosts = [scarce_host(card, folder, limits[0]), None]
    try:
        bench_measure.run(
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


def make(scratch: Path) -> None:
    """Random checkpoints, and the same at a quarter of the bytes; the smaller ones first."""
    import pipeload

    for name in TOKENS:
        folder = make_llama(SMALL if REHEARSED else PRESETS[name], scratch / name)
        if find_spec("bitsandbytes"):
            pipeload.quantize(folder, scratch / f"{name}-nf4", method="nf4")


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
    parser.add_argument("--make", action="store_true", help="make the checkpoints, no more")
    options = parser.parse_args()
    if options.make:
        make(options.scratch)
        return 0
    card, clock = find_card(options.scratch), Clock(options.seconds)
    if card is None:
        print("no accelerator here: nothing was measured")
        return 0
    if not REHEARSED:
        from pipeload.devices.open_device import open_device

        device = open_device(card.name)
        assert device is not None
        rates = [(rate or 0) / 1e9 for rate in (device.link_rate(), device.compute_rate())]
        print("link {:.1f} GB/s, products of one row {:.0f} GB/s".format(*rates), flush=True)
    for name, tokens in TOKENS.items():
        for folder in (options.scratch / name, options.scratch / f"{name}-nf4"):
            if folder.exists() and clock.allows(folder.name):
                print(f"\n{folder.name}: {model_bytes(folder) / 1e9:.2f} GB", flush=True)
                measure(card, folder, tokens)
    for share in SHARES:
        for disk in (False, True):
            if clock.allows(f"accelerate at {share}, {'disk' if disk else 'RAM'}"):
                measure_accelerate(options.scratch / next(iter(TOKENS)), share, disk=disk)
    return 0


if __name__ == "__main__":
    sys.exit(main())
