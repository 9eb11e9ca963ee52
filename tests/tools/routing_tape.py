"""Routing as real models do it, for models of random weights, whose routers choose evenly.

A tape says which experts each token of each layer is sent to. It is drawn so that some experts are
used more than others, and those of the last tokens more than that: `skew` and `stick` below give
the repeats that Qwen3-30B-A3B shows (37 % at the next token, 71 % within eight). The text changes
its topic now and then: then other experts are the favourites. Forward hooks on the routers of a
model have it go by the tape, a plain model as well as a streamed one, so bits stay comparable.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

Tape = list[list[list[int]]]
"""Experts by layer, token, place."""


def draw(
    layers: int,
    experts: int,
    routed: int,
    tokens: int,
    *,
    topic_tokens: int = 200,
    skew: float = 1.6,
    stick: float = 2.0,
    memory: float = 0.97,
    seed: int = 0,
) -> Tape:
    """Draw a tape whose topic changes after each `topic_tokens`."""
    source = random.Random(seed)
    tape: Tape = []
    for _ in range(layers):
        rows, used = [], [0.0] * experts
        for token in range(tokens):
            if token % topic_tokens == 0:
                bias = [skew * source.gauss(0, 1) for _ in range(experts)]
            scores = [
                bias[e] + stick * used[e] - math.log(-math.log(source.random() or 0.5))
                for e in range(experts)
            ]
            chosen = sorted(range(experts), key=lambda e: -scores[e])[:routed]
            used = [value * memory for value in used]
            for expert in chosen:
                used[expert] += 1 - memory
            rows.append(chosen)
        tape.append(rows)
    return tape


class TapePlayer:
    """Has the routers of a model choose by a tape; each router counts the tokens it has seen."""

    def __init__(self, model: nn.Module, tape: Tape) -> None:
        """Put a hook on each router, a module that gives (logits, weights, ids)."""
        self._tape = tape
        self.seen = [0] * len(tape)
        routers = [m for name, m in model.named_modules() if _is_router(name, m)]
        if len(routers) != len(tape):
            raise ValueError(f"the tape has {len(tape)} layers, the model {len(routers)} routers")
        self._handles: list[RemovableHandle] = [
            router.register_forward_hook(self._hook(layer)) for layer, router in enumerate(routers)
        ]

    def rewind(self, token: int = 0) -> None:
        """Go on at that token."""
        self.seen = [token] * len(self._tape)

    def remove(self) -> None:
        """Let the routers choose by themselves."""
        while self._handles:
            self._handles.pop().remove()

    def _hook(self, layer: int) -> Any:
        def choose(_module: nn.Module, _args: Any, output: Any) -> Any:
            logits, weights, ids = output
            start, count = self.seen[layer], ids.shape[0]
            self.seen[layer] += count
            rows = self._tape[layer]
            chosen = [rows[(start + at) % len(rows)] for at in range(count)]
            return logits, weights, torch.tensor(chosen, dtype=ids.dtype)

        return choose


def _is_router(name: str, module: nn.Module) -> bool:
    return type(module).__name__.endswith("Router") and name.rpartition(".")[2] in {
        "gate",
        "router",
    }
