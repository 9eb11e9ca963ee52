"""The limit holds with a draft in memory: a child under a kernel cap equal to it lives."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

import pipeload
from tests.support.cgroups import drop_caches
from tests.support.models import save_random, tiny_config

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
ids = torch.arange(40)[None] + 5
before = model.pipeload.plan.bytes_per_pass
DraftControl.pays = True
model.generate(ids, max_new_tokens=60, do_sample=False)
beside, kept = model.pipeload.plan.bytes_per_pass, model.pipeload.stats().tokens_per_pass
DraftControl.pays = False
model.generate(ids, max_new_tokens=40, do_sample=False)
stats = model.pipeload.stats()
print(json.dumps({"peak": stats.peak_rss_bytes, "kept": kept,
    "read": [before, beside, model.pipeload.plan.bytes_per_pass]}))
"""


@pytest.mark.slow
@pytest.mark.cgroup
def test_a_draft_under_a_cap(
    tmp_path: Path, cgroup: Callable[[int], AbstractContextManager[MemoryCgroup]]
) -> None:
    """It comes, guesses 12 at a time, is given up, and its memory holds weights again."""
    wide = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12}
    config = tiny_config("llama", **wide, num_attention_heads=8, num_key_value_heads=8)
    folder = save_random(config, tmp_path / "model", "fp32", seed=1)
    draft = pipeload.quantize(folder, tmp_path / "draft", method="int8")
    limit = 480_000_000
    drop_caches()  # pages that another group has read would be charged to that group
    with cgroup(limit) as group:
        child = group.run([sys.executable, "-c", _CHILD, str(folder), str(draft), str(limit)])
        assert child.returncode == 0, child.stderr
        assert group.oom_kills() == 0
    result = json.loads(child.stdout.splitlines()[-1])
    assert result["peak"] <= limit
    assert result["kept"] > 1
    before, beside, after = result["read"]
    assert before < beside
    assert after < before + (beside - before) / 4
