"""A group of ranks over torch.distributed's gloo: who is in it, and what they send each other.

[Note: nothing is waited for blindly] A blocking call of gloo's ends for no Ctrl-C, and for a rank
that hangs only after minutes. So each transfer is started, and asked whether it is done; meanwhile
the heartbeat is looked at. A transfer that is given up stays with gloo until the connection closes,
so the group is broken then, for good: models are loaded again.

Nothing that is received is unpickled: it is numbers, or JSON.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import PrefixStore

from pipeload.errors import GroupError
from pipeload.ring.environment import patience_here
from pipeload.ring.heartbeat import Heartbeat, Loss
from pipeload.ring.lane import Lane, Transfer
from pipeload.ring.meeting import connect, connect_all, meet, own_connection
from pipeload.ring.pairs import Pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from pipeload.ring.environment import Place

_log = logging.getLogger("pipeload")

JOIN_SECONDS = 300.0
"""How long the ranks that are there wait for the others when a model is loaded."""
_TOLD_SECONDS = 30.0
_SPIN_SECONDS, _LOOK_SECONDS, _MOST_PAUSE = 1e-4, 0.05, 1e-3


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
        self.waited_seconds = 0.0
        """For others, in all."""
        self._loss: tuple[Loss, str] | None = None
        """Who was lost while doing what; no error, which would hold frames."""
        patience, hosts_store = patience_here(), place.rank == 0 and not place.served
        end = time.monotonic() + JOIN_SECONDS
        self._store = connect(place, end, hosts=hosts_store)
        prefix, self.hosts = meet(self._store, place, end)
        self._place, self._prefix = place, prefix
        self._gloo: list[Any] = [connect_all(PrefixStore(f"{prefix}/gloo", self._store), place)]
        """Of each lane, whose transfers wait for each other."""
        beats = partial(own_connection, place, prefix, patience)
        self._heartbeat = Heartbeat(beats, place.rank, place.size, patience, hosts=hosts_store)
        # Also when the process ends: whoever has the store leaves last.
        self._leave = weakref.finalize(self, self._heartbeat.stop)

    # -- what is sent ----------------------------------------------------------------------------

    def lane(self, number: int = 0) -> Lane:
        """Transfers in an order of their own; lane 0 is that of all that takes no turns."""
        return Lane(self, number)

    def have_lanes(self, count: int) -> None:
        """Connect what is lacking of so many lanes. All ranks do so at the same time.

        Raises:
            GroupError: they cannot be connected.
        """
        self.check()
        try:
            while len(self._gloo) < count:
                self._gloo.append(Pairs(self.rank, self.size, self._connect))
        except BaseException as error:
            self.break_off(f"it could not be connected once more: {error}")
            raise

    def _connect(self, pair: tuple[int, int]) -> Any:
        name = f"{self._prefix}/lane{len(self._gloo)}/{pair[0]}to{pair[1]}"
        return connect_all(PrefixStore(name, self._store), self._place, pair, self._look_for_lost)

    def _look_for_lost(self) -> None:
        if (loss := self._heartbeat.lost()) is not None:
            self._lose(loss.rank, loss.why, "lanes are connected")

    def broadcast(self, tensor: torch.Tensor, root: int, doing: str) -> None:
        """See `Lane.broadcast`."""
        self.lane().broadcast(tensor, root, doing)

    def gather(self, tensor: torch.Tensor, doing: str) -> list[torch.Tensor]:
        """See `Lane.gather`."""
        return self.lane().gather(tensor, doing)

    def gather_json(self, value: Any, doing: str) -> list[Any]:
        """See `Lane.gather_json`."""
        return self.lane().gather_json(value, doing)

    def start(self, lane: int, transfer: Callable[[Any], Transfer], doing: str) -> Transfer:
        """Begin one on a lane. `doing`: what for, for errors.

        Raises:
            GroupError: a rank is lost.
        """
        self.check()
        with self._failing(doing):
            return transfer(self._gloo[lane])

    def finish(
        self, work: Transfer, doing: str, meanwhile: Callable[[], object] | None = None
    ) -> None:
        """Wait until a transfer is done; `meanwhile` is called again and again.

        Raises:
            GroupError: a rank is lost.
        """
        self.check()
        began = time.monotonic()
        with self._failing(doing):
            self._poll(work, doing, meanwhile)
            work.wait()
            self._heartbeat.done += 1
        self.waited_seconds += time.monotonic() - began

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

    @contextlib.contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        """Make of what gloo raises the loss of a rank."""
        try:
            yield
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

    def _poll(self, work: Transfer, doing: str, meanwhile: Callable[[], object] | None) -> None:
        began = looked = time.monotonic()
        pause, told = 5e-5, False
        while not work.is_completed():
            now = time.monotonic()
            if now - began < _SPIN_SECONDS:
                time.sleep(0)
                continue
            if meanwhile is not None:
                meanwhile()
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
        self._loss = Loss(rank, why), doing
        self.check_loss()

    def check_loss(self) -> None:
        """Name the rank that was lost, if this one has found that out.

        Raises:
            GroupError: it has.
        """
        if self._loss is None:
            return
        (rank, why), doing = self._loss
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
            farewell = threading.Thread(target=gloo.clear, name="pipeload-farewell", daemon=True)
            farewell.start()
            farewell.join(1.0)
        self.__dict__.pop("_store", None)
