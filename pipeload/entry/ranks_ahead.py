"""What several machines would make of a model, told on one of them, before any is set up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import transformers

from pipeload.budget.measured_host import measure
from pipeload.budget.reserve import PassHint, reserve_bytes
from pipeload.engine.forks import give_back_inherited
from pipeload.entry.loading import needs_of, touched_of
from pipeload.entry.sources import check_source
from pipeload.errors import OptionError
from pipeload.hf.takeover import peek
from pipeload.ring.deal import RankPower
from pipeload.ring.dealt_parts import parts_to_deal
from pipeload.ring.head_rows import deal_with_rows, head_rows
from pipeload.ring.joining import compute_rate

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from pipeload.ring.deal import Deal
    from pipeload.ring.head_rows import HeadRows
    from pipeload.weights.row_cuts import RowRange


class Machine(NamedTuple):
    """What one of them has."""

    memory_limit: int
    """Bytes that the process may hold there."""
    disk_rate: float
    """Bytes per second."""


def deals_ahead(
    pretrained: str | os.PathLike[str],
    machines: Sequence[Machine],
    *,
    tokens: int = 256,
    batch: int = 1,
    **kwargs: Any,
) -> list[tuple[Deal, Sequence[RowRange]]]:
    """How the model would be dealt out to the first machine, the first two, and so on.

    With the rows of the head that each has; none where the head is a part as the blocks are.
    Their processors are taken to be like this one's, and the network to take no time.

    Args:
        pretrained: a folder or a hub id.
        machines: rank 0 first.
        tokens: as for `from_pretrained`.
        batch: as for `from_pretrained`.
        **kwargs: as for `from_pretrained`.

    Raises:
        CheckpointError: as for `from_pretrained`.
        UnsupportedModelError: as for `from_pretrained`, or the model cannot be dealt out.
        OptionError: it has fewer blocks than there are machines, or is no model.
    """
    give_back_inherited()
    passed_on = check_source(pretrained, kwargs)
    auto = transformers.AutoModelForCausalLM
    pending = peek(lambda: auto.from_pretrained(pretrained, **passed_on), None)
    if pending is None:
        raise OptionError(f"{str(pretrained)!r} is no model. Name the folder of a checkpoint.")
    model = pending.model
    touched = touched_of(model, model)
    parts = parts_to_deal(model, pending.weights(), touched)
    head = None if parts[-1].layers else head_rows(model, pending.weights(), touched)
    blocks = sum(bool(part.layers) for part in parts)
    if blocks < len(machines):
        raise OptionError(
            f"the model has {blocks} blocks for {len(machines)} machines. Name {blocks} at most."
        )
    needs, hint = needs_of(pending, None), PassHint(tokens, batch)
    floor = measure(pending.files, "buffered").floor_bytes
    rate = compute_rate(model.dtype)
    powers = [
        RankPower(limit - floor - reserve_bytes(needs, hint, limit), disk, rate)
        for limit, disk in machines
    ]
    sizes = [part.nbytes for part in parts]

    def is_exact(head: HeadRows, rows: Sequence[RowRange]) -> bool:
        return all(map(head.is_exact, rows))

    ways = [powers[: count + 1] for count in range(len(powers))]
    return [deal_with_rows(head, sizes, some, is_exact, blocks=blocks) for some in ways]
