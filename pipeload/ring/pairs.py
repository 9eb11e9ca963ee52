"""Connections of a lane: between each two ranks by themselves.

[Note: each pair by itself] What gloo sends to all goes from rank to rank, and waits until the last
of them has come for it, before it sends the next. In a pipeline some are far ahead of others: what
is sent to one rank may not wait for a third.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import distributed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch._C._distributed_c10d import AllgatherOptions, BroadcastOptions, Work


class Pairs:
    """Does what a lane asks of gloo's connections between all ranks."""

    def __init__(self, rank: int, size: int, connect: Callable[[tuple[int, int]], Any]) -> None:
        """`connect`: connects two ranks, the lower first; both call it at the same time.

        Raises:
            GroupError: some cannot be connected.
        """
        self._rank = rank
        self._others = {
            other: connect((min(rank, other), max(rank, other)))
            for other in range(size)
            if other != rank
        }

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> Works:
        """As gloo's."""
        root = options.rootRank
        others = self._others if root == self._rank else {root: self._others[root]}
        works = []
        for other, gloo in others.items():
            pair = distributed.BroadcastOptions()
            pair.rootRank, pair.rootTensor = int(root > min(self._rank, other)), 0
            pair.timeout = options.timeout
            works.append(gloo.broadcast(tensors, pair))
        return Works(works)

    def allgather(
        self,
        found: list[list[torch.Tensor]],
        tensors: list[torch.Tensor],
        options: AllgatherOptions,
    ) -> Works:
        """As gloo's."""
        found[0][self._rank].copy_(tensors[0])
        works = []
        for other, gloo in self._others.items():
            own = tensors[0].clone()
            pair = [own, found[0][other]] if self._rank < other else [found[0][other], own]
            works.append(gloo.allgather([pair], tensors, options))
        return Works(works)


class Works:
    """Transfers that are one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        """Whether all are done, or have failed."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Raise what any has raised; all are done."""
        for work in self._works:
            work.wait()
