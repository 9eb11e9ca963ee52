"""Calls that a hint of so many tokens and sequences stands for, by what a model reads."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipeload.budget.pass_shape import SAMPLES
from pipeload.budget.pass_trial import Trial
from pipeload.budget.usage_trial import CACHES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pipeload.budget.pass_shape import PassShape
    from pipeload.budget.pass_trial import PassTrace

_WORDS, _PICTURES, _SOUNDS = "input_ids", "pictures", "sounds"
_PIXELS = 224
_SIZES = ("image_size", "img_size", "input_size")
_CHANNELS = ("num_channels", "in_channels", "in_chans")
_BINS = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "feature_size")
_STACKED = ("input_dim",)
"""Of frames that have several neighbours' bins each."""
_BESIDE_PICTURES = {"bbox": 4, "image_attention_mask": 1}
"""What some texts have for each of their tokens when a picture comes with them, and how much."""


def main_input(model: Any) -> str:
    """The name of what it reads."""
    name: object = getattr(model, "main_input_name", "input_ids")
    return str(name[0]) if isinstance(name, (list, tuple)) else str(name)


def hinted_trial(
    trace: PassTrace, shape: PassShape, kept: int, known: Trial, *, encodes: bool
) -> Trial | None:
    """What the calls take that `generate` makes for the hint; None where they cannot be tried.

    Args:
        trace: makes the trials.
        shape: of the hint.
        kept: positions that logits are made for.
        known: of decoders, what a pass takes, and keeps in its cache if `generate` makes one.
        encodes: whether an encoder runs before the decoder.
    """
    path = trace.encoder_path() if encodes else ""
    towers = _towers(trace.model, path)
    calls = hinted_calls(trace.model.get_submodule(path), shape, kept)
    first = _first_of(trace, path, calls)
    if not encodes:
        if first is None and not towers:
            return _ended_early(trace, shape, kept, known)
        text = known if first is None else _cached(first, known.kept)
        return _beside_towers(trace, towers, shape, text)
    if first is None:
        return None
    first = _beside_towers(trace, towers, shape, first)
    # Then the decoder, which caches what it makes of the encoder's result.
    ids = torch.ones((shape.batch, 1), dtype=torch.long)
    call = {"encoder_outputs": first.output, "decoder_input_ids": ids, "use_cache": True}
    then = _first_of(trace, "", [call])
    if then is None:
        return None
    both = first.kept + known.kept
    kernels = first.kernels + then.kernels
    return Trial(max(first.peak, both + then.peak), both + then.kept, kernels)


def _ended_early(trace: PassTrace, shape: PassShape, kept: int, known: Trial) -> Trial | None:
    """At least what a trial came to that could not be ended, as for a pass itself."""
    call = list(hinted_calls(trace.model, shape, kept))[-1]
    trial = trace.of("", (), call) if _WORDS in call else None
    return None if trial is None else known._replace(peak=max(known.peak, trial.peak))


def _cached(trial: Trial, grown: int) -> Trial:
    """With a cache: `generate` passes one to models that make none by themselves."""
    if any(getattr(trial.output, name, None) is not None for name in CACHES):
        return trial
    return trial._replace(peak=trial.peak + grown, kept=trial.kept + grown)


def _beside_towers(trace: PassTrace, towers: Iterable[str], shape: PassShape, text: Trial) -> Trial:
    """With a picture or a sound, or one of each, for each text: what they give stays beside it."""
    for path in towers:
        tower = _first_of(trace, path, hinted_calls(trace.model.get_submodule(path), shape))
        if tower is not None:
            peak = max(tower.peak, tower.kept + text.peak)
            text = text._replace(peak=peak, kernels=text.kernels + tower.kernels)
    return text


def _towers(model: Any, encoder: str) -> list[str]:
    """Names of parts that read a picture or a sound, the outermost ones beside the encoder."""
    found = [encoder] if encoder else []
    for name, module in model.named_modules():
        inside = not name or any(f"{name}.".startswith(f"{other}.") for other in found)
        if not inside and hasattr(module, "config") and _kind(module) != _WORDS:
            found.append(name)
    return found[bool(encoder) :]


def _kind(model: Any) -> str:
    """Words, pictures or sounds: by the name of what it reads, else by what it says of itself.

    One that has colours for words (ImageGPT) reads words all the same.
    """
    name = main_input(model)
    if name == _WORDS and name in inspect.signature(model.forward).parameters:
        return _WORDS
    if name in {"input_features", "input_values"}:
        return _SOUNDS
    if "pixel" in name:
        return _PICTURES
    told: Any = getattr(model, "input_modalities", "text")
    kinds = [told] if isinstance(told, str) else list(told)
    if kinds == ["audio"]:
        return _SOUNDS
    return _PICTURES if kinds == ["image"] else _WORDS


def _first_of(trace: PassTrace, path: str, calls: Iterable[Mapping[str, Any]]) -> Trial | None:
    """The first trial that comes to its end."""
    trials = (trace.of(path, (), call) for call in calls)
    return next((trial for trial in trials if trial is not None and trial.error is None), None)


def hinted_calls(model: Any, shape: PassShape, kept: int = 1) -> Iterator[dict[str, Any]]:
    """Arguments for a forward, the likeliest first. What is read as a whole has its usual size.

    `kept`: positions that logits are made for, if the model can be told.
    """
    kind = _kind(model)
    if kind == _WORDS:
        yield from _words(model, shape, kept)
        return
    told = inspect.signature(model.forward).parameters
    name = main_input(model)
    name = name if name in told else next(iter(told))  # a tower may call it something else
    for sizes in (_sounds if kind == _SOUNDS else _pictures)(model, shape):
        call = {name: _empty(model, sizes)}
        yield call
        masks = [other for other in told if kind == _SOUNDS and other.endswith("features_mask")]
        if masks:
            frames = torch.ones((shape.batch, max(sizes[1:])), dtype=torch.long)
            yield {**call, **dict.fromkeys(masks, frames)}


def _words(model: Any, shape: PassShape, kept: int) -> Iterator[dict[str, Any]]:
    told = inspect.signature(model.forward).parameters
    ids = torch.ones((shape.batch, shape.tokens), dtype=torch.long)
    call: dict[str, Any] = {_WORDS: ids}
    if "logits_to_keep" in told:
        call["logits_to_keep"] = kept
    beside = [(name, size) for name, size in _BESIDE_PICTURES.items() if name in told]
    if beside and "pixel_values" in told:
        more = {name: ids.new_zeros((*ids.shape, size)) for name, size in beside}
        for sizes in _pictures(model, shape):
            yield {**call, **more, "pixel_values": _empty(model, sizes)}
    yield call


def _empty(model: Any, sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(sizes, device="meta", dtype=getattr(model, "dtype", None))


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
    window = 2 * _number(model, ("n_window",)) or 1
    frames = -(-frames // window) * window
    if main_input(model) == "input_features":
        yield (shape.batch, bins, frames)
        yield (shape.batch, frames, bins)
        yield (shape.batch, 1, frames, bins)
    samples = SAMPLES * shape.tokens
    yield (shape.batch, samples)
    yield (shape.batch, 1, samples)
    yield (shape.batch, frames, bins)
    for stacked in dict.fromkeys((_number(model, _STACKED), _width(model))):
        if stacked and stacked != bins:
            yield (shape.batch, frames, stacked)


def _width(model: Any) -> int:
    """What the first of its Linears reads: frames that are stacked before a model gets them."""
    linears = (module for module in model.modules() if isinstance(module, nn.Linear))
    first = next(linears, None)
    return 0 if first is None else first.in_features


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
