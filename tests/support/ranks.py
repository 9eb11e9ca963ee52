"""Ranks of a group on this machine: forked processes that find each other over loopback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

from tests.support.children import WAIT_SECONDS
from tests.support.raised import NOTED

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = "3"
"""Seconds after which a rank that is silent is lost."""


def free_port() -> int:
    """One that nobody listens on."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Ranks:
    """Forked processes; each runs `action(rank)` and gives back what JSON can hold."""

    def __init__(
        self, size: int, action: Callable[[int], Any], *, seconds: float = WAIT_SECONDS
    ) -> None:
        """`seconds`: after so long the system ends one that hangs."""
        self._pipes: dict[int, int] = {}
        self._running: set[int] = set()
        self.pids: list[int] = []
        port = str(free_port())
        for rank in range(size):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reading)
                signal.alarm(round(seconds))
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                os.environ.setdefault("PIPELOAD_RANK_PATIENCE", PATIENCE)
                _tell(writing, {"gave": _outcome(action, rank), "noted": sorted(NOTED)})
                os._exit(0)
            os.close(writing)
            self._pipes[rank] = reading
            self.pids.append(pid)
            self._running.add(rank)

    def result(self, rank: int) -> Any:
        """What it gave; of one that was killed, the number of the signal."""
        with os.fdopen(self._pipes.pop(rank), "rb") as answer:
            text = answer.read().decode()
        status = self._wait(rank)
        if not text:
            return status
        told = json.loads(text)
        NOTED.update((file, line) for file, line in told["noted"])
        return told["gave"]

    def end(self) -> None:
        """Kill those that have not been waited for; nothing is left open."""
        for rank in [*self._running]:
            os.kill(self.pids[rank], signal.SIGKILL)
            self._wait(rank)
        while self._pipes:
            os.close(self._pipes.popitem()[1])

    def _wait(self, rank: int) -> int:
        status = os.waitpid(self.pids[rank], 0)[1]
        self._running.discard(rank)  # its number may be another process's from now on
        return status

    def results(self) -> list[Any]:
        """What each gave."""
        return [self.result(rank) for rank in range(len(self.pids))]


def _tell(pipe: int, what: object) -> None:
    with os.fdopen(pipe, "wb") as file:
        file.write(json.dumps(what).encode())


def _outcome(action: Callable[[int], Any], rank: int) -> Any:
    import torch

    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    try:
        return action(rank)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def on_ranks(size: int, action: Callable[[int], Any], **options: Any) -> list[Any]:
    """What `action(rank)` gives on each of `size` ranks; what it raised, as text."""
    return Ranks(size, action, **options).results()
