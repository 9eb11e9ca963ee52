"""Tables and pictures of the files in examples/results/, in the pages that show them.

A page has a table between `<!-- table NAME -->` and `<!-- end -->`; what stands there is made here,
and a test holds that it is. Prose around it has no figure of its own.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pipeload._sizes import format_size
from pipeload.bench.compare import CONTENDERS
from tests.results import pictures
from tests.results.frame import ROOT, STORE, saved
from tests.results.part_slowdown import ENDS

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
    if name in _TEXTS:
        return _TEXTS[name]()
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
        head = f"{model}, {_size(limit)} ({own['share']:.0%})"
        lines.append(f"| {head} | {own['step']:.2g} | {' | '.join(others)} |")
    return "\n" + "\n".join(lines) + f"\n\n{source(told)}\n\n"


def _both(row: Told) -> str:
    """Decoding, and the first token."""
    if not row["over_pipeload"]:
        return str(row["note"])
    return f"{_gain(row['over_pipeload'])} / {_gain(row['first_over_pipeload'])}"


def _blog() -> str:
    """What another's figures would need."""
    told = saved("pi")
    if told is None:
        return "\n"
    blog = told["blog"]
    bound = (blog["weights"] - blog["room"]) / blog["rate"]
    claimed = 1 / blog["tokens_per_second"]
    return (
        f"\nA blog that proposed this for such a board gives {blog['tokens_per_second']} tokens/s "
        f"for a 7B model in 4 bits ({_size(blog['weights'])}) with {_size(blog['room'])} from a "
        f"disk of {_size(blog['rate'])}/s. With all of that memory full of weights, the rest takes "
        f"{bound:.1f} s to read for each token, so those figures need a disk "
        f"{bound / claimed:.0f} times as fast.\n\n"
    )


