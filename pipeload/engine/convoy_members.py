"""Who travels in a convoy, and for whom."""

from __future__ import annotations

import queue
import threading
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeload.engine.direct_calls import PassCall
    from pipeload.engine.pass_state import PassState
    from pipeload.engine.thread_context import ThreadContext
    from pipeload.errors import MemoryLimitError


class CancelledError(Exception):
    """Raised in a member that is to end: nobody waits for it any more."""


class GaveWayError(Exception):
    """Raised in a member that gives up what it holds, so that older ones can go on."""

    def __init__(self, lacking: MemoryLimitError) -> None:
        super().__init__(lacking)
        self.lacking = lacking
        """What the older ones would have met."""


def forget_locals(error: BaseException) -> None:
    """Let go of what the frames hold that an error came through, such as caches."""
    one: BaseException | None = error
    seen: set[int] = set()  # `raise error from error` is its own cause
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        one = one.__cause__ or one.__context__


class Party:
    """Members that one caller waits for."""

    def __init__(self) -> None:
        self.outcomes: queue.SimpleQueue[tuple[Member, Any]] = queue.SimpleQueue()
        """Who has ended, and with what."""
        self.waits = False
        """Whether the caller waits for the next of them."""
        self.closed = False
        """Whether all are to end."""
        self.threads: list[threading.Thread] = []


class Member:
    """One thread of a convoy."""

    def __init__(
        self, party: Party, state: PassState, context: ThreadContext, number: int = 0
    ) -> None:
        self.party, self.state, self.context, self.number = party, state, context, number
        self.wake = threading.Lock()
        """Released by whoever gives it the turn."""
        self.wake.acquire()
        self.entered = threading.Event()
        self.call: PassCall | None = None
        """The pass with which it waits for a round."""
        self.passes = 0
        """Passes that it has begun."""
        self.error: Exception | None = None
        """To be raised when it has its turn."""
        self._told = False
        """Whether it was told to end; what it calls on its way out runs undisturbed."""

    @property
    def can_run(self) -> bool:
        """Whether it does not wait for a round."""
        return self.call is None or self.error is not None or self.party.closed

    def check(self, *, begins: bool = False) -> None:
        """Raise what was left for it; `begins`: where a pass does, also what it was told before."""
        error, self.error = self.error, None
        if error is None and self.party.closed and (begins or not self._told):
            self._told, error = True, CancelledError()
        if error is not None:
            self.call = None
            raise error


class Callers:
    """Who waits for members, and what they are to be told. Under the convoy's lock."""

    def __init__(self) -> None:
        self.untold: list[tuple[Member, Any]] = []
        """Who has ended, and with what."""
        self._waiting = 0

    def wait_for(self, party: Party) -> None:
        """The party's caller waits."""
        party.waits = True
        self._waiting += 1

    def serve(self, party: Party) -> None:
        """It waits no more."""
        if party.waits:
            party.waits = False
            self._waiting -= 1

    def wait_for_more(self) -> bool:
        """Whether anybody still waits once all is told."""
        for member, _ in self.untold:
            self.serve(member.party)
        return self._waiting > 0

    def tell(self) -> None:
        """Tell it, of the oldest first."""
        self.untold.sort(key=lambda ended: ended[0].number)
        while self.untold:
            member, outcome = self.untold.pop(0)
            member.party.outcomes.put((member, outcome))


def outcome_after(action: Callable[[], None], outcome: Any) -> Any:
    """The outcome; whoever waits is to hear of it if the action fails: reading has ended, say."""
    try:
        action()
    except Exception as error:
        return outcome if isinstance(outcome, BaseException) else error
    return outcome
