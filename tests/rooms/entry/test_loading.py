"""A model on its way into streaming is looked at once."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import pipeload
from pipeload.budget.make_plan import make_plan
from pipeload.budget.usage_trial import probe_usage
from pipeload.entry import loading

if TYPE_CHECKING:
    from tests.conftest import TinyCheckpoint


def test_a_model_is_tried_once_beside_others(tiny: TinyCheckpoint) -> None:
    """Models that share a limit are planned several times; how weights are used stays the same."""
    first = pipeload.from_pretrained(tiny("llama"), memory_limit="4GB")
    with (
        mock.patch.object(loading, "probe_usage", wraps=probe_usage) as probe,
        mock.patch.object(loading, "make_plan", wraps=make_plan) as make,
    ):
        second = pipeload.from_pretrained(tiny("qwen3"), memory_limit="4GB")
    assert make.call_count > 1
    assert probe.call_count == 1
    for model in (first, second):
        model.pipeload.remove()
