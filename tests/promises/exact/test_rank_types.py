"""Models that two ranks run in ways of their own, each for one reason; the others: ring_types."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.exact import steady_floor
from tests.tools.ring_types import EXACT, check

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["steady_floor"]  # a fixture: every test here runs with it

REASONS = {
    "gemma3n_text": "several streams of hidden states go from block to block",
    "hrm_text": "blocks run several times in a pass",
    "blip-2": "what it reads is a picture, and its text model is tried by itself",
    "fsmt": "positions come before sequences, and the cache has a name of its own",
    "zamba2": "a block is told which layer of the cache is its",
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


IN_THE_SWEEP = {"blip-2", "moonshine", "lasr_ctc"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [pytest.param(t, marks=[pytest.mark.sweep] * (t in IN_THE_SWEEP)) for t in REASONS],
)
def test_two_ranks(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward passes and `generate` equal those of plain."""
    monkeypatch.setenv("PIPELOAD_RANK_PATIENCE", "60")  # nobody is lost, and the machine is busy
    result, why = check(model_type, lambda _stage: None)
    assert result == EXACT, why
