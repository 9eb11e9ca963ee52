#!/usr/bin/env python3
"""Runs a tiny random model of every type that generates as two ranks, and compares to the last bit.

    python -m tests.tools.ring_types --table /tmp/types.tsv
    python -m tests.tools.ring_types --types llama,t5

Types are those of coverage.tsv that are exact and generate. A line for each: exact, refused (by
name, before anything is computed), failed (another error), WRONG. Rows are added as they come;
types that the table has already are skipped. Ends with 1 if any is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import pipeload
from pipeload.budget import pass_needs
from pipeload.ring import joining
from tests.support.ranks import on_ranks
from tests.tools.model_types import check as checking
from tests.tools.model_types.classes import classes_of
from tests.tools.model_types.outputs import difference_of, tensors_of
from tests.tools.model_types.run import in_child, read_table
from tests.tools.model_types.special_inputs import save_beside

if TYPE_CHECKING:
    from collections.abc import Callable

EXACT, REFUSED, FAILED, WRONG, PLAIN = "exact", "refused", "failed", "WRONG", "plain cannot"
COVERAGE = Path(__file__).parent / "model_types" / "coverage.tsv"
SECONDS = 90
_LIMIT = 12_000_000_000
"""Of a process that is said to hold 8 GB: all fits, and blocks of others are NaN."""


def check(model_type: str, say: Callable[[str], None]) -> tuple[str, str]:
    """What came of one type, and why."""
    say("plain")
    try:
        cls, model, inputs = _made(model_type)
    except checking.PlainError as error:
        return PLAIN, str(error)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        save_beside(model, Path(folder))
        plain = cls.from_pretrained(folder, dtype=torch.float32).eval()
        uses = [(name, run, _given(run, plain)) for name, run in checking._uses(plain, inputs)]
        wanted = [(name, run, expected) for name, run, expected in uses if expected]
        say("ranks")

        def act(_rank: int) -> list[str]:
            try:
                with (
                    checking.tiny_planning(),
                    mock.patch.object(joining, "disk_rate", return_value=1e9),
                    # What a pass takes is not asked here, and takes longest to be told.
                    mock.patch.object(pass_needs, "trace_of", return_value=None),
                ):
                    shared = pipeload.from_pretrained(
                        folder,
                        memory_limit=_LIMIT,
                        auto_class=cls,
                        dtype=torch.float32,
                        ranks="auto",
                    )
            except (pipeload.UnsupportedModelError, pipeload.GroupError) as error:
                return [REFUSED, str(error)]
            for name, run, expected in wanted:
                if difference := difference_of(_compared(run(shared)), expected):
                    return [WRONG, f"{name}: {difference}"]
            return [EXACT, " ".join(name for name, *_ in wanted)]

        told = on_ranks(2, act, seconds=SECONDS - 20)
    for one in told:
        if not isinstance(one, list):
            return FAILED, str(one)
    worst = max(told, key=lambda one: [EXACT, REFUSED, WRONG].index(one[0]))
    return worst[0], worst[1]


def _given(run: Callable[[Any], Any], plain: Any) -> dict[str, torch.Tensor]:
    """What a use gives; nothing where plain cannot."""
    try:
        return _compared(run(plain))
    except Exception:
        return {}


def _compared(output: Any) -> dict[str, torch.Tensor]:
    """All but caches, of which each rank has its own layers' alone."""
    named = tensors_of(output).items()
    return {n: t for n, t in named if ".cache" not in n and "past_key_values" not in n}


def _made(model_type: str) -> tuple[Any, Any, list[dict[str, Any]]]:
    reasons: list[str] = []
    for cls in classes_of(model_type):
        found = _try(model_type, cls, reasons)
        if found is not None:
            return (cls, *found)
    raise checking.PlainError("; ".join(reasons))


def _try(model_type: str, cls: Any, reasons: list[str]) -> tuple[Any, list[dict[str, Any]]] | None:
    try:
        model, inputs = checking._make(model_type, cls, lambda _stage: None)
    except checking.PlainError as error:
        reasons.append(str(error))
        return None
    return model.eval(), inputs


def main() -> int:
    """Check all types, or those that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", default="", help="separated by commas; all when empty")
    parser.add_argument("--table", type=Path, help="where rows are added")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = read_table(COVERAGE)
    generating = [name for name, row in rows.items() if "generate" in row.uses]
    done: dict[str, str] = {}
    if asked.table is not None and asked.table.exists():
        lines = asked.table.read_text(encoding="utf-8").splitlines()
        done = {name: result for name, result, *_ in (line.split("\t") for line in lines)}
    for name in asked.types.split(",") if asked.types else generating:
        if name in done:
            continue
        found, stages, ended = in_child(partial(check, name), SECONDS)
        result, why = found or (FAILED, f"{stages[-1]}: {ended}")
        done[name] = result
        line = "\t".join((name, result, " ".join(why.split())[:300]))
        print(line, flush=True)
        if asked.table is not None:
            with asked.table.open("a", encoding="utf-8") as table:
                table.write(line + "\n")
    print(
        ", ".join(f"{count} {result}" for result, count in sorted(Counter(done.values()).items()))
    )
    return int(WRONG in done.values())


if __name__ == "__main__":
    sys.exit(main())
