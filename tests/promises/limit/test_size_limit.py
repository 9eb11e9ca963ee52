"""`pipeload quantize --size` holds no more than its limit while gradients go back, either."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig

from tests.support.cgroups import memory_cgroup
from tests.support.commands import save_tokenizer
from tests.support.models import save_random

ROOT = Path(__file__).parents[3]
# What is refused says what works, each for a part of the way that needs more than the last.
CHILD = """
import sys
import pipeload
from pipeload.errors import MemoryLimitError
from tests.support.cgroups import peak_rss_bytes
limit = 1_000_000
for _ in range(6):
    try:
        pipeload.quantize(sys.argv[1], sys.argv[2], method="int4", size="12500kB",
            calibration_tokens=256, memory_limit=limit)
        break
    except MemoryLimitError as error:
        limit = error.smallest_limit + 8_000_000
        before = peak_rss_bytes()
print(limit, before, peak_rss_bytes())
"""


def test_the_peak_is_within_the_limit(tmp_path: Path) -> None:
    """At the smallest that is advised; it does take more than what came before."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=2048,
        max_position_embeddings=512,
        pad_token_id=0,
    )
    folder = save_random(config, tmp_path / "source", torch.bfloat16, seed=3)
    save_tokenizer(folder)
    with memory_cgroup(900_000_000) as group:
        command = [sys.executable, "-c", CHILD, str(folder), str(tmp_path / "made")]
        done = group.run(command, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert group.oom_kills() == 0
    limit, before, peak = map(int, done.stdout.split())
    assert before < peak <= limit, (limit, before, peak)
    assert (tmp_path / "made").exists()
