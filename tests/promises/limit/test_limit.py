"""The limit holds: a child under a kernel cap equal to it is never killed."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support.cgroups import drop_caches
from tests.tools.make_llama import PRESETS, make_llama

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.support.cgroups import MemoryCgroup

_CHILD = """
import json, sys, torch, transformers, pipeload
from pathlib import Path
transformers.utils.logging.disable_progress_bar()
folder, limit, generations, fail_file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
model = pipeload.from_pretrained(folder, memory_limit=limit, io_mode="direct")
prompt = torch.arange(16)[None] + 5
texts, resident, fails = set(), [], []
for _ in range(generations):
    text = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    texts.add(tuple(text[0].tolist()))
    resident.append(pipeload.system.memory.rss_bytes())
    fails.append(int(Path(fail_file).read_text()) if fail_file else 0)
stats = model.pipeload.stats()
print(json.dumps({"peak": stats.peak_rss_bytes, "resident": resident, "fails": fails,
    "texts": [list(text) for text in texts], "misses": stats.misses,
    "streamed": model.pipeload.plan.bytes_per_pass}))
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A quarter of the layers of the 1.1B shape in bf16, 0.8 GB, random; deleted after."""
    shape = replace(PRESETS["1.1b"], layers=6)
    folder = make_llama(shape, tmp_path_factory.mktemp("llama") / "quarter")
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.cgroup
@pytest.mark.parametrize("limit", [680_000_000])
def test_a_child_capped_at_the_limit_lives_and_stays_flat(
    limit: int, llama: Path, cgroup: Callable[[int], AbstractContextManager[MemoryCgroup]]
) -> None:
    """Generations under a cap equal to the limit: no kill, VmHWM below, memory flat."""
    drop_caches()  # pages that another group has read would be charged to that group
    with cgroup(limit) as group:
        fail_file = "" if group.is_v2 else str(group.path / "memory.failcnt")
        child = group.run([sys.executable, "-c", _CHILD, llama, str(limit), "6", fail_file])
        assert child.returncode == 0, child.stderr
        assert group.oom_kills() == 0
    result = json.loads(child.stdout.splitlines()[-1])
    assert result["peak"] <= limit
    assert result["streamed"] > 0
    assert len(result["texts"]) == 1
    assert result["misses"] == 0
    # Flat: the last generations take nothing that the first did not.
    assert max(result["resident"][4:]) - result["resident"][2] < 8_000_000
    # The kernel may still swap stale cache pages for fresh ones: hundreds of failed charges, the
    # number is its own. Fighting for memory in use would be a million.
    assert result["fails"][-1] - result["fails"][2] < 20_000
