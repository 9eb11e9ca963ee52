"""Which experts stay in memory. Pure: what is routed to goes in, what to read and drop comes out.

[Note: aged frequency] An expert's score is how often it was used, per row of input, where each pass
counts 0.9 times what the next one does: f <- 0.9 f + (rows sent to it) / (rows). It is one pool for
all layers. Least recently used would fall to nothing where a token's experts do not all fit, as
layers come in a cycle; a fixed set of favourites changes with the text. A prompt counts as one pass
of its mean use, so that experts which decoding uses all the time outlive it. Scores of experts that
are not used all fall at the same rate, so their order does not change: what is compared are
logarithms, from which the age is taken once, when an expert is used. Requests that take turns in
each layer are one pass: else each would age what the others use.

An expert that is read stays if there is room, or one with a lower score whose place it can take.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

AGEING = 0.9
"""What is left of an expert's score after a pass that does not use it."""
_DIGITS = 6
"""Of a score: what is equal but for the rounding of its sum is equal."""
_STEP = round(-math.log(AGEING), _DIGITS)

Key = tuple[int, int]
"""Number of the layer, and of the expert in it."""


class Chosen(NamedTuple):
    """What is to be done for the experts that one call is sent to."""

    hits: list[int]
    """They are there."""
    kept: list[int]
    """They are to be read, and stay."""
    passing: list[int]
    """They are to be read, and go when they were used."""
    evicted: list[Key]
    """They go first."""


class ExpertCache:
    """One pool of experts of all layers. Sizes in bytes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes`: what an expert of each layer takes."""
        self._sizes = sizes
        self.budget = 0
        self.used = 0
        self._scores: dict[Key, float] = {}
        self._held: list[set[int]] = [set() for _ in sizes]
        # By layer, with entries of before: only one that has its expert's score counts.
        self._lowest: list[list[tuple[float, int]]] = [[] for _ in sizes]
        self._passes, self._layer = 0, 0

    def held(self, layer: int) -> Collection[int]:
        """Experts of a layer that stay."""
        return self._held[layer]

    def choose(self, layer: int, shares: Mapping[int, float]) -> Chosen:
        """Choose for one call of a layer: `shares` of the rows of input by expert, each over 0."""
        # The same layer again is the turn of another request in the same pass.
        if layer < self._layer or len(self._sizes) == 1:
            self._passes += 1
        self._layer = layer
        for expert, share in shares.items():
            self._use(layer, expert, share)
        held = self._held[layer]
        hits = sorted(held & shares.keys())
        misses = sorted(shares.keys() - held)
        kept: list[int] = []
        evicted: list[Key] = []
        size = self._sizes[layer]
        # What this call uses is no victim of it, and what misses is compared with what may be one.
        spared = [(self._scores[layer, expert], expert) for expert in hits]
        held.difference_update(hits)
        for expert in sorted(misses, key=lambda e: -self._scores[layer, e]):
            score = self._at(layer, self._scores[layer, expert])
            while self.used + size > self.budget and size <= self.budget:
                victim = self._victim()
                if victim is None or self._at(victim[0], self._scores[victim]) >= score:
                    break
                self._drop(*victim)
                evicted.append(victim)
            if self.used + size > self.budget:
                break
            kept.append(expert)
            self.used += size
        for entry in spared:
            self._push(layer, entry)
        held.update(hits)
        for expert in kept:
            self._push(layer, (self._scores[layer, expert], expert))
        held.update(kept)
        return Chosen(hits, sorted(kept), sorted(set(misses).difference(kept)), evicted)

    def shrink(self, budget: int) -> list[Key]:
        """Hold no more than `budget` from now on; what goes."""
        self.budget = budget
        evicted = []
        while self.used > budget and (victim := self._victim()) is not None:
            self._drop(*victim)
            evicted.append(victim)
        return evicted

    def hold_only(self, there: Sequence[Collection[int]]) -> None:
        """Hold these experts of each layer, whatever was chosen, or half chosen, before."""
        self._held = [set(experts) for experts in there]
        self.used = sum(
            len(experts) * size for experts, size in zip(there, self._sizes, strict=True)
        )
        for layer, experts in enumerate(there):
            self._lowest[layer] = [(self._scores.get((layer, e), -math.inf), e) for e in experts]
            self._scores.update(((layer, e), score) for score, e in self._lowest[layer])
            heapq.heapify(self._lowest[layer])

    def _use(self, layer: int, expert: int, share: float) -> None:
        now, key = self._passes * _STEP, (layer, expert)
        before = math.exp(self._scores.get(key, -math.inf) - now)
        self._scores[key] = round(math.log(before + share) + now, _DIGITS)

    def _at(self, layer: int, score: float) -> float:
        """A score as it will be when the layer comes again: those that ran are a pass older."""
        return round(score - _STEP, _DIGITS) if layer <= self._layer else score

    def _victim(self) -> Key | None:
        """The expert that is missed least; of equal ones, that of the layer that comes last."""
        layers = len(self._sizes)
        found: tuple[float, int, int] | None = None
        for layer, heap in enumerate(self._lowest):
            held = self._held[layer]
            while heap and not (
                heap[0][1] in held and self._scores[layer, heap[0][1]] == heap[0][0]
            ):
                heapq.heappop(heap)
            if heap:
                away = (layer - self._layer - 1) % layers
                candidate = (self._at(layer, heap[0][0]), -away, heap[0][1])
                found = candidate if found is None else min(found, candidate)
        if found is None:
            return None
        return (self._layer + 1 - found[1]) % layers, found[2]

    def _drop(self, layer: int, expert: int) -> None:
        self._held[layer].discard(expert)
        self.used -= self._sizes[layer]

    def _push(self, layer: int, entry: tuple[float, int]) -> None:
        heap = self._lowest[layer]
        heapq.heappush(heap, entry)
        if len(heap) > 2 * len(self._held[layer]) + 64:
            heap[:] = [(self._scores[layer, e], e) for e in self._held[layer]]
            heapq.heapify(heap)
