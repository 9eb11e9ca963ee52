"""Calls that a hint of so many tokens and sequences stands for, by what a model reads."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from pipeload.budget.pass_trace import Trial

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pipeload.budget.pass_shape import PassShape
    from pipeload.budget.pass_trace import PassTrace

_SAMPLES = 320
"""Of a sound, those that an encoder makes one position of, at the usual rate."""
_PIXELS = 224
_SIZES = ("image_size", "img_size", "input_size")
_CHANNELS = ("num_channels", "in_channels", "in_chans")
_BINS = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "feature_size")


def main_input(model: Any) -> str:
    """The name of what it reads."""
    name: object = getattr(model, "main_input_name", "input_ids")
    return str(name[0]) if isinstance(name, (list, tuple)) else str(name)


def hinted_trial(trace: PassTrace, shape: PassShape, kept: int, grown: int | None) -> Trial | None:
    """What the calls take that `generate` makes for the hint; None where they cannot be tried.

    `grown`: for an encoder with a decoder, bytes of the decoder's own cache at the end of it.
    """
    if grown is None:
        return _first_of(trace, "", hinted_calls(trace.model, shape, kept))
    path = trace.encoder_path()
    encoder = trace.model.get_submodule(path)
    first = _first_of(trace, path, hinted_calls(encoder, shape))
    if first is None:
        return None
    # Then the decoder, which caches what it makes of the encoder's result.
    ids = torch.ones((shape.batch, 1), dtype=torch.long)
    call = {"encoder_outputs": first.output, "decoder_input_ids": ids, "use_cache": True}
    then = _first_of(trace, "", [call])
    if then is None:
        return None
    both = first.kept + grown
    kernels = first.kernels + then.kernels
    return Trial(max(first.peak, both + then.peak), both + then.kept, kernels)


def _first_of(trace: PassTrace, path: str, calls: Iterable[Mapping[str, Any]]) -> Trial | None:
    """The first trial that comes to its end."""
    trials = (trace.of(path, (), call) for call in calls)
    return next((trial for trial in trials if trial is not None and trial.error is None), None)


def hinted_calls(model: Any, shape: PassShape, kept: int = 1) -> Iterator[dict[str, Any]]:
    """Arguments for a forward, the likeliest first. What is read as a whole has its usual size.

    `kept`: positions that logits are made for, if the model can be told.
    """
    told = inspect.signature(model.forward).parameters
    more = {"logits_to_keep": kept} if "logits_to_keep" in told else {}
    name = main_input(model)
    if "pixel" in name:
        makers = _pictures(model, shape)
    elif name in {"input_features", "input_values"}:
        makers = _sounds(model, shape)
    else:
        name, makers = "input_ids", iter([(shape.batch, shape.tokens)])
    for sizes in makers:
        if name == "input_ids":
            yield {name: torch.ones(sizes, dtype=torch.long), **more}
        else:
            yield {name: torch.empty(sizes, device="meta", dtype=getattr(model, "dtype", None))}


def _pictures(model: Any, shape: PassShape) -> Iterator[tuple[int, ...]]:
    channels = _number(model, _CHANNELS) or 3
    size = _found(model, _SIZES)
    sides = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    sides = sides if len(sides) == 2 and all(isinstance(s, int) for s in sides) else (_PIXELS,) * 2
    frames = _number(model, ("num_frames", "frames_per_clip"))
    if frames:
        yield (shape.batch, frames, channels, *sides)
    yield (shape.batch, channels, *sides)
    yield (shape.batch, 1, channels, *sides)


def _sounds(model: Any, shape: PassShape) -> Iterator[tuple[int, ...]]:
    bins = _number(model, _BINS) or 80
    frames = 2 * _number(model, ("max_source_positions",)) or _number(model, ("max_length",))
    frames = frames or 2 * shape.tokens
    if main_input(model) == "input_features":
        yield (shape.batch, bins, frames)
        yield (shape.batch, frames, bins)
        yield (shape.batch, 1, frames, bins)
    samples = _SAMPLES * shape.tokens
    yield (shape.batch, samples)
    yield (shape.batch, 1, samples)
    yield (shape.batch, frames, bins)


def _number(model: Any, names: tuple[str, ...]) -> int:
    found = _found(model, names)
    return found if isinstance(found, int) and found > 0 else 0


def _found(model: Any, names: tuple[str, ...]) -> Any:
    """The first of these that a model's configuration, or one inside it, has."""
    configs = [getattr(model, "config", None)]
    while configs:
        config = configs.pop(0)
        own: Mapping[str, Any] = getattr(config, "__dict__", {})
        for name in names:
            if own.get(name) is not None:
                return own[name]
        configs += [inner for inner in own.values() if hasattr(inner, "to_diff_dict")]
    return None
