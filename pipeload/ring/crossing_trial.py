"""Runs a model without weights, and looks for tensors that go from block to block past outputs.

A prompt, then one token more with the cache that came of it. On the meta device alone where the
library has inputs for that; else with small values, as passes are tried for what they take.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pipeload.budget.hint_pass import hinted_calls
from pipeload.budget.pass_shape import PassShape
from pipeload.budget.pass_trial import trace_of
from pipeload.budget.usage_trial import CACHES, continue_it, read_prompt, try_without_values
from pipeload_hooks import Crossing, find_crossing, try_out

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

_log = logging.getLogger("pipeload")

Told = tuple[Crossing | None]
"""The first tensor that crosses, if any does."""


def try_crossing(model: nn.Module, names: Sequence[str]) -> Told | None:
    """What a trial of `model`, on the meta device, tells of its blocks; None if none can be made.

    `names`: of the blocks.
    """

    def observe(copied: Any, inputs: Mapping[str, torch.Tensor], _shortened: object) -> Told:
        def run() -> None:
            caches = read_prompt(copied, inputs)
            if caches:
                continue_it(copied, inputs, caches)

        return (find_crossing([copied.get_submodule(name) for name in names], run),)

    return try_without_values(model, observe) or _try_with_sizes(model, names)


def _try_with_sizes(model: nn.Module, names: Sequence[str]) -> Told | None:
    trace = trace_of(model)
    if trace is None:
        return None
    blocks = [trace.model.get_submodule(name) for name in names]
    for call in _calls(trace.model):
        # Inside: it has to see tensors before others take them for their sizes alone.
        trial = try_out(partial(_find, trace.model, blocks, call))
        if trial.error is None:
            found: Told = trial.output
            return found
        _log.debug("%s cannot run without weights: %r", type(model).__name__, trial.error)
    return None


def _find(model: Any, blocks: Sequence[nn.Module], call: Mapping[str, Any]) -> Told:
    return (find_crossing(blocks, partial(_run, model, call)),)


def _calls(model: Any) -> Iterator[dict[str, Any]]:
    """Arguments for a prompt, the likeliest first; with an encoder, also those of the decoder."""
    ids = torch.ones((1, 2), dtype=torch.long)
    try:
        for call in hinted_calls(model, PassShape(4, 1)):
            call.pop("logits_to_keep", None)
            if getattr(model.config, "is_encoder_decoder", False):
                call["decoder_input_ids"] = ids
            yield call
    except Exception as error:  # a configuration may be anything
        _log.debug("%s has no inputs: %r", type(model).__name__, error)


def _run(model: Any, call: Mapping[str, Any]) -> None:
    output = model(**call, use_cache=True)
    found = next((name for name in CACHES if name in output), None)
    if found is None:
        return
    one = torch.ones((1, 1), dtype=torch.long)
    encoded = output.get("encoder_last_hidden_state")
    if encoded is None:
        model(input_ids=one, use_cache=True, **{found: output[found]})
    else:
        given = {"encoder_outputs": (encoded,), "decoder_input_ids": one}
        model(**given, use_cache=True, **{found: output[found]})
