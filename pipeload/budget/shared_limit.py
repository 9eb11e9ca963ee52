"""One account of this process's memory, shared by all models that stream in it.

[Note: what is measured] The operating system says what the process holds; each model says how much
of that is weights it could give back. The difference is everybody else: the interpreter, caches,
activations, the user's own lists. It is measured, never estimated, so it cannot be forgotten.

[Note: fair shares] A byte that stays saves a byte of reading in each pass of its model. So a model
that has run clearly more often of late than another, as a draft model does, gets all that it can
use before the other gets more than its least: the greedy rule of the fractional knapsack (Dantzig,
Discrete-Variable Extremum Problems, 1957). Models that run about as often share by max-min
fairness: each gets the same, and what a small one cannot use goes to the others (Bertsekas and
Gallager, Data Networks, section 6.5.2).
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from pipeload._sizes import format_size
from pipeload.errors import OptionError
from pipeload.system.memory import rss_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


_KEPT_SHARE = 0.98
"""Of a count of passes, at each pass of anybody: some fifty passes count."""
_CLEARLY = 1.5
"""Times as many passes: one draft of one token for each pass is even, of two is clearly more."""
_CHANCE = 4.0
"""So many passes more tell nothing yet."""
_AHEAD = 100.0
"""Passes that a draft is counted with when it comes: before it has run it is known to be busy."""
_BEGINS_WITH: ContextVar[float] = ContextVar("pipeload_begins_with", default=0.0)
"""Passes that whoever comes next is counted with, of those whom this thread loads."""


class Client(Protocol):
    """A streamed model, as the accountant sees it. All sizes in bytes."""

    @property
    def name(self) -> str:
        """What it is called in errors."""

    def held_bytes(self) -> int:
        """Its weights and buffers in memory now."""

    def promised_bytes(self) -> int:
        """What it may come to hold by its plan, `held_bytes` included."""

    def least_bytes(self) -> int:
        """What it cannot do without."""

    def running_bytes(self) -> int:
        """What its running pass was granted beside that, 0 when none runs."""

    @property
    def budget(self) -> int:
        """What its residents and buffers may take."""

    @property
    def wants(self) -> tuple[int, int]:
        """The least and the most that residents and buffers can make use of."""

    def shrink(self, budget: int) -> bool:
        """Give back down to `budget` now; False when a pass is running that cannot be disturbed."""

    def check_limit(self, limit: int) -> None:
        """Raise MemoryLimitError if another limit of the process does not hold what is there."""

    def take_limit(self, limit: int) -> None:
        """Plan for another limit of the process, and give back what is over it."""


class Accountant:
    """Keeps the limit of this process and knows everybody who may give memory back."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Whoever moves a budget holds it: models ask each other for memory, so with a lock each,
        two could wait for one another."""
        self._clients: weakref.WeakValueDictionary[int, Client] = weakref.WeakValueDictionary()
        """By their `id`."""
        self._passes: dict[int, float] = {}
        """How often each has run of late, by its `id`."""
        self.limit: int | None = None
        """Bytes, None while no model streams."""
        self.spare: Callable[[int], int] | None = None
        """Gives back so many bytes of what is kept for speed alone; returns how many it did."""
        self.rss_bytes = 0
        """All that the process held when it was measured last."""

    def renew_lock(self) -> None:
        """In a forked child: whoever held the lock is not there to let it go."""
        self.lock = threading.RLock()

    @property
    def clients(self) -> list[Client]:
        """Everybody who streams now."""
        with self.lock:
            clients = [c for one in self._clients.valuerefs() if (c := one()) is not None]
            if not clients:
                self.limit = None
            return clients

    def check_limit(self, limit: int) -> None:
        """Whether a model may be loaded with `limit` beside those that are there.

        Raises:
            OptionError: the process has another limit.
        """
        if self.clients:
            # One that its user dropped counts for as long as a cycle, of a pipeline say, holds it.
            gc.collect()
        if self.clients and self.limit is not None and limit != self.limit:
            raise OptionError(
                f"memory_limit={limit} bytes ({format_size(limit)}) differs from that of a model "
                f"that is streaming in this process already, {self.limit} bytes "
                f"({format_size(self.limit)}), and the limit is the whole process's. Pass the same "
                "one, change it with handle.set_memory_limit() first, or remove the other model."
            )

    def join(self, client: Client, limit: int) -> None:
        """Count `client` from now on, as long as it lives."""
        with self.lock:
            self.limit = limit
            self._clients[id(client)] = client
            self._passes[id(client)] = _BEGINS_WITH.get()

    @contextlib.contextmanager
    def serving_first(self) -> Iterator[None]:
        """Whoever this thread has come inside is known to run more often than all there are."""
        with self.lock:
            most = max(self._passes.values(), default=0.0)
        token = _BEGINS_WITH.set(most + _AHEAD)
        try:
            yield
        finally:
            _BEGINS_WITH.reset(token)

    def leave(self, client: Client) -> None:
        """Forget `client`. May be called again.

        Without the lock: a model may be collected in a thread that somebody waits for who has it.
        """
        self._clients.pop(id(client), None)

    def forget_all(self) -> None:
        """Count nobody any more."""
        with self.lock:
            self._clients.clear()

    def note_pass(self, client: Client) -> None:
        """A pass of `client` begins; of one that is alone nobody has to know."""
        if len(self._clients) < 2:
            return
        with self.lock:
            there = {id(one) for one in self.clients}
            self._passes = {
                key: count * _KEPT_SHARE for key, count in self._passes.items() if key in there
            }
            self._passes[id(client)] = self._passes.get(id(client), 0.0) + 1

    def set_limit(self, limit: int) -> None:
        """Change the limit of everybody. Nothing changes when this raises.

        Raises:
            MemoryLimitError: what is there does not fit.
        """
        with self.lock:
            self.check_change(limit)
            self.limit = limit
            for client in self.clients:
                client.take_limit(limit)

    def check_change(self, limit: int) -> None:
        """Whether everybody who is there can do with another limit.

        Raises:
            MemoryLimitError: somebody cannot.
        """
        for client in self.clients:
            client.check_limit(limit)

    def other_bytes(self) -> int:
        """What this process holds beside weights that stream: see [Note: what is measured]."""
        self.rss_bytes = rss_bytes()
        return self.rss_bytes - sum(client.held_bytes() for client in self.clients)

    def promised_to_others(self, client: Client | None) -> int:
        """What all but `client` may come to hold, and what their running passes may take."""
        others = (other for other in self.clients if other is not client)
        return sum(other.promised_bytes() + other.running_bytes() for other in others)

    def least_of_others(self, client: Client) -> int:
        """What all but `client` hold at least, their running passes included."""
        others = (other for other in self.clients if other is not client)
        return sum(other.least_bytes() + other.running_bytes() for other in others)

    def share(self, client: Client, budget: int) -> int:
        """The fair part of `client`, if all the others' memory and `budget` were one."""
        clients = self.clients
        others = [other for other in clients if other is not client]
        if not others:
            return budget
        pool = budget + sum(other.budget for other in others)
        return self._shares([client, *others], [one.wants for one in (client, *others)], pool)[0]

    def make_room(self, wants: tuple[int, int], budget: int) -> bool:
        """Have the others give back what is over their share; returns whether any did.

        For a newcomer that `budget` bytes are left for, and that wants from least to most.
        """
        others = self.clients
        pool = budget + sum(other.budget for other in others)
        theirs = self._shares(others, [other.wants for other in others], pool, newcomer=wants)
        given = [
            other.shrink(share)
            for other, share in zip(others, theirs, strict=True)
            if share < other.budget
        ]
        return any(given)

    def _shares(
        self,
        clients: Sequence[Client],
        wants: Sequence[tuple[int, int]],
        pool: int,
        newcomer: tuple[int, int] | None = None,
    ) -> list[int]:
        """The shares of `clients`; one that is yet to come takes part as the busiest do."""
        counts = [self._passes.get(id(client), 0.0) for client in clients]
        if newcomer is None:
            return shares_by_use(wants, counts, pool)
        count = max(_BEGINS_WITH.get(), *counts) if counts else 0.0
        counts, wants = [count, *counts], [newcomer, *wants]
        return shares_by_use(wants, counts, pool)[1:]

    def reclaim(self, client: Client, nbytes: int) -> int:
        """Have all but `client` give back `nbytes`, if they can; returns what they did.

        What is kept for speed alone goes first.
        """
        given = 0 if self.spare is None else self.spare(nbytes)
        for other in self.clients:
            before = other.budget
            if other is not client and given < nbytes and other.shrink(before - nbytes + given):
                given += before - other.budget
        return given

    def name_holders(self) -> str:
        """A sentence about who streams in this process and what they hold; empty if nobody does."""
        held = [f"{client.name} ({format_size(client.held_bytes())})" for client in self.clients]
        if not held:
            return ""
        return (
            f" Of that, weights of models that stream here already: {', '.join(sorted(held))}. "
            "One that is not needed goes with the last reference to it: del model before this "
            "call. pipeload.handle(model).remove() makes a plain one of it, mapped where it can be."
        )

    def untouched_bytes(self) -> int:
        """What models may come to hold and do not hold yet."""
        held = sum(client.held_bytes() for client in self.clients)
        return self.promised_to_others(None) - held


