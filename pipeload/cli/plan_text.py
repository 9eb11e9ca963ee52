"""How `pipeload plan` shows what a limit buys, or what several do."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from pipeload._sizes import counted, format_least, format_size
from pipeload.errors import MemoryLimitError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeload.budget.plan import Plan


def shown(
    model: str,
    plans: Sequence[Plan | MemoryLimitError],
    *,
    batch: int,
    probed: bool,
    as_json: bool,
) -> str:
    """One plan in full; of several a line each, or of a limit that was refused what would do.

    Args:
        model: as it was named.
        plans: one for each limit, with rates.
        batch: sequences at once.
        probed: whether the disk's rate was measured.
        as_json: for programs; sizes in bytes.
    """
    first = plans[0]
    if len(plans) == 1 and not isinstance(first, MemoryLimitError):
        if not as_json:
            return _text(first, batch=batch, probed=probed)
        return json.dumps({"model": model, **_figures(first, batch=batch, probed=probed)})
    if not as_json:
        return _table(plans, batch=batch, probed=probed)
    found = [
        {"memory_limit": plan.limit, "smallest_limit": plan.smallest_limit, "too_small": True}
        if isinstance(plan, MemoryLimitError)
        else {**_figures(plan, batch=batch, probed=probed), "too_small": False}
        for plan in plans
    ]
    return json.dumps({"model": model, "plans": found})


def _tokens_per_second(plan: Plan, batch: int) -> float | None:
    return batch / plan.seconds_per_pass if plan.seconds_per_pass else None


def _figures(plan: Plan, *, batch: int, probed: bool) -> dict[str, object]:
    return {
        "memory_limit": plan.memory_limit,
        "smallest_limit": plan.smallest_limit,
        "floor_bytes": plan.floor_bytes,
        "reserve_bytes": plan.reserve_bytes,
        "pinned_bytes": plan.pinned_bytes,
        "resident_bytes": plan.resident,
        "stored_bytes": plan.stored_bytes,
        "buffer_bytes": plan.buffers,
        "slots": plan.slots,
        "scratch_bytes": plan.scratch_bytes,
        "units": len(plan.units),
        "bytes_per_pass": plan.bytes_per_pass,
        "bytes_per_token": plan.bytes_per_pass / batch,
        "fits": plan.fits,
        "io_mode": plan.io_mode,
        "kernel": plan.kernel,
        "readers": plan.readers,
        "disk_bytes_per_second": plan.disk_rate,
        "disk_rate_measured": probed,
        "seconds_per_pass": plan.seconds_per_pass,
        "tokens_per_second": _tokens_per_second(plan, batch),
        "experts": None if plan.experts is None else asdict(plan.experts),
        "whole_experts": list(plan.whole_experts),
        **plan.host_figures(),
    }


def _table(plans: Sequence[Plan | MemoryLimitError], *, batch: int, probed: bool) -> str:
    """A line for each limit."""
    lines = [("limit", "resident", "read/token", "s/token", "smallest")]
    for plan in plans:
        if isinstance(plan, MemoryLimitError):
            limit, smallest = format_size(plan.limit), format_least(plan.smallest_limit)
            lines.append((limit, "too small", "-", "-", smallest))
            continue
        seconds = (plan.seconds_per_pass or 0.0) / batch
        lines.append(
            (
                format_size(plan.memory_limit),
                format_size(plan.resident),
                format_size(round(plan.bytes_per_pass / batch)),
                f"{seconds:.3g}" if seconds else "-",
                format_least(plan.smallest_limit),
            )
        )
    rate = next(plan.disk_rate for plan in plans if not isinstance(plan, MemoryLimitError))
    source = "measured just now" if probed else "as given"
    return "\n".join(
        [
            *("".join(f"{cell:>12}" for cell in line) for line in lines),
            "",
            f"s/token is what reading takes at {format_size(round(rate or 0))}/s ({source}); "
            "computing may take longer.",
        ]
    )


def _text(plan: Plan, *, batch: int, probed: bool) -> str:
    lines = [plan.table(), ""]
    rate = format_size(round(plan.disk_rate or 0)) + "/s"
    source = "measured just now" if probed else "as given"
    speed = _tokens_per_second(plan, batch)
    if plan.fits or speed is None:
        some = ", some as they are stored" if plan.stored_bytes else ""
        lines.append(f"All weights fit{some}: the disk is needed for the first pass only.")
    else:
        per_token = format_size(round(plan.bytes_per_pass / batch))
        if plan.experts is not None:
            per_token = f"about {per_token}"
        link = ""
        share = plan.device_share
        if share is not None and share.link_rate:
            copied = format_size(round(plan.link_bytes_per_pass / batch))
            link = f", {copied} over the link at {format_size(round(share.link_rate))}/s"
        lines.append(
            f"{counted(len(plan.units), 'unit')}; {per_token} come from disk per token. "
            f"At {rate} ({source}){link}\n"
            f"that allows at most {speed:.3g} tokens/s; computing may take longer."
        )
    if plan.io_mode == "buffered" and not plan.fits:
        lines.append(
            "The page cache has room for all of it, so passes after the first may read from there."
        )
    return "\n".join(lines)
