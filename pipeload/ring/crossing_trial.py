"""Runs a model without weights, and looks for tensors that go from block to block past outputs.

A prompt, then one token more with the cache that came of it. On the meta device alone where the
library has inputs for that; else with small values, as passes are tried for what they take.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipeload.budget.hint_pass import hinted_calls, main_input
from pipeload.budget.pass_shape import PassShape
from pipeload.budget.pass_trial import trace_of
from pipeload.budget.usage_trial import CACHES, continue_it, read_prompt, try_without_values
from pipeload_hooks import Crossing, find_crossing, try_out

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_log = logging.getLogger("pipeload")

_LENGTHS = PassShape(4, 1), PassShape(64, 1)
"""Of a prompt: a few words, and sounds that are longer than a kernel is wide."""
_WORDS, _TARGET, _VECTORS = "input_ids", "decoder_input_ids", "inputs_embeds"
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
    for tried in dict.fromkeys((trace.model, *_inner_models(trace.model, blocks))):
        for call in _calls(tried):
            # Inside: it has to see tensors before others take them for their sizes alone.
            trial = try_out(partial(_find, tried, blocks, call))
            if trial.error is None:
                found: Told = trial.output
                return found
            _log.debug("%s cannot run without weights: %r", type(tried).__name__, trial.error)
    return None


def _inner_models(model: Any, blocks: Sequence[nn.Module]) -> tuple[Any, Any]:
    """The innermost part that reads words and has all blocks in it, and the one that reads vectors.

    The model itself, where there is none. No decoder by itself: what it makes of an encoder's
    output would not be tried.
    """
    wanted, text, stack = set(blocks), model, model
    for module in model.modules():  # from the outside in
        if not hasattr(module, "config") or not wanted <= set(module.modules()):
            continue
        told = inspect.signature(module.forward).parameters
        if getattr(module.config, "is_encoder_decoder", False) and _TARGET not in told:
            continue
        if _WORDS in told and main_input(module) == _WORDS:
            text = module
        elif _WORDS not in told and _VECTORS in told:
            stack = module
    return text, stack


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
    """Arguments for a prompt, the likeliest first; with an encoder, also those of the decoder.

    Vectors for words are as wide as one of its Linears: nobody says which.
    """
    ids = torch.ones((1, 2), dtype=torch.long)
    encodes = getattr(model.config, "is_encoder_decoder", False)
    told = inspect.signature(model.forward).parameters
    try:
        for call in (call for length in _LENGTHS for call in hinted_calls(model, length)):
            call.pop("logits_to_keep", None)
            if encodes and _TARGET in told:
                yield {**call, _TARGET: ids}
            yield call
    except Exception as error:  # a configuration may be anything
        _log.debug("%s has no inputs: %r", type(model).__name__, error)
    linears = (module for module in model.modules() if isinstance(module, nn.Linear))
    for width in dict.fromkeys(linear.in_features for linear in linears if _VECTORS in told):
        yield {_VECTORS: torch.empty((1, 2, width), device="meta")}


def _run(model: Any, call: Mapping[str, Any]) -> None:
    output = model(**call, use_cache=True)
    found = isinstance(output, Mapping) and next((name for name in CACHES if name in output), None)
    if not found:
        return
    ways = _one_more(call, output.get("encoder_last_hidden_state"))
    for way in ways[:-1]:
        try:
            model(**way, use_cache=True, **{found: output[found]})
        except Exception as error:  # noqa: PERF203 - a model wants to be called in another way
            _log.debug("%s cannot go on by %s: %r", type(model).__name__, [*way], error)
            output = model(**call, use_cache=True)  # the cache may have more by now
        else:
            return
    model(**ways[-1], use_cache=True, **{found: output[found]})


def _one_more(call: Mapping[str, Any], encoded: Any) -> list[dict[str, Any]]:
    """Arguments for what comes behind `call`: one word; all that it was, of one word; all words."""
    one = torch.ones((1, 1), dtype=torch.long)
    first: dict[str, Any] = {_WORDS: one}
    if encoded is not None:
        first = {"encoder_outputs": _Encoded((encoded,)), _TARGET: one}
    words = next(iter(call.values())).shape[1:2]
    last = {name: t[:, -1:] if t.shape[1:2] == words else t for name, t in call.items()}
    longer = [{_WORDS: one.expand(1, words[0] + 1)}] if _WORDS in call else []
    return [first, last, *longer]
