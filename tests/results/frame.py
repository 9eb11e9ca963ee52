"""A part of the results: what it is given, the file that it leaves, and who it ran for.

A file holds rows and what each was measured with: machine, versions, command, state of the cache.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeload.bench.measure import measure_disk
from tests.results import shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[2]
STORE = ROOT / "examples" / "results"
COLD = "cold: the model's files are dropped from the page cache before each run"
ROUNDS = 2
"""How often each way takes its turn, if nothing else is asked for."""
_PACKAGES = ("torch", "transformers", "accelerate", "safetensors")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Given:
    """What a part works with."""

    folder: Path
    """Where models are made; on the disk that is measured."""
    full: bool
    """The models of several gigabytes."""
    rounds: int
    began: float = field(default_factory=time.monotonic)
    """When the work for the next file began; for its seconds."""

    def anew(self) -> Given:
        """For another file of the same part."""
        return replace(self, began=time.monotonic())

    def model(self, name: str) -> Path:
        """That one, made if it is not there."""
        tell(f"  model {name}")
        return shapes.make(name, self.folder)


def tell(line: str) -> None:
    """Say how far it is."""
    print(line, file=sys.stderr, flush=True)


def middle(samples: Sequence[Row], figure: str) -> float:
    """The median of a figure."""
    return float(statistics.median(sample[figure] for sample in samples))


def ratio(samples: Sequence[Row], others: Sequence[Row], figure: str) -> float:
    """How many times the others' figure is, the median over rounds: each beside its own."""
    pairs = zip(samples, others, strict=True)
    return float(statistics.median(other[figure] / one[figure] for one, other in pairs))


def alternated(runs: Mapping[str, Callable[[], Row]], rounds: int) -> dict[str, list[Row]]:
    """The results of each, all in turn, `rounds` times."""
    found: dict[str, list[Row]] = {name: [] for name in runs}
    for number in range(rounds):
        for name, run in runs.items():
            found[name].append(run())
            shown = {key: found[name][-1].get(key) for key in ("seconds", "peak")}
            tell(f"  {number + 1} of {rounds}: {name}: {shown}")
    return found


def steps_of(run: Row) -> float:
    """Seconds of a pass after the first: the median."""
    return float(statistics.median(run["steps"]))


def machine(folder: Path) -> dict[str, Any]:
    """What the figures depend on. Rates in bytes per second, memory in bytes."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    files = [str(file) for file in folder.rglob("*.safetensors")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "isa": _isa(),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "disk_rate": measure_disk(files) if files else 0.0,
        "load": os.getloadavg()[0],
    }


def _isa() -> str:
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Of Python and of all that takes part here."""
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **found}


def save(name: str, given: Given, rows: Sequence[Row], cache: str, **more: Any) -> Path:
    """Write the file of a part, whole or not at all."""
    stem = f"{name}-full" if given.full else name
    told = {
        "name": stem,
        "machine": machine(given.folder),
        "versions": versions(),
        "command": f"python -m tests.results {name.partition('-')[0]}"
        + (" --full" if given.full else "")
        + (f" --rounds {given.rounds}" if given.rounds != ROUNDS else ""),
        "seconds": time.monotonic() - given.began,
        "cache": cache,
        "rounds": given.rounds,
        "rows": list(rows),
        **more,
    }
    STORE.mkdir(parents=True, exist_ok=True)
    target = STORE / f"{stem}.json"
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    partial.replace(target)
    return target


def saved(name: str) -> dict[str, Any] | None:
    """What the file of a part holds, if there is one."""
    file = STORE / f"{name}.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found or None
