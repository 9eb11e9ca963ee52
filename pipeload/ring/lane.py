"""Transfers between all ranks that come in the same order on each of them.

[Note: lanes] What gloo is told to send waits for what it was told before, and a rank that does
things in another order would wait for ever. So requests that take turns have a lane each, which is
a set of connections of its own: in each the order is that of one `generate`, and what one lane
waits for holds up no other.
"""

from __future__ import annotations

import json
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import distributed
from torch._C._distributed_c10d import AllgatherOptions

if TYPE_CHECKING:
    from collections.abc import Callable


_NEVER = timedelta(days=1)  # gloo's own patience: ours is shorter


class Transfer(Protocol):
    """One on its way."""

    def is_completed(self) -> bool:
        """Whether it is over."""

    def wait(self) -> object:
        """Return once it is done. Raises if it has failed."""


class Carrier(Protocol):
    """The group that a lane is of."""

    @property
    def rank(self) -> int:
        """This one."""

    @property
    def size(self) -> int:
        """How many there are."""

    def start(self, lane: int, transfer: Callable[[Any], Transfer], doing: str) -> Transfer:
        """Begin a transfer by what a lane's connections are."""

    def finish(
        self, work: Transfer, doing: str, meanwhile: Callable[[], object] | None = None
    ) -> None:
        """Wait until one is done; `meanwhile` is called again and again."""


class Lane:
    """See [Note: lanes]. One thread at a time may use it."""

    def __init__(self, group: Carrier, number: int) -> None:
        self._group, self._number = group, number
        self._sent: deque[tuple[Transfer, str, torch.Tensor]] = deque()
        """On its way, the first first."""

    def broadcast(self, tensor: torch.Tensor, root: int, doing: str) -> None:
        """Have `tensor`, of the same size everywhere, hold what it holds on rank `root`.

        `doing`: what for, for errors.

        Raises:
            GroupError: a rank is lost.
        """
        self._group.finish(self._start_broadcast(tensor, root, doing), doing)

    def send(self, tensor: torch.Tensor, doing: str) -> None:
        """Have the others' `broadcast` hold this; it may not change before `settle` has returned.

        Raises:
            GroupError: a rank is lost.
        """
        while self._sent and self._sent[0][0].is_completed():
            self._settle_one()
        self._sent.append((self._start_broadcast(tensor, self._group.rank, doing), doing, tensor))

    def settle(self) -> None:
        """Return once all have what was sent.

        Raises:
            GroupError: a rank is lost.
        """
        while self._sent:
            self._settle_one()

    def _settle_one(self) -> None:
        work, doing, _ = self._sent[0]
        self._group.finish(work, doing)
        self._sent.popleft()

    def _start_broadcast(self, tensor: torch.Tensor, root: int, doing: str) -> Transfer:
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = root, 0, _NEVER
        return self._group.start(
            self._number, lambda gloo: gloo.broadcast([tensor], options), doing
        )

    def begin_gather(
        self, tensor: torch.Tensor, doing: str, meanwhile: Callable[[], object] | None = None
    ) -> Callable[[], list[torch.Tensor]]:
        """Begin to ask what `tensor`, of the same size everywhere, holds on each rank.

        Returns what waits for it, `meanwhile` calling that.

        Raises:
            GroupError: a rank is lost; so may what it returns.
        """
        found = [torch.empty_like(tensor) for _ in range(self._group.size)]
        options = AllgatherOptions()
        options.timeout = _NEVER
        work = self._group.start(
            self._number, lambda gloo: gloo.allgather([found], [tensor], options), doing
        )

        def finish() -> list[torch.Tensor]:
            self._group.finish(work, doing, meanwhile)
            return found

        return finish

    def gather(
        self, tensor: torch.Tensor, doing: str, meanwhile: Callable[[], object] | None = None
    ) -> list[torch.Tensor]:
        """What `tensor`, of the same size everywhere, holds on each rank.

        Raises:
            GroupError: a rank is lost.
        """
        return self.begin_gather(tensor, doing, meanwhile)()

    def gather_json(
        self, value: Any, doing: str, meanwhile: Callable[[], object] | None = None
    ) -> list[Any]:
        """`value` of each rank.

        Raises:
            GroupError: a rank is lost.
        """
        text = json.dumps(value).encode()
        sizes = [int(n) for n in self.gather(torch.tensor([len(text)]), doing, meanwhile)]
        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        found = self.gather(mine, doing, meanwhile)
        return [
            json.loads(one[:size].numpy().tobytes()) for one, size in zip(found, sizes, strict=True)
        ]
