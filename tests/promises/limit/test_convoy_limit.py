"""The limit holds for many requests together: a child under a kernel cap equal to it lives."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.cgroups import drop_caches

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.support.cgroups import MemoryCgroup

_CHILD = """
import json, sys, torch, transformers, pipeload
transformers.utils.logging.disable_progress_bar()
folder, limit = sys.argv[1], int(sys.argv[2])
model = pipeload.from_pretrained(folder, memory_limit=limit, dtype="auto", io_mode="direct")
prompts = [torch.arange(20 + 60 * n)[None] % 999 + 5 for n in range(8)]
many = [{"input_ids": ids, "max_new_tokens": 6, "do_sample": False} for ids in prompts]
found = dict(pipeload.generate_many(model, many, at_once=8))
alone = [model.generate(**request) for request in many]
stats = model.pipeload.stats()
print(json.dumps({"peak": stats.peak_rss_bytes, "streamed": model.pipeload.plan.bytes_per_pass,
    "equal": sum(torch.equal(found[n], one) for n, one in enumerate(alone))}))
"""


@pytest.mark.slow
@pytest.mark.cgroup
def test_many_requests_under_a_cap(
    smollm2_bf16: Path, cgroup: Callable[[int], AbstractContextManager[MemoryCgroup]]
) -> None:
    """Prompts of 20 to 440 tokens at once: no kill, VmHWM below the limit, all equal to alone."""
    limit = 540_000_000
    drop_caches()  # pages that another group has read would be charged to that group
    with cgroup(limit) as group:
        child = group.run([sys.executable, "-c", _CHILD, smollm2_bf16, str(limit)])
        assert child.returncode == 0, child.stderr
        assert group.oom_kills() == 0
    result = json.loads(child.stdout.splitlines()[-1])
    assert result["peak"] <= limit
    assert result["streamed"] > 0
    assert result["equal"] == 8