def source(told: Told) -> str:
    """What the rows of a file were measured with, in two lines."""
    here = told["machine"]
    names = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    disk = f"a disk that read {format_size(round(here['disk_rate']))}/s"
    return (
        f"<sub>`{told['command']}`, {told['rounds']} rounds. {here['processor']}, "
        f"{here['cores']} processors ({here['isa']}), {format_size(here['memory'])}, {disk}, load "
        f"{here['load']:.1f} at the end; {here['system']}; {names}. Cache: {told['cache']}.</sub>"
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _size(value: float | None) -> str:
    return "-" if not value else format_size(round(value))


def _same(row: Told) -> str:
    return "yes" if row.get("equal", True) else "**no**"


def _beside(row: Told, figure: str) -> str:
    """As many times as fast as the loaders with the same memory."""
    return _gain(row[figure]) if row["way"].startswith("pipeload") else ""


def _gain(value: float | None) -> str:
    """How many times as fast pipeload is; bold where it is slower."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value >= 1 else f"**{value:.2f}**"


_PI: Columns = {
    "model": lambda r: r["model"],
    "way": lambda r: r["way"],
    "limit": lambda r: _size(r["limit"]),
    "peak memory": lambda r: _size(r["peak"]),
    "of it weights and work": lambda r: _size(r["peak"] - r["floor"]),
    "load, then run": lambda r: _seconds(r["latency"]),
    "x plain": lambda r: _times(r["latency_over_plain"]),
    "next token or input": lambda r: _seconds(r["again"]),
    "x plain ": lambda r: _times(r["again_over_plain"]),
    "equal": _same,
}
_HERMES: Columns = {
    "model": lambda r: r["model"],
    "way": lambda r: r["way"],
    "peak memory": lambda r: _size(r["peak"]),
    "of it weights and work": lambda r: _size(r["peak"] - r["floor"]),
    "less of that than PipeSwitch": lambda r: f"{r['memory_under_pipeswitch']:.0%}",
    "load, then run": lambda r: _seconds(r["latency"]),
    "of it before the first layer": lambda r: _seconds(r.get("load")),
    "times as fast as PipeSwitch": lambda r: _times(r["latency_over_pipeswitch"]),
    "times as fast as those loaders": lambda r: _beside(r, "latency_over_same_memory"),
    "next token or input": lambda r: _seconds(r["again"]),
    "times as fast as those loaders ": lambda r: _beside(r, "again_over_same_memory"),
    "equal": _same,
}
_LIMITS: Columns = {
    "room for layers": lambda r: _size(r["room"]),
    "loaders": lambda r: str(r["loaders"]),
    "they take": lambda r: _seconds(r["latency_loaders"]),
    "pipeload takes": lambda r: _seconds(r["latency"]),
    "times as fast": lambda r: _gain(r["latency_ratio"]),
    "next input, they": lambda r: _seconds(r["again_loaders"]),
    "pipeload": lambda r: _seconds(r["again"]),
    "times as fast ": lambda r: _gain(r["again_ratio"]),
}
_LENGTHS: Columns = {
    "tokens": lambda r: str(r["tokens"]),
    "way": lambda r: r["way"],
    "latency": lambda r: _seconds(r["latency"]),
    "times as fast as PipeSwitch": lambda r: _times(r["over_pipeswitch"]),
    "peak memory": lambda r: _size(r["peak"]),
}
_WAYS = {
    "naive": "a layer at a time, read then computed",
    "same": "pipeload, the same memory",
    "half": "pipeload, room for half of the weights",
    "pipeload": "pipeload",
}
_DISKS: Columns = {
    "model": lambda r: r["model"],
    "disk": lambda r: f"{_size(r['rate'])}/s",
    "way": lambda r: _WAYS[r["way"]],
    "limit": lambda r: _size(r["limit"]),
    "per token": lambda r: _seconds(r["step"]),
    "tokens/s": lambda r: f"{r['tokens_per_second']:.3g}",
    "x layer at a time": lambda r: _times(r.get("over_naive")),
    "read per token": lambda r: _size(r["per_pass"]),
    "that at the disk's rate": lambda r: _seconds(r["bound"] or None),
}
_SLOWDOWN: Columns = {
    "memory": lambda r: (
        f"room for {float(r['way']):.0%} of the weights" if r["way"][0] == "0" else r["way"]
    ),
    "limit": lambda r: _size(r["limit"]),
    "per token": lambda r: _seconds(r["step"]),
    "times all in memory": lambda r: _times(r["slowdown"]),
    "read per token": lambda r: _size(r["per_pass"]),
    "peak memory": lambda r: _size(r["peak"]),
    "equal": _same,
}
_PEERS: Columns = {
    "model": lambda r: r["model"],
    "limit": lambda r: f"{_size(r['limit'])} ({r['share']:.0%})",
    "way": lambda r: f"{r['way']} {next(iter(r['versions'].values()), '')}",
    "per token": lambda r: _seconds(r["step"]),
    "pipeload, times as fast": lambda r: (
        "" if r["way"] == "pipeload" else _gain(r["over_pipeload"])
    ),
    "first token": lambda r: _seconds(r["first"]),
    "pipeload, times as fast ": lambda r: (
        "" if r["way"] == "pipeload" else _gain(r["first_over_pipeload"])
    ),
    "peak memory": lambda r: _size(r["peak"]),
    "read per token": lambda r: _size(r["read"]),
    "": lambda r: r["note"],
}
_RHO: Columns = {
    "limit": lambda r: _size(r["memory_limit"]),
    "tokens/s": lambda r: f"{r['tokens_per_second']:.3g}",
    "per token": lambda r: _seconds(r["seconds"]),
    "least possible": lambda r: _seconds(r["least_seconds"]),
    "rho": lambda r: _times(r["rho"]),
    "rho, disk measured busy": lambda r: _times(r["rho_busy"]),
    "read per token": lambda r: _size(r["bytes_per_token"]),
    "held of what could be": lambda r: _times(r["held_share"]),
    "peak memory": lambda r: _size(r["peak_rss"]),
}
_THEORIES: Columns = {
    "theory": lambda r: r["theory"],
    "figure": lambda r: r["figure"],
    "value": lambda r: r["value"],
    "verdict": lambda r: r["verdict"],
}


def _simulated() -> str:
    """What another's simulation gives for slow disks."""
    told = saved("disks")
    if told is None:
        return "\n"
    low, high = told["simulated"]
    return (
        f"\nA paper's simulation of reading ahead gives {low} to {high} times a layer at a time. "
        "Two is the most that overlap can give, and only where computing takes as long as reading; "
        "here reading takes nearly all of the time, and what is kept in memory decides.\n\n"
    )


def _published() -> str:
    """How much slower another's layer at a time is."""
    told = saved("slowdown")
    if told is None:
        return "\n"
    other = told["published"]
    times = other["layer at a time"] / other["all"]
    return (
        f"\n{other['name']} gives {other['all']} s per token with all in memory and "
        f"{other['layer at a time']} s a layer at a time, {times:.1f} times.\n\n"
    )


def _long() -> str:
    """What the picture of a long generation shows."""
    told = saved("slowdown-full") or saved("slowdown")
    if told is None:
        return "\n"
    long, count = told["long"], len(told["long"]["steps"])
    return (
        f"\nThe first tokens took {_seconds(long['first'])} each, the last "
        f"{_seconds(long['last'])} (medians of {ENDS} of {count}); the process held "
        f"{_size(long['peak'])} at most, of {_size(long['limit'])}.\n\n"
    )


_TEXTS = {
    "long": _long,
    "speed": _speed,
    "blog": _blog,
    "simulated": _simulated,
    "published": _published,
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
