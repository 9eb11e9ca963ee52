"""`pipeload plan --machine`: what each further machine brings."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from pipeload._sizes import format_size, parse_size
from pipeload.cli.load_model import DTYPES, check_model, explained
from pipeload.cli.log_lines import silence_libraries
from pipeload.entry.ranks_ahead import Machine, deals_ahead
from pipeload.ring.deal import helps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeload.ring.deal import Deal
    from pipeload.weights.row_cuts import RowRange


def show(
    model: str, texts: Sequence[str], *, tokens: int, batch: int, dtype: str, as_json: bool
) -> None:
    """Print what each machine gets, and how long a token takes with so many of them.

    Raises:
        PipeloadError: something is wrong with the model or an option.
    """
    silence_libraries(debug=False)
    check_model(model)
    pairs = [text.partition("@") for text in texts]
    machines = [
        Machine(parse_size(limit, name="--machine"), parse_size(rate, name="--machine"))
        for limit, _, rate in pairs
    ]
    with explained(model):
        ahead = deals_ahead(
            model,
            machines,
            tokens=tokens,
            batch=batch,
            dtype=DTYPES[dtype],
            trust_remote_code=False,
        )
    deals, rows = [deal for deal, _ in ahead], ahead[-1][1]
    if as_json:
        text = json.dumps(_figures(model, machines, deals, rows))
    else:
        text = _text(machines, deals, rows)
    sys.stdout.write(text + "\n")


def _figures(
    model: str, machines: Sequence[Machine], deals: Sequence[Deal], rows: Sequence[RowRange]
) -> dict[str, object]:
    last = deals[-1]
    return {
        "model": model,
        "machines": [
            {
                "memory_limit": machine.memory_limit,
                "disk_bytes_per_second": machine.disk_rate,
                "parts": share.count,
                "head_rows": rows[rank] if rows else None,
                "bytes_per_token": share.read_bytes,
            }
            for rank, (machine, share) in enumerate(zip(machines, last.shares, strict=True))
        ],
        "owners": last.owners,
        "seconds_per_token": [deal.seconds for deal in deals],
        "disk_seconds": [deal.disk_seconds for deal in deals],
        "chain_seconds": [deal.chain_seconds for deal in deals],
    }


def _text(machines: Sequence[Machine], deals: Sequence[Deal], rows: Sequence[RowRange]) -> str:
    lines = [("rank", "limit", "disk", "parts", "read/token", "s/token", "")]
    for rank, (machine, share) in enumerate(zip(machines, deals[-1].shares, strict=True)):
        told = f"  and rows {rows[rank].start}:{rows[rank].stop} of the head" if rows else ""
        if rank and not helps(deals[rank - 1], deals[rank]):
            told += "  no faster with this one"
        lines.append(
            (
                str(rank),
                format_size(machine.memory_limit),
                f"{format_size(round(machine.disk_rate))}/s",
                str(share.count),
                format_size(share.read_bytes),
                f"{deals[rank].seconds:.3g}",
                told,
            )
        )
    last = deals[-1]
    longest = "reading" if last.disk_seconds >= last.chain_seconds else "computing"
    return "\n".join(
        [
            *("".join(f"{cell:>12}" for cell in line[:-1]) + line[-1] for line in lines),
            "",
            f"s/token is with this and all ranks above. With all, {longest} takes longest: "
            f"{last.disk_seconds:.3g} s of reading,",
            f"{last.chain_seconds:.3g} s of computing on processors like this one. "
            "What the network takes comes on top.",
        ]
    )
