"""What torch's allocator makes of a plan: it cuts tensors out of segments that count as a whole."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import pipeload
from pipeload.devices.torch_accelerator import TorchDevice
from pipeload.devices.weights_on_device import device_bytes
from tests.support.fake_device import FakeDevice, lend
from tests.tools.make_llama import PRESETS, LlamaShape, make_llama

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pipeload.budget.plan import Plan, UnitPlan

MIB = 1 << 20


class Segments:
    """Sizes alone: the smallest hole that is large enough, what is left of it if that is worth it.

    As in c10/cuda/CUDACachingAllocator.cpp, without what is given back.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self.holes: dict[bool, list[int]] = {True: [], False: []}

    def take(self, nbytes: int) -> None:
        nbytes += -nbytes % 512
        small = nbytes <= MIB
        holes = self.holes[small]
        fit = min((hole for hole in holes if hole >= nbytes), default=0)
        if fit:
            holes.remove(fit)
        else:
            shared = 2 * MIB if small else 20 * MIB
            fit = shared if nbytes < 10 * MIB else nbytes + -nbytes % (2 * MIB)
            self.reserved += fit
        if fit - nbytes >= (512 if small else MIB + 1):
            holes.append(fit - nbytes)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """The one that `device="fake"` names, with an allocator that counts as torch's."""
    for made in lend(monkeypatch):
        made.takes = partial(TorchDevice.takes, made)  # type: ignore[method-assign, arg-type]
        yield made


def reserved(plan: Plan) -> int:
    """What the allocator has for a model of that plan, pinned weights in segments of their own."""
    segments = Segments()
    segments.take(plan.pinned_bytes)
    buffers = 0
    for unit in plan.units:
        for layout in unit.resident:
            segments.take(device_bytes(layout))
        if unit.streamed.nbytes and buffers < plan.slots:
            segments.take(_largest(plan.units))
            buffers += 1
    return segments.reserved


def _largest(units: tuple[UnitPlan, ...]) -> int:
    return max(device_bytes(unit.streamed) for unit in units)


SHAPES = {
    "8 MiB": PRESETS["1.1b"],  # two in a segment of 20
    "9.5 MiB": LlamaShape(2048, 2432, 16, 32, 8),
    "0.8 MiB": LlamaShape(640, 1728, 40, 10, 10),  # two in one of 2
}


@pytest.mark.parametrize("shape", SHAPES)
def test_segments_are_within_the_limit(tmp_path: Path, device: FakeDevice, shape: str) -> None:
    """Holes that no weight fits into are planned for, however much stays."""
    folder = make_llama(dataclasses.replace(SHAPES[shape], headers_only=True), tmp_path / "model")
    options: dict[str, Any] = {"device": "fake", "dtype": "auto", "host_memory_limit": 1 << 40}
    whole = pipeload.plan(folder, memory_limit=1 << 40, **options)
    least, enough = whole.smallest_limit, whole.memory_limit - whole.unused
    for share in (0.3, 0.7, 1.0):
        limit = least + int((enough - least) * share)
        plan = pipeload.plan(folder, memory_limit=limit, **options)
        assert plan.device_share is not None
        begun = 24 * MIB  # a segment of each kind
        assert reserved(plan) + plan.reserve_bytes <= limit + begun, (share, plan.table())
