"""How many requests help: what fills the time of reading, fits, and costs less than it saves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from pipeload.entry.convoy_size import ConvoySize, Sizes, sizes_of

MODEL = SimpleNamespace(generation_config=GenerationConfig(max_length=64, num_beams=1))


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ({}, Sizes(1, 64, 1)),
        ({"input_ids": torch.ones(2, 9)}, Sizes(9, 64, 2)),
        ({"inputs": torch.ones(1, 9), "max_new_tokens": 5}, Sizes(9, 14, 1)),
        ({"inputs_embeds": torch.ones(1, 80, 7)}, Sizes(80, 80, 1)),
        ({"input_ids": torch.ones(2, 3), "num_beams": 4, "max_length": 20}, Sizes(3, 20, 8)),
        (
            {"generation_config": GenerationConfig(max_new_tokens=7, num_beams=3)},
            Sizes(1, 8, 3),
        ),
    ],
)
def test_sizes(arguments: dict[str, Any], sizes: Sizes) -> None:
    """Of prompts, answers, and rows, as `generate` takes them."""
    assert sizes_of(MODEL, arguments) == sizes


def most(
    *,
    streamed: int = 1000,
    made: int = 0,
    spare: int = 1000,
    cache: int = 10,
    one_pass: int = 50,
    computing: float | None = None,
) -> int:
    """How many requests of one kind run at once; the disk reads 100 bytes in a second.

    Of weights, 500 bytes are unpacked in a second.
    """
    governor: Any = SimpleNamespace(
        plan=SimpleNamespace(bytes_per_pass=streamed, made_per_pass=made),
        spare_bytes=lambda: spare,
        bytes_alone=lambda *_sizes: (cache, one_pass),
    )
    counters: Any = SimpleNamespace(
        read_seconds=10.0, bytes_read=1000, make_seconds=4.0, made_bytes=2000
    )
    convoy: Any = SimpleNamespace(rounds=SimpleNamespace(seconds_per_pass=computing))
    size = ConvoySize(governor, counters, convoy)
    running: list[dict[str, Any]] = []
    while size.allows(MODEL, running, {}):
        running.append({})
        assert len(running) < 200
    return len(running)


def test_as_many_as_help() -> None:
    """One more than fill the time of reading; before that is known, some."""
    assert most() == 16
    assert most(computing=1.0) == 11
    assert most(computing=3.0) == 5
    assert most(computing=100.0) == 2


def test_a_model_that_streams_nothing_has_one() -> None:
    """Nothing is shared then."""
    assert most(streamed=0) == 1


def test_unpacking_is_shared_as_well() -> None:
    """What stays as it is stored is unpacked once for all."""
    assert most(streamed=0, made=5000, computing=1.0) == 11
    assert most(streamed=500, made=2500, computing=1.0) == 11


def test_memory() -> None:
    """All caches, and what one computes with; but one runs in any case."""
    assert most(spare=100, cache=10, one_pass=50) == 5
    assert most(spare=1) == 1


def test_caches_that_cost_more_than_they_save() -> None:
    """What a cache takes from the residents is read in every round."""
    assert most(cache=300, spare=10**6) == 4
