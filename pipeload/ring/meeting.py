"""How ranks find each other: over a store that rank 0 serves, then by connections between all."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore

from pipeload.errors import GroupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._C._distributed_c10d import Store

    from pipeload.ring.environment import Place

CONNECT_SECONDS = 60.0
"""How long gloo may take to connect all ranks, which have met by then."""
_SERVED: dict[tuple[str, int], Store] = {}
"""Stores that this process serves, as long as it lives: a group that follows another one finds the
same, whichever of its ranks comes first."""


def own_connection(place: Place, prefix: str, patience: float) -> Store:
    """For a thread that may have to wait for it."""
    store = connect(place, time.monotonic() + patience, hosts=False)
    store.set_timeout(timedelta(seconds=max(60.0, 4 * patience)))
    return PrefixStore(prefix, store)


def connect(place: Place, end: float, *, hosts: bool) -> Store:
    """A connection to the store, which may be up later than this process.

    Raises:
        GroupError: it is not there in the end, or another program has its port.
    """
    while True:
        store = _try_to_connect(place, hosts=hosts)
        if not isinstance(store, Exception):
            return store
        if hosts and "EADDRINUSE" in str(store):
            raise GroupError(
                f"rank 0 cannot listen on port {place.port}: another program does, perhaps one "
                "that ran before. Set MASTER_PORT to a free one on all ranks, or have that "
                "program end.",
                rank=0,
                host=place.address,
            ) from store
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


def meet(store: Store, place: Place, end: float) -> tuple[str, list[str]]:
    """Have all ranks be there; what this group's keys begin with, and the ranks' machines.

    How often a rank has come is counted in the store, so that groups one after the other are told
    apart, also where one of the processes is new.

    Raises:
        GroupError: some are not there in the end.
    """
    came = f"pipeload/came/{place.rank}"
    prefix = f"pipeload/{store.add(came, 1)}of{place.size}"
    with ExitStack() as stack, _reached(place):
        stack.callback(_come_no_more, store, came, f"{prefix}/host/{place.rank}")
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


def _come_no_more(store: Store, came: str, host: str) -> None:
    with suppress(RuntimeError):  # the store may be gone
        store.delete_key(host)
        store.add(came, -1)


def connect_all(
    store: Store,
    place: Place,
    pair: tuple[int, int] | None = None,
    look: Callable[[], object] = lambda: None,
) -> Any:
    """Gloo's connections between all ranks; between two of them where a `pair` is named.

    It waits for them deaf to Ctrl-C, so it does in a thread of its own; `look` is called meanwhile,
    and may raise.

    Raises:
        GroupError: they cannot be made.
    """
    found: list[Any] = []
    thread = threading.Thread(
        target=_build, args=(found, store, place, pair), name="pipeload-connect", daemon=True
    )
    thread.start()
    end = time.monotonic() + CONNECT_SECONDS + 5
    while thread.is_alive() and time.monotonic() < end:
        thread.join(0.1)
        look()
    made = found.pop() if found else TimeoutError("gloo does not answer")
    if not isinstance(made, Exception):
        return made
    raise GroupError(
        f"rank {place.rank} of {place.size} has met the others, and cannot be connected to them: "
        f"{str(made).splitlines()[0][:300]}. Set GLOO_SOCKET_IFNAME to the network interface that "
        "reaches them, on each machine, and check that no firewall is between them."
    ) from made


def _build(found: list[Any], store: Store, place: Place, pair: tuple[int, int] | None) -> None:
    rank, size = (place.rank, place.size) if pair is None else (pair.index(place.rank), 2)
    try:
        patience = timedelta(seconds=CONNECT_SECONDS)
        found.append(distributed.ProcessGroupGloo(store, rank, size, patience))
    except Exception as error:  # whatever gloo says
        found.append(error)


def _not_there(place: Place, missing: list[int]) -> GroupError:
    return GroupError(
        f"rank {place.rank} of {place.size} has waited for rank {', '.join(map(str, missing))} in "
        "vain. Run the same script there, with RANK set, or set WORLD_SIZE to how many there are.",
        rank=missing[0],
    )
