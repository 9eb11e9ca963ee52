"""`pipeload bench --compare`: other ways to run the model, each under the same limit.

Each run has a process of its own, in a kernel memory group of the limit where one can be made
(Linux, root), with the model's files dropped from the page cache before it. Contenders take turns,
round by round, though a slow one only once; medians are shown. accelerate gets the best of several
`max_memory`.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeload._sizes import format_size
from pipeload.bench import contender
from pipeload.errors import OptionError, PipeloadError
from pipeload.system.memory import parse_limit
from pipeload.system.memory_group import MemoryCgroup, drop_cached, memory_group

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

LLAMA_CPP = ("llama.cpp", "llama.cpp-repacked")
"""With its file mapped, as fits any limit, or as it is by default: in memory, in its own order."""
CONTENDERS = ("plain", "accelerate", "airllm", *LLAMA_CPP)
SHARES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
"""Of the limit, that accelerate is tried with as `max_memory`: beside weights it needs the rest."""
_TIMEOUT_SECONDS = 1200
_SLOW_SECONDS = 20
"""Who takes longer for a run takes part in the first round alone."""
_ALL = 1 << 50
_OWN = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Compared:
    """One contender at one limit. Bytes and seconds, medians over rounds; None: not known."""

    limit: int
    way: str
    step: float | None = None
    """Of a token after the first."""
    first: float | None = None
    """To the first token, loading included."""
    peak: int | None = None
    read: float | None = None
    """From disk, for each token."""
    over_pipeload: float | None = None
    """How many times pipeload's step, round by round."""
    first_over_pipeload: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    """Why there are no figures, or with which setting they were reached."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is compared, and how."""

    model: str
    """A folder."""
    ways: Sequence[str]
    """Of `CONTENDERS`; pipeload itself takes part always."""
    pythons: Mapping[str, str]
    """Interpreters of contenders that are not installed in this one."""
    gguf: str | None
    """llama.cpp's file of the same model."""
    new_tokens: int
    rounds: int


def compare(
    setting: Setting,
    limits: Sequence[str | int],
    *,
    as_json: bool = False,
    progress: Callable[[str], None] | None = None,
) -> list[Compared]:
    """Measure every contender at every limit, and print a table or JSON.

    Raises:
        OptionError: a contender, its interpreter or its file is none, or the model is no folder.
        PipeloadError: pipeload itself could not run it so.
    """
    _check(setting)
    sizes = [parse_limit(limit) for limit in limits]
    tell = progress or (lambda _line: None)
    with contextlib.ExitStack() as stack:
        scratch = ""
        if not {"accelerate", "airllm"}.isdisjoint(setting.ways):  # they write beside the model
            place = Path(setting.model).resolve().parent
            folder = tempfile.TemporaryDirectory(prefix=".pipeload-compare-", dir=place)
            scratch = stack.enter_context(folder)
        if "airllm" in setting.ways:  # a copy of the model, once: that is not timed
            _measure("airllm", _ALL, setting, {"scratch": scratch, "tokens": 2})
        rows = [row for size in sizes for row in _at(size, setting, scratch, tell)]
    if as_json:
        told = {"model": setting.model, "capped": capped(), "rows": [asdict(row) for row in rows]}
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        sys.stdout.write(f"{table(rows)}\n\n{_legend()}\n")
    return rows


def _check(setting: Setting) -> None:
    for way in [*setting.ways, *setting.pythons]:
        if way not in CONTENDERS:
            raise OptionError(f"{way!r} is no contender. Name some of {', '.join(CONTENDERS)}.")
    for way, python in setting.pythons.items():
        if not os.access(python, os.X_OK):
            raise OptionError(
                f"{python!r}, the interpreter for {way}, cannot be run. Check the path."
            )
    if setting.gguf is not None and not Path(setting.gguf).is_file():
        raise OptionError(f"there is no file {setting.gguf!r} for llama.cpp. Check the path.")
    if not Path(setting.model).is_dir():
        raise OptionError(
            f"{setting.model!r} is no folder, which others are to read, too. Download the model, "
            "and name its folder."
        )
    if len({*setting.ways}) < len(setting.ways):
        raise OptionError("a contender is named twice in --compare. Name each once.")
    if setting.new_tokens < 2:
        raise OptionError("contenders are timed by tokens after the first. Give --new-tokens 2.")


def capped() -> bool:
    """Whether the kernel keeps contenders within the limit here."""
    try:
        with memory_group(1 << 30):
            return True
    except OSError:
        return False


def _at(limit: int, setting: Setting, scratch: str, tell: Callable[[str], None]) -> list[Compared]:
    """All contenders at one limit, pipeload first."""
    ways = ["pipeload", *setting.ways]
    notes: dict[str, str] = {}
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    more: dict[str, dict[str, Any]] = {"airllm": {"scratch": scratch}}
    if "accelerate" in ways:
        share, notes["accelerate"] = _best_share(limit, setting, scratch)
        more["accelerate"] = {"scratch": scratch, "share": share}
    slow: set[str] = set()
    for number in range(setting.rounds):
        for way in ways:
            if way in slow:
                continue
            began = time.monotonic()
            result = _measure(way, limit, setting, more.get(way, {}))
            if way == "pipeload" and "step" not in result:
                raise PipeloadError(
                    f"pipeload did not run: {_why(result)}. Try a larger --memory-limit, or see "
                    "what `pipeload run` says."
                )
            found[way].append(result)
            if way != "pipeload" and time.monotonic() - began > _SLOW_SECONDS:
                slow.add(way)
            shown = f"{result['step']:.3g} s per token" if "step" in result else _why(result)
            tell(f"{format_size(limit)}, {number + 1} of {setting.rounds}: {way}: {shown}")
    return [_row(limit, way, found[way], found["pipeload"], notes.get(way, "")) for way in ways]


