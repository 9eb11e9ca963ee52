"""The server as an ASGI application: OpenAI's endpoints, health and metrics.

[Note: statuses come first] A request is refused before it is begun, or begun before its status is
sent: an answer in pieces begins with its first text, or with an error. Where that takes long, the
status is sent all the same, and comments keep the connection open; then an error is a piece.
"""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pipeload.entry.api import handle
from pipeload.errors import PipeloadError
from pipeload.serving.encoding import is_longer
from pipeload.serving.outcome import fitted
from pipeload.serving.reply import Pieces, answer, ends_of
from pipeload.serving.request import CHAT, TEXT, parse
from pipeload.serving.request_error import RequestError, parse_json
from pipeload.serving.waiting import GONE, Waiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from starlette.requests import Request

    from pipeload.serving.desk import Desk
    from pipeload.serving.metrics import Metrics
    from pipeload.serving.request import Asked, Settings

_MOST_BYTES = 1_000_000  # of a request
_LONG_LETTERS = 30_000  # of a text whose length is looked at before it is made tokens of
_BODIES = 8  # that may be in memory before it is known whether they can be answered
_BODY_SECONDS = 30.0  # for one to come
_QUIET_SECONDS = 10.0  # until a client is told that its answer is on its way


class Parts(NamedTuple):
    """What the application is made of."""

    model: Any
    typed: str
    """How the model was named on the command line."""
    settings: Settings
    desk: Desk
    metrics: Metrics


