"""One model type of each kind that streaming has to care for, as `tests/coverage_run.py` does."""

from __future__ import annotations

import pytest

from tests.coverage_check import EXACT, NO_CLASS, PLAIN, REFUSED, Row, check
from tests.coverage_run import totals

KINDS = {
    "llama": "a decoder",
    "gpt2": "transposed weights, tied head",
    "bloom": "a tied head that is one unit",
    "t5": "two towers, weights kept in fp32",
    "bert": "an encoder with a head",
    "mixtral": "experts stacked from the file",
    "qwen3_next": "layers of two kinds, one with a state",
    "mamba": "no attention",
    "deepseek_v3": "latent attention, groups of experts",
    "gemma3_text": "windows in turn with full attention",
    "minimax_m3_vl": "a Linear made of several tensors",
    "gemma4": "rows of a table picked past its module",
    "recurrent_gemma": "a state; another way through where one token comes",
    "rwkv": "weights changed from outside their block",
    "gpt_oss": "experts in one tensor",
    "qwen2_vl": "patches in a row, positions in three dimensions",
    "llava": "a picture among the tokens",
    "clipseg": "positions of a picture that are used whole",
    "whisper": "frames of sound",
    "nemotron_asr_streaming": "decoder layers alone are counted",
    "wav2vec2": "raw sound",
    "dac": "an initialisation that overwrites without asking",
    "vit": "a picture alone",
}


@pytest.mark.parametrize("model_type", KINDS)
def test_streamed_is_plain(model_type: str) -> None:
    """All outputs and generated tokens, at two limits and in two dtypes."""
    row = check(model_type)
    assert row.result == EXACT, row.reason
    assert not row.uses.startswith("0 units"), "nothing was streamed"


def test_totals() -> None:
    """They count what the table says; what plain cannot run is not held against streaming."""
    rows = [Row(name, "", name, "", "", "") for name in (EXACT, REFUSED, PLAIN, PLAIN, NO_CLASS)]
    told = totals(rows)
    assert told.startswith("5 types: 2 plain cannot")
    assert told.endswith("Of 2 that plain can run, 1 exact.")
