"""The cache of experts against the rule it stands for, written down without haste."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from pipeload.budget.expert_cache import AGEING, ExpertCache
from tests.tools.routing_tape import draw

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Key = tuple[int, int]
_TOPIC_TOKENS = 100


class Plainly:
    """The rule: the lowest score goes, as it will be when its layer comes again."""

    def __init__(self, sizes: Sequence[int], budget: int) -> None:
        self._sizes, self._budget = sizes, budget
        self._scores: dict[Key, tuple[float, int]] = {}
        self.held: set[Key] = set()
        self._passes, self._layer = 0, 0

    def _score(self, key: Key, passes: int) -> float:
        score, last = self._scores.get(key, (0.0, 0))
        return score * AGEING ** (passes - last)

    def _when_it_comes(self, key: Key) -> float:
        return self._score(key, self._passes + (key[0] <= self._layer))

    def choose(self, layer: int, shares: Mapping[int, float]) -> tuple[list[int], list[Key]]:
        """Misses that stay, and what goes."""
        self._passes += layer <= self._layer
        self._layer = layer
        for expert, share in shares.items():
            key = layer, expert
            self._scores[key] = self._score(key, self._passes) + share, self._passes
        used = {(layer, expert) for expert in shares}
        kept, gone = [], []
        for key in sorted(used - self.held, key=lambda k: (-self._when_it_comes(k), k[1])):
            while self._bytes() + self._sizes[layer] > self._budget:
                there = self.held - used
                victims = sorted(there, key=self._when_it_comes)
                if not victims or self._when_it_comes(victims[0]) >= self._when_it_comes(key):
                    break
                if self._sizes[layer] > self._budget:
                    break
                self.held.discard(victims[0])
                gone.append(victims[0])
            if self._bytes() + self._sizes[layer] > self._budget:
                break
            kept.append(key[1])
            self.held.add(key)
        return sorted(kept), gone

    def _bytes(self) -> int:
        return sum(self._sizes[layer] for layer, _ in self.held)


@pytest.mark.parametrize("seed", range(6))
def test_as_the_rule_says(seed: int) -> None:
    """Prompts and single tokens, layers of different sizes, layers that are left out."""
    source = random.Random(seed)
    sizes = [source.choice([10, 10, 25]) for _ in range(5)]
    budget = source.choice([0, 9, 60, 200, 10_000])
    cache, plainly = ExpertCache(sizes), Plainly(sizes, budget)
    cache.shrink(budget)
    for _ in range(120):
        rows = source.choice([1, 1, 1, 40])
        for layer in range(5):
            if source.random() < 0.1:
                continue
            experts = source.sample(range(16), k=3 if rows == 1 else 12)
            # No two scores are equal.
            shares = {expert: source.uniform(0.05, 1.0) for expert in experts}
            found = cache.choose(layer, shares)
            kept, gone = plainly.choose(layer, shares)
            assert sorted(found.kept) == kept
            assert found.evicted == gone
            assert sorted([*found.hits, *found.kept, *found.passing]) == sorted(experts)
            assert cache.used <= budget
        held = {(layer, e) for layer in range(5) for e in cache.held(layer)}
        assert held == plainly.held


def test_a_smaller_budget_drops_the_least_used_first() -> None:
    cache = ExpertCache([10, 10])
    cache.shrink(60)
    for _ in range(3):
        cache.choose(0, {1: 1.0, 2: 1.0})
        cache.choose(1, {5: 1.0})
    cache.choose(0, {3: 1.0})
    assert cache.shrink(30) == [(0, 3)]
    assert cache.used == 30
    assert cache.shrink(0)
    assert cache.used == 0
    assert cache.choose(0, {1: 1.0}).passing == [1]


def test_of_equal_ones_the_last_to_come_again_goes() -> None:
    """Layers come in a cycle, so that is the one which has just run."""
    cache = ExpertCache([10] * 4)
    cache.shrink(40)
    for layer in range(4):
        cache.choose(layer, {layer: 0.5})
    assert cache.choose(0, {0: 0.5, 5: 1.0}).evicted == [(3, 3)]


def test_told_what_is_there() -> None:
    """After an interrupt."""
    cache = ExpertCache([10, 10])
    cache.shrink(100)
    cache.choose(0, {1: 1.0, 2: 1.0})
    cache.hold_only([{1}, {7}])
    assert (set(cache.held(0)), set(cache.held(1)), cache.used) == ({1}, {7}, 20)
    assert cache.choose(0, {1: 1.0, 2: 1.0}).kept == [2]
    assert cache.shrink(10) == [(1, 7), (0, 1)]


def test_a_prompt_leaves_what_decoding_uses() -> None:
    """Experts that each of the last tokens used outlive a prompt that goes by all of them once."""
    cache = ExpertCache([1])
    cache.shrink(8)
    for _ in range(20):
        cache.choose(0, dict.fromkeys(range(4), 1.0))
    cache.choose(0, dict.fromkeys(range(4, 64), 1 / 15))
    assert {0, 1, 2, 3} <= set(cache.held(0))


def _lru(tape: list[list[list[int]]], room: int) -> int:
    held: dict[Key, None] = {}
    hits = 0
    for token in range(len(tape[0])):
        for layer, rows in enumerate(tape):
            for expert in rows[token]:
                hits += (layer, expert) in held
                held.pop((layer, expert), None)
                held[layer, expert] = None
            while len(held) > room:
                del held[next(iter(held))]
    return hits


def _aged(tape: list[list[list[int]]], room: int) -> int:
    cache = ExpertCache([1] * len(tape))
    cache.shrink(room)
    calls = ((layer, rows[t]) for t in range(len(tape[0])) for layer, rows in enumerate(tape))
    return sum(len(cache.choose(layer, dict.fromkeys(row, 1.0)).hits) for layer, row in calls)


def _best(tape: list[list[list[int]]], room: int) -> int:
    """Belady's: what is used last again goes first."""
    calls = [(layer, rows[t]) for t in range(len(tape[0])) for layer, rows in enumerate(tape)]
    later: dict[Key, list[int]] = {}
    for at in range(len(calls) - 1, -1, -1):
        for expert in calls[at][1]:
            later.setdefault((calls[at][0], expert), []).append(at)
    held: set[Key] = set()
    hits = 0
    for layer, row in calls:
        for expert in row:
            hits += (layer, expert) in held
            later[layer, expert].pop()
            held.add((layer, expert))
        excess = len(held) - room
        if excess > 0:
            never = len(calls)
            order = sorted(held, key=lambda k: later[k][-1] if later[k] else never)
            held.difference_update(order[-excess:])
    return hits


