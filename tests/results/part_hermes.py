"""Whole-layer loaders as published beside pipeload, each with the same memory.

Load-then-run: everything from the weights on disk to the output. Then a second input, or the next
tokens: loaders of whole layers read everything again, pipeload what it could not keep.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tests.results import frame
from tests.results.forks import Runner, runner

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.results.frame import Given, Row

SMALL = ("bert-large", "vit-large", "gpt2")
LOADERS = (2, 4, 6)
SWEEP_MB = (60, 110, 160, 210, 310)
"""Room for layers, of ViT-L."""
_LAYER = 50.4e6
LENGTHS = (1, 8, 32)
NEW = 4
"""Tokens of the table, of models that generate."""


def run(given: Given) -> None:
    """Measure, and write two files: the table, and the sweeps of limits and lengths."""
    names = ("gpt-j",) if given.full else SMALL
    rows: list[Row] = []
    with runner() as forks:
        for name in names:
            rows += _model(forks, given, name, NEW)
            frame.save("hermes", given, rows, frame.COLD)
        if not given.full:
            given = given.anew()
            sweeps = _limits(forks, given)
            frame.save("hermes-sweeps", given, sweeps, frame.COLD)
            sweeps += _lengths(forks, given)
            frame.save("hermes-sweeps", given, sweeps, frame.COLD)


def _model(forks: Runner, given: Given, name: str, new: int) -> list[Row]:
    folder = given.model(name)
    jobs: dict[str, Row] = {
        "load all, then run": {"way": "plain"},
        "PipeSwitch": {"way": "layers", "loaders": 1, "keep": True},
        **{f"m = {m}": {"way": "layers", "loaders": m} for m in LOADERS},
    }
    peaks = _peaks(forks, folder, jobs, new)
    for m in LOADERS:
        way = f"m = {m}"
        jobs[f"pipeload, memory of {way}"] = {"way": "pipeload", "limit": peaks[way]}
        peaks[f"pipeload, memory of {way}"] = peaks[way]
    found = frame.alternated(_runs(forks, folder, jobs, peaks, new), given.rounds)
    base, plain = found["PipeSwitch"], found["load all, then run"][0]
    rows = []
    for way, samples in found.items():
        equal = _least(found, way) if way.startswith("pipeload") else ""
        same = found[equal] if equal else samples
        rows.append(
            {
                "model": name,
                "way": way,
                "latency": frame.middle(samples, "seconds"),
                "load": frame.middle(samples, "load"),
                "again": frame.middle(samples, "step"),
                "peak": max(sample["peak"] for sample in samples),
                "floor": samples[0]["floor"],
                "latency_over_pipeswitch": frame.ratio(samples, base, "seconds"),
                "memory_under_pipeswitch": 1 - _own(samples[0]) / _own(base[0]),
                "latency_over_same_memory": frame.ratio(samples, same, "seconds"),
                "again_over_same_memory": frame.ratio(samples, same, "step"),
                "equal": all(sample["digest"] == plain["digest"] for sample in samples),
                "latencies": [sample["seconds"] for sample in samples],
            }
        )
    return rows


def _own(sample: Row) -> int:
    """Bytes beside those of Python and its libraries."""
    return int(sample["peak"] - sample["floor"])


def _least(found: dict[str, list[Row]], way: str) -> str:
    """The loaders that have the memory which that row of pipeload has."""
    return next(name for name in found if way == f"pipeload, memory of {name}")


def _peaks(forks: Runner, folder: Path, jobs: dict[str, Row], new: int) -> dict[str, int]:
    """Bytes that each takes, where nothing binds it."""
    more = {"folder": str(folder), "new": new}
    return {way: forks.run(job | more)["peak"] for way, job in jobs.items()}


def _runs(
    forks: Runner, folder: Path, jobs: dict[str, Row], caps: dict[str, int], new: int
) -> dict[str, Callable[[], Row]]:
    def one(job: Row, cap: int) -> Row:
        found = forks.run(job | {"folder": str(folder), "new": new}, cap=cap)
        if found.get("steps"):
            found["step"] = frame.steps_of(found)
        return found

    return {way: partial(one, job, caps[way]) for way, job in jobs.items()}


def _limits(forks: Runner, given: Given) -> list[Row]:
    """ViT-L over the memory that layers may have: the better of 2 and most loaders; pipeload."""
    folder = given.model("vit-large")
    rows = []
    alone = forks.run({"way": "layers", "loaders": 0, "folder": str(folder), "new": 1})
    around = alone["peak"] - _LAYER  # libraries, activations, and what is no layer
    for room in SWEEP_MB:
        cap = int(around + room * 1e6)
        most = int(room * 1e6 / _LAYER) - 1
        tried = sorted({min(2, most), most})
        jobs: dict[str, Row] = {
            **{str(loaders): {"way": "layers", "loaders": loaders} for loaders in tried},
            "pipeload": {"way": "pipeload", "limit": cap},
        }
        caps = dict.fromkeys(jobs, cap)
        found = frame.alternated(_runs(forks, folder, jobs, caps, 1), given.rounds)
        best = min(tried, key=lambda loaders: frame.middle(found[str(loaders)], "seconds"))
        ours, theirs = found["pipeload"], found[str(best)]
        rows.append(
            {
                "sweep": "limit",
                "room": room * 1e6,
                "limit": cap,
                "loaders": best,
                "tried": tried,
                "latency_loaders": frame.middle(theirs, "seconds"),
                "latency": frame.middle(ours, "seconds"),
                "latency_ratio": frame.ratio(ours, theirs, "seconds"),
                "again_loaders": frame.middle(theirs, "step"),
                "again": frame.middle(ours, "step"),
                "again_ratio": frame.ratio(ours, theirs, "step"),
                "peak": max(one["peak"] for one in ours),
                "peak_loaders": max(one["peak"] for one in theirs),
            }
        )
    return rows


def _lengths(forks: Runner, given: Given) -> list[Row]:
    """GPT-2 over the length of the answer, with the memory of six loaders."""
    folder = given.model("gpt2")
    jobs: dict[str, Any] = {"m = 6": {"way": "layers", "loaders": 6}}
    cap = _peaks(forks, folder, jobs, 1)["m = 6"]
    jobs |= {
        "PipeSwitch": {"way": "layers", "loaders": 1, "keep": True},
        "pipeload": {"way": "pipeload", "limit": cap},
    }
    caps = {"m = 6": cap, "pipeload": cap, "PipeSwitch": 0}
    rows = []
    for new in LENGTHS:
        found = frame.alternated(_runs(forks, folder, jobs, caps, new), given.rounds)
        base = found["PipeSwitch"]
        rows += [
            {
                "sweep": "length",
                "tokens": new,
                "way": way,
                "latency": frame.middle(samples, "seconds"),
                "over_pipeswitch": frame.ratio(samples, base, "seconds"),
                "peak": max(one["peak"] for one in samples),
            }
            for way, samples in found.items()
        ]
    return rows
