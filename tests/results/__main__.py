"""Measure what the tables and pictures of examples/RESULTS.md are made of, and make them.

    make results         # everything that fits a small machine, within half an hour
    make results-full    # the models of several gigabytes
    python -m tests.results hermes disks --rounds 5
    python -m tests.results --render    # the tables and pictures alone, from the files there are

Each part writes files in examples/results/. One that is cut off is begun again by the same command;
parts that were finished stay. Needs root, for memory groups and throttled disks.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from pathlib import Path

from pipeload.demo.model import default_model_folder
from tests.results import render
from tests.results.frame import ROOT, Given, tell

PARTS = ("pi", "hermes", "disks", "slowdown", "limits", "peers", "theories")
FULL = ("pi", "hermes", "disks", "slowdown", "peers")
"""Those that have larger models to show."""
PROGRESS = ROOT / ".cache" / "results.json"


def finished(full: bool) -> list[str]:
    """Parts of a run that was cut off."""
    if not PROGRESS.exists():
        return []
    told = json.loads(PROGRESS.read_text(encoding="utf-8"))
    return list(told["parts"]) if told["full"] == full else []


def main() -> int:
    """Run parts, then render; 1 if any part failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="all of them if none")
    parser.add_argument("--full", action="store_true", help="the models of several gigabytes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=default_model_folder().parent / "results")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    asked = parser.parse_args()
    given = Given(asked.folder.resolve(), asked.full, asked.rounds)
    given.folder.mkdir(parents=True, exist_ok=True)
    failed = False
    if not asked.render:
        done = [] if asked.parts else finished(asked.full)
        for name in asked.parts or [
            part for part in (FULL if asked.full else PARTS) if part not in done
        ]:
            began = time.monotonic()
            tell(f"{name} ...")
            try:
                importlib.import_module(f"tests.results.part_{name}").run(given)
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
