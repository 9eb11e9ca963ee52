"""Models that are tried in ways of their own, each for one reason."""

from __future__ import annotations

from typing import Any

import pytest

from pipeload.ring.crossing_trial import try_crossing
from pipeload.ring.dealt_parts import layers_of_all
from pipeload_hooks import find_decoder_blocks
from tests.tools.model_types import check as checking
from tests.tools.model_types.classes import classes_of

REASONS = {
    "blt": "its blocks are called with vectors, as many as weights decide",
    "cpmant": "it wants all words with each further one",
    "dbrx": "it looks for an expert that there is none of",
    "dia": "a position has several words, which it begins with by itself",
    "idefics": "it wants its picture with each further word",
    "modernbert-decoder": "it calls its head a decoder",
    "qwen3_omni_moe_talker_code_predictor": "it reads vectors where others read words",
    "rag": "its encoder and decoder are a model inside of it",
}


def _made(model_type: str) -> Any:
    cls = classes_of(model_type)[0]
    return checking._make(model_type, cls, lambda _stage: None)[0]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", REASONS)
def test_it_can_be_tried(model_type: str) -> None:
    """And nothing crosses its blocks."""
    model = _made(model_type)
    names = [name for name, _ in find_decoder_blocks(model)]
    assert len(names) > 1
    assert try_crossing(model.to("meta"), names) == (None,)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "layers"), [("llama", set()), ("bart", set()), ("diffusion_gemma", {0, 1, 2})]
)
def test_layers_of_all(model_type: str, layers: set[int]) -> None:
    """An encoder whose cache the decoder reads writes to it on every rank."""
    assert layers_of_all(_made(model_type)) == layers
