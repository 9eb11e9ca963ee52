"""The limit holds with a draft in memory: a child under a kernel cap equal to it lives."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

import pipeload
from tests.support.cgroups import drop_caches

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.support.cgroups import MemoryCgroup

_CHILD = """
import json, sys, torch, transformers, pipeload
from pipeload.entry.draft_control import DraftControl
transformers.utils.logging.disable_progress_bar()
DraftControl.promises = lambda *_: True
DraftControl.count = lambda self, room: min(12, room)
folder, draft, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = pipeload.from_pretrained(folder, memory_limit=limit, dtype="auto", io_mode="direct",
    draft=draft, tokens=160)
ids = torch.arange(60)[None] % 999 + 5
before = model.pipeload.plan.bytes_per_pass
DraftControl.pays = True
model.generate(ids, max_new_tokens=60, do_sample=False)
beside, kept = model.pipeload.plan.bytes_per_pass, model.pipeload.stats().tokens_per_pass
DraftControl.pays = False
for _ in range(3):
    model.generate(ids, max_new_tokens=12, do_sample=False)
stats = model.pipeload.stats()
print(json.dumps({"peak": stats.peak_rss_bytes, "kept": kept,
    "read": [before, beside, model.pipeload.plan.bytes_per_pass]}))
"""


@pytest.mark.slow
@pytest.mark.cgroup
def test_a_draft_under_a_cap(
    smollm2_bf16: Path,
    tmp_path: Path,
    cgroup: Callable[[int], AbstractContextManager[MemoryCgroup]],
) -> None:
    """It comes, guesses 12 at a time, is given up, and its memory holds weights again."""
    draft = pipeload.quantize(smollm2_bf16, tmp_path / "draft", method="int4", group_size=32)
    limit = 600_000_000
    drop_caches()  # pages that another group has read would be charged to that group
    with cgroup(limit) as group:
        child = group.run([sys.executable, "-c", _CHILD, smollm2_bf16, str(draft), str(limit)])
        assert child.returncode == 0, child.stderr
        assert group.oom_kills() == 0
    result = json.loads(child.stdout.splitlines()[-1])
    assert result["peak"] <= limit
    assert result["kept"] > 1.5
    before, beside, after = result["read"]
    assert before < beside
    assert after < beside
