"""Tables and pictures of the files in examples/results/, in the pages that show them.

A page has a table between `<!-- table NAME -->` and `<!-- end -->`; what stands there is made here,
and a test holds that it is. Prose around it has no figure of its own.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pipeload._sizes import counted, format_size
from pipeload.bench.compare import CONTENDERS
from tests.results import part_hermes, part_pi, pictures
from tests.results.cells import beside, cost, gain, marked, same, seconds, size, times
from tests.results.frame import ROOT, STORE, saved
from tests.results.texts import TEXTS

if TYPE_CHECKING:
    from collections.abc import Callable

PAGES = (ROOT / "README.md", ROOT / "examples" / "RESULTS.md", ROOT / "examples" / "THEORIES.md")
_BLOCK = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Told = dict[str, Any]
Columns = dict[str, "Callable[[Told], str]"]


def write() -> None:
    """Make all tables and pictures again, of the files that are there."""
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    pictures.draw(STORE)


def filled(text: str) -> str:
    """A page with its tables as they have to be."""
    return _BLOCK.sub(lambda match: f"{match[1]}{_table(match[2])}{match[3]}", text)


def _table(name: str) -> str:
    if name == "speed":
        return _speed()
    if name in TEXTS:
        return TEXTS[name]()
    file, columns, chosen = _TABLES[name.removesuffix("-full")]
    stem = file + ("-full" if name.endswith("-full") else "")
    told = saved(stem)
    if told is None:
        full = " --full" if name.endswith("-full") else ""
        return f"\nNot measured yet: `python -m tests.results {file.partition('-')[0]}{full}`.\n\n"
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [
        f"| {' | '.join(show(row) for show in columns.values())} |"
        for row in told["rows"]
        if chosen(row)
    ]
    return "\n" + "\n".join(lines) + f"\n\n{source(told)}\n\n"


def _speed() -> str:
    """For people in a hurry: how many times as fast as each other pipeload is, by limit."""
    told = saved("peers-full") or saved("peers")
    if told is None:
        return "\nNot measured yet: `make results`.\n\n"
    ways = [way for way in CONTENDERS if any(row["way"] == way for row in told["rows"])]
    cells: dict[tuple[str, int], dict[str, Told]] = {}
    for row in told["rows"]:
        cells.setdefault((row["model"], row["limit"]), {})[row["way"]] = row
    lines = [f"| model, limit (weights that have room) | s/token | {' | '.join(ways)} |"]
    lines.append("|---" * (2 + len(ways)) + "|")
    for (model, limit), found in cells.items():
        own = found["pipeload"]
        others = [_both(found[way]) if way in found else "" for way in ways]
        head = f"{model}, {size(limit)} ({own['share']:.0%})"
        lines.append(f"| {head} | {own['step']:.2g} | {' | '.join(others)} |")
    return "\n" + "\n".join(lines) + f"\n\n{source(told)}\n\n"


def _both(row: Told) -> str:
    """Decoding, and the first token."""
    if not row["over_pipeload"]:
        return str(row["note"])
    return f"{gain(row['over_pipeload'])} / {gain(row['first_over_pipeload'])}"


def source(told: Told) -> str:
    """What the rows of a file were measured with, in two lines."""
    here = told["machine"]
    names = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    disk = f"a disk that read {format_size(round(here['disk_rate']))}/s"
    took = f", took {told['seconds']:.0f} s" if "seconds" in told else ""
    return (
        f"<sub>`{told['command']}`, {counted(told['rounds'], 'round')}{took}. {here['processor']}, "
        f"{here['cores']} processors ({here['isa']}), {format_size(here['memory'])}, {disk}, load "
        f"{here['load']:.1f} at the end; {here['system']}; {names}. Cache: {told['cache']}.</sub>"
    )


_PI: Columns = {
    "model": lambda r: r["model"],
    "way": lambda r: r["way"],
    "limit": lambda r: size(r["limit"]),
    "peak memory": lambda r: size(r["peak"]),
    "of it weights and work": lambda r: size(r["peak"] - r["floor"]),
    f"load, then an input or {part_pi.NEW} tokens": lambda r: seconds(r["latency"]),
    "times plain's time": lambda r: cost(r, "latency_over_plain"),
    "next token or input": lambda r: seconds(r["again"]),
    "times plain's time ": lambda r: cost(r, "again_over_plain"),
    "equal": same,
}
_HERMES: Columns = {
    "model": lambda r: r["model"],
    "way": lambda r: r["way"],
    "peak memory": lambda r: size(r["peak"]),
    "of it weights and work": lambda r: size(r["peak"] - r["floor"]),
    "less of that than PipeSwitch": lambda r: f"{round(r['memory_under_pipeswitch'], 2) + 0:.0%}",
    f"load, then an input or {part_hermes.NEW} tokens": lambda r: seconds(r["latency"]),
    "of it before the first layer": lambda r: seconds(r.get("load")),
    "times as fast as PipeSwitch": lambda r: marked(r, "latency_over_pipeswitch"),
    "times as fast as those loaders": lambda r: beside(r, "latency_over_same_memory"),
    "next token or input": lambda r: seconds(r["again"]),
    "times as fast as those loaders ": lambda r: beside(r, "again_over_same_memory"),
    "equal": same,
}
_LIMITS: Columns = {
    "room for layers": lambda r: size(r["room"]),
    "loaders": lambda r: str(r["loaders"]),
    "they take": lambda r: seconds(r["latency_loaders"]),
    "pipeload takes": lambda r: seconds(r["latency"]),
    "times as fast": lambda r: gain(r["latency_ratio"]),
    "next input, they": lambda r: seconds(r["again_loaders"]),
    "pipeload": lambda r: seconds(r["again"]),
    "times as fast ": lambda r: gain(r["again_ratio"]),
}
_LENGTHS: Columns = {
    "tokens": lambda r: str(r["tokens"]),
    "way": lambda r: r["way"],
    "latency": lambda r: seconds(r["latency"]),
    "times as fast as PipeSwitch": lambda r: marked(r, "over_pipeswitch"),
    "peak memory": lambda r: size(r["peak"]),
}
_WAYS = {
    "naive": "a layer at a time, read then computed",
    "same": "pipeload, the same memory",
    "half": "pipeload, room for half of the weights",
    "pipeload": "pipeload",
}
_DISKS: Columns = {
    "model": lambda r: r["model"],
    "disk": lambda r: f"{size(r['rate'])}/s",
    "way": lambda r: _WAYS[r["way"]],
    "limit": lambda r: size(r["limit"]),
    "per token": lambda r: seconds(r["step"]),
    "tokens/s": lambda r: f"{r['tokens_per_second']:.3g}",
    "times as fast as a layer at a time": lambda r: marked(r, "over_naive"),
    "read per token": lambda r: size(r["per_pass"]),
    "that at the disk's rate": lambda r: seconds(r["bound"] or None),
}
_SLOWDOWN: Columns = {
    "memory": lambda r: (
        f"room for {float(r['way']):.0%} of the weights" if r["way"][0] == "0" else r["way"]
    ),
    "limit": lambda r: size(r["limit"]),
    "per token": lambda r: seconds(r["step"]),
    "times all in memory": lambda r: times(r["slowdown"]),
    "read per token": lambda r: size(r["per_pass"]),
    "peak memory": lambda r: size(r["peak"]),
    "equal": same,
}
_PEERS: Columns = {
    "model": lambda r: r["model"],
    "limit": lambda r: f"{size(r['limit'])} ({r['share']:.0%})",
    "way": lambda r: f"{r['way']} {next(iter(r['versions'].values()), '')}",
    "per token": lambda r: seconds(r["step"]),
    "pipeload, times as fast": lambda r: "" if r["way"] == "pipeload" else gain(r["over_pipeload"]),
    "first token": lambda r: seconds(r["first"]),
    "pipeload, times as fast ": lambda r: (
        "" if r["way"] == "pipeload" else gain(r["first_over_pipeload"])
    ),
    "peak memory": lambda r: size(r["peak"]),
    "read per token": lambda r: size(r["read"]),
    "": lambda r: r["note"],
}
_RHO: Columns = {
    "limit": lambda r: size(r["memory_limit"]),
    "tokens/s": lambda r: f"{r['tokens_per_second']:.3g}",
    "per token": lambda r: seconds(r["seconds"]),
    "least possible": lambda r: seconds(r["least_seconds"]),
    "rho": lambda r: times(r["rho"]),
    "rho, disk measured busy": lambda r: times(r["rho_busy"]),
    "read per token": lambda r: size(r["bytes_per_token"]),
    "held of what could be": lambda r: times(r["held_share"]),
    "peak memory": lambda r: size(r["peak_rss"]),
}
_MADE = {
    "a layer's state tells the next layer's experts": (
        ": the first measured with random routers over this model's states, since it has no "
        "experts; the second computed from the first"
    )
}
"""Of theories that this model alone cannot try: what was made for it."""
_THEORIES: Columns = {
    "theory": lambda r: r["theory"],
    "figure": lambda r: r["figure"] + _MADE.get(r["theory"], ""),
    "value": lambda r: r["value"],
    "verdict": lambda r: r["verdict"],
}


def _any(_row: Told) -> bool:
    return True


_TABLES: dict[str, tuple[str, Columns, Callable[[Told], bool]]] = {
    "pi": ("pi", _PI, _any),
    "hermes": ("hermes", _HERMES, _any),
    "hermes-limits": ("hermes-sweeps", _LIMITS, lambda r: r["sweep"] == "limit"),
    "hermes-lengths": ("hermes-sweeps", _LENGTHS, lambda r: r["sweep"] == "length"),
    "disks": ("disks", _DISKS, _any),
    "slowdown": ("slowdown", _SLOWDOWN, _any),
    "limits": ("limits", _RHO, _any),
    "peers": ("peers", _PEERS, _any),
    "theories": ("theories", _THEORIES, _any),
    "lossless": ("theories-lossless", _THEORIES, _any),
}
