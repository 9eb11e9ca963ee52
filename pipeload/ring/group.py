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
import socket
import threading
import time
import weakref
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore

from pipeload.errors import GroupError
from pipeload.ring.environment import patience_here
from pipeload.ring.heartbeat import Heartbeat, Loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._C._distributed_c10d import Store, Work

    from pipeload.ring.environment import Place

_log = logging.getLogger("pipeload")

JOIN_SECONDS = 300.0
"""How long the ranks that are there wait for the others when a model is loaded."""
_TOLD_SECONDS = 30.0
_SPIN_SECONDS, _LOOK_SECONDS, _MOST_PAUSE = 1e-4, 0.05, 1e-3
_SERVED: dict[tuple[str, int], Store] = {}
"""Stores that this process serves, as long as it lives: a group that follows another one finds the
same, whichever of its ranks comes first."""
_NEVER = timedelta(days=1)  # gloo's own patience: ours is shorter


class Group:
    """The ranks that run one model. One thread at a time may use it."""

    def __init__(self, place: Place) -> None:
        """Meet the others.

        Raises:
            GroupError: some do not come within `JOIN_SECONDS`.
            OptionError: the patience in the environment means nothing.
        """
        self.rank, self.size = place.rank, place.size
        self.hosts: list[str] = []
        """The name of each rank's machine."""
        self.broken: str | None = None
        """Why nothing can be sent any more."""
        patience, hosts_store = patience_here(), place.rank == 0 and not place.served
        end = time.monotonic() + JOIN_SECONDS
        self._store = _connect(place, end, hosts=hosts_store)
        prefix, self.hosts = _meet(self._store, place, end)
        self._gloo: Any = distributed.ProcessGroupGloo(
            PrefixStore(f"{prefix}/gloo", self._store),
            place.rank,
            place.size,
            _NEVER,
        )
        connect = partial(_own_connection, place, prefix, patience)
        self._heartbeat = Heartbeat(connect, place.rank, place.size, patience, hosts=hosts_store)
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
        options.rootRank, options.rootTensor = root, 0
        self._wait(lambda: self._gloo.broadcast([tensor], options), doing)

    def gather(self, tensor: torch.Tensor, doing: str) -> list[torch.Tensor]:
        """What `tensor`, of the same size everywhere, holds on each rank.

        Raises:
            GroupError: a rank is lost.
        """
        self.check()
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self._wait(lambda: self._gloo.allgather([found], [tensor]), doing)
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
                f"the group of {self.size} ranks is broken: {self.broken}. Call handle.remove() "
                "and load the model again, on all of them."
            )

    def _wait(self, start: Callable[[], Work], doing: str) -> None:
        try:
            work = start()
            self._poll(work, doing)
            work.wait()
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
            "machine and its network, then call handle.remove() and load the model again, on all "
            "of them.",
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


def _own_connection(place: Place, prefix: str, patience: float) -> Store:
    """For a thread that may have to wait for it."""
    store = _connect(place, time.monotonic() + patience, hosts=False)
    store.set_timeout(timedelta(seconds=max(60.0, 4 * patience)))
    return PrefixStore(prefix, store)


def _connect(place: Place, end: float, *, hosts: bool) -> Store:
    """A connection to the store, which may be up later than this process.

    Raises:
        GroupError: it is not there in the end.
    """
    while True:
        store = _try_to_connect(place, hosts=hosts)
        if not isinstance(store, Exception):
            return store
        if time.monotonic() > end:
            raise _unreachable(place, store) from store
        time.sleep(0.1)


def _try_to_connect(place: Place, *, hosts: bool) -> Store | Exception:
    served = _SERVED.get((place.address, place.port))
    if hosts and served is not None:
        return served
    try:
        if not hosts:  # torch prints a page of C++ where nobody listens
            socket.create_connection((place.address, place.port), timeout=1).close()
        store = TCPStore(
            place.address,
            place.port,
            None,
            hosts,
            timedelta(seconds=1),  # not longer: nothing interrupts it
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (OSError, RuntimeError) as error:  # DistNetworkError is one
        return error
    if hosts:
        _SERVED[place.address, place.port] = store
    return store


def _meet(store: Store, place: Place, end: float) -> tuple[str, list[str]]:
    """Have all ranks be there; what this group's keys begin with, and the ranks' machines.

    How often a rank has come is counted in the store, so that groups one after the other are told
    apart, also where one of the processes is new.

    Raises:
        GroupError: some are not there in the end.
    """
    came = f"pipeload/came/{place.rank}"
    prefix = f"pipeload/{store.add(came, 1)}of{place.size}"
    with ExitStack() as stack, _reached(place):
        stack.callback(_come_no_more, store, came)
        store.set(f"{prefix}/host/{place.rank}", socket.gethostname())
        store.set(f"{prefix}/beat/{place.rank}", "0 ")
        keys = [f"{prefix}/host/{rank}" for rank in range(place.size)]
        while not store.check(keys) and time.monotonic() < end:
            time.sleep(0.02)
        if missing := [rank for rank, key in enumerate(keys) if not store.check([key])]:
            raise _not_there(place, missing)
        stack.pop_all()
    return prefix, [store.get(key).decode() for key in keys]


@contextmanager
def _reached(place: Place) -> Iterator[None]:
    """Say where the store should be, if it is gone."""
    try:
        yield
    except RuntimeError as error:  # DistNetworkError is one
        raise _unreachable(place, error) from error


def _unreachable(place: Place, error: Exception) -> GroupError:
    return GroupError(
        f"rank {place.rank} of {place.size} cannot reach rank 0 at {place.address}:{place.port}: "
        f"{str(error).splitlines()[0]}. Check MASTER_ADDR and MASTER_PORT, that rank 0 runs, and "
        "that no firewall is between them.",
        rank=0,
        host=place.address,
    )


def _come_no_more(store: Store, came: str) -> None:
    with suppress(RuntimeError):  # the store may be gone
        store.add(came, -1)


def _not_there(place: Place, missing: list[int]) -> GroupError:
    return GroupError(
        f"rank {place.rank} of {place.size} has waited for rank {', '.join(map(str, missing))} in "
        "vain. Run the same script there, with RANK set, or set WORLD_SIZE to how many there are.",
        rank=missing[0],
    )
