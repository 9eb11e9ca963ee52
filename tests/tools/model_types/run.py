#!/usr/bin/env python3
"""Streams a tiny random model of every type that the installed transformers know.

    python tests/tools/model_types/run.py --table tests/tools/model_types/coverage.tsv
    python tests/tools/model_types/run.py --types llama,t5 --table /tmp/some.tsv --fast

Each type runs in a process of its own, so that a crash costs one row. Rows are added as they come;
types that the table has already are skipped. Totals go to stdout. Types whose classes need a
package that is missing (timm with torchvision and pillow, scipy) count as what plain cannot.
"""

from __future__ import annotations

import argparse
import os
import pickle
import resource
import select
import signal
import sys
import time
from base64 import b64decode, b64encode
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.tools.model_types.check import (
    EXACT,
    FAILED,
    HALF_WAY,
    NO_CLASS,
    PLAIN,
    Row,
    check,
)
from tests.tools.model_types.classes import model_types

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 90
_ADDRESS_SPACE = 14 << 30


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--types", default="", help="separated by commas; all when empty")
    arguments.add_argument(
        "--table", type=Path, default=Path("tests/tools/model_types/coverage.tsv")
    )
    arguments.add_argument("--seconds", type=int, default=SECONDS, help="for one type")
    arguments.add_argument("--fast", action="store_true", help="fp32 and the smallest limit alone")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    # Forked children share what the parent has imported.
    torch.manual_seed(0)
    wanted = [name for name in given.types.split(",") if name] or model_types()
    rows = read_table(given.table)
    for model_type in wanted:
        if model_type not in rows:
            started = time.monotonic()
            row = check_in_child(model_type, given.seconds, fast=given.fast)
            with given.table.open("a") as table:
                table.write("\t".join(row) + "\n")
            rows[model_type] = row
            seconds = time.monotonic() - started
            print(f"{seconds:5.1f} s {row.result:12} {model_type}: {row.reason[:200]}", flush=True)
    print(totals(list(rows.values())))
    return 0


def check_in_child(model_type: str, seconds: float = SECONDS, *, fast: bool = False) -> Row:
    """`check` in a forked process, within `seconds` and a bounded address space."""
    row, stages, ended = in_child(lambda say: check(model_type, say, fast=fast), seconds)
    if isinstance(row, Row):
        return row
    why = f"{stages[-1]}: {ended}"
    if not stages[-1].startswith("plain"):
        return Row(model_type, "", FAILED, "", "", why)
    if HALF_WAY in stages:
        return Row(model_type, "", EXACT, "fp32", "", why)
    return Row(model_type, "", PLAIN, "", "", why)


def in_child(
    work: Callable[[Callable[[str], None]], Any], seconds: float
) -> tuple[Any, list[str], str]:
    """Do some work in a forked process, within `seconds` and a bounded address space.

    Returns what it gives, None if it does not come to that; the stages that it told; and how it
    ended if it gave nothing.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        _child(work, writing, seconds)
    os.close(writing)
    data, late = b"", False
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reading], [], [], left)[0]:
            late = True
            os.kill(pid, signal.SIGKILL)
            break
        part = os.read(reading, 1 << 16)
        if not part:
            break
        data += part
    os.close(reading)
    status = os.waitpid(pid, 0)[1]
    stages, found = ["plain: start"], None
    for line in data.split(b"\n\0"):
        if line[:1] == b"R":
            found = pickle.loads(b64decode(line[1:]))  # from our own child
        if line[:1] == b"S":
            stages.append(line[1:].decode())
    return found, stages, f"took over {seconds} s" if late else f"ended with status {status}"


def _child(work: Callable[[Callable[[str], None]], Any], writing: int, seconds: float) -> None:
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2) if not os.environ.get("COVERAGE_LOUD") else ():
            os.dup2(null, stream)
        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        torch.set_num_threads(1)  # those of a parent that has computed are not here to wait for
        signal.alarm(int(seconds) + 2)  # a child of this child's ends, too, if this is killed

        def say(stage: str) -> None:
            os.write(writing, b"S" + stage.encode() + b"\n\0")

        os.write(writing, b"R" + b64encode(pickle.dumps(work(say))) + b"\n\0")
    finally:
        os._exit(0)


def read_table(path: Path) -> dict[str, Row]:
    """Rows by type; empty where there is no such file."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = (Row(*line.split("\t")) for line in lines if line.count("\t") == len(Row._fields) - 1)
    return {row.model_type: row for row in rows}


def totals(rows: list[Row]) -> str:
    """How many of each result, and what part of those that plain can run is exact."""
    counts = Counter(row.result for row in rows)
    can = sum(n for result, n in counts.items() if result not in {PLAIN, NO_CLASS})
    parts = ", ".join(f"{n} {result}" for result, n in counts.most_common())
    return f"{len(rows)} types: {parts}. Of {can} that plain can run, {counts['exact']} exact."


if __name__ == "__main__":
    sys.exit(main())