def _measure(way: str, limit: int, setting: Setting, more: Mapping[str, Any]) -> dict[str, Any]:
    """One run from a cold cache."""
    if way in LLAMA_CPP and setting.gguf is None:
        return {"failed": "needs a GGUF file of the same model: --gguf FILE"}
    job = {
        "way": way,
        "model": str(setting.model),
        "gguf": setting.gguf,
        "limit": limit,
        "tokens": setting.new_tokens + 1,
        "threads": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        **more,
    }
    python = setting.pythons.get(way, sys.executable)
    command = [python, "-W", "ignore", str(Path(contender.__file__)), json.dumps(job)]
    # What has scripts streamed would have the others streamed, too.
    own = {name: text for name, text in os.environ.items() if not name.startswith("PIPELOAD_")}
    environment = own | {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    if way not in setting.pythons:
        paths = [str(_OWN), str(_OWN / "hooks"), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    read = [setting.model, setting.gguf, more.get("scratch")]
    drop_cached(*(Path(place) for place in read if place))
    try:
        done = _run(command, limit, environment)
    except subprocess.TimeoutExpired:
        return {"failed": f"no end in {_TIMEOUT_SECONDS} s"}
    if done.returncode:
        last = ["", *done.stderr.strip().splitlines()][-1]
        killed = done.returncode in (-9, 137)
        return {"failed": "killed for memory" if killed else last or f"status {done.returncode}"}
    try:  # libraries may print something, too, and behind it
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        result: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        return {"failed": "it told no figures"}
    return result


def _run(
    command: Sequence[str], limit: int, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """In a group of that limit; without one where none can be made."""
    with contextlib.ExitStack() as stack:
        group: MemoryCgroup | None = None
        with contextlib.suppress(OSError):
            group = stack.enter_context(memory_group(limit))
        if group is not None:
            return group.run(command, timeout=_TIMEOUT_SECONDS, env=environment)
        return subprocess.run(  # noqa: S603 - our own program, with an interpreter of the user's
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_SECONDS,
            env=environment,
        )


def _best_share(limit: int, setting: Setting, scratch: str) -> tuple[int, str]:
    """The `max_memory` in bytes that accelerate is fastest with, and a note of it."""
    tried = []
    for share in SHARES:
        size = int(limit * share)
        result = _measure(
            "accelerate", limit, setting, {"scratch": scratch, "share": size, "tokens": 3}
        )
        if "missing" in result or result.get("failed", "").startswith("no end"):
            break
        tried.append((result.get("step", float("inf")), size, f"max_memory {share:.0%}"))
    return min(tried)[1:] if tried else (0, "")


def _why(result: Mapping[str, Any]) -> str:
    if "missing" in result:
        name = result["missing"]
        return f"not installed: pip install {name}, or name its interpreter with --python"
    return str(result["failed"])


def _row(
    limit: int,
    way: str,
    samples: Sequence[dict[str, Any]],
    ours: Sequence[dict[str, Any]],
    note: str,
) -> Compared:
    good = [(one, own) for one, own in zip(samples, ours, strict=False) if "step" in one]
    if not good:
        return Compared(limit, way, note=_why(samples[-1]))

    def middle(name: str) -> Any:
        known = [one[name] for one, _ in good if one[name] is not None]
        return statistics.median(known) if known else None

    def ratio(name: str) -> float:
        return float(statistics.median(one[name] / own[name] for one, own in good))

    peaks = [one["peak"] for one, _ in good if one["peak"] is not None]
    return Compared(
        limit,
        way,
        middle("step"),
        middle("first"),
        max(peaks, default=None),
        middle("read"),
        ratio("step"),
        ratio("first"),
        good[0][0]["versions"],
        note,
    )


_COLUMNS: tuple[tuple[str, Callable[[Compared], str]], ...] = (
    ("limit", lambda r: format_size(r.limit)),
    ("way", lambda r: r.way),
    ("s/token", lambda r: f"{r.step:.3g}" if r.step else "-"),
    ("x pipeload", lambda r: f"{r.over_pipeload:.2f}" if r.over_pipeload else "-"),
    ("first s", lambda r: f"{r.first:.3g}" if r.first else "-"),
    ("x pipeload", lambda r: f"{r.first_over_pipeload:.2f}" if r.first_over_pipeload else "-"),
    ("peak", lambda r: format_size(r.peak) if r.peak else "-"),
    ("MB/token", lambda r: "-" if r.read is None else f"{r.read / 1e6:.0f}"),
    ("version", lambda r: next(iter(r.versions.values()), "")),
    ("", lambda r: r.note),
)


def table(rows: Sequence[Compared]) -> str:
    """A line for each contender at each limit."""
    cells = [[name for name, _ in _COLUMNS]]
    cells += [[show(row) for _, show in _COLUMNS] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_COLUMNS))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def _legend() -> str:
    cap = (
        "Each ran in a kernel memory group of the limit, from a cold page cache."
        if capped()
        else "No kernel memory group can be made here (Linux, root): the limit binds only pipeload."
    )
    return f"x pipeload: above 1, pipeload is faster. {cap}"
