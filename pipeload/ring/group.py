"""A group of ranks over torch.distributed's gloo: who is in it, and what they send each other.

[Note: nothing is waited for blindly] A blocking call of gloo's ends for no Ctrl-C, and for a rank
that hangs only after minutes. So each transfer is started, and asked whether it is done; meanwhile
the heartbeat is looked at. A transfer that is given up stays with gloo until the connection closes,
so the group is broken then, for good: models are loaded again.

Nothing that is received is unpickled: it is numbers, or JSON.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore

from pipeload.errors import GroupError
from pipeload.ring.environment import patience_here
from pipeload.ring.heartbeat import Heartbeat, Loss
from pipeload.ring.meeting import connect, connect_all, meet, own_connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Work

    from pipeload.ring.environment import Place

_log = logging.getLogger("pipeload")

JOIN_SECONDS = 300.0
"""How long the ranks that are there wait for the others when a model is loaded."""
_TOLD_SECONDS = 30.0
_SPIN_SECONDS, _LOOK_SECONDS, _MOST_PAUSE = 1e-4, 0.05, 1e-3
_NEVER = timedelta(days=1)  # gloo's own patience: ours is shorter


class Group:
    """The ranks that run one model. One thread at a time may use it."""

    def __init__(self, place: Place) -> None:
        """Meet the others.

        Raises:
            GroupError: some do not come within `JOIN_SECONDS`, or cannot be connected to.
            OptionError: the patience in the environment means nothing.
        """
        self.rank, self.size = place.rank, place.size
        self.hosts: list[str] = []
        """The name of each rank's machine."""
        self.broken: str | None = None
        """Why nothing can be sent any more."""
        patience, hosts_store = patience_here(), place.rank == 0 and not place.served
        end = time.monotonic() + JOIN_SECONDS
        self._store = connect(place, end, hosts=hosts_store)
        prefix, self.hosts = meet(self._store, place, end)
        self._gloo = connect_all(PrefixStore(f"{prefix}/gloo", self._store), place)
        beats = partial(own_connection, place, prefix, patience)
        self._heartbeat = Heartbeat(beats, place.rank, place.size, patience, hosts=hosts_store)
        # Also when the process ends: whoever has the store leaves last.
        self._leave = weakref.finalize(self, self._heartbeat.stop)

    # -- what is sent ----------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int, doing: str) -> None:
        """Have `tensor`, of the same size everywhere, hold what it holds on rank `root`.

        `doing`: what for, for errors.

        Raises:
            GroupError: a rank is lost.
        """
        self.check()
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = root, 0, _NEVER
        self._wait(lambda: self._gloo.broadcast([tensor], options), doing)

    def gather(self, tensor: torch.Tensor, doing: str) -> list[torch.Tensor]:
        """What `tensor`, of the same size everywhere, holds on each rank.

        Raises:
            GroupError: a rank is lost.
        """
        self.check()
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        options = AllgatherOptions()
        options.timeout = _NEVER
        self._wait(lambda: self._gloo.allgather([found], [tensor], options), doing)
        return found

    def gather_json(self, value: Any, doing: str) -> list[Any]:
        """`value` of each rank.

        Raises:
            GroupError: a rank is lost.
        """
        text = json.dumps(value).encode()
        sizes = [int(n) for n in self.gather(torch.tensor([len(text)]), doing)]
        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        found = self.gather(mine, doing)
        return [
            json.loads(one[:size].numpy().tobytes()) for one, size in zip(found, sizes, strict=True)
        ]

    # -- waiting, and what ends it ---------------------------------------------------------------

    def check(self) -> None:
        """Refuse to go on with a broken group.

        Raises:
            GroupError: it is broken.
        """
        if self.broken is not None:
            raise GroupError(
                f"the group of {self.size} ranks is broken: {self.broken}. Call "
                "handle.remove(), or `del model` where that is refused, and load the model again, "
                "on all of them."
            )

    def _wait(self, start: Callable[[], Work], doing: str) -> None:
        try:
            work = start()
            self._poll(work, doing)
            work.wait()
            self._heartbeat.done += 1
        except GroupError:
            raise
        except RuntimeError as error:
            loss = self._heartbeat.why_failed()
            if loss is None:
                self.break_off(f"a transfer failed while {doing}: {error}")
                self.check()
            else:
                self._lose(loss.rank, loss.why, doing)
        except BaseException as error:
            self.break_off(f"{type(error).__name__} while {doing}")
            raise

    def _poll(self, work: Work, doing: str) -> None:
        began = looked = time.monotonic()
        pause, told = 5e-5, False
        while not work.is_completed():
            now = time.monotonic()
            if now - began < _SPIN_SECONDS:
                time.sleep(0)
                continue
            time.sleep(pause)
            pause = min(1.5 * pause, _MOST_PAUSE)
            if now - looked < _LOOK_SECONDS:
                continue
            looked = now
            if (loss := self._heartbeat.lost()) is not None:
                self._lose(loss.rank, loss.why, doing)
            if not told and now - began > _TOLD_SECONDS:
                told = True
                _log.warning("%s: waiting for %.0f s, all ranks are alive", doing, now - began)

    def _lose(self, rank: int, why: str, doing: str) -> None:
        self.broken = f"{self.name(rank)} {why}"
        self._heartbeat.say_lost(Loss(rank, why))
        raise GroupError(
            f"{self.name(rank)} of {self.size} is lost, while {doing}: it {why}. Check that "
            "machine and its network, then call handle.remove(), or `del model` where that is "
            "refused, and load the model again, on all of them.",
            rank=rank,
            host=self.hosts[rank],
        )

    def break_off(self, why: str) -> None:
        """Have every rank know that this one cannot go on."""
        if self.broken is None:
            self.broken = f"{self.name(self.rank)} broke off: {why}"
            self._heartbeat.say_broken(f"broke off: {why}")

    def name(self, rank: int) -> str:
        """Of a rank, for people."""
        return f"rank {rank} ({self.hosts[rank]})"

    def close(self) -> None:
        """Leave. May be called again."""
        self.broken = self.broken or "this rank has left it"
        self._leave()
        gloo = self.__dict__.pop("_gloo", None)
        if gloo is not None:
            # It waits for transfers that were given up, which may be for ever: not in this thread.
            held = [gloo]
            del gloo
            farewell = threading.Thread(target=held.clear, name="pipeload-farewell", daemon=True)
            farewell.start()
            farewell.join(1.0)
        self.__dict__.pop("_store", None)
