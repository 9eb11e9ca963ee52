"""What one forward pass needs in memory beside the weights, from the arguments of that very pass.

Counts the tensors that the library's decoders hold at once, in the three phases of a pass that can
be its peak: attention, feed-forward, and head. All figures in bytes. An estimate: it leads,
measured memory decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeload.budget import attention_memory
from pipeload.budget.attention_memory import kept_scores, mask_elements, recorded
from pipeload.budget.hint_pass import hinted_calls, hinted_trial, main_input
from pipeload.budget.kv_cache import (
    NO_ROWS,
    CachedLayers,
    CacheReader,
    self_and_cross,
)
from pipeload.budget.model_sizes import (
    decoder_and_whole,
    layers_here,
    read_widths,
    settings_of,
)
from pipeload.budget.pass_shape import (
    MOST,
    Extras,
    PassShape,
    cache_of,
    encoder_positions,
    encodes_sound,
    largest,
    read_before,
    read_extras,
    read_shape,
    reads_text_alone,
)
from pipeload.budget.pass_trial import PassTrace, Trial, trace_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import nn

    from pipeload.budget.attention_memory import AttentionInUse

__all__ = ["PassNeeds", "PassShape"]

# Thread buffers of the matrix products, position tables, and what lies between the counted tensors.
_MARGIN = 1.05
_MARGIN_BYTES = 6_000_000
# Small cached tensors lie in the heap, between temporaries whose room they then keep apart.
_HOLES_BYTES = 8_000_000
# Of one of the last logits, while `generate` samples by top p once the model has run: it in fp32,
# scaled and cut, sorted with its place, its probability, and the sum of those. Measured.
_SAMPLED_BYTES = 30
_FP32 = 4  # bytes
# Each expert's share of a prompt is another shape, and each shape another compiled kernel: of
# products in half precision, and of convolutions. In fp32 these take a fifth of it: 40 to 120 KB,
# measured with AVX2, and what the table of all types says of AVX-512.
_KERNEL = 600_000
_SINGLE_KERNEL = 120_000
_MOST_KERNELS = 32
# Trials say whether what is known of decoders holds for one: shares of what they took. Scores are
# the most of long sequences, and what is in a layer beside them of short ones.
_SAMPLES = (PassShape(24, 32), PassShape(384, 2))
_LEAST_SHARE, _MOST_SHARE = 0.97, 1.12


class PassNeeds:
    """Memory needs of one model's passes. Holds numbers and the configuration, not the model."""

    def __init__(
        self,
        model: nn.Module,
        config: Any,
        *,
        products: Callable[[int], int] | None = None,
        fused: bool = True,
        away: Collection[int] = (),
        attention: AttentionInUse | None = None,
    ) -> None:
        """`products(rows)`: bytes that a product of a quantised weight takes beside its tensors.

        `fused`: whether there is a kernel for attention in the model's dtype. `away`: layers whose
        cache another rank has. `attention`: of a model that is served.
        """
        self._widths = read_widths(model, config)
        self._fused = fused and self._widths.same_heads
        self._configs = decoder_and_whole(config)
        self._products = products
        self._heard = self._widths.seen_by_encoder
        self._rotated = attention_memory.rotated(self._widths)
        self._reader = CacheReader(self._widths.layers, self._widths.item)
        self._cross_reader = CacheReader(self._widths.layers, self._widths.item)
        # Trials take attention to be one kernel, as it is on processors.
        self._trace = trace_of(model, attention) if fused else None
        self._short_by = 1.0
        self._attention = attention
        self._generates: bool = getattr(model, "can_generate", bool)()
        alone = not self._widths.encoder_decoder and reads_text_alone(config)
        if self._trace is not None and self._generates and alone:
            self._compare(self._trace)
        if away:
            self._reader = CacheReader(tuple(layers_here(self._widths, away)), self._widths.item)

    def _compare(self, trace: PassTrace) -> None:
        """Have no more trials where what is known of all decoders describes this one well."""
        for shape in _SAMPLES:
            call = next(hinted_calls(trace.model, shape))
            trial = trace.of("", (), call)
            if trial is None or trial.error is not None:
                return
            layers = self._reader.fresh(shape.batch)
            growth = sum(layer.growth(shape.tokens) for layer in layers)
            extras = read_extras(call, shape, self._widths, self._configs)
            known = growth + self._peak(layers, shape, extras, sampled=False)
            if not _LEAST_SHARE * trial.peak <= known <= _MOST_SHARE * trial.peak:
                self._short_by = max(1.0, trial.peak / known)
                return
        self._trace = None

    def shape(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PassShape:
        """The size of the pass that the model is called for; what it cannot read counts as one."""
        self._widths = settings_of(self._configs[0], self._widths)
        if not self._heard or not encodes_sound(kwargs):
            return read_shape(args, kwargs)
        shape = read_shape(args, kwargs)  # its frames, of which fewer positions are made
        return shape._replace(tokens=min(shape.tokens, self._heard))

    def for_pass(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], module: nn.Module | None = None
    ) -> int:
        """All that this pass takes on, with a margin.

        `module`: the part of the model that is called by itself, if it is not the whole.
        """
        shape = self.shape(args, kwargs)
        trial = None
        # Beside a cache a decoder is known; one that is given all its words again cuts them itself,
        # and has some of its own in the cache beside them.
        if self._trace is not None and 2 * shape.tokens > shape.cached:
            path = self._trace.path(module)
            trial = self._trace.of(path, args, kwargs, module)
            if trial is not None and trial.error is None:
                return self._with_trial(trial, shape, sampled=not path)
        layers = self._cached(args, kwargs, shape)
        growth = self._growth(layers, args, kwargs, shape)
        extras = read_extras(kwargs, shape, self._widths, self._configs)
        need = _with_margin(growth, int(self._short_by * self._peak(layers, shape, extras)))
        return need if trial is None else max(need, self._with_trial(trial, shape, sampled=False))

    def between_turns(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """What of it is there while others compute whose passes take turns with this one."""
        if self._trace is not None:
            return MOST  # all of it, as far as anybody knows
        shape = self.shape(args, kwargs)
        layers = self._cached(args, kwargs, shape)
        extras, w = read_extras(kwargs, shape, self._widths, self._configs), self._widths
        masks = {layer.kind: mask_elements(layer, shape, extras, w) for layer in layers}
        kept = shape.tokens * shape.batch * 3 * w.hidden * w.item + int(sum(masks.values())) * (
            w.item if w.attention == "eager" else 1
        )
        kept += recorded(w, layers, shape, extras) + self._head(shape, extras, sampled=False)
        grown = max(0, self._growth(layers, args, kwargs, shape))
        return int((grown + kept) * _MARGIN) + min(grown // 2, _HOLES_BYTES)

    def _with_trial(self, trial: Trial, shape: PassShape, *, sampled: bool) -> int:
        """What a pass takes that was tried; and what `generate` makes of its logits."""
        peak = trial.peak + self._beside(shape.tokens * shape.batch)
        more = _KERNEL if self._widths.item < _FP32 else _SINGLE_KERNEL
        if trial.kernels:  # the first one brings along what compiles them
            peak += _KERNEL + (min(trial.kernels, _MOST_KERNELS) - 1) * more
        if sampled and self._generates:
            peak = max(peak, trial.kept + shape.batch * self._widths.vocabulary * _SAMPLED_BYTES)
        return _with_margin(trial.kept, peak - trial.kept)

    def for_shape(self, shape: PassShape, *, kept: int = 1) -> int:
        """The same for a pass of the plain library on an empty cache, with a margin.

        What reads pictures or sound is taken to read such of its usual size.
        """
        layers = self._reader.fresh(shape.batch)
        growth = sum(layer.growth(shape.tokens) for layer in layers)
        if self._trace is not None:
            grown = growth if self._generates else 0
            known = Trial(grown + self._peak(layers, shape, Extras(kept)), grown)
            encodes = self._widths.encoder_decoder
            trial = hinted_trial(self._trace, shape, kept, known, encodes=encodes)
            if trial is not None:
                return self._with_trial(trial, shape, sampled=True)
        return _with_margin(growth, self._peak(layers, shape, Extras(kept)))

    def cache_bytes(self, tokens: int, batch: int) -> int:
        """What a cache of `batch` sequences of `tokens` takes."""
        return sum(layer.growth(tokens) for layer in self._reader.fresh(batch))

    def longest_tokens(self, room_bytes: int, batch: int) -> int:
        """The longest prompt of `batch` sequences that fits in `room_bytes`; 0 if none does.

        A picture counts as one token.
        """
        pictures = self._trace is not None and "pixel" in main_input(self._trace.model)
        return largest(
            lambda tokens: self.for_shape(PassShape(tokens, batch)) <= room_bytes,
            most=1 if pictures else MOST,
        )

    def largest_batch(self, room_bytes: int, tokens: int) -> int:
        """How many prompts of `tokens` fit at once in `room_bytes`; 0 if not one does."""
        return largest(lambda batch: self.for_shape(PassShape(tokens, batch)) <= room_bytes)

    def prefill_chunk(self, room_bytes: int, shape: PassShape) -> int | None:
        """The largest `prefill_chunk_size` of `generate` with which a prompt of `shape` fits.

        The cache of the whole prompt must fit in any case; None where it does not.
        """
        if shape.tokens <= 1 or not self._generates or self._widths.encoder_decoder:
            return None
        if self._chunked(shape, shape.tokens) <= room_bytes:
            return shape.tokens
        # From here on every chunk but the first has a mask: more tokens need more memory.
        chunk = largest(
            lambda chunk: self._chunked(shape, chunk) <= room_bytes, most=shape.tokens - 1
        )
        return chunk or None

    def _chunked(self, shape: PassShape, chunk: int) -> int:
        """All that a prompt takes on in chunks: the last of them has the longest past."""
        past = shape.tokens - chunk
        before = [layer.after(shape.cached) for layer in self._reader.fresh(shape.batch)]
        last = [layer.after(past) for layer in before]
        growth = sum(
            new.alike * (new.storage_after(chunk) - old.storage + old.state)
            for new, old in zip(last, before, strict=True)
        )
        size = PassShape(chunk, shape.batch, shape.cached + past)
        return _with_margin(growth, self._peak(last, size, Extras()))

    def _cached(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], shape: PassShape
    ) -> list[CachedLayers]:
        """The layers of the self-attention cache; of none at all, as if it were fresh."""
        own, _ = self_and_cross(cache_of(args, kwargs))
        try:
            return self._reader.read(own, shape.batch)
        except Exception:  # pages of continuous batching, or a foreign one: what its mask tells
            before = read_before(kwargs, shape.tokens)
            return [layer.after(before) for layer in self._reader.fresh(shape.batch)]

    def _growth(
        self,
        layers: Sequence[CachedLayers],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        shape: PassShape,
    ) -> int:
        cache = cache_of(args, kwargs)
        if cache is None:
            use = kwargs.get("use_cache")
            if use is False or (use is None and not self._widths.use_cache):
                return 0
        growth = sum(layer.growth(shape.tokens) for layer in layers)
        if self._widths.encoder_decoder:
            if encodes_sound(kwargs):
                return 0
            growth += self._cross_growth(cache, kwargs, shape)
        return growth

    def _cross_growth(self, cache: Any, kwargs: Mapping[str, Any], shape: PassShape) -> int:
        """The encoder's keys and values: cached once, in the first pass."""
        _, cross = self_and_cross(cache)
        if cross is None and cache is not None:
            return 0
        try:
            layers = self._cross_reader.read(cross, shape.batch)
        except Exception:
            return 0
        seen = encoder_positions(kwargs, self._widths.seen_by_encoder)
        return sum(layer.growth(seen) for layer in layers if not layer.storage)

    def _peak(
        self,
        layers: Sequence[CachedLayers],
        shape: PassShape,
        extras: Extras,
        *,
        sampled: bool = True,
    ) -> int:
        """The largest phase. What is alive: the embeddings, a layer's input, and its residual.

        `sampled`: `generate` makes something of the logits.
        """
        w = self._widths
        positions = shape.tokens * shape.batch
        layers = [layer for layer in layers if layer.kind != NO_ROWS]
        masks = [mask_elements(layer, shape, extras, w) for layer in layers]
        item = w.item
        mask = int(sum({layer.kind: m for layer, m in zip(layers, masks, strict=True)}.values()))
        kept = kept_scores(self._attention, shape, extras, w)
        stream = 3 * w.hidden * item
        norm = w.hidden * (item + 2 * _FP32)
        forward = (w.hidden + w.inner) * item
        block = positions * (stream + max(norm, forward, self._rotated))
        scores = max(
            (
                positions * (stream + 2 * w.query * item)
                + attention_memory.attention(layer, m, shape, w, fused=self._fused, kept=kept)
                for layer, m in zip(layers, masks, strict=True)
            ),
            default=0,
        )
        # A mask of two values as it lives throughout: bool, or the scores' own type.
        held = mask * (item if w.attention == "eager" else 1)
        held += recorded(w, layers, shape, extras)
        held += self._beside(positions)
        head = self._head(shape, extras, sampled=sampled)
        return max(max(block, scores) + held, head + held, attention_memory.towers(extras, w))

    def _beside(self, positions: int) -> int:
        """What kernels take for so many positions, beside tensors."""
        w, nbytes = self._widths, 0
        if self._products is not None:
            nbytes += self._products(positions)
        if w.experts and w.item < _FP32 and positions > 1:
            nbytes += min(2 * w.experts, 2 * positions, _MOST_KERNELS) * _KERNEL
        return nbytes

    def _head(self, shape: PassShape, extras: Extras, *, sampled: bool) -> int:
        """Logits, and what they come from or what `generate` makes of the last ones."""
        w = self._widths
        kept = extras.kept * shape.batch
        logits = kept * w.vocabulary
        nbytes = w.item * (1 + w.capped) * logits
        hidden = (shape.tokens * shape.batch + kept) * w.hidden * w.item
        # The loss takes them in fp32, and their logarithms.
        loss = logits * 2 * _FP32 * extras.labels
        sampling = shape.batch * w.vocabulary * _SAMPLED_BYTES if sampled else 0
        sampling = max(sampling, logits * extras.made_of_logits)
        return nbytes + max(hidden + loss, sampling)


def _with_margin(growth: int, transient: int) -> int:
    grown = max(0, growth)
    holes = min(grown // 2, _HOLES_BYTES)
    return int((grown + transient) * _MARGIN) + holes + _MARGIN_BYTES
