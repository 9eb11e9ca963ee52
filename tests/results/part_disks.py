"""Slow disks: a layer at a time, read then computed, beside pipeload with the same memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.results import frame
from tests.results.forks import Runner, runner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.results.frame import Given, Row

CASES = (("llama-small", (25, 60, 90)), ("gpt2", (60,)))
"""Models, and the disks' rates in MB/s."""
SIMULATED = (1.82, 1.94)
"""How many times as fast as a layer at a time simulations of "cascaded prediction" are."""
_SLOW = 50
_LIMIT = 512_000_000


def run(given: Given) -> None:
    """Throttled by the kernel; with --full a model of 7 billion weights in 512 MB."""
    cache = f"{frame.COLD}; the disk throttled by the kernel's blkio group"
    rows: list[Row] = []
    with runner() as forks:
        for case in CASES if not given.full else ((),):
            rows += _beside_naive(forks, given, *case) if case else _large(forks, given)
            frame.save("disks", given, rows, cache, rounds=1, simulated=SIMULATED)


def _beside_naive(forks: Runner, given: Given, name: str, rates: Sequence[int]) -> list[Row]:
    folder = str(given.model(name))
    job: dict[str, Any] = {"folder": folder, "new": 3}
    naive = job | {"way": "layers", "loaders": 0}
    cap = forks.run(naive)["peak"]
    half = forks.run(job | {"way": "limit", "share": 0.5})["limit"]
    rows = []
    for megabytes in rates:
        rate = megabytes * 10**6
        jobs = {
            "naive": naive,
            "same": job | {"way": "pipeload", "limit": cap},
            "half": job | {"way": "pipeload", "limit": half},
        }
        new = 2 if megabytes < _SLOW else job["new"]  # they differ little from token to token
        found = {
            way: forks.run(one | {"new": new}, cap=one.get("limit", cap), rate=rate)
            for way, one in jobs.items()
        }
        for way, sample in found.items():
            step = frame.steps_of(sample)
            rows.append(
                {
                    "model": name,
                    "rate": rate,
                    "way": way,
                    "limit": sample.get("limit", cap),
                    "tokens_per_second": 1 / step,
                    "over_naive": frame.steps_of(found["naive"]) / step,
                    "per_pass": sample.get("per_pass", 0),
                    "bound": sample.get("per_pass", 0) / rate,
                    "step": step,
                    "latency": sample["seconds"],
                    "peak": sample["peak"],
                    "equal": sample["digest"] == found["naive"]["digest"],
                }
            )
            frame.tell(f"  {megabytes} MB/s, {way}: {step:.2f} s per token")
    return rows


def _large(forks: Runner, given: Given) -> list[Row]:
    folder = str(given.model("llama-7b-int4"))
    job = {"folder": folder, "way": "pipeload", "limit": _LIMIT, "options": {"io_mode": "direct"}}
    own = frame.machine(given.folder)["disk_rate"]
    rows = []
    for rate, new in ((None, 6), (25_000_000, 2)):
        sample = forks.run(job | {"new": new}, cap=_LIMIT, rate=rate)
        step = frame.steps_of(sample)
        bound = sample["per_pass"] / (rate or own)
        rows.append(
            {
                "model": "llama-7b-int4",
                "way": "pipeload",
                "rate": rate or own,
                "limit": _LIMIT,
                "step": step,
                "tokens_per_second": 1 / step,
                "bound": bound,
                "per_pass": sample["per_pass"],
                "peak": sample["peak"],
                "latency": sample["seconds"],
            }
        )
        frame.tell(f"  7B int4, {rate or own:.3g} B/s: {step:.2f} s per token, bound {bound:.2f}")
    return rows
