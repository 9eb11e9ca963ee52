"""Streamed logits equal plain ones bit for bit: families, dtypes, limits and ways of reading."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.exact import (
    assert_same,
    assert_streamed,
    bytes_streamed,
    fitting_limit,
    limits,
    load,
    load_smallest,
    prompt,
    steady_floor,
    step_logits,
)
from tests.support.models import (
    DTYPES,
    FAMILIES,
    data_start,
    load_plain,
    save_random,
    tensor_files,
    tiny_config,
)
from tests.support.sweeps import few

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from tests.conftest import TinyCheckpoint

__all__ = ["steady_floor"]  # a fixture: every test here runs with it

STEPS = 5
IO_MODES = ("direct", "direct", "uncached", "buffered")


def outputs(model: Any) -> list[torch.Tensor]:
    """Prompt logits, decode logits and generated tokens, of one sequence and of two."""
    generated = model.generate(prompt(2, 9), max_new_tokens=6, do_sample=False)
    return [*step_logits(model, prompt(), STEPS), *step_logits(model, prompt(2), 2), generated]


@pytest.mark.parametrize(
    ("family", "dtype"),
    few(
        itertools.product(FAMILIES, ["fp32", "bf16"]),
        [*((family, "fp32") for family in FAMILIES), ("llama", "bf16"), ("gemma3", "bf16")],
    ),
)
def test_logits_at_every_limit(tiny: TinyCheckpoint, family: str, dtype: str) -> None:
    """From the smallest limit to where all fits, prompt and decode logits equal plain ones."""
    folder = tiny(family, dtype)
    wanted = outputs(load_plain(folder))
    for limit, io_mode in zip(limits(folder), IO_MODES, strict=True):
        model = load(folder, limit, io_mode=io_mode)
        assert_same(outputs(model), wanted, f"limit {limit} ({io_mode})")
        if limit == fitting_limit(folder):
            assert model.pipeload.plan.fits
        else:
            assert_streamed(model)


@pytest.mark.parametrize(
    ("stored", "asked"), [("fp32", "fp16"), ("bf16", "fp32"), ("fp32", "bf16"), ("fp16", "fp32")]
)
def test_casts(tmp_path: Path, stored: str, asked: str) -> None:
    """Weights that are cast while they are read give what the library's own cast gives."""
    # Sizes that are no multiples of 16 bytes: a cast weight must be aligned all the same.
    config = tiny_config("llama", hidden_size=90, head_dim=16, intermediate_size=175)
    folder = save_random(config, tmp_path, stored, seed=3, max_shard_size="300KB")
    wanted = outputs(load_plain(folder, dtype=DTYPES[asked]))
    every = limits(folder, 3, dtype=DTYPES[asked])
    for limit, io_mode in zip(every, ("direct", "uncached", "buffered"), strict=True):
        model = load(folder, limit, dtype=DTYPES[asked], io_mode=io_mode)
        assert_same(outputs(model), wanted, f"limit {limit} ({io_mode})")
        if limit != every[-1]:
            assert_streamed(model)


@pytest.mark.parametrize(
    ("family", "start"),
    few(
        [*(("llama", start) for start in (0, 1, 2, 4, 8)), ("gpt2", 1), ("gpt2", 4), ("qwen3", 2)],
        [("llama", 1), ("llama", 4), ("llama", 8), ("gpt2", 4), ("qwen3", 2)],
    ),
)
def test_where_the_data_start(tmp_path: Path, family: str, start: int) -> None:
    """Weights keep their alignment: fp32 products with one row round differently with another."""
    folder = save_random(family, tmp_path, "fp32", seed=5, data_start_mod16=start)
    assert data_start(folder / "model.safetensors") % 16 == start
    wanted = outputs(load_plain(folder))
    for limit in limits(folder, 3):
        model = load(folder, limit)
        assert_same(outputs(model), wanted, f"limit {limit}")
        model.pipeload.remove()
        assert_same(outputs(model), wanted, f"removed, limit {limit}")


@pytest.mark.parametrize(
    ("io_mode", "readers"), [("direct", 1), ("direct", 3), ("buffered", 3), ("uncached", 1)]
)
def test_ways_of_reading(tiny: TinyCheckpoint, io_mode: str, readers: int) -> None:
    """No way of reading changes a bit, and each reads as much per pass as the plan says."""
    folder = tiny("llama", "bf16")
    model = load_smallest(folder, io_mode=io_mode, readers=readers)
    assert model.pipeload.plan.io_mode == io_mode
    assert_same(outputs(model), outputs(load_plain(folder)))
    assert_streamed(model)
    plan, passes = model.pipeload.plan, model.pipeload.stats().passes
    # The next pass's first blocks may have been read already.
    assert bytes_streamed(model) < (passes + 1) * plan.bytes_per_pass


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_tied_head(tiny: TinyCheckpoint, family: str) -> None:
    """A head that shares the embedding's weight stays shared and gives equal logits."""
    folder = tiny(family, "bf16")
    assert "lm_head.weight" not in tensor_files(folder)
    model = load_smallest(folder)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert_same(outputs(model), outputs(load_plain(folder)))
    assert_streamed(model)


def test_sizes_of_a_pass(tiny: TinyCheckpoint) -> None:
    """Prompts of one token, of many, and batches, in turns on one model, are all exact."""
    folder = tiny("llama", "fp32")
    model, plain = load_smallest(folder), load_plain(folder)
    for rows, length in ((1, 1), (1, 2), (3, 1), (2, 64), (1, 200), (5, 3), (1, 1)):
        ids = prompt(rows, length, seed=rows * length)
        where = f"{rows} x {length}"
        assert_same(step_logits(model, ids, 2), step_logits(plain, ids, 2), where)
    assert_streamed(model)
