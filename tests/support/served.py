"""A server within the test's own process, and how to ask it."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeload.cli.serve import bound
from pipeload.entry.texts import load_tokenizer
from pipeload.serving.outcome import settings_of
from pipeload.serving.server import Listening, Service
from tests.support.streaming import WAIT_SECONDS, load_streamed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Answer(NamedTuple):
    """What a server said."""

    status: int
    headers: dict[str, str]
    """Their names in small letters."""
    text: str

    @property
    def body(self) -> Any:
        """The object that it is."""
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        """What is wrong."""
        error: dict[str, Any] = self.body["error"]
        return error

    @property
    def events(self) -> list[dict[str, Any]]:
        """The pieces, of which the last must be there."""
        found = [line.removeprefix("data: ") for line in self.text.split("\n\n") if line]
        found = [line for line in found if not line.startswith(":")]
        assert found.pop() == "[DONE]"
        return [json.loads(line) for line in found]

    @property
    def said(self) -> str:
        """The text of the answer, whole or in pieces."""
        if self.headers["content-type"].startswith("text/event-stream"):
            choices = [choice for event in self.events for choice in event["choices"]]
            shown = [choice.get("delta", choice) for choice in choices]
        else:
            shown = [choice.get("message", choice) for choice in self.body["choices"]]
        return "".join(each.get("content") or each.get("text") or "" for each in shown)


class Client(NamedTuple):
    """Somebody who asks a server."""

    port: int
    key: str | None = None
    patience: float = WAIT_SECONDS

    def open(
        self, path: str, body: object = None, *, method: str | None = None, **headers: str
    ) -> http.client.HTTPConnection:
        """A connection on which that was asked."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.patience)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        if data is not None:
            headers = {"Content-Type": "application/json"} | headers
        if self.key is not None:
            headers = {"Authorization": f"Bearer {self.key}"} | headers
        connection.request(method or ("GET" if data is None else "POST"), path, data, headers)
        return connection

    def ask(self, path: str, body: object = None, **options: Any) -> Answer:
        """What comes of it."""
        connection = self.open(path, body, **options)
        with contextlib.closing(connection):
            response = connection.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, headers, response.read().decode())

    def chat(self, text: str, **fields: Any) -> Answer:
        """What is said to that."""
        return self.ask(CHAT, {"messages": [{"role": "user", "content": text}]} | fields)


class Served(NamedTuple):
    """A server, from inside and from outside."""

    model: Any
    service: Service
    client: Client


@contextlib.contextmanager
def served(
    folder: Path,
    *,
    at_once: int | None = 4,
    most_waiting: int = 16,
    key: str | None = None,
    model: Any = None,
    prefix_bytes: int = 0,
    names: Iterable[str] = (),
) -> Iterator[Served]:
    """One that serves the model in `folder`, as `model` or streamed under its smallest limit."""
    model = load_streamed(folder) if model is None else model
    tokenizer = load_tokenizer(str(folder))
    settings = settings_of(model, tokenizer, str(folder), max_new_tokens=8, streams=True)
    service = Service(
        model,
        str(folder),
        settings,
        at_once=at_once,
        most_waiting=most_waiting,
        key=key,
        local=True,
        prefix_bytes=prefix_bytes,
        names=names,
    )
    with contextlib.closing(bound("127.0.0.1", 0)) as listener:
        server = service.server(Listening(listener, 0, print))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield Served(model, service, Client(listener.getsockname()[1], key))
        finally:
            server.should_exit = True
            service.close()
            thread.join()


def wait_until(happened: Any) -> None:
    """Return once it is so."""
    until = time.monotonic() + WAIT_SECONDS
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.005)
