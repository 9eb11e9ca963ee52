"""Keys and values of requests that have ended, for others that begin alike.

[Note: one owner] What is kept is lent to one request at a time, which goes on with it in its place:
to copy it would take as much memory again. So a conversation finds what its last turn has left, and
requests with a beginning in common find it as often as there are that many of them.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeload.budget.usage_trial import CACHES
from pipeload.errors import OptionError
from pipeload.hf.cache_layers import cache_bytes, cut_back, rotates_by_length
from pipeload.system.memory import trim_heap

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

_LEAST_TOKENS = 16
"""Fewer are computed about as fast as they are looked for."""


class Kept(NamedTuple):
    """What one request has left."""

    ids: tuple[int, ...]
    """The tokens whose keys and values are in the cache."""
    cache: Any
    nbytes: int


class Prefixes:
    """Up to so many bytes of them, the oldest first to go. For all threads."""

    def __init__(self, model: Any, most_bytes: int) -> None:
        """Raises OptionError: nothing can be kept of such a model."""
        told = inspect.signature(model.forward).parameters
        name = next((name for name in CACHES if name in told), None)
        if name is None or rotates_by_length(model.config):
            why = "takes no cache" if name is None else "rotates keys by the length of a text"
            raise OptionError(
                f"--prefix-cache keeps nothing of {type(model).__name__}: it {why}. Leave that out."
            )
        self._name = name
        self._most = most_bytes
        self._lock = threading.Lock()
        self._kept: list[Kept] = []
        """The one that was used last is the last."""

    @property
    def nbytes(self) -> int:
        """What they hold together."""
        with self._lock:
            return sum(kept.nbytes for kept in self._kept)

    def lend(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """Arguments of `generate` with what was kept of the prompt; how many tokens that are.

        The cache that it returns is to be kept by `keep`, so it is asked for.
        """
        given = {**arguments, "return_dict_in_generate": True}
        prompt: list[int] = arguments["input_ids"][0].tolist()
        with self._lock:
            found = [(_common(kept.ids, prompt), kept) for kept in self._kept]
            found.sort(key=lambda one: one[0])
            while found:
                length, kept = found.pop()
                if length < _LEAST_TOKENS:
                    break
                if cut_back(kept.cache, len(kept.ids) - length):
                    self._kept.remove(kept)
                    return given | {self._name: kept.cache}, length
        return given, 0

    def keep(self, output: Any) -> torch.Tensor:
        """Take over the cache of a request that has ended; its tokens, `[1, tokens]`, int64.

        A cache that does not tell how long it is, as one of states alone, is not kept.
        """
        sequences: torch.Tensor = output.sequences
        with contextlib.suppress(Exception):  # the answer is there, whatever its cache is like
            self._take(output, tuple(sequences[0].tolist()[:-1]))  # nobody computed the last one
        return sequences

    def _take(self, output: Any, ids: tuple[int, ...]) -> None:
        caches = (output.get(name) for name in CACHES)
        cache = next((cache for cache in caches if cache is not None), None)
        if cache is None or cache.get_seq_length() != len(ids):
            return
        kept = Kept(ids, cache, cache_bytes(cache))
        with self._lock:
            self._kept.append(kept)
            self._shrink(self._most)

    def give_back(self, nbytes: int) -> int:
        """Let go of so many bytes, or all there are; returns how many. In any thread."""
        with self._lock:
            before = sum(kept.nbytes for kept in self._kept)
            self._shrink(max(0, before - nbytes))
            freed = before - sum(kept.nbytes for kept in self._kept)
        if freed:
            trim_heap()
        return freed

    def _shrink(self, most: int) -> None:
        while self._kept and sum(kept.nbytes for kept in self._kept) > most:
            del self._kept[0]


def _common(kept: tuple[int, ...], prompt: list[int]) -> int:
    """How many tokens both begin with; the last of a prompt is always computed."""
    pairs = zip(kept, prompt[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
