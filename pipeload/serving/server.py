"""A server and its end: signals, the time that requests have left, and what is cleaned up."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import uvicorn

from pipeload._sizes import counted
from pipeload.entry.api import handle
from pipeload.serving.app import App, Parts
from pipeload.serving.desk import Desk
from pipeload.serving.gate import Gate
from pipeload.serving.metrics import Metrics
from pipeload.serving.request_error import RequestError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from pipeload.serving.request import Settings

_MORE_CONNECTIONS = 128  # than requests that wait: each may send a body, which takes memory
_LAST_SECONDS = 5  # that answers of a server that stops have to be sent


class Listening(NamedTuple):
    """Where a server listens, and how it ends."""

    listener: socket.socket
    """Bound to its address."""
    grace: float
    """Seconds that requests have to end once a signal has come."""
    say: Callable[..., None]
    """Told what happens, as `logging` takes it."""


class Service:
    """One model behind an application."""

    def __init__(
        self,
        model: Any,
        typed: str,
        settings: Settings,
        *,
        at_once: int | None,
        most_waiting: int,
        key: str | None,
        local: bool,
        prefix_bytes: int = 0,
    ) -> None:
        """`typed`: how the model was named; the rest as `Desk` and `Gate` take it."""
        self._most_waiting = most_waiting
        self.desk = Desk(
            model, at_once=at_once, most_waiting=most_waiting, prefix_bytes=prefix_bytes
        )
        metrics = Metrics(handle(model).stats, self.desk)
        self._app = App(Parts(model, typed, settings, self.desk, metrics))
        self.asgi = Gate(self._app.asgi, key=key, local=local)

    def run(self, listening: Listening) -> None:
        """Answer requests until a signal comes. In the main thread."""
        try:
            self.server(listening).run(sockets=[listening.listener])
        finally:
            self.close()

    def server(self, listening: Listening) -> uvicorn.Server:
        """What is to run, until its `should_exit`."""
        config = uvicorn.Config(
            self.asgi,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=self._most_waiting + _MORE_CONNECTIONS,
            timeout_graceful_shutdown=int(listening.grace) + 2 * _LAST_SECONDS,
        )
        return _Server(config, self.desk, listening)

    def close(self) -> None:
        """End all requests and threads."""
        self.desk.stop(_stopping())
        self.desk.join()
        self._app.close()


class _Server(uvicorn.Server):
    """Ends on a signal: no more connections, what runs may end, the rest is told that it will not.

    A second signal ends at once.
    """

    def __init__(self, config: uvicorn.Config, desk: Desk, listening: Listening) -> None:
        super().__init__(config)
        self._desk, self._listening = desk, listening

    def handle_exit(self, sig: int, frame: object) -> None:
        """A signal has come. In the main thread, between two steps of the event loop."""
        again, self.should_exit = self.should_exit, True
        loop = asyncio.get_running_loop()
        if again:
            loop.call_soon(self._desk.stop, _stopping())
            return
        running, grace = self._desk.running + self._desk.waiting, self._listening.grace
        if running:
            self._listening.say(
                "finishing %s, for %g seconds at most; once more ends at once",
                counted(running, "request"),
                grace,
            )
        loop.call_later(grace, self._desk.stop, _stopping())


def _stopping() -> RequestError:
    return RequestError(
        "the server stops. Send it again once it is back.", code="stopping", status=503
    )
