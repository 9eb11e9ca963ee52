"""One forward pass at a time, and recovery from passes that died without a word.

[Note: passes that die] torch runs `always_call` hooks for Exception only. After a
KeyboardInterrupt, SystemExit or GeneratorExit inside a forward no post-hook runs, so nobody says
that the pass is over. The gate therefore never trusts its own record alone: whoever comes next
looks at the call stack of the thread that owns the pass. If the model's call is not running there
any more, the pass is dead.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING

from pipeload_hooks._callers import CALL_CODE, Mark

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from types import FrameType

    from torch import nn

_POLL_SECONDS = 0.05
_GATES: weakref.WeakSet[PassGate] = weakref.WeakSet()


class PassGate:
    """A re-entrant lock over forward passes that can tell a dead owner from a busy one."""

    def __init__(self) -> None:
        self._renew_lock()
        self._owner: int | None = None
        self._entered: list[nn.Module | Mark] = []
        self._held: Callable[[], None] | None = None
        """Called when a pass waits for whoever holds it; None where nobody does."""
        _GATES.add(self)

    def _renew_lock(self) -> None:
        # Guards _owner and _entered. Taken as it is, not through the condition: that one enters and
        # leaves in Python, where a KeyboardInterrupt could strike between the lock and its holder.
        self._lock = threading.RLock()
        # Threads wait here for the running pass; leave() notifies.
        self._changed = threading.Condition(self._lock)

    def enter(self, module: nn.Module) -> bool:
        """Called before `module` runs. True when this begins a pass, False inside one.

        Waits while another thread runs a pass. Must be called from a forward pre-hook of `module`.
        """
        me = threading.get_ident()
        with self._lock:
            if self._owner == me and self._alive(sys._getframe(), module):
                self._entered.append(module)
                return False
            self._wait_for_others(me)
            self._owner, self._entered = me, [module]
            return True

    def hold(self, wanted: Callable[[], None]) -> None:
        """Keep passes from beginning until `let_go`, in all threads. Waits for the running one.

        For those who let passes take turns in ways of their own, by other gates. `wanted` is called
        when a pass waits for them.
        """
        with self._lock:
            self._wait_for_others(None)
            self._held, self._owner, self._entered = wanted, None, []

    def let_go(self) -> None:
        """Let passes begin again, whoever has kept them from it."""
        with self._lock:
            self._held = None
            self._changed.notify_all()

    def _wait_for_others(self, me: int | None) -> None:
        while self._held is not None or (
            self._owner not in (None, me) and not (self._rests() or self._owner_is_dead())
        ):
            if self._held is not None:
                self._held()
            self._changed.wait(_POLL_SECONDS)

    def leave(self, module: nn.Module) -> bool:
        """Called after `module` ran. True when this ends the pass."""
        with self._lock:
            if self._owner != threading.get_ident() or not self._holds(module):
                return False
            # Inner modules whose post-hook never ran are over, too.
            while self._entered.pop() is not module:
                pass
            if self._entered:
                return False
            self._owner = None
            self._changed.notify_all()
            return True

    def lend(self, mark: Mark) -> None:
        """The pass that has just begun is a marked call's, and lasts as long as that."""
        with self._lock:
            self._entered.insert(0, mark)

    def step_in(self, module: nn.Module) -> bool:
        """A part of the calling thread's pass runs until it is left; False where that has no pass.

        Between its parts a marked call's pass may be another thread's: the call may wait for it.
        """
        with self._lock:
            if self.owned():
                self._entered.append(module)
                return True
            return False

    def _rests(self) -> bool:
        return len(self._entered) == 1 and isinstance(self._entered[0], Mark)

    @property
    def lent_to(self) -> Mark | None:
        """The marked call that the calling thread's pass is, if it is one: nobody says its end."""
        first = self._entered[0] if self._entered and self.owned() else None
        return first if isinstance(first, Mark) else None

    def part(self, module: nn.Module, *, first: bool) -> None:
        """End a marked call's pass before `module`, if it is the `first` or has run in it before.

        Not inside another module that is on record.
        """
        with self._lock:
            mark = self.lent_to if len(self._entered) == 1 else None
            if mark is not None and (first or mark.begins(module, again=True)):
                self.abandon()

    def abandon(self) -> None:
        """The calling thread's pass is over, if there is one: it could not begin."""
        with self._lock:
            if self.owned():
                self._owner, self._entered = None, []
                self._changed.notify_all()

    def is_outermost(self, module: nn.Module) -> bool:
        """Whether the calling thread's pass ends when `module` is left."""
        return (
            self._owner == threading.get_ident()
            and len(self._entered) > 0
            and self._entered[0] is module
        )

    def owned(self) -> bool:
        """Whether the calling thread is inside a pass, or in none since its last one died."""
        return self._owner == threading.get_ident()

    def died(self) -> bool:
        """Whether the pass that the calling thread is on record for does not run any more."""
        return self.owned() and not self._alive(sys._getframe(), None)

    @property
    def busy(self) -> bool:
        """Whether a pass runs in any thread."""
        with self._lock:
            return self._runs()

    def _runs(self) -> bool:
        return self._held is not None or (self._owner is not None and not self._owner_is_dead())

    @contextlib.contextmanager
    def idle(
        self, modules: Collection[nn.Module], waiting: Collection[int], *, held: bool = False
    ) -> Iterator[bool]:
        """Keep passes from beginning; gives whether none runs.

        Calls of `modules` count as well: they may have begun while these carried no hooks. Threads
        that are `waiting`, by their identity, have not yet computed anything in theirs. `held`: the
        caller is one of those that `hold` was called for.
        """
        with self._lock:
            running = self._runs() and not held
            wanted = set(map(id, modules))
            yield not running and not any(
                _is_inside(frame, wanted)
                for thread, frame in sys._current_frames().items()
                if thread not in waiting
            )

    def wait_while_idle(self) -> None:
        """Return once nobody is in a block of `idle`; one that begins later sees the caller's call.

        For calls that carry no hook, so that `enter` does not hold them back.
        """
        with self._lock:
            pass

    def _holds(self, module: nn.Module) -> bool:
        return any(entered is module for entered in self._entered)

    def _owner_is_dead(self) -> bool:
        frame = sys._current_frames().get(self._owner or 0)
        return frame is None or not self._alive(frame, None)

    def _alive(self, frame: FrameType, arriving: nn.Module | None) -> bool:
        """Whether the owner's outermost call still runs on the stack of `frame`.

        `arriving` is a module whose new call is on that stack already but not in the record.
        """
        if not self._entered:
            return False
        outermost = self._entered[0]
        if isinstance(outermost, Mark):
            return outermost.is_on(frame)
        wanted = sum(entered is outermost for entered in self._entered) + (arriving is outermost)
        return _running_calls(frame, outermost) >= wanted


def _running_calls(frame: FrameType | None, module: nn.Module) -> int:
    count = 0
    while frame is not None:
        if frame.f_code is CALL_CODE and frame.f_locals.get("self") is module:
            count += 1
        frame = frame.f_back
    return count


def _is_inside(frame: FrameType | None, modules: Collection[int]) -> bool:
    """Whether a call of a module with one of these `id`s runs on a stack."""
    while frame is not None:
        if frame.f_code is CALL_CODE and id(frame.f_locals.get("self")) in modules:
            return True
        frame = frame.f_back
    return False


def _renew_locks() -> None:
    """In a forked child: whoever held a lock is not there to let it go."""
    for gate in _GATES:
        gate._renew_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
