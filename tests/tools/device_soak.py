#!/usr/bin/env python3
"""Many random events on a device made of host memory; every output is compared bit for bit.

    python tests/tools/device_soak.py [--seconds 55] [--seed 1]

Limits that change, blocks that move between disk, host memory and device, passes that die, copies
and computing of changing speed, and models that are dropped in the middle of it.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import pipeload
from pipeload.budget.shared_limit import ACCOUNTANT
from pipeload.devices.host_tier import choose_hosted
from tests.support.fake_device import FakeDevice
from tests.support.models import load_plain, save_random
from tests.support.streaming import Reference, generated, logits

if TYPE_CHECKING:
    from collections.abc import Sequence

OPTIONS: dict[str, Any] = {"device": "fake", "host_memory_limit": "4GB", "dtype": "auto"}


class Died(BaseException):
    """Like a KeyboardInterrupt: torch runs no hooks after it."""


class Soak:
    """One device and one checkpoint, and what happens to models on it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.device = FakeDevice(slow=0.0)
        self.share = 1.0
        """Of what is streamed, the most that stays in host memory."""
        self.passes = 0
        plain = load_plain(folder)
        for parameter in plain.parameters():
            parameter.data = parameter.data.clone()
        self.expected: Reference = logits(plain), generated(plain)

    def choose(self, units: Sequence[Any], budget: int) -> frozenset[str]:
        """In the place of the product's: models here are so small that all would stay."""
        streamed = sum(unit.streamed.nbytes for unit in units)
        return choose_hosted(units, min(budget, int(self.share * streamed)))

    def live(self) -> None:
        """The life of one model."""
        self.share = self.random.choice([0.0, 0.3, 0.6, 1.0])
        try:
            pipeload.plan(self.folder, memory_limit=1, **OPTIONS)
        except pipeload.MemoryLimitError as error:
            least = error.smallest_limit
        spare = self.random.choice([0, 50_000, 300_000, 2_000_000])
        model = pipeload.from_pretrained(self.folder, memory_limit=least + spare, **OPTIONS)
        for _ in range(self.random.randint(3, 14)):
            self.device.slow = self.random.choice([0, 0.0005, 0.003])
            self.device.slow_computing = self.random.choice([0, 0.001, 0.01])
            self.happen(model, least)
            self.check(model)
        del model
        gc.collect()
        assert self.device.allocated_bytes() == 0
        assert self.device.pinned == {}
        self.device.log.clear()

    def happen(self, model: Any, least: int) -> None:
        """One of the events, or none."""
        event = self.random.randrange(6)
        if event == 0:
            spare = self.random.choice([0, 30_000, 100_000, 500_000, 2_000_000])
            model.pipeload.set_memory_limit(least + spare)
        elif event == 1:
            self.share = self.random.choice([0.0, 0.3, 0.6, 1.0])
        elif event == 2:
            self.die(model)
        elif event == 3:
            (host,) = ACCOUNTANT.clients
            host.shrink(self.random.choice([0, 200_000, 600_000]))

    def die(self, model: Any) -> None:
        """A pass ends in the middle."""
        error = self.random.choice([Died, RuntimeError])

        def fail(*_args: object) -> None:
            raise error("died")

        block = self.random.choice(list(model.model.layers))
        place = self.random.choice([block, block.mlp, block.self_attn])
        before = self.random.random() < 0.5
        hook = (
            place.register_forward_pre_hook(fail) if before else place.register_forward_hook(fail)
        )
        try:
            logits(model)
        except (Died, RuntimeError):
            pass
        else:
            raise AssertionError("it did not die")
        finally:
            hook.remove()

    def check(self, model: Any) -> None:
        """The output is what it is to be, and the device holds no more than it may."""
        self.passes += 1
        assert torch.equal(logits(model), self.expected[0])
        if self.random.random() < 0.3:
            assert generated(model) == self.expected[1]
        assert self.device.allocated_bytes() <= model.pipeload.plan.memory_limit


def main() -> int:
    """Until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=55.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_random("llama", Path(scratch) / "llama", "bf16", seed=7)
        soak = Soak(folder, options.seed)
        with (
            mock.patch("pipeload.entry.request.open_device", return_value=soak.device),
            mock.patch("pipeload.devices.host_tier.choose_hosted", soak.choose),
        ):
            end = time.monotonic() + options.seconds
            while time.monotonic() < end:
                soak.live()
        soak.device.synchronize()
    assert soak.device.torn == [], soak.device.torn
    print(f"seed {options.seed}: {soak.passes} times, all equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
