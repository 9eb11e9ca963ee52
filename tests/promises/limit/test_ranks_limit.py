"""Each rank keeps its own limit, in a kernel memory group that would kill it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.cgroups import skip_or_fail
from tests.tools.many_at_once import BLKIO
from tests.tools.ring_speed import measure

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.cgroup
@pytest.mark.slow
def test_two_ranks_under_caps(smollm2_bf16: Path) -> None:
    """With other limits, and disks that bind: both stay below, and have the same tokens."""
    if not (BLKIO / "blkio.throttle.read_bps_device").exists():
        skip_or_fail("no group for disks can be made here")
    limits = [480_000_000, 440_000_000]
    first, other = measure(smollm2_bf16, limits, [300_000_000] * 2, 3, apart=False)
    assert first["tokens"] == other["tokens"]
    assert first["peak"] <= limits[0]
    assert other["peak"] <= limits[1]
    assert first["read"] + other["read"] > 0
