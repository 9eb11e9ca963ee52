"""Casts and conversions, which hold bytes twice for a while, stay within the limit, too."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, MixtralConfig

from tests.support import quantised
from tests.support.models import save_random
from tests.support.sweeps import few
from tests.support.warm import warm_python

_CHILD = """
import json, sys, torch, transformers, pipeload
transformers.utils.logging.disable_progress_bar()
folder, dtype, passes = sys.argv[1], getattr(torch, sys.argv[2]), int(sys.argv[3])
prompt = torch.arange(int(sys.argv[4]))[None] % 500 + 3
options = {"dtype": dtype, "tokens": max(256, prompt.numel() + 3)}
try:
    pipeload.plan(folder, memory_limit=1, **options)
except pipeload.MemoryLimitError as error:
    limit = error.smallest_limit + int(sys.argv[5])
model = pipeload.from_pretrained(folder, memory_limit=limit, io_mode="direct", **options)
for _ in range(passes):
    model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0)
stats = model.pipeload.stats()
print(json.dumps({"over": stats.peak_rss_bytes - limit, "read": stats.bytes_read,
    "streamed": model.pipeload.plan.bytes_per_pass,
    "stored": model.pipeload.plan.stored_bytes, "experts": stats.expert_bytes_read}))
"""


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral of 180 MB whose experts lie one by one in the file and are stacked when read."""
    config = MixtralConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=8,
        max_position_embeddings=256,
        pad_token_id=0,
    )
    folder = tmp_path_factory.mktemp("experts")
    return save_random(config, folder, torch.bfloat16, seed=3)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA of 50 MB in FP8: a matrix takes more than the smallest range of rows."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=1536,
        intermediate_size=4096,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=256,
        pad_token_id=0,
    )
    return quantised.fp8(tmp_path_factory.mktemp("fp8"), config)


@pytest.mark.parametrize(
    ("dtype", "passes"), few([("bfloat16", 0), ("bfloat16", 2), ("float32", 2)], [("bfloat16", 2)])
)
def test_the_reported_limit_works_and_holds(experts: Path, dtype: str, passes: int) -> None:
    """The very limit that the error names; also for a script that ends while weights are read."""
    check(experts, dtype, passes, experts=True)


def test_unpacking_stays_within_the_limit(unpacked: Path) -> None:
    """What is read, what is made of it, and what the library takes meanwhile, in fp32."""
    check(unpacked, "bfloat16", 2)


def test_products_with_many_rows_stay_within_the_limit(tmp_path: Path) -> None:
    """LLM.int8 holds them in int32, and twice in fp32, for all of a prompt at once."""
    pytest.importorskip("bitsandbytes")
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=6144,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        pad_token_id=0,
    )
    folder = save_random(config, tmp_path / "floats", torch.bfloat16, seed=3)
    AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        quantization_config=BitsAndBytesConfig(load_in_8bit=True),
        device_map="cpu",
    ).save_pretrained(tmp_path / "int8")
    check(tmp_path / "int8", "bfloat16", 1, prompt=1500)


def test_what_stays_as_it_is_stored_is_within_the_limit(tmp_path: Path) -> None:
    """Of 92 MB in bf16, computed in fp32, what does not fit as floats; then nothing is read."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
    )
    folder = save_random(config, tmp_path, torch.bfloat16, seed=3)
    result = child(folder, "float32", 3, spare=120_000_000)
    assert result["over"] <= 0
    assert result["stored"] > 40_000_000
    assert result["streamed"] == 0


def check(
    folder: Path, dtype: str, passes: int, *, prompt: int = 17, experts: bool = False
) -> None:
    """A child of its own loads and runs at the smallest limit, and does not pass it."""
    result = child(folder, dtype, passes, prompt=prompt)
    assert result["over"] <= 0
    assert (result["experts"] if experts else result["streamed"]) > 0 or not passes
    assert result["read"] >= passes * result["streamed"]


def child(
    folder: Path, dtype: str, passes: int, *, prompt: int = 17, spare: int = 0
) -> dict[str, int]:
    """What came of one that runs at the smallest limit and `spare` bytes."""
    done = subprocess.run(
        [*warm_python(), "-c", _CHILD, folder, dtype, *map(str, (passes, prompt, spare))],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, int] = json.loads(done.stdout)
    return result
