"""Many requests to one model at once: one reading of the weights serves all of them."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import secrets
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from pipeload.engine.convoy_members import GaveWayError, Party
from pipeload.entry.api import handle
from pipeload.entry.convoy_size import ConvoySize
from pipeload.entry.ranks import turns_of
from pipeload.errors import GroupError, OptionError
from pipeload.hf.assisted import UNASSISTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn

    from pipeload.engine.convoy_members import Member
    from pipeload.engine.session import Session

_SEEDS = 1 << 63
_END = object()
_TORCH_SEEDS = range(-(1 << 63), 1 << 64)
_MOST = 1 << 30
"""Where nobody says how many."""
_PLAIN = (torch.Tensor, int, float, str, GenerationConfig, PreTrainedTokenizerBase)
"""What `generate` takes, and does not change."""


def generate_many(
    model: nn.Module, requests: Iterable[Mapping[str, Any]], at_once: int | str = "auto"
) -> Iterator[tuple[int, Any]]:
    """Have a streamed model answer many requests, all by the same reading of its weights.

    Each request has the result of `model.generate(...)` alone, bit for bit: they take turns, and
    none is batched with another. The model may be called as ever between two results.

    Args:
        model: what `from_pretrained` or `wrap` returned.
        requests: dicts of `generate`'s arguments, taken as there is room for them; `seed` beside
            these is that of its random numbers, as `torch.manual_seed` sets them; without one they
            are others each time. The process's own random numbers stay as they are.
        at_once: the most requests that run at the same time; "auto" takes as many as fit in memory
            and make it faster.

    Yields:
        The number of a request, from 0 on, and what it returned, as they end; an exception where
        that is what came of it. To close the iterator ends those that still run.

    Raises:
        OptionError: nothing in `model` is streamed, or an option means nothing.
        GroupError: where several ranks run the model, one is lost, or does something else.
    """
    if at_once != "auto" and (not isinstance(at_once, int) or at_once < 1):
        raise OptionError(
            f'at_once={at_once!r} is no number of requests. Pass "auto", or a whole number from 1.'
        )
    session = handle(model).session
    return Requests(
        model, session, requests, at_once if isinstance(at_once, int) else None
    ).outcomes()


class Request(NamedTuple):
    """One call of `generate`."""

    number: int
    arguments: Mapping[str, Any]
    seed: int

    @property
    def can_repeat(self) -> bool:
        """Whether nothing that it was given may have changed since it began."""
        return all(map(_is_plain, self.arguments.values()))


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if getattr(value, "keeps_nothing", False):
        return True
    return value is None or isinstance(value, _PLAIN)


def _request(number: int, given: object, draw: Callable[[], int], *, alone: bool) -> Request:
    """A request, as it was given; `draw`: another seed each time; `alone`: it runs beside no other.

    Raises:
        OptionError: it is none.
    """
    if not isinstance(given, Mapping):
        raise OptionError(
            f"request {number} is a {type(given).__name__}. Give a dict of generate()'s arguments: "
            '{"input_ids": ids, "max_new_tokens": 64}.'
        )
    if given.get("adapter_names") is not None and not alone:
        raise OptionError(
            f"request {number} names adapters, which are hooks on the model while it runs: others "
            "beside it would have them, too. Pass at_once=1, or call model.set_adapter() before."
        )
    seed = given.get("seed")
    if seed is None:
        seed = draw()
    elif not isinstance(seed, int) or isinstance(seed, bool) or seed not in _TORCH_SEEDS:
        raise OptionError(
            f"seed={seed!r} of request {number} is no seed. Give a whole number, as for "
            "torch.manual_seed(), or none at all."
        )
    arguments = {name: value for name, value in given.items() if name != "seed"}
    return Request(number, arguments, seed)


class Requests:
    """Requests on their way through a model, for one caller."""

    def __init__(
        self, model: Any, session: Session, requests: Iterable[Any], at_once: int | None
    ) -> None:
        """`at_once`: how many; None: as many as help."""
        self._model, self._passes = model, session.passes
        self._convoy, self._party = session.passes.convoy, Party()
        self._given = iter(requests)
        self._numbers = itertools.count()
        self._next: deque[Request] = deque()
        """What was asked for and does not run: it gave way, or there was no room."""
        self._running: dict[Member, Request] = {}
        self._most = at_once
        self._cap: float | None = None
        """How many run since one had to give way; it grows by one with as many that end."""
        self._size = ConvoySize(session.governor, session.prefetcher.counters, self._convoy)
        self._ambient = _Ambient()
        self._ranks = turns_of(model)

    def outcomes(self) -> Iterator[tuple[int, Any]]:
        """Each request's number, and what came of it, as they end."""
        if self._ranks is not None:
            self._ranks.join(self._convoy, self._most)
        try:
            while True:
                yield from self._refused_until_full()
                if not self._running:
                    return
                yield from self._ended()
        except KeyboardInterrupt:
            if self._ranks is not None:
                self._ranks.break_off("it was interrupted")
            raise
        finally:
            self._convoy.close(self._party)

    def _ended(self) -> Iterator[tuple[int, Any]]:
        """The next one that has ended, if it had not to give way.

        By itself, so that nothing is held of it, as its cache, once the caller asks for another.
        """
        member, outcome = self._convoy.outcome(self._party)
        request = self._running.pop(member)
        if self._ranks is not None and isinstance(outcome, GroupError):
            self._ranks.check()
        if isinstance(outcome, GaveWayError):
            self._cap = max(1, len(self._running))
            if request.can_repeat:
                self._next.appendleft(request)
                return
            outcome = outcome.lacking
        elif self._cap is not None:
            self._cap += 1 / self._cap
        yield request.number, outcome

    def _refused_until_full(self) -> Iterator[tuple[int, OptionError]]:
        """Have as many requests run as may; those that are none."""
        while len(self._running) < min(self._most or _MOST, int(self._cap or _MOST)):
            if not self._next:
                given = next(self._given, _END)
                if given is _END:
                    return
                number = next(self._numbers)
                try:
                    self._next.append(_request(number, given, self._seed, alone=self._most == 1))
                except OptionError as error:
                    yield number, error
                    continue
            running = [request.arguments for request in self._running.values()]
            if self._most is None and not self._helps(running, self._next[0].arguments):
                return
            self._start(self._next.popleft())

    def _helps(self, running: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> bool:
        helps = self._size.allows(self._model, running, more)
        return helps if self._ranks is None else self._ranks.all_have_room(here=helps)

    def _seed(self) -> int:
        seed = secrets.randbelow(_SEEDS)
        return seed if self._ranks is None else self._ranks.same_seed(seed)

    def _start(self, request: Request) -> None:
        model, ambient = self._model, self._ambient

        def work() -> Any:
            with ambient.brought_along():
                return model.generate(**request.arguments)

        context, passes = contextvars.copy_context(), self._passes
        member = self._convoy.start(
            self._party,
            passes,
            lambda: context.run(work),
            seed=request.seed,
            name=f"pipeload-request-{request.number}",
        )
        self._running[member] = request


class SharedCall:
    """One call of `generate` that shares readings with whatever else runs, and can be cancelled."""

    def __init__(self, model: Any, arguments: Mapping[str, Any], *, seed: int, name: str) -> None:
        """`seed` is that of its random numbers, `name` that of its thread."""
        self._model, self._arguments, self._seed, self._name = model, arguments, seed, name
        self._party = Party()
        self._ambient = _Ambient()

    def result(self) -> Any:
        """Have it run, and wait for its end; what it returned.

        Raises:
            GaveWayError: others went on with its memory; another call may do the same again.
            CancelledError: it was cancelled.
            Exception: whatever the call raised.
        """
        model, ambient = self._model, self._ambient

        def work() -> Any:  # a traceback holds this function: the arguments are to go before
            with ambient.brought_along():
                return model.generate(**self._arguments)

        passes = handle(model).session.passes
        convoy = passes.convoy
        try:
            convoy.start(self._party, passes, work, seed=self._seed, name=self._name)
            _, outcome = convoy.outcome(self._party)
        finally:
            convoy.close(self._party)
            self._arguments = {}
        if not isinstance(outcome, BaseException):
            return outcome
        try:
            raise outcome
        finally:
            del outcome  # its traceback holds this frame

    def cancel(self) -> None:
        """Have it end at its next turn, or not begin. Returns at once, in any thread."""
        self._party.closed = True


class _Ambient:
    """What torch knows of the caller's thread, and results depend on."""

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        self._inference, self._grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        kinds = {"cpu", getattr(torch.accelerator.current_accelerator(), "type", "cpu")}
        self._autocast = {
            kind: torch.get_autocast_dtype(kind)
            for kind in kinds
            if torch.is_autocast_enabled(kind)
        }

    @contextlib.contextmanager
    def brought_along(self) -> Iterator[None]:
        """In whichever thread, as in the one in which this was made."""
        torch.set_num_threads(self._threads)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            # Requests share a reading already, and each is to have the bits of a run alone.
            stack.callback(UNASSISTED.reset, UNASSISTED.set(True))
            yield
