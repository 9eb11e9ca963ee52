"""The output head, of which each rank computes some rows: its logits are put together on all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipeload.ring.trees import as_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeload.ring.lane import Lane
    from pipeload.weights.row_cuts import RowRange

_PIECE_BYTES = 1 << 20
"""The most that is sent at once: what is copied for that is counted nowhere."""


class SharedRows:
    """Sends own rows of one Linear's outputs, and receives those of the others."""

    def __init__(self, lane: Lane, rank: int, name: str, ranges: Sequence[RowRange]) -> None:
        """`ranges`: the rows of each rank, one behind the other; `rank`: this one."""
        self._lane, self._rank, self._name, self._ranges = lane, rank, name, ranges
        self._met = False

    def complete(self, output: torch.Tensor) -> dict[int, str]:
        """Fill in others' rows of `output`, `[..., N]`, which is contiguous and has own ones.

        Returns why ranks have none, by rank: nothing is filled in then.

        Raises:
            GroupError: a rank is lost.
        """
        self._met = True
        if failures := self._meet(failed=False):
            return failures
        lane, flat = self._lane, output.view(-1, output.shape[-1])
        for rank, (start, stop) in enumerate(self._ranges):
            own, doing = rank == self._rank, f"rows {start}:{stop} of {self._name!r} are sent"
            lines = max(1, _PIECE_BYTES // ((stop - start) * output.itemsize))
            for piece in flat[:, start:stop].split(lines) if len(flat) else ():
                # What several lines have lies apart in memory.
                room = piece.contiguous() if own else torch.empty(piece.shape, dtype=piece.dtype)
                lane.broadcast(as_bytes(room), rank, doing)
                if not own:
                    piece.copy_(room)
        return {}

    def tell_failure(self, why: str) -> None:
        """Tell the others that this rank has no rows for them.

        Raises:
            GroupError: a rank is lost.
        """
        self._meet(failed=True, why=why)

    def settle(self) -> bool:
        """Whether the others know how this call ended. Begins anew."""
        met, self._met = self._met, False
        return met

    def _meet(self, *, failed: bool, why: str = "") -> dict[int, str]:
        lane, doing = self._lane, f"rows of {self._name!r} are ready"
        found = lane.gather(torch.tensor([int(failed)]), doing)
        if not any(int(one) for one in found):
            return {}
        texts = lane.gather_json(why, f"a failure in {self._name!r} is told")
        return {rank: texts[rank] for rank, one in enumerate(found) if int(one)}
