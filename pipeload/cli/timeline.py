"""`pipeload timeline`: one pass of a trace as a picture."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeload.cli.log_lines import log
from pipeload.errors import OptionError

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

_MICRO = 1e-6
_ROWS = ("compute", "wait", "read")
_COLOURS = {"compute": "#4477aa", "wait": "#cc3311", "read": "#999933"}
_MOST_NAMED = 40  # bars that are wide enough for a name


class Bar(NamedTuple):
    """Something that took its time. In seconds of the trace's clock."""

    kind: str
    name: str
    began: float
    ended: float
    thread: int


def draw(trace: Path, picture: Path) -> None:
    """Draw the pass in the middle of a trace, in the form that the picture's name ends in.

    Raises:
        OptionError: there is no trace, no pass in it, no matplotlib, or the picture cannot be made.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise OptionError(
            "pipeload timeline needs the package matplotlib, which is not installed: "
            "pip install 'pipeload[timeline]'"
        ) from error
    bars = one_pass(bars_of(read_events(trace), str(trace)), str(trace))
    figure, seconds = drawn(bars)
    try:
        figure.savefig(picture)
    except (OSError, ValueError) as error:  # a form that it does not know is a ValueError
        cause = getattr(error, "strerror", None) or str(error).partition(" (")[0]
        raise OptionError(
            f"cannot draw {str(picture)!r}: {cause}. Name another file, as pass.png."
        ) from error
    log.info("a pass of %.3g s, drawn in %s", seconds, picture)


def drawn(bars: list[Bar]) -> tuple[Figure, float]:
    """A picture of a pass, which begins with what it computed first; and the seconds it took."""
    from matplotlib.figure import Figure

    began, ended = bars[0].began, max(bar.ended for bar in bars if bar.kind == "compute")
    figure = Figure(figsize=(14, 3), layout="constrained")
    axes = figure.subplots()
    axes.set_xlim(0, (ended - began) * 1e3)
    for row, kind in enumerate(reversed(_ROWS)):
        for bar in bars:
            if bar.kind != kind:
                continue
            left, width = (bar.began - began) * 1e3, (bar.ended - bar.began) * 1e3
            axes.broken_barh([(left, width)], (row - 0.4, 0.8), facecolor=_COLOURS[kind], alpha=0.8)
            if width * _MOST_NAMED > (ended - began) * 1e3 and left >= 0:
                short = ".".join(bar.name.split(".")[-2:])
                axes.text(left, row, short, fontsize=6, clip_on=True, va="center")
    axes.set_yticks(range(len(_ROWS)), reversed(_ROWS))
    axes.set_xlabel("milliseconds")
    return figure, ended - began


def read_events(trace: Path) -> list[dict[str, Any]]:
    """What a trace holds, though its end may be missing.

    Raises:
        OptionError: it cannot be read, or is none.
    """
    try:
        text = trace.read_text(encoding="utf-8").strip()
        if not text.endswith("]"):  # it is being written, or was broken off
            text = text.rpartition(",\n")[0] + "]"
        events: list[dict[str, Any]] = json.loads(text)
        for event in events:
            event["ph"]
    except OSError as error:
        raise OptionError(
            f"cannot read the trace {str(trace)!r}: {error.strerror}. Check the path."
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise OptionError(
            f"{str(trace)!r} is no trace ({error}). Name one that --trace has written."
        ) from error
    return events


def bars_of(events: list[dict[str, Any]], trace: str) -> list[Bar]:
    """What took time; a read from its beginning to its end.

    Raises:
        OptionError: an event is none that a trace has.
    """
    try:
        bars = _bars(events)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise OptionError(
            f"{trace!r} is no trace: an event in it is damaged ({error}). Name one that --trace "
            "has written."
        ) from error
    return sorted(bars, key=lambda bar: bar.began)


def _bars(events: list[dict[str, Any]]) -> list[Bar]:
    bars: list[Bar] = []
    begun: dict[object, float] = {}
    for event in events:
        kind, phase = event.get("cat"), event.get("ph")
        if kind not in _ROWS:
            continue
        name, at = str(event["name"]).partition(" ")[2], _seconds(event["ts"])
        if phase == "X":
            bars.append(Bar(kind, name, at, at + _seconds(event["dur"]), event["tid"]))
        elif phase == "b":
            begun[event["id"]] = at
        elif phase == "e" and event["id"] in begun:
            bars.append(Bar(kind, name, begun.pop(event["id"]), at, event["tid"]))
    return bars


def _seconds(given: Any) -> float:
    """A time of an event, which are in microseconds.

    Raises:
        TypeError, ValueError, OverflowError: it is none.
    """
    seconds = float(given * _MICRO)
    if not math.isfinite(seconds):
        raise ValueError(f"{given} is no time")
    return seconds


def one_pass(bars: list[Bar], trace: str) -> list[Bar]:
    """What lies in the pass in the middle, of the thread that computed first.

    Raises:
        OptionError: nothing was computed.
    """
    computed = [bar for bar in bars if bar.kind == "compute"]
    if not computed:
        raise OptionError(
            f"nothing was computed in the trace {trace!r}. Name one of a model that ran."
        )
    first = computed[0]
    computed = [bar for bar in computed if bar.thread == first.thread]
    starts = [at for at, bar in enumerate(computed) if bar.name == first.name]
    middle = len(starts) // 2
    end = starts[middle + 1] if middle + 1 < len(starts) else len(computed)
    mine = computed[starts[middle] : end]
    began, ended = mine[0].began, max(bar.ended for bar in mine)
    beside = [
        bar
        for bar in bars
        if (bar.kind == "read" or (bar.kind == "wait" and bar.thread == first.thread))
        and bar.ended > began
        and bar.began < ended
    ]
    return [*mine, *beside]
