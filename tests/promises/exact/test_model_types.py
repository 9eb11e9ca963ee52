"""One model type of each kind that streaming has to care for, as `model_types/run.py` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlavaConfig

from tests.support.sweeps import few
from tests.tools.model_types.check import EXACT, NO_CLASS, PLAIN, REFUSED, Row, check
from tests.tools.model_types.configs import config_for
from tests.tools.model_types.repairs import repaired
from tests.tools.model_types.run import totals
from tests.tools.model_types.special import settle

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS = {
    "llama": "a decoder",
    "gpt2": "transposed weights, tied head",
    "bloom": "a tied head that is one unit",
    "t5": "two towers, weights kept in fp32",
    "bert": "an encoder with a head",
    "mixtral": "experts stacked from the file",
    "qwen3_next": "layers of two kinds, one with a state",
    "deepseek_v3": "latent attention, groups of experts",
    "gemma3_text": "windows in turn with full attention",
    "minimax_m3_vl": "a Linear made of several tensors",
    "gemma4": "rows of a table picked past its module",
    "recurrent_gemma": "a state; another way through where one token comes",
    "rwkv": "no attention; weights changed from outside their block",
    "gpt_oss": "experts in one tensor",
    "qwen2_vl": "patches in a row, positions in three dimensions",
    "llava": "a picture among the tokens",
    "clipseg": "positions of a picture that are used whole",
    "whisper": "frames of sound",
    "nemotron_asr_streaming": "decoder layers alone are counted",
    "wav2vec2": "raw sound",
    "dory": "layers that run in a loop, among others that do not",
    "musicgen_decoder": "rows of tokens that make one sequence",
    "dac": "an initialisation that overwrites without asking",
    "vit": "a picture alone",
}


IN_THE_SWEEP = {"rwkv", "bloom", "clipseg", "dory", "musicgen_decoder", "nemotron_asr_streaming"}
# Weights kept in fp32, experts, windows, and the plainest.
THOROUGHLY = {"t5", "mixtral", "gemma3_text", "llama"}


@pytest.mark.parametrize("model_type", few(KINDS, KINDS.keys() - IN_THE_SWEEP))
def test_streamed_is_plain(model_type: str) -> None:
    """All outputs and generated tokens; of some in two dtypes and at all limits.

    So the command does it of every type.
    """
    row = check(model_type, fast=model_type not in THOROUGHLY)
    assert row.result == EXACT, row.reason
    assert not row.uses.startswith("0 units"), "nothing was streamed"


def test_totals() -> None:
    """They count what the table says; what plain cannot run is not held against streaming."""
    rows = [Row(name, "", name, "", "", "") for name in (EXACT, REFUSED, PLAIN, PLAIN, NO_CLASS)]
    told = totals(rows)
    assert told.startswith("5 types: 2 plain cannot")
    assert told.endswith("Of 2 that plain can run, 1 exact.")


_FLAT = torch.nn.Linear(24, 8)
_IMAGE = torch.nn.Conv2d(3, 4, 2)
_TABLE = torch.nn.Embedding(4, 8)


def _of_four(value: torch.Tensor) -> torch.Tensor:
    batch, _, _, width = value.shape
    return value.sum().expand(batch, width)


@pytest.mark.parametrize(
    ("forward", "given"),
    [
        (_FLAT, torch.zeros(5, 16)),
        (_IMAGE, torch.zeros(1, 5, 8, 8)),
        (torch.nn.LayerNorm(24), torch.zeros(5, 16)),
        (lambda value: torch.ones(5, 9) + value, torch.zeros(5, 7)),
        (_of_four, torch.zeros(2, 5)),
        (_of_four, torch.zeros(1, 2, 3, 4, 5)),
        (_TABLE, torch.zeros(1, 5, 8)),
    ],
)
def test_repaired(forward: Callable[[torch.Tensor], Any], given: torch.Tensor) -> None:
    """An input that fails leads to one that does not, in the words of the library's errors."""
    with pytest.raises((RuntimeError, ValueError)) as caught:
        forward(given)
    works = 0
    for other in repaired({"value": given}, str(caught.value)):
        forward(other["value"])
        works += 1
    assert works


def test_settings_of_types_inside() -> None:
    """They hold wherever their type stands, and leave what others stand beside them."""
    text = {"model_type": "ernie4_5_vl_moe_text", "rope_parameters": {"rope_theta": 3.0}}
    numbers = {"model_type": "unheard_of", "text_config": text}
    settle("unheard_of", numbers)
    assert text["rope_parameters"] == {"rope_theta": 3.0, "mrope_section": [2, 2, 4]}


def test_config_of_a_part() -> None:
    """A class of the text alone takes the text's configuration out of a composite one."""
    text = LlamaConfig(hidden_size=32, num_hidden_layers=1)
    both = LlavaConfig(text_config=text)
    assert config_for(LlamaForCausalLM, both) is both.text_config
    assert config_for(LlamaForCausalLM, text) is text
