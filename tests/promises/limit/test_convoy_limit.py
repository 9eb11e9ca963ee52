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
prompts = [torch.arange(20 + 60 * n)[None] % 999 + 5 for n in (0, 1, 3)]
many = [{"input_ids": ids, "max_new_tokens": 4, "do_sample": False} for ids in prompts]
found = dict(pipeload.generate_many(model, many, at_once=3))
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
    """Prompts of 20 to 200 tokens at once: no kill, VmHWM below the limit, all equal to alone."""
    limit = 540_000_000
    drop_caches()  # pages that another group has read would be charged to that group
    with cgroup(limit) as group:
        child = group.run([sys.executable, "-c", _CHILD, smollm2_bf16, str(limit)])
        assert child.returncode == 0, child.stderr
        assert group.oom_kills() == 0
    result = json.loads(child.stdout.splitlines()[-1])
    assert result["peak"] <= limit
    assert result["streamed"] > 0
    assert result["equal"] == 3


@pytest.mark.slow
@pytest.mark.cgroup
@pytest.mark.parametrize(
    "kind",
    [["--batched"], pytest.param(["--prefix-cache", "40MB"], marks=pytest.mark.sweep)],
)
def test_a_batch_under_a_cap(
    smollm2_bf16: Path,
    tmp_path: Path,
    cgroup: Callable[[int], AbstractContextManager[MemoryCgroup]],
    kind: list[str],
) -> None:
    """As rows of one pass, drawn or not, or with what others have left: no kill, no line lost."""
    limit = 540_000_000
    requests, results = tmp_path / "requests", tmp_path / "results"
    with requests.open("w") as file:
        for number in range(12):
            said = {"role": "user", "content": "What is a river? " * (1 + number % 8)}
            body = {"messages": [said], "max_tokens": 3}
            body |= {"temperature": 0.7} if number % 3 == 0 else {}
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions"}
            file.write(json.dumps(line | {"body": body}) + "\n")
    command: list[str | Path] = [sys.executable, "-m", "pipeload", "batch"]
    command += [smollm2_bf16, requests, results]
    options = ["--memory-limit", str(limit), "--io-mode", "direct", "--json", *kind]
    drop_caches()
    with cgroup(limit) as group:
        child = group.run([*command, *options])
        assert child.returncode == 0, child.stderr
        assert group.oom_kills() == 0
    figures = json.loads(child.stdout)
    assert figures["peak_rss_bytes"] <= limit
    assert figures["answered"] == 12
    bodies = [json.loads(line)["response"]["body"] for line in results.read_text().splitlines()]
    told = [body.get("pipeload") for body in bodies if body.get("pipeload")]
    assert len(told) == (12 if "--batched" in kind else len(told)) > 0
    assert told[0] == {"exact": False}
