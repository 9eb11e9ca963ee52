"""Where the passes of one thread stand, as the other ranks are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipeload.errors import GroupError
from pipeload.ring.outputs import Outputs
from pipeload.ring.told import does_something_else

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipeload.ring.group import Group
    from pipeload.ring.lane import Lane


class Passing:
    """The passes of one thread, on a lane of their own: of all that takes no turns, or a member."""

    def __init__(self, group: Group, lane: Lane) -> None:
        self._group, self.lane = group, lane
        self.outputs = Outputs(lane)
        self.begin_anew()

    def begin_anew(self) -> None:
        """The passes to come are those of somebody else."""
        self.number = 0
        """Of the pass."""
        self.expected = True
        """Whether the others wait for it, or to hear that it cannot begin."""
        self.inside = False
        """Whether a call of the model runs, or was left by an interrupt."""
        self.met = False
        """Whether it has met those of the other ranks."""
        self.told = False
        """Whether all ranks know of its failure, so that they are in step again."""
        self.given = 0
        """A checksum of what the model was called with."""
        self.computing = ""
        """The part that this rank computes now."""
        self.seen: Sequence[int] = ()
        """By each layer of the cache, before that part."""
        self.sent = 0
        """Blocks of this pass, so far: of a member."""
        self.sends_large = False
        """Whether what is being sent is still where the part has put it."""
        self.handed_over = 0
        """How often members had let others have their turns when it was sent."""

    def exchange(
        self, mine: list[int], come: Callable[[], object] = lambda: None
    ) -> list[list[int]]:
        """What each rank says of this pass; `come` is called before it is waited for.

        Raises:
            GroupError: a rank is lost, or in another pass.
        """
        group = self._group
        self.number += 1
        doing = f"pass {self.number} begins"
        finish = self.lane.begin_gather(torch.tensor([self.number, *mine]), doing)
        come()
        found = [t.tolist() for t in finish()]
        numbers = [number for number, *_ in found]
        if len(set(numbers)) > 1:
            rank = next(r for r, number in enumerate(numbers) if number != numbers[0])
            if min(numbers) < 0:  # see turns.py
                self.number -= 1  # that rank has not begun this one
                raise does_something_else(group, rank)
            raise GroupError(
                f"{group.name(rank)} is at pass {numbers[rank]}, and rank 0 at "
                f"{numbers[0]}. Have all ranks run the same script.",
                rank=rank,
                host=group.hosts[rank],
            )
        return [what for _, *what in found]

    def share_random_state(self) -> None:
        """Have all ranks draw the numbers that rank 0 would: they choose tokens by them.

        Raises:
            GroupError: a rank is lost.
        """
        state = torch.get_rng_state()
        self.lane.broadcast(state, 0, "random numbers are shared")
        torch.set_rng_state(state)

    def settle(self) -> None:
        """Return once the part's output is free to be changed.

        Raises:
            GroupError: a rank is lost.
        """
        if self.sends_large:
            self.sends_large = False
            self.lane.settle()
