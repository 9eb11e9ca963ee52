"""What passes need together, of which one computes at a time."""

from __future__ import annotations

from typing import Any

import torch
import transformers

import pipeload.hf.cache_layers  # noqa: F401 - caches are read by it
from pipeload.budget.pass_needs import PassNeeds
from pipeload.budget.passes_in_turns import Called, needs_in_turns
from tests.support.models import tiny_config


class Needs:
    """Each pass needs its first number, and keeps its second between turns."""

    def for_pass(self, args: Any, _kwargs: Any, _module: Any = None) -> int:
        return int(args[0])

    def between_turns(self, args: Any, _kwargs: Any) -> int:
        return int(args[1])


def together(*pairs: tuple[int, int]) -> list[int]:
    needs: Any = Needs()
    return needs_in_turns(needs, [Called(None, pair, {}) for pair in pairs])


def test_one_computes_at_a_time() -> None:
    """All that they keep, and the most that any takes beside that."""
    assert together((10, 4)) == [10]
    assert together((10, 4), (30, 5), (7, 1)) == [10, 34, 35]
    assert together((10, 4), (8, 99)) == [10, 18]  # none keeps more than it takes


def test_threads_that_are_new() -> None:
    """Each takes on what libraries keep of a thread."""
    needs: Any = Needs()
    calls = [Called(None, (10, 4), {}, first=True) for _ in range(3)]
    oldest, *new = needs_in_turns(needs, calls)
    assert oldest == 10  # what fits alone is to fit
    assert new[1] - new[0] == new[0] - oldest == 4 + 5_000_000


def test_what_a_decoder_keeps() -> None:
    """Its cache and what goes from block to block: a part of what a prompt takes."""
    config = tiny_config("llama", hidden_size=192, intermediate_size=1024)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    needs = PassNeeds(model, config)
    needs._trace = None  # as of a model that the formulas describe
    ids: dict[str, Any] = {"input_ids": torch.ones(2, 200, dtype=torch.int64), "logits_to_keep": 1}
    kept, alone = needs.between_turns((), ids), needs.for_pass((), ids)
    cache = needs.cache_bytes(200, 2)
    assert cache < kept < alone
    one = {"input_ids": torch.ones(2, 1, dtype=torch.int64)}
    assert needs.between_turns((), one) < kept
