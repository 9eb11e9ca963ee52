"""Small machines: models of a Raspberry Pi's size, plain and by pipeload."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tests.results import frame
from tests.results.forks import runner

if TYPE_CHECKING:
    from tests.results.frame import Given, Row

SMALL = ("bert-base", "vit-base", "gpt2", "llama-7b-8-int4")
FULL = ("llama-7b-int4",)
NEW = 8
"""Tokens, of models that generate."""
SHARE = 0.4
"""Of the weights: pipeload's room for them."""
BLOG = {"rate": 400e6, "tokens_per_second": 2.5, "room": 2.1e9, "weights": 4.1e9}
"""What a blog post on PIPELOAD says of a Pi 4: bytes per second of its disk, its memory, and the
bytes of 7 billion weights in 4 bits."""


def run(given: Given) -> None:
    """Plain against pipeload: memory, load-then-run, and the next token or input."""
    rows: list[Row] = []
    with runner() as forks:
        for name in FULL if given.full else SMALL:
            folder = str(given.model(name))
            job = {"folder": folder, "new": NEW}
            limit = forks.run(job | {"way": "limit", "share": SHARE})["limit"]
            ours = job | {"way": "pipeload", "limit": limit}
            found = frame.alternated(
                {
                    "plain": partial(forks.run, job | {"way": "plain"}),
                    "pipeload": partial(forks.run, ours, cap=limit),
                },
                given.rounds,
            )
            for samples in found.values():
                for sample in samples:
                    sample["step"] = frame.steps_of(sample)
            rows += [
                {
                    "model": name,
                    "way": way,
                    "limit": limit if way == "pipeload" else 0,
                    "latency": frame.middle(samples, "seconds"),
                    "again": frame.middle(samples, "step"),
                    "peak": max(sample["peak"] for sample in samples),
                    "floor": samples[0]["floor"],
                    "latency_over_plain": frame.ratio(found["plain"], samples, "seconds"),
                    "again_over_plain": frame.ratio(found["plain"], samples, "step"),
                    "equal": all(s["digest"] == found["plain"][0]["digest"] for s in samples),
                }
                for way, samples in found.items()
            ]
            frame.save("pi", given, rows, frame.COLD, blog=BLOG)
