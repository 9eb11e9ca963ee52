"""A server and its end: signals, the time that requests have left, and what is cleaned up."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from pipeload._sizes import counted
from pipeload.entry.api import handle
from pipeload.serving.app import App, Parts
from pipeload.serving.desk import Desk
from pipeload.serving.gate import Gate
from pipeload.serving.metrics import Metrics
from pipeload.serving.request_error import RequestError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable

    from pipeload.serving.request import Settings

_MORE_CONNECTIONS = 128  # than requests that wait: each may send a body, which takes memory
_HEAD_SECONDS = 20.0  # for the head of a request to come
_TOLD_SECONDS = 1.0  # that answers have to say that they end, once all is to end at once
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
        names: Iterable[str] = (),
        prefix_bytes: int = 0,
    ) -> None:
        """`typed`: how the model was named; the rest as `Desk` and `Gate` take it."""
        self._most = most_waiting + (at_once or 0)
        self.desk = Desk(
            model,
            at_once=at_once,
            most_waiting=most_waiting,
            prefix_bytes=prefix_bytes,
            positions=settings.positions,
        )
        metrics = Metrics(handle(model).stats, self.desk)
        self._app = App(Parts(model, typed, settings, self.desk, metrics))
        self.asgi = Gate(self._app.asgi, key=key, local=local, names=names)

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
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=self._most + _MORE_CONNECTIONS,
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
            loop.call_later(_TOLD_SECONDS, self._force)
            return
        running, grace = self._desk.running + self._desk.waiting, self._listening.grace
        if running:
            self._listening.say(
                "finishing %s, for %g seconds at most; once more ends at once",
                counted(running, "request"),
                grace,
            )
        loop.call_later(grace, self._desk.stop, _stopping())

    def _force(self) -> None:
        """Wait for no client any more."""
        self.force_exit = True
        for connection in [*self.server_state.connections]:
            connection.transport.abort()


class _Connection(H11Protocol):
    """Closed where the head of a request does not come: it would keep a place from others.

    Between two requests, while nothing comes at all, the base closes it.
    """

    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody is there."""
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        """Something has come: a head, or a part of it, or of a body."""
        super().data_received(data)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        super().connection_lost(exc)
        self._stop()

    def _look(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._closing is None:
            self._closing = self.loop.call_later(_HEAD_SECONDS, self.transport.close)

    def _stop(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None


def _stopping() -> RequestError:
    return RequestError(
        "the server stops. Send it again once it is back.", code="stopping", status=503
    )