class App:
    """Answers requests. `asgi` is what a server runs."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        # One thread: prompts take memory one by one, and tokenizers are not made for several.
        self._clerk = ThreadPoolExecutor(1, "pipeload-prompts")
        self._bodies = asyncio.Semaphore(_BODIES)
        self._watching: set[asyncio.Task[None]] = set()
        self._since = int(time.time())
        routes = [
            Route(CHAT, self._complete, methods=["POST"]),
            Route(TEXT, self._complete, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._one_model),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        handlers: dict[Any, Any] = {HTTPException: _not_served, Exception: self._failed}
        self.asgi = Starlette(routes=routes, exception_handlers=handlers)

    def close(self) -> None:
        """End its thread."""
        self._clerk.shutdown(cancel_futures=True)

    # -- answers ---------------------------------------------------------------------------------

    async def _complete(self, request: Request) -> Response:
        try:
            response = await self._response(request)
        except RequestError as error:
            headers = {}
            if error.status == 429:
                headers["Retry-After"] = str(self._parts.desk.retry_seconds())
            response = JSONResponse(error.body(), error.status, headers)
        if not isinstance(response, StreamingResponse):  # whose end is told by its last piece
            self._parts.metrics.ended(response.status_code)
        return response

    async def _response(self, request: Request) -> Response:
        async with self._bodies:
            body = await _read(request)
            asked = await self._by_clerk(partial(self._asked, request.url.path, body))
            del body
        waiting = Waiting(asked, self._parts.settings.tokenizer)
        await self._by_clerk(partial(self._parts.desk.take, waiting.job))
        watching = asyncio.create_task(_watch(request, waiting))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)
        if not asked.streams:
            return JSONResponse(await self._body(waiting))
        first = await waiting.text(_QUIET_SECONDS)
        whole = await self._body(waiting) if first is None else None
        pieces = self._pieces(waiting, first, whole)
        return StreamingResponse(
            pieces, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    async def _by_clerk(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._clerk, work)

    def _asked(self, url: str, body: bytes) -> Asked:
        """What a request asks for, if memory would hold it. In the clerk's thread."""
        parts = self._parts
        try:
            given = parse_json(body)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is no JSON ({error}). Send one object.") from error
        if not isinstance(given, dict):
            raise RequestError("the body is no JSON object. Send one.")
        self._check_length(given)
        asked = fitted(parse(url, given, parts.settings), parts.model, parts.typed)
        parts.desk.check(asked)
        return asked

    def _check_length(self, given: dict[str, Any]) -> None:
        """Refuse what is too long before a tokenizer takes memory for it."""
        rendered = [given.get(name) for name in ("messages", "prompt")]
        if given.get("tool_choice") != "none":
            rendered.append(given.get("tools"))
        text = " ".join(_texts(rendered))
        if len(text) <= _LONG_LETTERS:
            return
        parts = self._parts
        longest, positions = parts.desk.longest_prompt(), parts.settings.positions
        if is_longer(parts.settings.tokenizer, text, longest):
            if longest == positions:
                raise RequestError(
                    f"the prompt is longer than the {longest} tokens that the model was made for. "
                    "Give a shorter one.",
                    code="context_length_exceeded",
                )
            raise RequestError(
                f"the prompt is longer than the {longest} tokens that memory holds. Give a shorter "
                "one.",
                code="memory_limit",
                status=413,
            )

    async def _body(self, waiting: Waiting) -> dict[str, Any]:
        """The whole answer, once it is there.

        Raises:
            RequestError: there will be none.
        """
        parts, job = self._parts, waiting.job
        output = await waiting.output()
        ends, cached = ends_of(parts.model), job.cached_tokens
        body, new = answer(job.asked, output, parts.settings, ends, cached=cached)
        parts.metrics.answered(
            prompt=job.asked.prompt_tokens,
            new=new,
            first=job.first_token_seconds,
            whole=time.monotonic() - job.arrived,
        )
        return body

    async def _pieces(
        self, waiting: Waiting, text: str | None, body: dict[str, Any] | None
    ) -> AsyncIterator[str]:
        """Server-sent events; `text` is the first of it, None if the whole `body` is there."""
        made = Pieces(waiting.job.asked, self._parts.settings)
        status = GONE
        try:
            while text is not None:
                yield _event(made.piece(text)) if text else ": it is on its way\n\n"
                text = await waiting.text(_QUIET_SECONDS)
            for piece in made.last(body or await self._body(waiting)):
                yield _event(piece)
            yield "data: [DONE]\n\n"
            status = 200
        except RequestError as error:
            status = error.status
            yield _event(error.body())
        finally:
            self._parts.metrics.ended(status)
            waiting.close()

    # -- the rest --------------------------------------------------------------------------------

    async def _models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def _one_model(self, request: Request) -> Response:
        if request.path_params["name"] not in self._parts.settings.names:
            raise HTTPException(404)
        return JSONResponse(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        name = self._parts.settings.model
        return {"id": name, "object": "model", "created": self._since, "owned_by": "pipeload"}

    async def _health(self, _request: Request) -> Response:
        try:
            handle(self._parts.model).session.prefetcher.check_reading()
        except PipeloadError as error:
            return JSONResponse({"status": "failed", "reason": str(error)}, 503)
        return JSONResponse({"status": "ok"})

    async def _failed(self, _request: Request, error: Exception) -> Response:
        told = RequestError(f"{type(error).__name__}: {error}", code="internal_error", status=500)
        self._parts.metrics.ended(told.status)
        return JSONResponse(told.body(), told.status)

    async def _metrics(self, _request: Request) -> Response:
        text = self._parts.metrics.text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _texts(given: object) -> Iterator[str]:
    """All that a parsed request holds, also its keys: a template writes those of tools, too.

    Those of messages stand for what it writes around each of them.
    """
    todo = [given]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            yield from one
            todo += one.values()
        elif isinstance(one, list):
            todo += one
        else:
            yield one if isinstance(one, str) else json.dumps(one)


def _event(piece: dict[str, Any]) -> str:
    # In ASCII: some clients end a line at letters that JSON lets stand for themselves.
    return f"data: {json.dumps(piece)}\n\n"


async def _watch(request: Request, waiting: Waiting) -> None:
    """Cancel what nobody waits for: the client has gone, or has its answer."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    waiting.job.cancel()


async def _read(request: Request) -> bytes:
    """The body of a request.

    Raises:
        RequestError: it is no JSON, too long to be one that can be answered, or does not come.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # what a page of another site may send unasked is none
        raise RequestError(
            f"Content-Type is {kind!r}. Send application/json.", code="wrong_type", status=415
        )
    try:
        return await asyncio.wait_for(_body_of(request), _BODY_SECONDS)
    except asyncio.TimeoutError as error:
        raise RequestError(
            f"the body did not come within {_BODY_SECONDS:g} seconds. Send it at once.",
            code="timeout",
            status=408,
        ) from error
    except ClientDisconnect as error:
        raise RequestError("the client has gone.", code="cancelled", status=GONE) from error


async def _body_of(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MOST_BYTES:
            raise RequestError(
                f"the request is longer than {_MOST_BYTES} bytes. Send a shorter one.",
                code="too_long",
                status=413,
            )
    return bytes(body)


async def _not_served(_request: Request, error: HTTPException) -> Response:
    told = RequestError(
        "there is nothing of that name, or not by this method.",
        code="not_found",
        status=error.status_code,
    )
    return JSONResponse(told.body(), error.status_code, error.headers)
