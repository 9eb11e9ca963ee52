"""Ranges of rows on tiny models: every kind of weight, from all streamed to all resident."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import pipeload
from pipeload import _build, _refusals, _sites
from tests.models import load_plain
from tests.streaming import assert_nothing_held, generated, load_streamed, logits, streamer_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

# Stored, and loaded as: read as it is, and cast while it is read.
DTYPES = [("fp32", "fp32"), ("bf16", "bf16"), ("fp32", "bf16"), ("bf16", "fp32"), ("fp16", "fp32")]
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 rows at a time: tiny matrices have several ranges, and tiny tables are read by rows."""
    for module in (_build, _sites):
        monkeypatch.setattr(module, "CHUNKS", (1 << 14,))
    monkeypatch.setattr(_sites, "_TABLE_BYTES", 1 << 12)


def split_sites(model: Any) -> list[Any]:
    return [seat for seat in streamer_of(model)._seats if seat.whole is not None]


@pytest.mark.parametrize(("stored", "loaded"), DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2"])
def test_every_kind(tiny: TinyCheckpoint, family: str, stored: str, loaded: str) -> None:
    """Equal with nothing resident, with a part, with everything, and after remove()."""
    folder, dtype = tiny(family, stored), TORCH[loaded]
    plain = load_plain(folder, dtype=dtype)
    wanted, text = logits(plain), generated(plain)
    for spare in (0, 150_000, 10_000_000):
        model = load_streamed(folder, spare=spare, modules=True, dtype=dtype)
        if spare < 1_000_000:
            # A Conv1D is no Linear, and GPT-2's head shares a table, which is not cast row by row.
            assert split_sites(model) or (family == "gpt2" and stored != loaded)
            assert streamer_of(model).tables or stored != loaded, "no table is read by rows"
        for _ in range(2):
            assert torch.equal(logits(model), wanted), spare
        assert generated(model) == text
        assert_nothing_held(model)
        model.pipeload.remove()
        assert torch.equal(logits(model), wanted)


def test_another_number_of_threads(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again whether ranges are exact; where they are not, the pass is refused."""
    folder: Path = tiny("llama")
    model = load_streamed(folder, modules=True)
    for seat in split_sites(model):
        seat.threads += 1
    monkeypatch.setattr(_refusals, "rows_are_exact", lambda *_args, **_options: False)
    with pytest.raises(pipeload.UnsupportedOperationError, match="set_num_threads"):
        logits(model)
    monkeypatch.setattr(_refusals, "rows_are_exact", lambda *_args, **_options: True)
    assert torch.equal(logits(model), logits(load_plain(folder)))
    assert_nothing_held(model)
