"""Models that two ranks run in ways of their own, each for one reason; the others: ring_types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import DynamicCache

from pipeload.ring.block_inputs import pass_through
from tests.support.exact import steady_floor
from tests.tools.ring_types import EXACT, check

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["steady_floor"]  # a fixture: every test here runs with it

REASONS = {
    "gemma3n_text": "several streams of hidden states go from block to block",
    "hrm_text": "blocks run several times in a pass",
    "blip-2": "what it reads is a picture, and its text model is tried by itself",
    "moonshine": "its decoder asks by name for what the encoder gave",
    "lasr_ctc": "its convolution is wider than a few frames",
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the ranks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", REASONS)
def test_two_ranks(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward passes and `generate` equal those of plain."""
    monkeypatch.setenv("PIPELOAD_RANK_PATIENCE", "60")  # nobody is lost, and the machine is busy
    result, why = check(model_type, lambda _stage: None)
    assert result == EXACT, why


def test_positions_of_several_streams() -> None:
    """The last but one size is of positions, the one before of sequences."""
    cache = DynamicCache()
    pass_through(cache, {"hidden_states": torch.zeros(4, 2, 7, 5)}, [0])
    assert cache.get_seq_length() == 7
    layer: Any = cache.layers[0]
    assert layer.keys.shape == (2, 1, 7, 1)
