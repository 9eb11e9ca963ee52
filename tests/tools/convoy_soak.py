#!/usr/bin/env python3
"""Requests join, end, fail and are cancelled at random: none is wrong, and nothing is left.

    python -m tests.tools.convoy_soak --rounds 300

A tiny random LLaMA, cut into ranges of rows or not, answers them at its smallest limit. Ends with 1
if an answer differs from that of a run alone, or a thread, a unit or memory is left.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import transformers

import pipeload
from pipeload.budget import cut, passes_in_turns
from pipeload.budget.shared_limit import Accountant
from tests.support.exact import FLOOR_BYTES, load_smallest
from tests.support.measuring import steady
from tests.support.models import save_random
from tests.support.streaming import assert_nothing_held

if TYPE_CHECKING:
    from collections.abc import Iterator


class Boom(transformers.StoppingCriteria):
    """Fails after some tokens."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, ids: torch.Tensor, _scores: object, **_options: object) -> torch.Tensor:
        self.left -= 1
        if not self.left:
            raise ValueError("boom")
        return torch.zeros(len(ids), dtype=torch.bool)


WAYS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "top_k": 30},
    {"do_sample": False, "num_beams": 3},
    {"do_sample": False, "prompt_lookup_num_tokens": 3},
    {"do_sample": False, "cache_implementation": "static"},
    {"do_sample": True, "num_return_sequences": 2},
]


def made(chance: random.Random) -> dict[str, Any]:
    """A request with everything about it random."""
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    ids = torch.randint(3, 500, (1, chance.randint(1, 60)), generator=generator)
    new = chance.randint(1, 12)
    return {"input_ids": ids, "max_new_tokens": new, "seed": new, **chance.choice(WAYS)}


def alone(model: Any, request: dict[str, Any]) -> Any:
    """What one gives by itself."""
    arguments = dict(request)
    torch.manual_seed(arguments.pop("seed"))
    return model.generate(**arguments)


def anonymous_bytes() -> int:
    """Anonymous memory of this process."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def floor(_accountant: Accountant) -> int:
    """What the process is said to hold; a mock would remember each call, and grow."""
    return FLOOR_BYTES


def one_round(model: Any, chance: random.Random) -> tuple[int, int]:
    """Some requests at once; how many were compared, and how many were wrong."""
    given: list[dict[str, Any]] = []
    fails: set[int] = set()

    def requests() -> Iterator[dict[str, Any]]:
        for number in range(chance.randint(1, 12)):
            request = made(chance)
            given.append(request)
            if chance.random() < 0.15:
                fails.add(number)
                request = request | {"stopping_criteria": [Boom(chance.randint(1, 6))]}
            yield request

    at_once: int | str = chance.choice([1, 2, 3, 5, 8, 8]) if chance.random() < 0.8 else "auto"
    running = pipeload.generate_many(model, requests(), at_once=at_once)
    found = list(itertools.islice(running, chance.randint(0, 12)))
    running.close()  # type: ignore[attr-defined]
    assert_nothing_held(model)
    wrong = 0
    for number, output in found:
        if isinstance(output, ValueError) and number in fails:
            continue
        good = isinstance(output, torch.Tensor) and torch.equal(output, alone(model, given[number]))
        wrong += not good
        if not good:
            print(f"request {number} of {len(given)}, {at_once} at once: {output!r}")
    return len(found), wrong


def main() -> int:
    """Run the rounds. Returns 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranges", action="store_true", help="cut blocks into ranges of rows")
    given = parser.parse_args()
    if given.ranges:
        cut.CHUNKS = (1 << 14,)  # type: ignore[assignment]
    chance = random.Random(given.seed)
    compared = wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = save_random("llama", Path(name), "bf16", seed=3)
        # As if the process never grew: in the room for that, so small a model would fit.
        passes_in_turns._THREAD_BYTES = 0
        held = mock.patch.object(Accountant, "other_bytes", floor)
        with steady(FLOOR_BYTES), held:
            model = load_smallest(folder, tokens=80, batch=3)
            threads, grown = threading.active_count(), 0
            for number in range(given.rounds):
                one, bad = one_round(model, chance)
                compared, wrong = compared + one, wrong + bad
                if number == given.rounds // 3:
                    grown = -anonymous_bytes()
        grown += anonymous_bytes()
        left = threading.active_count() - threads
    print(
        f"{given.rounds} rounds, {compared} answers, {wrong} wrong, {left} threads left, "
        f"memory grew by {grown / 1e6:.1f} MB after the first third"
    )
    return int(wrong > 0 or left > 0 or grown > 20e6)


if __name__ == "__main__":
    sys.exit(main())
