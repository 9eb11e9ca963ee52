"""A type of each kind generates at its own smallest limit: a part of the tool of this name."""

from __future__ import annotations

import pytest

from tests.support.sweeps import few
from tests.tools.generate_at_smallest import OK, generate_in_child

KINDS = {
    "llama": "a decoder",
    "bert": "a cache that it does not make by itself",
    "t5": "an encoder before it",
    "whisper": "sound of the length that it is made for",
    "audioflamingo3": "sound among text",
    "florence2": "pictures beside an encoder",
    "blip-2": "pictures that are what it says it reads",
    "udop": "pages: words, their places, and a picture",
    "imagegpt": "colours for words",
    "cpmant": "all words again beside their cache, and some of its own in that",
}


@pytest.mark.parametrize("model_type", few(KINDS, ["llama", "t5", "udop", "cpmant"]))
def test_the_hint_is_enough(model_type: str) -> None:
    """The same tokens as plain, no pass refused or estimated over what is promised."""
    row = generate_in_child(model_type)
    assert row.result == OK, row
