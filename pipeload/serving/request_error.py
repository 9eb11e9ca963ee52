"""What is said of a request that is not answered; loads no torch."""

from __future__ import annotations

import json
from typing import Any


class RequestError(Exception):
    """A request that cannot be answered as it asks."""

    def __init__(
        self,
        message: str,
        *,
        parameter: str | None = None,
        code: str = "invalid_request",
        status: int = 400,
    ) -> None:
        """`status` is HTTP's; from 500 on it is not the request's fault."""
        super().__init__(message)
        self.parameter, self.code, self.status = parameter, code, status

    def body(self) -> dict[str, Any]:
        """As OpenAI's API tells it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        told = {"message": str(self), "type": kind, "param": self.parameter, "code": self.code}
        return {"error": told}


def parse_json(data: bytes) -> Any:
    """What JSON says that anybody may have written.

    Raises:
        ValueError: it is none, or holds halves of letters, which no tokenizer takes, nor any file.
        RecursionError: it is nested too deeply.
    """
    given = json.loads(data.decode("utf-8-sig"))
    json.dumps(given, ensure_ascii=False).encode()
    return given