def shares_by_use(
    wants: Sequence[tuple[int, int]], passes: Sequence[float], pool: int
) -> list[int]:
    """Split `pool` between clients that have run so often of late: see [Note: fair shares].

    `wants` from least to most, in bytes. Nobody gets less than its least.
    """
    shares = [least for least, _ in wants]
    left = pool - sum(shares)
    waiting = sorted(range(len(wants)), key=lambda i: -passes[i])
    while waiting:
        # Those that nobody who waits has clearly run more often than.
        busy = [i for i in waiting if passes[waiting[0]] < _CLEARLY * passes[i] + _CHANCE]
        waiting = [i for i in waiting if i not in busy]
        theirs = sum(shares[i] for i in busy) + max(0, left)
        for i, share in zip(busy, fair_shares([wants[i] for i in busy], theirs), strict=True):
            left -= share - shares[i]
            shares[i] = share
    return shares


def fair_shares(wants: Sequence[tuple[int, int]], pool: int) -> list[int]:
    """Split `pool` by max-min fairness between clients that want from least to most, in bytes.

    Nobody gets less than its least, whatever the pool holds: whether that fits is for others.
    """
    shares = [least for least, _ in wants]
    left = pool - sum(shares)
    hungry = [i for i, (least, most) in enumerate(wants) if most > least]
    while left > 0 and hungry:
        # Raise the lowest first, to the next level at which somebody joins or is full.
        level = min(shares[i] for i in hungry)
        lowest = [i for i in hungry if shares[i] == level]
        above = [shares[i] for i in hungry if shares[i] > level]
        step = min([wants[i][1] for i in lowest] + above) - level
        step = min(step, left // len(lowest))
        if not step:
            break
        for i in lowest:
            shares[i] += step
        left -= step * len(lowest)
        hungry = [i for i in hungry if shares[i] < wants[i][1]]
    return shares


def host_limit_alone(host_memory_limit: object) -> OptionError:
    """The error for a second limit where there is only one memory."""
    return OptionError(
        f"host_memory_limit={host_memory_limit!r} is for models on another device: on the CPU, "
        "memory_limit is the host's. Leave it out, or pass device=."
    )


ACCOUNTANT = Accountant()
"""The account of this process's memory."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=ACCOUNTANT.renew_lock)
