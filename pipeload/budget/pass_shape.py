"""What a call of a model asks for, read from its arguments. Foreign arguments count as little."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pipeload.budget.kv_cache import is_cache, seen_positions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pipeload.budget.model_sizes import Widths

MOST = 1 << 40
"""No prompt and no batch is larger."""

_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds", "inputs_embeds", "input_ids")

# What continuous batching makes of each logit once the model has run: fp32, or with processors
# that, sorted with its place, its probability, their sums, and what is left. Measured.
_UNPROCESSED_BYTES, _PROCESSED_BYTES = 4, 30
SAMPLES = 320
"""Numbers of a picture or a sound that one position is made of, at the least: a patch has several
hundred, and a frame of sound is 20 ms of it, at the usual rate."""


class PassShape(NamedTuple):
    """How much one pass computes."""

    tokens: int
    """New positions of each sequence."""
    batch: int
    """Sequences at once."""
    cached: int = 0
    """Positions of each sequence that are in the cache already."""
    sizes: tuple[int, ...] = ()
    """Of the input where that is no text: pictures, sound."""

    def __str__(self) -> str:
        """What was asked for, as a person would say it."""
        if self.sizes:
            return f"an input of {' x '.join(map(str, self.sizes))}"
        return f"{self.batch} x {self.tokens} tokens after {self.cached}"


class Extras(NamedTuple):
    """What a call asks for beside the next token."""

    kept: int = 1
    """Positions of each sequence that the head computes logits for."""
    padded: bool = False
    """Whether a mask has to be written out in any case."""
    patches: int = 0
    """Image patches of all sequences."""
    encoded: int = 0
    """Positions of all sequences that an encoder goes through in this pass."""
    labels: bool = False
    hidden_states: int = 0
    """Hidden states that are kept."""
    attentions: bool = False
    made_of_logits: int = 0
    """Bytes that continuous batching makes of each logit that is kept."""


def reads_text_alone(config: Any) -> bool:
    """Whether a model has no part with a configuration of its own: a tower, a codec."""
    return not any(hasattr(value, "to_diff_dict") for value in vars(config).values())


def read_shape(args: Sequence[Any], kwargs: Mapping[str, Any]) -> PassShape:
    """The size of the pass; what cannot be read counts as one."""
    tokens, batch, sizes = _tokens_and_batch(args, kwargs)
    try:
        cached = seen_positions(cache_of(args, kwargs))
    except Exception:  # a foreign cache must not stop the pass
        cached = 0
    return PassShape(tokens, batch, cached, sizes)


def read_extras(
    kwargs: Mapping[str, Any], shape: PassShape, widths: Widths, configs: Sequence[Any] = ()
) -> Extras:
    """What a pass of `shape` does beside its layers; what it is not told, `configs` say."""
    keep = kwargs.get("logits_to_keep")
    kept = shape.tokens
    made = 0
    if isinstance(keep, Tensor):
        kept = max(1, keep.shape[-1] if keep.dim() else 1)
        made = _made_of_logits(kwargs)
    elif isinstance(keep, int) and keep > 0:
        kept = min(keep, shape.tokens)
    elif widths.encoder_decoder and encodes_sound(kwargs):
        kept = 1  # frames have no logits, and the decoder's first pass is another one
    mask, pixels = kwargs.get("attention_mask"), kwargs.get("pixel_values")
    patches = encoded = 0
    if isinstance(pixels, Tensor) and widths.patch:
        patches = pixels.numel() // (3 * widths.patch**2)
    if widths.encoder_decoder and kwargs.get("encoder_outputs") is None:
        encoded = shape.batch * encoder_positions(kwargs, widths.seen_by_encoder)
    return Extras(
        kept,
        padded=shape.tokens > 1 and isinstance(mask, Tensor) and not _all_ones(mask),
        patches=patches,
        encoded=encoded,
        labels=kwargs.get("labels") is not None,
        hidden_states=_hidden_states(_asked("output_hidden_states", kwargs, configs), widths),
        attentions=_asked("output_attentions", kwargs, configs) is True,
        made_of_logits=made,
    )


def _made_of_logits(kwargs: Mapping[str, Any]) -> int:
    """Its processors cut, sort and add up all rows at once; without any they are fp32 alone."""
    processed = kwargs.get("logits_processor_args")
    if not isinstance(processed, Tensor):
        return 0
    return _PROCESSED_BYTES if processed.shape[0] else _UNPROCESSED_BYTES


def read_before(kwargs: Mapping[str, Any], tokens: int) -> int:
    """Positions beside `tokens` new ones that a mask speaks of, which was written out already."""
    mask = kwargs.get("attention_mask")
    masks = mask.values() if isinstance(mask, dict) else [mask]  # one for each kind of layer
    wide = [m.shape[-1] for m in masks if isinstance(m, Tensor) and m.dim() == 4]
    return max(0, max(wide, default=0) - tokens)


def _asked(name: str, kwargs: Mapping[str, Any], configs: Sequence[Any]) -> Any:
    """What a call asks for, else what is set for all calls."""
    value = kwargs.get(name)
    if value is not None:
        return value
    return next((found for found in (getattr(c, name, None) for c in configs) if found), None)


def _hidden_states(asked: Any, widths: Widths) -> int:
    """How many are kept: all, or those of these numbers."""
    if asked is True:
        return len(widths.layers) + 1
    if isinstance(asked, int):  # the number of one; or False
        return int(asked is not False)
    return len(asked) if isinstance(asked, (list, tuple)) else 0


def _tokens_and_batch(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int, int, tuple[int, ...]]:
    """From the input of the decoder if there is one, else from the first tensor.

    With its sizes if it is neither the numbers of words nor what stands for them.
    """
    named = [kwargs.get(name) for name in _INPUTS]
    for value in (*named, *args, *kwargs.values()):
        if not isinstance(value, Tensor) or not value.dim():
            continue
        text = not value.is_floating_point() or any(value is one for one in named)
        sizes = () if text else tuple(value.shape)
        shape = value.shape
        if len(shape) == 2 and value.is_floating_point():  # patches in a row, or raw sound
            shape = torch.Size([max(shape[0], value.numel() // SAMPLES)])
        match shape:
            case (tokens,):
                return max(1, tokens), 1, sizes
            case (batch, tokens):
                return max(1, tokens), max(1, batch), sizes
            case (batch, tokens, _) if value is not kwargs.get("input_features"):
                return max(1, tokens), max(1, batch), sizes
            case (batch, *sides) if len(sides) == 2:  # sound: its frames come last
                return max(1, *sides), max(1, batch), sizes
            case (batch, *_):  # images: their patches are counted apart
                return 1, max(1, batch), sizes
    return 1, 1, ()


def encodes_sound(kwargs: Mapping[str, Any]) -> bool:
    """Whether `generate` calls the encoder by itself: with sound, and nothing for a decoder."""
    others = (*_INPUTS, "labels", "encoder_outputs")
    return kwargs.get("input_features") is not None and all(kwargs.get(n) is None for n in others)


def cache_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The cache that a call is given, under either of the library's names; None without one."""
    cache = kwargs.get("cache")
    if cache is None:
        cache = kwargs.get("past_key_values")
    if cache is None and len(args) > 1:
        cache = next((value for value in args if is_cache(value)), None)
    return cache


def encoder_positions(kwargs: Mapping[str, Any], most: int) -> int:
    """Positions of the encoder's output, or of what goes into it."""
    outputs = kwargs.get("encoder_outputs")
    first = kwargs.get("encoder_hidden_states")
    if first is None and outputs is not None:
        first = outputs[0]
    if first is None:
        first = kwargs.get("input_ids")
    return int(first.shape[1]) if isinstance(first, Tensor) and first.dim() > 1 else most


def _all_ones(mask: Tensor) -> bool:
    """Whether a mask hides nothing; one that is not of two dimensions was written out already."""
    return mask.dim() == 2 and bool(mask.all())


def largest(fits: Callable[[int], bool], *, most: int = MOST) -> int:
    """The largest whole number up to `most` that fits, if all smaller ones do; 0 if none does."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
