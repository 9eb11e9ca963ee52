"""What the event loop sees of a request that is answered in other threads."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from pipeload.engine.convoy_members import CancelledError
from pipeload.serving.answer_text import Cut, TextSoFar
from pipeload.serving.desk import Job
from pipeload.serving.outcome import blamed
from pipeload.serving.request_error import RequestError

if TYPE_CHECKING:
    import torch

    from pipeload.serving.request import Asked

GONE, _UNAVAILABLE = 499, 503  # the first is nginx' word for a client that has gone


class Waiting:
    """A request on its way: text as it comes, and what came of it in the end."""

    def __init__(self, asked: Asked, tokenizer: Any) -> None:
        """To be made in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._texts: asyncio.Queue[str | None] = asyncio.Queue()
        self._next: asyncio.Future[str | None] | None = None
        self._so_far, self._cut = TextSoFar(tokenizer), Cut(asked.stops)
        # With tools, what comes may turn out to be a call of one.
        self._shows = asked.streams and not asked.tools
        self.job = Job(asked, self._take)
        self.job.outcome.add_done_callback(self._end)

    def _take(self, tokens: list[int]) -> None:
        if self._shows:
            self._send(self._cut.add(self._so_far.add(tokens), end=False))

    def _end(self, outcome: Any) -> None:
        if self._shows and outcome.exception() is None:
            self._send(self._cut.add(self._so_far.end(), end=True))
        self._send(None)

    def _send(self, text: str | None) -> None:
        if text != "":
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody listens
                self._loop.call_soon_threadsafe(self._texts.put_nowait, text)

    async def text(self, seconds: float) -> str | None:
        """More text; None at the end, and the empty one where nothing came for so long."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._texts.get())
        done, _ = await asyncio.wait({self._next}, timeout=seconds)
        if not done:
            return ""
        text, self._next = self._next.result(), None
        return text

    async def output(self) -> torch.Tensor:
        """What `generate` returned, once it has.

        Raises:
            RequestError: it did not.
        """
        try:
            return await asyncio.wrap_future(self.job.outcome)
        except RequestError:
            raise
        except CancelledError as error:
            raise RequestError("the client has gone.", code="cancelled", status=GONE) from error
        except Exception as error:
            told = blamed(error) or RequestError(
                str(error), code="unavailable", status=_UNAVAILABLE
            )
            raise told from error

    def close(self) -> None:
        """Nobody waits for it any more."""
        self.job.cancel()
        if self._next is not None:
            self._next.cancel()
