"""How close to what disk and processor allow, over the limit; and one pass as it went."""

from __future__ import annotations

import contextlib
import io
import tempfile
from dataclasses import asdict
from pathlib import Path

from pipeload.bench import measure
from pipeload.cli.timeline import bars_of, one_pass, read_events
from tests.results import frame
from tests.results.forks import Runner, runner

SHARES = (0.1, 0.3, 0.5, 0.8, 1.1)
"""Room for weights, as a part of them; the last holds all."""
_PASS_SHARE = 0.5


def run(given: frame.Given) -> None:
    """`pipeload bench` over limits, and a trace of the middle one."""
    folder = str(given.model("llama-1.1b" if given.full else "llama-small"))
    with runner() as forks:
        job = {"folder": folder, "way": "limit", "new": 10}
        sizes = {s: forks.run(job | {"share": s})["limit"] for s in (*SHARES, _PASS_SHARE)}
        bars = _one_pass(forks, folder, sizes[_PASS_SHARE])
    with contextlib.redirect_stdout(io.StringIO()):
        rows = measure.run(
            model=folder,
            limits=[sizes[share] for share in SHARES],
            rounds=given.rounds,
            progress=lambda line: frame.tell(f"  {line}"),
        )
    told = [{"share": s, **asdict(row)} for s, row in zip(SHARES, rows, strict=True)]
    cache = "past the page cache: direct reads"
    model = folder.rpartition("/")[2]
    frame.save("limits", given, told, cache, one_pass=bars, limit=sizes[_PASS_SHARE], model=model)


def _one_pass(forks: Runner, folder: str, limit: int) -> list[tuple[object, ...]]:
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch, "trace.json")
        job = {"folder": folder, "way": "pipeload", "limit": limit, "new": 5, "trace": str(trace)}
        forks.run(job | {"options": {"io_mode": "direct"}}, cap=limit)
        return [tuple(bar) for bar in one_pass(bars_of(read_events(trace), str(trace)), str(trace))]
