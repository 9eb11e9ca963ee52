"""`pipeload convert` holds no more than its limit, which the kernel sees to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cgroups import memory_cgroup
from tests.support.sweeps import few

ROOT = Path(__file__).parents[3]
# Its smallest limit in this process, which has loaded what converting needs; then at that limit.
CHILD = """
import sys
import pipeload
from pipeload.errors import MemoryLimitError
from tests.support.cgroups import peak_rss_bytes
try:
    pipeload.convert(sys.argv[1], sys.argv[2], memory_limit=1_000_000)
except MemoryLimitError as error:
    limit = error.smallest_limit + 8_000_000  # it has held the model's skeleton since
pipeload.convert(sys.argv[1], sys.argv[2], memory_limit=limit)
print(limit, peak_rss_bytes())
"""


@pytest.mark.parametrize("kind", few(["gptq", "compressed-tensors"], ["gptq"]))
def test_the_peak_is_within_the_limit(kind: str, tmp_path: Path) -> None:
    """Of a model whose floats are several times as large as what is free below the limit."""
    tool = [sys.executable, str(ROOT / "tests/tools/make_packed.py"), str(tmp_path / "source")]
    sizes = ["--layers", "4", "--hidden", "2048", "--intermediate", "5632", "--vocabulary", "4096"]
    subprocess.run([*tool, "--kind", kind, *sizes], check=True)
    with memory_cgroup(900_000_000) as group:
        command = [sys.executable, "-c", CHILD, str(tmp_path / "source"), str(tmp_path / "made")]
        done = group.run(command, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert group.oom_kills() == 0
    limit, peak = map(int, done.stdout.split())
    assert peak <= limit, (limit, peak)
