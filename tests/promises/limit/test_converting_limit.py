"""`pipeload convert` holds no more than its limit, which the kernel sees to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cgroups import memory_cgroup
from tests.support.sweeps import few
from tests.support.warm import warm_python

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


SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 4, "vocab_size": 4096}


def make_source(kind: str, folder: Path) -> Path:
    """A model whose floats are several times as large as what is free below the limit."""
    if kind == "gguf":
        more = {"num_attention_heads": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-6}
        (folder / "config.json").write_text(json.dumps(SIZES | more), encoding="utf-8")
        tool = [*warm_python(), str(ROOT / "tests/tools/make_gguf.py"), str(folder)]
        subprocess.run([*tool, str(folder / "source.gguf"), "Q4_K"], check=True)
        return folder / "source.gguf"
    tool = [*warm_python(), str(ROOT / "tests/tools/make_packed.py"), str(folder / "source")]
    hidden, intermediate, layers, vocabulary = map(str, SIZES.values())
    sizes = ["--layers", layers, "--hidden", hidden, "--intermediate", intermediate]
    subprocess.run([*tool, "--kind", kind, *sizes, "--vocabulary", vocabulary], check=True)
    return folder / "source"


@pytest.mark.parametrize("kind", few(["gptq", "compressed-tensors", "gguf"], ["gptq"]))
def test_the_peak_is_within_the_limit(kind: str, tmp_path: Path) -> None:
    """Also with the whole of a large weight unpacked, and with its statistics."""
    source = make_source(kind, tmp_path)
    with memory_cgroup(900_000_000) as group:
        command = [sys.executable, "-c", CHILD, str(source), str(tmp_path / "made")]
        done = group.run(command, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert group.oom_kills() == 0
    limit, peak = map(int, done.stdout.split())
    assert peak <= limit, (limit, peak)
