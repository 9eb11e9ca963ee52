"""Tells which rank of a group is gone: one that was killed, that hangs, or that has said so.

[Note: how a lost rank is named] Each rank counts in a store, four times a second, and looks at the
counts of all others. What breaks first is mostly a transfer, whose error names nobody; the rank
whose count has stood still for longest is the one. A rank that has found it out says so beside its
count, and the others take its word: else they would blame whoever ended because of it.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._C._distributed_c10d import Store

BEAT_SECONDS = 0.25
GRACE_SECONDS = 1.0
"""How long a rank is silent, once a transfer has failed, before it is taken to be the reason."""
_LEFT = "left"
"""What a rank says that needs the group no more; how many transfers it has done follows."""


class Loss(NamedTuple):
    """A rank that cannot go on, and why."""

    rank: int
    why: str


class Heartbeat:
    """Counts for one rank, in a thread of its own, and watches the others."""

    def __init__(
        self, connect: Callable[[], Store], rank: int, size: int, patience: float, *, hosts: bool
    ) -> None:
        """Begin to count.

        Args:
            connect: makes a connection to the store that nobody else uses.
            rank: this one.
            size: ranks of the group.
            patience: seconds of silence after which a rank is lost.
            hosts: whether the store is in this process.
        """
        self._rank, self._size, self._patience, self._hosts = rank, size, patience, hosts
        now = time.monotonic()
        self._heard = [now] * size
        """When each rank's count was last seen to change; of this one, when the store answered."""
        self._words: list[str] = [""] * size
        self._word = ""
        self.done = 0
        """Transfers that this rank has done; the group counts them."""
        self._said = threading.Event()
        self._stop = threading.Event()
        self._store_error = ""
        self._thread = threading.Thread(
            target=self._run, args=(connect,), name="pipeload-heartbeat", daemon=True
        )
        self._thread.start()

    def _run(self, connect: Callable[[], Store]) -> None:
        counts = [""] * self._size
        count = 0
        keys = [f"beat/{rank}" for rank in range(self._size)]
        try:
            store = connect()
            while True:
                stopping, word = self._stop.is_set(), self._word
                count += 1
                store.set(keys[self._rank], f"{count} {word}")
                if word:
                    self._said.set()
                if stopping:
                    return
                self._look(store.multi_get(keys), counts)
                self._stop.wait(BEAT_SECONDS)
        except Exception as error:  # whatever the store says when its process is gone
            self._store_error = str(error) or type(error).__name__
        finally:
            self._said.set()

    def _look(self, values: Sequence[bytes], counts: list[str]) -> None:
        now = time.monotonic()
        for rank, value in enumerate(values):
            count, _, word = value.decode(errors="replace").partition(" ")
            if count != counts[rank]:
                counts[rank], self._heard[rank] = count, now
                self._words[rank] = word

    def lost(self, patience: float | None = None) -> Loss | None:
        """The rank that is lost, if any is; `patience`: after less silence than usual.

        What others have found out comes before what this rank would make of their silence.
        """
        wait = self._patience if patience is None else patience
        return self._told() or self._unreachable(wait) or self._silent(wait)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _told(self) -> Loss | None:
        """What others have found out, and whoever has broken off."""
        for rank in self._others:
            word, _, text = self._words[rank].partition(" ")
            blamed, _, why = text.partition(" ")
            if word == "lost" and int(blamed) != self._rank:
                return Loss(int(blamed), why)
        for rank in self._others:
            word, _, text = self._words[rank].partition(" ")
            if word == "broken":
                return Loss(rank, text)
        return None

    def _unreachable(self, wait: float) -> Loss | None:
        """Rank 0, where the store is; unless it is here."""
        if self._hosts:
            return None
        if self._store_error:
            return Loss(0, f"is gone, and the store with it ({self._store_error.splitlines()[0]})")
        silent = time.monotonic() - self._heard[self._rank]
        return Loss(0, f"has not answered for {silent:.1f} s") if silent > wait else None

    def _silent(self, wait: float) -> Loss | None:
        """Whoever has left, or has been silent for longest."""
        for rank in self._others:
            word, _, done = self._words[rank].partition(" ")
            # One that has sent its last may be gone before that has arrived here.
            if word == _LEFT and self.done >= int(done):
                return Loss(rank, "has left: its script has ended, or let the model go")
        rank = min(self._others, key=lambda rank: self._heard[rank], default=self._rank)
        # As of the last look: nobody is heard of while the store is silent.
        silent = self._heard[self._rank] - self._heard[rank]
        if rank == self._rank or silent <= wait:
            return None
        return Loss(rank, f"has been silent for {silent:.1f} s")

    def why_failed(self) -> Loss | None:
        """The rank that is the reason for a transfer that has failed; None if none falls silent."""
        end = time.monotonic() + 2 * GRACE_SECONDS
        while time.monotonic() < end:
            if (loss := self.lost(GRACE_SECONDS)) is not None:
                return loss
            time.sleep(0.02)
        return None

    def say_lost(self, loss: Loss) -> None:
        """Tell the others whom this rank has lost."""
        self._say(f"lost {loss.rank} {_one_line(loss.why)}")

    def say_broken(self, why: str) -> None:
        """Tell the others that this rank has broken off."""
        self._say(f"broken {_one_line(why)}")

    def _say(self, word: str) -> None:
        if self._word:
            return
        self._word = word
        self._said.clear()
        if self._thread.is_alive():
            self._said.wait(2 * BEAT_SECONDS)
        self._wait_for_others()

    def _wait_for_others(self) -> None:
        """Whoever has the store leaves last: else the others would take it for the one lost."""
        end = time.monotonic() + GRACE_SECONDS
        while self._hosts and time.monotonic() < end and not self._all_know():
            time.sleep(0.02)

    def _all_know(self) -> bool:
        now = time.monotonic()
        return all(
            self._words[rank] or now - self._heard[rank] > GRACE_SECONDS
            for rank in range(self._size)
            if rank != self._rank
        )

    def stop(self) -> None:
        """Count no more. May be called again."""
        self._word = self._word or f"{_LEFT} {self.done}"
        self._wait_for_others()
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(4 * BEAT_SECONDS)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:400]
