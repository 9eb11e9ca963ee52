"""Counts forward passes, their time, and the tokens they gave."""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_ENDLESS = 1 << 62


class PassLog:
    """One entry at a time, but for those of others whose passes take turns with each other.

    Tokens are counted as growth of the cache, since a pass with drafts may keep several tokens or
    crop some away. How much a pass kept shows only when the next one begins.
    """

    def __init__(self) -> None:
        self._passes = 0
        self.pass_seconds = 0.0
        self._tokens = 0
        self._started = 0.0
        self._cache: weakref.ref[Any] | None = None
        self._length = 0
        self._batch = 1
        self._prompt = _ENDLESS
        self._ended = 0
        self._others: list[PassLog] = []

    @property
    def passes(self) -> int:
        """Passes so far."""
        return self._passes + sum(log.passes for log in self._others)

    @property
    def tokens(self) -> int:
        """Tokens so far, those of the last pass included."""
        return self._tokens + self._grown() + sum(log.tokens for log in self._others)

    def open_for(self, other: PassLog) -> None:
        """Count what `other` counts as well, but for its time."""
        self._others.append(other)

    def close_for(self, other: PassLog) -> None:
        """Nothing is added to `other` any more."""
        self._others.remove(other)
        self._passes += other.passes
        self._tokens += other.tokens

    def start_clock(self) -> None:
        """Time is counted from now on, until `lap`."""
        self._started = time.perf_counter()

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A pass with these arguments starts."""
        self._tokens += self._grown()
        cache = kwargs.get("cache")
        cache = kwargs.get("past_key_values") if cache is None else cache
        self._batch = _batch(args, kwargs)
        self._length = _length(cache)
        self._prompt = _prompt_length(kwargs, self._length)
        try:
            self._cache = weakref.ref(cache) if cache is not None else None
        except TypeError:
            self._cache = None  # a tuple of tensors, from long ago
        self._ended = 0
        self.start_clock()

    def end(self) -> None:
        """Count a pass that has given its output."""
        self.lap()
        self.count()

    def lap(self) -> None:
        """Count the time of a pass until now: it may be over, which nobody says."""
        now = time.perf_counter()
        self.pass_seconds += now - self._started
        self._started = now

    def count(self) -> None:
        """Count one more pass, however long it takes."""
        self._passes += 1
        # What the pass gave at least, should its cache be gone before anybody asks.
        self._ended = self._batch

    def _grown(self) -> int:
        cache = self._cache() if self._cache is not None else None
        if cache is None or not self._ended:
            return self._ended
        grown = max(0, _length(cache) - self._length)
        if self._length == 0:
            # The first pass of a cache takes the whole prompt and predicts one token, and one more
            # for each token of a draft that was kept.
            grown = min(grown, 1 + max(0, grown - self._prompt))
        return self._batch * grown


def _length(cache: Any) -> int:
    try:
        return int(cache.get_seq_length())
    except (AttributeError, TypeError, ValueError, NotImplementedError):
        return 0


def _prompt_length(kwargs: Mapping[str, Any], length: int) -> int:
    """Tokens before the draft in the input of a first pass, as the logits it is to give tell."""
    ids, kept = kwargs.get("input_ids"), kwargs.get("logits_to_keep")
    if length or not isinstance(ids, torch.Tensor) or not isinstance(kept, int) or kept < 1:
        return _ENDLESS
    return int(ids.shape[-1]) - kept + 1


def _batch(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    for value in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return int(value.shape[0])
    return 1
