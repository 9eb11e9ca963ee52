"""The pictures of the files in examples/results/; needs matplotlib (`pip install .[timeline]`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from pipeload.cli.timeline import Bar, drawn
from tests.results.frame import saved

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from matplotlib.axes import Axes

_COLOURS = {
    "pipeload": "#4477aa",
    "plain": "#cc3311",
    "accelerate": "#ee7733",
    "airllm": "#999933",
    "llama.cpp": "#aa3377",
}
Told = dict[str, Any]


def draw(folder: Path) -> list[Path]:
    """Draw each whose file is there; a full run's in the place of a small one's."""
    pictures: dict[str, tuple[str, Callable[[Told], Figure]]] = {
        "tokens": ("peers", _tokens),
        "bytes": ("peers", _bytes),
        "rho": ("limits", _rho),
        "timeline": ("limits", _timeline),
        "memory": ("slowdown", _memory),
    }
    made = []
    for name, (file, make) in pictures.items():
        told = saved(f"{file}-full") or saved(file)
        if told is not None:
            made.append(folder / f"{name}.png")
            # Without a date or a version of what drew it: drawn again, it is the same file.
            make(told).savefig(made[-1], dpi=100, metadata={"Software": None})
    return made


def _figure(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(5.2 * count, 3.4), layout="constrained")
    return figure, [figure.add_subplot(1, count, number + 1) for number in range(count)]


def _over_limit(told: Told, figure_of: Callable[[Told], float | None], label: str) -> Figure:
    """A panel for each model, a line for each way."""
    models = list(dict.fromkeys(row["model"] for row in told["rows"]))
    figure, panels = _figure(len(models))
    for model, axes in zip(models, panels, strict=True):
        rows = [row for row in told["rows"] if row["model"] == model]
        for way in dict.fromkeys(row["way"] for row in rows):
            found = [(r["limit"] / 1e9, figure_of(r)) for r in rows if r["way"] == way]
            known = [(limit, value) for limit, value in found if value is not None]
            if known:
                axes.plot(*zip(*known, strict=True), "o-", color=_COLOURS[way], label=way)
        axes.set(title=model, xlabel="memory limit, GB", ylabel=label, ylim=(0, None))
        axes.legend(fontsize=8)
    return figure


def _tokens(told: Told) -> Figure:
    return _over_limit(told, lambda r: 1 / r["step"] if r["step"] else None, "tokens/s")


def _bytes(told: Told) -> Figure:
    def read(row: Told) -> float | None:
        return None if row["read"] is None else row["read"] / 1e6

    return _over_limit(told, read, "MB read per token")


def _rho(told: Told) -> Figure:
    figure, (speed, share) = _figure(2)
    limits = [row["memory_limit"] / 1e9 for row in told["rows"]]
    speed.plot(limits, [row["tokens_per_second"] for row in told["rows"]], "o-", color="#4477aa")
    least = [1 / row["least_seconds"] for row in told["rows"]]
    speed.plot(limits, least, "--", color="#999999", label="the most possible")
    speed.set(title=told["model"], xlabel="memory limit, GB", ylabel="tokens/s", ylim=(0, None))
    speed.legend(fontsize=8)
    share.plot(limits, [row["rho"] for row in told["rows"]], "o-", color="#4477aa", label="rho")
    busy = [row["rho_busy"] for row in told["rows"]]
    share.plot(limits, busy, "o--", color="#999933", label="rho, disk measured busy")
    share.set(xlabel="memory limit, GB", ylabel="share of the possible", ylim=(0, None))
    share.axhline(1, color="#999999", linewidth=0.8)
    share.legend(fontsize=8)
    return figure


def _timeline(told: Told) -> Figure:
    return drawn([Bar(*bar) for bar in told["one_pass"]])[0]


def _memory(told: Told) -> Figure:
    long = told["long"]
    figure, (memory, steps) = _figure(2)
    memory.plot([nbytes / 1e6 for nbytes in long["memory"]], color="#4477aa", label="the process")
    memory.axhline(long["limit"] / 1e6, color="#cc3311", label="memory limit")
    memory.set(title=told["model"], xlabel="token", ylabel="MB in memory", ylim=(0, None))
    memory.legend(fontsize=8)
    steps.plot([seconds * 1e3 for seconds in long["steps"]], color="#4477aa", linewidth=0.8)
    steps.set(xlabel="token", ylabel="milliseconds per token", ylim=(0, None))
    return figure
