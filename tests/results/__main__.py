"""Measure what the tables and pictures of examples/RESULTS.md are made of, and make them.

    make results         # everything that fits a small machine
    make results-full    # the models of several gigabytes
    python -m tests.results hermes disks --rounds 5
    python -m tests.results --render    # the tables and pictures alone, from the files there are

Each part writes files in examples/results/. One that is cut off is begun again by the same command;
parts that were finished stay. Needs root, for memory groups and throttled disks, these by control
groups of version 1; parts that lack what they need are left out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from pathlib import Path

import pytest

from pipeload.demo.model import default_model_folder
from pipeload.system.memory_group import memory_group
from tests.results import render
from tests.results.frame import ROOT, ROUNDS, Given, tell
from tests.tools.many_at_once import BLKIO

PARTS = ("pi", "hermes", "disks", "slowdown", "limits", "peers", "theories")
FULL = ("pi", "hermes", "disks", "slowdown", "peers")
"""Those that have larger models to show."""
UNGROUPED = ("theories",)
"""Those that run without a memory group."""
PROGRESS = ROOT / ".cache" / "results.json"


def finished(full: bool) -> list[str]:
    """Parts of a run that was cut off."""
    if not PROGRESS.exists():
        return []
    told = json.loads(PROGRESS.read_text(encoding="utf-8"))
    return list(told["parts"]) if told["full"] == full else []


def lacking() -> dict[str, str]:
    """Parts that cannot be measured here, and why."""
    found = {}
    if not (BLKIO / "blkio.throttle.read_bps_device").exists():
        found["disks"] = "disks are throttled by control groups of version 1, and here are none"
    try:
        with memory_group(1 << 50):
            pass
    except OSError as error:
        reason = f"no kernel memory group can be made here: {error}"
        found |= {part: reason for part in PARTS if part not in UNGROUPED}
    return found


def main() -> int:
    """Run parts, then render; 1 if any part failed, not if one was left out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="all of them if none")
    parser.add_argument("--full", action="store_true", help="the models of several gigabytes")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", type=Path, default=default_model_folder().parent / "results")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    failed = False
    if not asked.render:
        done = [] if asked.parts else finished(asked.full)
        missing = lacking()
        for name in asked.parts or [
            part for part in (FULL if asked.full else PARTS) if part not in done
        ]:
            if name in missing:
                tell(f"{name} is left out: {missing[name]}")
                continue
            began = time.monotonic()
            tell(f"{name} ...")
            try:
                importlib.import_module(f"tests.results.part_{name}").run(
                    Given(folder, asked.full, asked.rounds)
                )
            except pytest.skip.Exception as error:  # a BaseException: what a part needs is not here
                tell(f"{name} is left out: {error}")
                continue
            except Exception:  # others are worth their time all the same
                traceback.print_exc()
                failed = True
                continue
            tell(f"{name}: {time.monotonic() - began:.0f} s")
            if not asked.parts:
                done.append(name)
                PROGRESS.parent.mkdir(exist_ok=True)
                PROGRESS.write_text(json.dumps({"full": asked.full, "parts": done}))
        if not asked.parts and not failed:
            PROGRESS.unlink(missing_ok=True)
    render.write()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
