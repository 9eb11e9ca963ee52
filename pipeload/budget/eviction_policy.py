"""When residents go and when they come back, and what an estimate is corrected by. Pure.

[Note: no swinging] Budgets move in steps, at once downwards and only after some passes upwards, to
the least that any of those passes allowed. What the estimate of a pass fell short of what was then
measured raises the next estimates.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 128
"""Steps that a limit is divided into. A smaller change of the budget would be as much work for
weights that are hardly more: each means another plan, and units that are laid out anew."""
MIN_STEP_BYTES = 2 << 20
"""The smallest step, in bytes: what a process takes and gives back all the time is less."""
PATIENCE = 4
"""Passes that must agree before residents come back: a prompt and some decoding, so that one
prompt after the other does not have them read and dropped again."""
WARM_PASSES = 3
"""Passes after which a process is not fresh any more: the first ones take on code and caches."""
MOST_ERROR = 4.0
"""The most that an estimate is multiplied by: what is further off was no pass's doing."""
FORGET = 0.98
"""What is left of the correction after a pass that its estimate covered: half after 34 of them."""


def step_bytes(limit: int) -> int:
    """The step in which budgets move under a limit, in bytes."""
    return max(MIN_STEP_BYTES, limit // STEPS)


class Patience:
    """What the last passes allowed, and the budget that follows from it. In bytes."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=PATIENCE)
        self.latest = 0
        """What the pass that began last allows so far."""

    def note(self, room: int) -> None:
        """A pass that begins allows so much."""
        self._recent.append(room)
        self.latest = room

    def lower(self, room: int) -> None:
        """The pass that runs allows no more, whatever it began with."""
        if self._recent and room < self.latest:
            self._recent[-1] = self.latest = room

    def forget(self) -> None:
        """What was allowed under another limit says nothing."""
        self._recent.clear()

    @property
    def allowed(self) -> int | None:
        """What all of the last passes allowed; None before there were enough of them."""
        return min(self._recent) if len(self._recent) == PATIENCE else None

    def aim(self, room: int, budget: int, most: Callable[[], int], limit: int) -> int | None:
        """Another budget than `budget`; None while that one stays.

        Args:
            room: what is allowed now.
            budget: what is in force.
            most: what a budget is never more than.
            limit: of the memory, which steps are a part of.
        """
        step = step_bytes(limit)
        if room < budget:
            return room - room % step
        allowed = self.allowed
        if allowed is not None and allowed >= min(most(), budget + 2 * step):
            return allowed
        return None


class Correction:
    """How far estimates of passes fall short of what was measured."""

    def __init__(self) -> None:
        self.factor = 1.0
        """What an estimate is to be multiplied by."""
        self._passes = 0

    def learn(self, used: int, need: int, *, steady: bool) -> None:
        """A pass is over.

        Args:
            used: what it took on, in bytes.
            need: what it was thought to need, corrected.
            steady: whether weights of the model did not come meanwhile, which count for others.
        """
        self._passes += 1
        # A fresh process takes on more than the pass.
        if steady and self._passes > WARM_PASSES and used > need:
            self.factor = min(MOST_ERROR, used / max(1, need))
        else:
            self.factor = max(1.0, self.factor * FORGET)
