#!/usr/bin/env python3
"""Estimate against measured memory of a pass, for every type that the installed transformers know.

    python tests/tools/pass_memory/run.py
    python tests/tools/pass_memory/run.py --shard 0/2
    python tests/tools/pass_memory/run.py --types llama,t5 --halves --table /tmp/some.tsv
    python tests/tools/pass_memory/run.py --kept /tmp/kept --table old.tsv
    python tests/tools/pass_memory/run.py --kept /tmp/kept --again old.tsv --table new.tsv

Types that the table has already are skipped; shards may write to the same table at once. Those that
the coverage run does not run are listed with its reason. A summary goes to stdout, of the whole
table. Exits with 1 if a pass took over 3 % more than was estimated.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from pipeload.system.memory import keep_few_kernels, return_freed_memory
from tests.tools.model_types.check import EXACT, REFUSED
from tests.tools.model_types.classes import model_types
from tests.tools.model_types.run import in_child
from tests.tools.model_types.run import read_table as coverage
from tests.tools.pass_memory.measure import LEAST, Line, empty, lines_of

SECONDS = 1800
COVERAGE = Path(__file__).parents[1] / "model_types" / "coverage.tsv"
_UNDER, _WELL = 0.97, 1.3
"""Of the estimate by what was measured: less than that is too little, up to that is close."""
_WORST = 15


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--types", default="", help="separated by commas; all when empty")
    arguments.add_argument("--table", type=Path, default=Path("tests/tools/pass_memory/memory.tsv"))
    arguments.add_argument("--shard", default="0/1", help="which part of the types, of how many")
    arguments.add_argument("--halves", action="store_true", help="in bf16, too")
    arguments.add_argument("--quick", action="store_true", help="one forward of each type alone")
    arguments.add_argument(
        "--kept", type=Path, help="a folder: models need no search in another run"
    )
    arguments.add_argument("--again", type=Path, help="a table: its forwards are estimated anew")
    arguments.add_argument("--seconds", type=int, default=SECONDS, help="for one type")
    given = arguments.parse_args()
    torch.set_num_threads(1)  # two would wait for one another wherever others run
    keep_few_kernels()
    return_freed_memory()  # before any model runs: what that left free would hold parts of others
    torch.manual_seed(0)
    part, parts = map(int, given.shard.split("/"))
    wanted = [name for name in given.types.split(",") if name] or model_types()
    done = {line.model_type for line in read_table(given.table)}
    old = read_table(given.again) if given.again else []
    unrun = not_run()
    if given.kept is not None:
        given.kept.mkdir(parents=True, exist_ok=True)
    for model_type in wanted[part::parts]:
        if model_type in done:
            continue
        started = time.monotonic()
        work = partial(
            lines_of,
            model_type,
            halves=given.halves,
            quick=given.quick,
            kept=given.kept,
            old=[line for line in old if line.model_type == model_type],
        )
        if model_type in unrun:
            lines = [empty(model_type, "", unrun[model_type])]
        else:
            lines, stages, ended = in_child(work, given.seconds)
            why = f"not measured: {stages[-1]}: {ended}"
            lines = lines or [empty(model_type, "", why)]
        with given.table.open("a") as table:
            table.write("".join("\t".join(line) + "\n" for line in lines))
        told = " ".join(f"{line.use} {line.ratio}" for line in lines) + lines[0].note[-100:]
        print(f"{time.monotonic() - started:5.1f} s {model_type}: {told}", flush=True)
    lines = read_table(given.table)
    print(summary(lines))
    return int(any(is_under(line) for line in lines))


def read_table(path: Path) -> list[Line]:
    """All its lines; none where there is no such file."""
    rows = path.read_text().splitlines() if path.exists() else []
    cells = (row.split("\t") for row in rows)
    return [Line(*row) for row in cells if len(row) == len(Line._fields)]


def not_run(path: Path = COVERAGE) -> dict[str, str]:
    """Types that the coverage run does not run, and why."""
    return {
        name: f"{row.result}: {row.reason}"[:200]
        for name, row in coverage(path).items()
        if row.result not in {EXACT, REFUSED}
    }


def is_under(line: Line) -> bool:
    """Whether a pass took more than was estimated, by more than what measuring differs by."""
    return bool(line.ratio) and float(line.ratio) < _UNDER


def summary(lines: list[Line]) -> str:
    """How many types and passes, how many under, how many close, and the worst."""
    types = {line.model_type for line in lines}
    left = len(types & set(not_run()))
    known = [line for line in lines if line.ratio]
    large = [line for line in known if max(int(line.first), int(line.second)) >= LEAST]
    under = [line for line in known if is_under(line)]
    close = sum(_UNDER <= float(line.ratio) <= _WELL for line in large)
    worst = sorted(large, key=lambda line: float(line.ratio))
    told = [
        f"{len(types)} types, {left} of them plain cannot run; "
        f"{len({line.model_type for line in known})} measured: {len(known)} "
        f"passes, {len(large)} of them over {LEAST // 1_000_000} MB.",
        f"{len(under)} took over 3 % more than estimated (types: "
        f"{len({line.model_type for line in under})}).",
        f"Of the large ones {close} ({100 * close / max(1, len(large)):.1f} %) are within "
        f"{_UNDER} to {_WELL} times what was measured.",
    ]
    for name, some in (("lowest", worst[:_WORST]), ("highest", worst[::-1][:_WORST])):
        told.append(f"{name}:")
        told += [f"  {w.ratio:>6} {w.model_type} {w.dtype} {w.use}: {w.inputs[:90]}" for w in some]
    return "\n".join(told)


if __name__ == "__main__":
    sys.exit(main())
