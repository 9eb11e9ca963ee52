"""The limit holds while experts come and go: a child under a kernel cap equal to it lives."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

import pipeload
from tests.support.cgroups import drop_caches
from tests.tools.make_moe import MoeShape, make_moe

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.support.cgroups import MemoryCgroup

SHAPE = MoeShape("qwen3_moe", 512, 512, 64, 4, 3, 8, 4, 64, 4096)
"""300 MB of experts, of which a token takes 19."""
_CHILD = """
import json, sys, torch, transformers, pipeload
transformers.utils.logging.disable_progress_bar()
folder, limit = sys.argv[1], int(sys.argv[2])
options = {"dtype": "auto", "tokens": 700}
if not limit:
    print(pipeload.smallest_limit(folder, **options))
    raise SystemExit
model = pipeload.from_pretrained(folder, memory_limit=limit, io_mode="direct", **options)
texts = []
for length, new in ((16, 12), (600, 2), (16, 12), (40, 24)):
    prompt = torch.arange(length)[None] * 7 % 4000 + 5
    text = model.generate(prompt, max_new_tokens=new, do_sample=False, pad_token_id=0)
    texts.append(text[0, length:].tolist())
stats = model.pipeload.stats()
print(json.dumps({"peak": stats.peak_rss_bytes, "read": stats.expert_bytes_read, "texts": texts,
    "hits": stats.expert_hits, "misses": stats.expert_misses, "there": stats.expert_bytes}))
"""


@pytest.mark.slow
@pytest.mark.cgroup
@pytest.mark.parametrize("form", ["bf16", pytest.param("int4", marks=pytest.mark.sweep)])
def test_a_child_capped_at_the_limit_lives(
    form: str, tmp_path: Path, cgroup: Callable[[int], AbstractContextManager[MemoryCgroup]]
) -> None:
    """With next to no cache and with some, a long prompt between: never killed, the same texts."""
    folder = make_moe(SHAPE, tmp_path / "moe")
    expert = 3 * 512 * 512 * 2
    if form == "int4":
        folder = pipeload.quantize(folder, tmp_path / "int4", method=form)
        expert = expert * 9 // 32
    texts, shares = [], []
    with cgroup(4_000_000_000) as group:
        asked = group.run([sys.executable, "-c", _CHILD, folder, "0"])
    for spare in (2_000_000, 60_000_000):
        limit = int(asked.stdout) + spare
        drop_caches()  # pages that another group has read would be charged to that group
        with cgroup(limit) as group:
            child = group.run([sys.executable, "-c", _CHILD, folder, str(limit)])
        assert child.returncode == 0, child.stderr
        result = json.loads(child.stdout)
        assert result["peak"] <= limit
        # Each stored tensor shares its first and last page with a neighbour.
        assert result["read"] <= result["misses"] * (expert + 6 * 4096)
        assert result["there"] <= spare + 8_000_000  # floors of two processes differ
        shares.append(result["hits"] / (result["hits"] + result["misses"]))
        texts.append(result["texts"])
    assert texts[0] == texts[1]
    assert shares[0] < shares[1] * 2 / 3
