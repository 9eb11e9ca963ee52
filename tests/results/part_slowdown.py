"""How much slower a part of the model in memory is than all of it; and whether it stays so."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from tests.results import frame
from tests.results.forks import runner

if TYPE_CHECKING:
    from tests.results.frame import Given, Row

SHARES = (0.25, 0.5, 0.75, 0.95)
PUBLISHED = {"name": "llama2.pi", "all": 7.5, "layer at a time": 69.8}
"""Seconds per token that this project gives for all in memory, and for a layer at a time."""
LONG, LONG_SHARE, ENDS = 200, 0.75, 40


def run(given: Given) -> None:
    """Against all in memory and against a layer at a time; then 200 tokens."""
    folder = str(given.model("llama-7b-int4" if given.full else "llama-small"))
    job: dict[str, Any] = {"folder": folder, "new": 8, "options": {"io_mode": "direct"}}
    rows: list[Row] = []
    with runner() as forks:
        runs = {
            "all": partial(forks.run, job | {"way": "pipeload", "limit": 1 << 45}),
            # Whole layers of floats; integers are no tensors that a bare loader could bind.
            **({} if given.full else {"layer at a time": partial(forks.run, _naive(job))}),
        }
        for share in SHARES:
            limit = forks.run(job | {"way": "limit", "share": share})["limit"]
            mine = job | {"way": "pipeload", "limit": limit}
            runs[str(share)] = partial(forks.run, mine, cap=limit)
        found = frame.alternated(runs, given.rounds)
        for samples in found.values():
            for sample in samples:
                sample["step"] = frame.steps_of(sample)
        rows += [
            {
                "way": way,
                "limit": samples[0].get("limit", 0) if way != "all" else 0,
                "step": frame.middle(samples, "step"),
                "slowdown": frame.ratio(found["all"], samples, "step"),
                "per_pass": samples[0].get("per_pass", 0),
                "peak": max(sample["peak"] for sample in samples),
                "equal": samples[0]["digest"] == found["all"][0]["digest"],
            }
            for way, samples in found.items()
        ]
        job["new"] = LONG
        limit = forks.run(job | {"way": "limit", "share": LONG_SHARE})["limit"]
        long = forks.run(job | {"way": "pipeload", "limit": limit}, cap=limit)
    steps = long["steps"]
    flat = {
        "limit": long["limit"],
        "peak": long["peak"],
        "first": median(steps[:ENDS]),
        "last": median(steps[-ENDS:]),
        "steps": steps,
        "memory": long["memory"],
    }
    model = folder.rpartition("/")[2]
    frame.save("slowdown", given, rows, frame.COLD, long=flat, published=PUBLISHED, model=model)


def _naive(job: dict[str, Any]) -> dict[str, Any]:
    return {"folder": job["folder"], "new": job["new"], "way": "layers", "loaders": 0}
