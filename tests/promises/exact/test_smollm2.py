"""A real model on a chat prompt, SmolLM2-135M-Instruct: streamed output equals plain output."""

from __future__ import annotations

import json
import shutil
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoTokenizer, pipeline

from tests.support.exact import (
    assert_same,
    assert_streamed,
    limits,
    load,
    load_smallest,
    smallest_limit,
    steady_floor,
    step_logits,
)
from tests.support.models import load_plain, smollm2, tensor_files
from tests.support.sweeps import few

if TYPE_CHECKING:
    from pathlib import Path

    import torch

__all__ = ["steady_floor"]  # a fixture: every test here runs with it

STEPS = 6
QUESTION = [{"role": "user", "content": "Why is the sky blue? Answer in one sentence."}]
GREEDY: dict[str, Any] = {"max_new_tokens": STEPS, "do_sample": False}


@cache
def chat_prompt() -> torch.Tensor:
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2("bf16"))
    inputs = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids: torch.Tensor = inputs["input_ids"]
    return ids


@cache
def plain_logits(dtype: str) -> list[torch.Tensor]:
    """What the plain model gives; the model itself is gone afterwards."""
    return step_logits(load_plain(smollm2(dtype)), chat_prompt(), STEPS)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("step", few([0, 1, 2], [0, 1]), ids=["smallest", "middle", "all fits"])
def test_logits_at_limit(dtype: str, step: int) -> None:
    """Prompt logits and those of six decode steps are equal, wherever the weights are."""
    folder = smollm2(dtype)
    model = load(folder, limits(folder, 3)[step])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same(step_logits(model, chat_prompt(), STEPS), plain_logits(dtype))
    assert model.pipeload.plan.fits == (step == 2)
    if not model.pipeload.plan.fits:
        assert_streamed(model)


def test_layers_lie_in_two_shards() -> None:
    """The checkpoint of these tests has layers that straddle shards."""
    homes: dict[str, set[str]] = {}
    for name, file in tensor_files(smollm2("bf16")).items():
        homes.setdefault(name.split(".")[2], set()).add(file)
    assert max(len(files) for files in homes.values()) == 2


@pytest.mark.sweep
def test_single_file(smollm2_bf16: Path, tmp_path: Path) -> None:
    """The same tensors in one file, read through the page cache, give the same logits."""
    tensors: dict[str, torch.Tensor] = {}
    for name, file in tensor_files(smollm2_bf16).items():
        with safe_open(smollm2_bf16 / file, "pt") as opened:
            tensors[name] = opened.get_tensor(name)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    del tensors
    for file in ("config.json", "generation_config.json"):
        shutil.copy(smollm2_bf16 / file, tmp_path)
    model = load_smallest(tmp_path, io_mode="uncached")
    assert_same(step_logits(model, chat_prompt(), STEPS), plain_logits("bf16"))
    assert_streamed(model)


def test_bf16_file_as_fp32(smollm2_bf16: Path) -> None:
    """A bf16 file that is cast to fp32 while it is read gives the library's fp32 logits."""
    limit = smallest_limit(smollm2_bf16, dtype="float32")
    model = load(smollm2_bf16, limit, dtype="float32")
    wanted = step_logits(load_plain(smollm2_bf16, dtype="float32"), chat_prompt(), 3)
    assert_same(step_logits(model, chat_prompt(), 3), wanted)
    assert_streamed(model)


def test_chat_pipeline(smollm2_bf16: Path) -> None:
    """A chat through the library's own pipeline gets the plain model's answer, word for word."""
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_bf16)

    def answer(model: Any) -> str:
        chat = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
        messages: Any = chat(QUESTION, **GREEDY)
        return json.dumps(messages)

    model = load_smallest(smollm2_bf16)
    wanted = answer(load_plain(smollm2_bf16))
    assert answer(model) == wanted
    assert "sky" in wanted
    assert_streamed(model)
