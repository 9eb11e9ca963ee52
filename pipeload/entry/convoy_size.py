"""How many requests at once help: as many as fill the time of reading, and fit in memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeload.budget.governor import Governor
    from pipeload.budget.plan import Plan
    from pipeload.budget.read_counters import Counters
    from pipeload.engine.convoy import Convoy

_AT_FIRST = 16
"""The most before it was measured what one of them computes."""


class Sizes(NamedTuple):
    """What a call of `generate` comes to, as far as its arguments tell."""

    prompt: int
    """Tokens of each sequence that are given."""
    tokens: int
    """With those that may come."""
    batch: int
    """Sequences at once, beams among them."""


def sizes_of(model: Any, arguments: Mapping[str, Any]) -> Sizes:
    """Read from the arguments, else from the model's own settings."""
    config = arguments.get("generation_config") or model.generation_config

    def setting(name: str) -> int | None:
        value = arguments.get(name)
        value = getattr(config, name, None) if value is None else value
        return value if isinstance(value, int) else None

    given = (arguments.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))
    inputs = next((value for value in given if isinstance(value, torch.Tensor)), None)
    shape = inputs.shape if inputs is not None and inputs.dim() > 1 else (1, 1)
    batch, prompt = int(shape[0]), int(shape[1])
    new = setting("max_new_tokens")
    longest = (setting("max_length") or 0) if new is None else prompt + new
    rows = max(setting("num_beams") or 1, setting("num_return_sequences") or 1)
    return Sizes(prompt, max(prompt, longest), batch * rows)


class ConvoySize:
    """Says whether one more request helps. In bytes and seconds.

    [Note: as many as help] A round takes as long as its reading, or its computing if that is more
    (what is unpacked from memory counts as read):
    more requests than fill the time of reading add nothing. Each takes its cache from the
    residents, which are then read in every round: that is worth it as long as this adds less than
    the share of the reading that it takes over from the others.
    """

    def __init__(self, governor: Governor, counters: Counters, convoy: Convoy) -> None:
        self._governor, self._counters, self._convoy = governor, counters, convoy
        self._known: dict[Sizes, tuple[int, int]] = {}
        self._spare = governor.spare_bytes()
        """What there was for all of them before the first began."""

    def allows(
        self, model: Any, running: Sequence[Mapping[str, Any]], more: Mapping[str, Any]
    ) -> bool:
        """Whether `more` helps beside the requests that are `running`."""
        if not running:
            return True
        plan = self._governor.plan
        shared = plan.bytes_per_pass + plan.made_per_pass
        if len(running) >= self._most(plan):
            return False
        wanted = [self._bytes_of(sizes_of(model, each)) for each in (*running, more)]
        caches, passes = zip(*wanted, strict=True)
        fits = sum(caches) + max(passes) <= self._spare
        return fits and bool(caches[-1] * len(running) < shared)

    def _bytes_of(self, sizes: Sizes) -> tuple[int, int]:
        if sizes not in self._known:  # to find out may take a trial
            self._known[sizes] = self._governor.bytes_alone(*sizes)
        return self._known[sizes]

    def _most(self, plan: Plan) -> int:
        """How many fill the time of reading and unpacking, and one more."""
        computing, counters = self._convoy.rounds.seconds_per_pass, self._counters
        if not (plan.bytes_per_pass or plan.made_per_pass):
            return 1
        if not computing or not counters.read_seconds:
            return _AT_FIRST
        shared = plan.bytes_per_pass * counters.read_seconds / counters.bytes_read
        shared += plan.made_per_pass * counters.make_seconds / max(1, counters.made_bytes)
        return math.ceil(shared / computing) + 1