@pytest.mark.parametrize(("share", "behind"), [(0.03, 1.0), (0.1, 0.19), (0.25, 0.11), (0.5, 0.05)])
def test_hits_on_a_tape(share: float, behind: float) -> None:
    """Never fewer than the least recently used, and how far from the best there can be.

    The topic changes in the middle, and nobody who does not know the future has its experts there.
    """
    layers, experts, routed = 8, 128, 8
    tape = draw(layers, experts, routed, 2 * _TOPIC_TOKENS, topic_tokens=_TOPIC_TOKENS)
    room = int(share * layers * experts)
    routes = layers * routed * 2 * _TOPIC_TOKENS
    counts: list[Callable[[list[list[list[int]]], int], int]] = [_lru, _aged, _best]
    lru, aged, best = (count(tape, room) / routes for count in counts)
    assert aged >= lru
    assert aged >= best - behind
    assert aged > 0.15


def test_requests_that_take_turns_are_one_pass() -> None:
    """Four texts, in turns in each layer: what each uses does not age four times as fast."""
    layers, experts, routed, tokens, requests = 3, 64, 4, 50, 4
    tapes = [draw(layers, experts, routed, tokens, seed=seed) for seed in range(requests)]
    cache = ExpertCache([1] * layers)
    cache.shrink(layers * experts // 4)
    turns = (
        (layer, tape[layer][t]) for t in range(tokens) for layer in range(layers) for tape in tapes
    )
    hits = sum(len(cache.choose(layer, dict.fromkeys(row, 1.0)).hits) for layer, row in turns)
    assert hits / (layers * routed * tokens * requests) > 0.57  # 0.52 where each ages all
