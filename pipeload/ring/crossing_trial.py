"""Runs a model without weights, and looks for tensors that go from block to block past outputs.

A prompt, then one token more with the cache that came of it. On the meta device alone where the
library has inputs for that; else with small values, as passes are tried for what they take.
"""

from __future__ import annotations

import inspect
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pipeload.budget.hint_pass import hinted_calls, main_input
from pipeload.budget.pass_shape import PassShape
from pipeload.budget.pass_trial import trace_of
from pipeload.budget.usage_trial import CACHES, continue_it, read_prompt, try_without_values
from pipeload_hooks import Crossing, find_crossing, try_out

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

_log = logging.getLogger("pipeload")

_LENGTHS = PassShape(4, 1), PassShape(64, 1)
"""Of a prompt: a few words, and sounds that are longer than a kernel is wide."""
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
    # A picture's tokens have to be where it says; without one, its text model runs by itself.
    for tried in dict.fromkeys((trace.model, _text_model(trace.model, blocks))):
        for call in _calls(tried):
            # Inside: it has to see tensors before others take them for their sizes alone.
            trial = try_out(partial(_find, tried, blocks, call))
            if trial.error is None:
                found: Told = trial.output
                return found
            _log.debug("%s cannot run without weights: %r", type(tried).__name__, trial.error)
    return None


def _text_model(model: Any, blocks: Sequence[nn.Module]) -> Any:
    """The innermost part that reads words and has all blocks in it; the model itself, if none.

    No decoder by itself: what it makes of an encoder's output would not be tried.
    """
    wanted, found = set(blocks), model
    for module in model.modules():  # from the outside in
        if not hasattr(module, "config") or getattr(module.config, "is_encoder_decoder", False):
            continue
        words = "input_ids" in inspect.signature(module.forward).parameters
        if words and main_input(module) == "input_ids" and wanted <= set(module.modules()):
            found = module
    return found


class _Encoded(tuple[torch.Tensor]):
    """What an encoder gave, as `generate` hands it on: by its place, or by name; nothing else."""

    __slots__ = ()

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


def _find(model: Any, blocks: Sequence[nn.Module], call: Mapping[str, Any]) -> Told:
    return (find_crossing(blocks, partial(_run, model, call)),)


def _calls(model: Any) -> Iterator[dict[str, Any]]:
    """Arguments for a prompt, the likeliest first; with an encoder, also those of the decoder."""
    ids = torch.ones((1, 2), dtype=torch.long)
    encodes = getattr(model.config, "is_encoder_decoder", False)
    told = inspect.signature(model.forward).parameters
    try:
        for call in (call for length in _LENGTHS for call in hinted_calls(model, length)):
            call.pop("logits_to_keep", None)
            if encodes and "decoder_input_ids" in told:
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
        given = {"encoder_outputs": _Encoded((encoded,)), "decoder_input_ids": one}
        model(**given, use_cache=True, **{found: output[found]})
