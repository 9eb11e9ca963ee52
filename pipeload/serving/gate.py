"""Who may ask a server: whoever has the key; without one, pages of other hosts may not."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from pipeload.serving.request_error import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import ASGIApp, Receive, Scope, Send

_OPEN = "/health"
_LOCAL = {"localhost", "127.0.0.1", "[::1]"}


class Gate:
    """Lets requests through to an application, or refuses them before it reads anything.

    [Note: names of this machine] A web page may have its own name point to this machine, and then
    ask what listens here in the name of whoever looks at it. A key keeps it out; where there is
    none, and only this machine is listened to, requests must name this machine.
    """

    def __init__(
        self, app: ASGIApp, *, key: str | None, local: bool, names: Iterable[str] = ()
    ) -> None:
        """`key` is what clients must show; `local`: only this machine is listened to.

        `names`: of this machine, as where it listens, beside the usual ones.
        """
        self._app, self._local = app, local
        self._names = _LOCAL | {f"[{n}]" if ":" in n else n for n in map(str.lower, names)}
        self._wanted = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        error = self._refusal(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
        await JSONResponse(error.body(), error.status, headers)(scope, receive, send)

    def _refusal(self, scope: Scope) -> RequestError | None:
        headers = Headers(scope=scope)
        if self._wanted is not None:
            shown = headers.get("authorization", "").encode("latin-1")
            if scope["path"] == _OPEN or hmac.compare_digest(shown, self._wanted):
                return None
            return RequestError(
                "the API key is missing, or another one. Send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
                status=401,
            )
        host = headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self._local and name.lower() not in self._names:
            return RequestError(
                f"this server answers on its own machine only, and not to {host!r}. Ask localhost, "
                "or start it with --api-key.",
                code="wrong_host",
                status=403,
            )
        return None
