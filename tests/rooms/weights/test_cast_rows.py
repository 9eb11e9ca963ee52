"""A matrix whose dtype the user changes is read row by row, as one that is stored so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from pipeload.checkpoint.headers import TensorEntry
from pipeload.hf.recipes import Recipe
from pipeload.weights.cast_rows import CastRows
from tests.support.exact import (
    assert_same,
    assert_streamed,
    limits,
    load,
    prompt,
    smallest_limit,
    steady_floor,
    step_logits,
)
from tests.support.models import load_plain, save_random

__all__ = ["steady_floor"]  # a fixture: every test here runs with it

CONFIG = LlamaConfig(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=60_000,
    pad_token_id=0,
)


def test_rows() -> None:
    """Any of them, in steps of about a megabyte."""
    stored = torch.randn(700, 1024, dtype=torch.float16)
    cast = CastRows("F16", 2048)
    steps = list(cast.steps(700, 4096))
    assert steps == [(0, 512), (512, 700)]
    made = torch.empty(700, 1024)
    for start, stop in steps:
        rows, part = cast.part(start, stop)
        part.fill(stored[rows.start : rows.stop].view(torch.uint8), made[start:stop])
    assert torch.equal(made, stored.float())


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [(torch.float16, torch.bfloat16), (torch.float32, torch.bfloat16), ("bf16", torch.float32)],
)
def test_table_and_head_are_not_held_whole(
    stored: torch.dtype | str, wanted: torch.dtype, tmp_path: Path
) -> None:
    """The bits of a plain load at every limit; the smallest one is that of a stored cast."""
    folder = save_random(CONFIG, tmp_path / "stored", stored, seed=4)
    expected = step_logits(load_plain(folder, dtype=wanted), prompt(), 3)
    first, *others = limits(folder, 3, dtype=wanted)
    model = load(folder, first, dtype=wanted)
    assert_same(step_logits(model, prompt(), 3), expected, "smallest")
    assert_streamed(model)
    for limit in others:
        made = load(folder, limit, dtype=wanted)
        assert_same(step_logits(made, prompt(), 3), expected, f"at {limit}")
    save_random(CONFIG, tmp_path / "as-wanted", wanted, seed=4)
    table = CONFIG.vocab_size * CONFIG.hidden_size * wanted.itemsize
    # Two readers have room to cast in, of 4 MB each.
    assert first - smallest_limit(tmp_path / "as-wanted") < table


def test_rows_of_many_columns_are_cast_by_elements() -> None:
    """One alone would not fit what a reader has to cast in."""
    file = Path("model.safetensors")
    short, long = (
        TensorEntry("w", file, "F32", (2, columns), 0, 8 * columns)
        for columns in (1 << 20, (1 << 20) + 1)
    )
    assert Recipe(None, [(short, "w")]).cast_rows(short.shape, "BF16") is not None
    assert Recipe(None, [(long, "w")]).cast_rows(long.shape, "BF16") is None
