"""Who is answered when: requests wait their turn, run together, end, and are cancelled.

[Note: threads of a server] The event loop's thread takes requests and sends answers; whatever may
take a while happens elsewhere. A request that runs has two threads: one that waits for its outcome,
and the member of the convoy that computes. All that threads share stands under one lock, which
nobody holds while a pass runs; to cancel takes no lock at all.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from transformers.generation.streamers import BaseStreamer

from pipeload._sizes import counted
from pipeload.engine.convoy_members import CancelledError, GaveWayError, forget_locals
from pipeload.entry.api import handle
from pipeload.entry.convoy_size import ConvoySize, Sizes, sizes_of
from pipeload.entry.many import SharedCall
from pipeload.entry.request_room import MOST_TOKENS, RequestRoom
from pipeload.errors import MemoryLimitError
from pipeload.serving.prefixes import Prefixes
from pipeload.serving.request_error import RequestError
from pipeload.system.memory import trim_heap

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pipeload.serving.request import Asked

_REMEMBERED = 16
_LONGEST_WAIT = 60  # seconds that a client is told to wait at most
_END_SECONDS = 30.0


class Job:
    """A request on its way. A client waits for `outcome`."""

    def __init__(self, asked: Asked, on_tokens: Callable[[list[int]], None]) -> None:
        """`on_tokens` gets new tokens as they come, of one answer; in some thread."""
        self.asked, self._on_tokens = asked, on_tokens
        self.outcome: Future[torch.Tensor] = Future()
        """What `generate` returned: int64, `[answers, tokens]`."""
        self.outcome.set_running_or_notify_cancel()  # whoever waits for it cannot cancel it
        self.arrived = time.monotonic()
        self.first_token_seconds: float | None = None
        self.cached_tokens = 0
        """Of its prompt, that were not computed again."""
        self.borrows = True
        """Whether it may be lent what others have kept."""
        self.cancelled = False
        self.call: SharedCall | None = None
        self._given: list[int] = []

    def cancel(self) -> None:
        """Nobody waits for it any more: it ends at its next turn. In any thread."""
        self.cancelled = True
        if (call := self.call) is not None:
            call.cancel()

    def arguments(self, prefixes: Prefixes | None) -> dict[str, Any]:
        """Those of `generate`, for one more try: what was given before is not given again."""
        arguments = self.asked.arguments
        arguments.pop("seed", None)
        if self.asked.answers == 1:
            arguments["streamer"] = _Tokens(self._take)
            self.cached_tokens = 0
            if prefixes is not None and self.borrows:
                arguments, self.cached_tokens = prefixes.lend(arguments)
        return arguments

    def _take(self, at: int, tokens: list[int]) -> None:
        """New tokens of the answer, the first of which is its token `at`.

        Raises:
            RequestError: others were sent in their place.
        """
        if self.first_token_seconds is None:
            self.first_token_seconds = time.monotonic() - self.arrived
        again = self._given[at : at + len(tokens)]
        if self.asked.streams and again != tokens[: len(again)]:
            # What was lent to the first try is gone, and without it last bits may be others.
            raise RequestError(
                "the answer was begun again, and became another. Send the request again.",
                code="begun_again",
                status=503,
            )
        new = tokens[len(again) :]
        if new:
            self._given += new
            self._on_tokens(new)


class _Tokens(BaseStreamer):
    """Hands on tokens, but for those of the prompt."""

    keeps_nothing = True

    def __init__(self, take: Callable[[int, list[int]], None]) -> None:
        self._take, self._seen = take, -1

    def put(self, value: torch.Tensor) -> None:
        if self._seen < 0:
            self._seen = 0
            return
        tokens = value.flatten().tolist()
        self._take(self._seen, tokens)
        self._seen += len(tokens)

    def end(self) -> None:
        """The outcome says it, too."""


class Desk:
    """Takes requests to a model, and has them run. See [Note: threads of a server]."""

    def __init__(
        self,
        model: Any,
        *,
        at_once: int | None,
        most_waiting: int,
        prefix_bytes: int = 0,
        positions: int | None = None,
    ) -> None:
        """`at_once`: the most that run together; None: as many as fit and help.

        `prefix_bytes`: how much may be kept of requests that have ended; `positions`: for how many
        tokens the model was made.
        """
        self._model, self._at_once, self._most_waiting = model, at_once, most_waiting
        session = handle(model).session
        self._room = RequestRoom(session.governor)
        self._prefixes = Prefixes(model, prefix_bytes) if prefix_bytes else None
        if self._prefixes is not None:
            self._account = session.governor.ledger.account
            self._account.spare = self._prefixes.give_back
        self._most_tokens = min(positions or MOST_TOKENS, MOST_TOKENS)
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()
        self._running: dict[Job, threading.Thread] = {}
        self._cap: int | None = None
        """How many may run since one had to give way: one more with each that ends."""
        self._parts = session.governor, session.prefetcher.counters, session.passes.convoy
        self._size = ConvoySize(*self._parts)
        self._took: deque[float] = deque(maxlen=_REMEMBERED)
        """Seconds of the last requests."""
        self._stopped: RequestError | None = None

    @property
    def running(self) -> int:
        """How many run."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """How many wait for one of these to end."""
        return len(self._waiting)

    @property
    def kept_bytes(self) -> int:
        """What is kept of requests that have ended."""
        return 0 if self._prefixes is None else self._prefixes.nbytes

    def check(self, asked: Asked) -> None:
        """Refuse what would not fit if nothing else ran.

        Raises:
            RequestError: it does not. Says what would.
        """
        sizes = sizes_of(self._model, asked.arguments)
        with self._lock:
            if not self._running:
                self._room.measure(self.kept_bytes)
        if self._room.holds(sizes):
            return
        prompt = self._room.longest_prompt(sizes, most=self._most_tokens)
        answer = self._room.longest_answer(sizes, most=self._most_tokens)
        ways = [f"a prompt of up to {counted(prompt, 'token')}"] if prompt else []
        ways += [f"max_tokens of up to {answer}"] if answer else []
        asked_for = f"{counted(sizes.prompt, 'token')} and {sizes.tokens - sizes.prompt} new ones"
        many = f", {sizes.batch} times" if sizes.batch > 1 else ""
        raise RequestError(
            f"memory does not hold a prompt of {asked_for}{many}. "
            f"Give {' or '.join(ways) or 'less of both'}.",
            code="memory_limit",
            status=413,
        )

    def longest_prompt(self) -> int:
        """How many tokens a prompt may have, if it is answered by one."""
        return self._room.longest_prompt(Sizes(1, 2, 1), most=self._most_tokens)

    def take(self, job: Job) -> None:
        """Have a request run, now or once there is room.

        Raises:
            RequestError: too many wait already, or the server stops.
        """
        with self._lock:
            if self._stopped is not None:
                raise self._stopped
            self._drop_cancelled()
            self._waiting.append(job)
            self._start_some()
            if len(self._waiting) <= self._most_waiting or self._waiting[-1] is not job:
                return
            self._waiting.pop()
            raise RequestError(
                f"{len(self._running)} requests run and {len(self._waiting)} wait. Try again "
                "later.",
                code="rate_limit_exceeded",
                status=429,
            )

    def retry_seconds(self) -> int:
        """When one more may have a place, as a guess."""
        with self._lock:
            took = sum(self._took) / len(self._took) if self._took else 1.0
            return max(1, min(_LONGEST_WAIT, math.ceil(took / max(1, len(self._running)))))

    def stop(self, error: RequestError) -> None:
        """Answer all that run or wait with `error`, and those that come. In any thread."""
        with self._lock:
            self._stopped = error
            for job in [*self._running, *self._waiting]:
                job.cancel()
            self._drop_cancelled()

    def join(self) -> None:
        """Wait until nothing runs."""
        until = time.monotonic() + _END_SECONDS
        for thread in [*self._running.values()]:
            thread.join(max(0.0, until - time.monotonic()))
        if self._prefixes is not None:
            self._account.spare = None

    def _drop_cancelled(self) -> None:
        gone = [job for job in self._waiting if job.cancelled]
        for job in gone:
            self._waiting.remove(job)
            job.outcome.set_exception(self._stopped or CancelledError())

    def _start_some(self) -> None:
        """Begin those that wait longest, as many as there is room for. Under the lock."""
        self._drop_cancelled()
        while self._waiting and self._may_start(self._waiting[0]):
            job = self._waiting.popleft()
            name = f"pipeload-answer-{id(job):x}"
            thread = threading.Thread(target=self._run, args=(job,), name=name, daemon=True)
            self._running[job] = thread
            try:
                thread.start()
            except RuntimeError as error:  # the system gives none
                del self._running[job]
                job.outcome.set_exception(error)

    def _may_start(self, job: Job) -> bool:
        limits = [limit for limit in (self._at_once, self._cap) if limit is not None]
        if limits and len(self._running) >= min(limits):
            return False
        if self._at_once is not None:
            return True
        running = [other.asked.arguments for other in self._running]
        return self._size.allows(self._model, running, job.asked.arguments)

    def _outcome(self, job: Job) -> Any:
        """What came of it: tokens, or an exception."""
        try:
            seed = job.asked.options.get("seed", 0)  # without one nothing is drawn
            arguments = job.arguments(self._prefixes)
            job.call = SharedCall(self._model, arguments, seed=seed, name="pipeload-request")
            del arguments
            if job.cancelled:
                job.call.cancel()
            outcome = job.call.result()
            if self._prefixes is not None and job.asked.answers == 1:
                outcome = self._prefixes.keep(outcome)
        except BaseException as error:
            forget_locals(error)  # among them are caches
            return error
        return outcome

    def _run(self, job: Job) -> None:
        """Have one run to its end; in a thread of its own."""
        outcome = self._outcome(job)
        job.call = None
        # What was lent may be larger than what it saves, and stays as long as it is used.
        lent_too_much = isinstance(outcome, MemoryLimitError) and job.cached_tokens > 0
        if lent_too_much:
            job.borrows = False
            gc.collect()  # the cache is in a circle of its parts
        trim_heap()  # what is measured next is to be what is needed
        with self._lock:
            del self._running[job]
            gave_way = isinstance(outcome, GaveWayError)
            again = (gave_way or lent_too_much) and not job.cancelled and self._stopped is None
            if again:
                self._waiting.appendleft(job)
            if again and gave_way:
                self._cap = max(1, len(self._running))
            elif self._cap is not None:
                self._cap += 1
            self._took.append(time.monotonic() - job.arrived)
            if not self._running:
                self._cap = None
                self._size = ConvoySize(*self._parts)
            self._start_some()
        if again:
            return
        if not isinstance(outcome, BaseException):
            job.outcome.set_result(outcome)
        else:
            told = (self._stopped or CancelledError()) if job.cancelled else outcome
            job.outcome.set_exception(told)
        del outcome  # whose traceback holds this frame
