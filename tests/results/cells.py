"""How figures are shown in the cells of tables."""

from __future__ import annotations

from typing import Any

from pipeload._sizes import format_size

Told = dict[str, Any]


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"


def times(value: float | None) -> str:
    """Two digits: noise has the others."""
    if value is None:
        return "-"
    rounded = float(f"{value:.2g}")
    return f"{rounded:#.2g}" if rounded < 10 else f"{rounded:.0f}"


def size(value: float | None) -> str:
    return "-" if not value else format_size(round(value))


def same(row: Told) -> str:
    return "yes" if row.get("equal", True) else "**no**"


def beside(row: Told, figure: str) -> str:
    """As many times as fast as the loaders with the same memory."""
    return gain(row[figure]) if row["way"].startswith("pipeload") else ""


def marked(row: Told, figure: str) -> str:
    """How many times as fast a way is; bold where that is pipeload, and slower."""
    own = row["way"].startswith("pipeload") or row["way"] in {"same", "half"}
    return gain(row.get(figure)) if own else times(row.get(figure))


def gain(value: float | None) -> str:
    """How many times as fast pipeload is; bold where it is slower."""
    shown = times(value)
    return f"**{shown}**" if value is not None and float(shown) < 1 else shown


def cost(row: Told, figure: str) -> str:
    """How many times as long a way takes as plain; bold where that is pipeload, and longer."""
    shown = times(row[figure])
    return f"**{shown}**" if row["way"] == "pipeload" and float(shown) > 1 else shown
