"""Many requests as rows of one pass, by the library's continuous batching, sized for the limit.

[Note: sessions] The library makes room for keys and values once, and draws for all requests or for
none. So requests run in sessions: one takes requests as long as they are of its kind and its room
holds them; then those that run end, and the next begins. Where a pass does not fit in memory after
all, a session ends, and its requests begin anew, fewer at once.
"""

from __future__ import annotations

import gc
from collections import deque
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pipeload.budget.limit_errors import request_too_large
from pipeload.engine.convoy_members import forget_locals
from pipeload.entry.api import handle
from pipeload.hf.continuous_batching import PAGE_TOKENS, Batching, Room, spare_pages
from pipeload.system.memory import trim_heap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pipeload.budget.governor import Governor
    from pipeload.errors import MemoryLimitError

_MOST_AT_ONCE = 64
"""Unless somebody says how many: from about here on each row more takes as long as the last."""
_SHARE = 0.9
"""Of what is free before the first pass, which takes on more than the estimates know of."""
_ROWS = (256, 128, 64, 32, 16)
"""How many tokens a pass may have, at the most."""
MOST_ROWS = _ROWS[0]
"""So many requests may run together: each has one token at least in every pass."""


class _Wanted(NamedTuple):
    """A request, and its number."""

    number: int
    arguments: Mapping[str, Any]

    @property
    def ids(self) -> torch.Tensor:
        """The prompt: int64, `[1, tokens]`."""
        ids: torch.Tensor = self.arguments["input_ids"]
        return ids

    @property
    def samples(self) -> bool:
        """Whether its tokens are drawn."""
        return bool(self.arguments["do_sample"])

    @property
    def pages(self) -> int:
        """For all tokens that it may come to."""
        new: int = self.arguments["max_new_tokens"]
        return -(-(self.ids.shape[1] + new) // PAGE_TOKENS)

    @property
    def stops(self) -> Sequence[Any]:
        """What looks whether it has ended."""
        stops: Sequence[Any] = self.arguments.get("stopping_criteria", ())
        return stops


class Batched:
    """Requests on their way through a model. See [Note: sessions]."""

    def __init__(
        self,
        model: Any,
        requests: Iterable[Mapping[str, Any]],
        at_once: int | None,
        ending: Callable[[], bool] = lambda: False,
    ) -> None:
        """`requests`: each has `input_ids` of one prompt, `max_new_tokens` and `do_sample`.

        It may have `temperature`, `top_p`, `top_k` and `stopping_criteria`. `at_once`: how many run
        together; None: as many as fit and help. `ending`: whether no other is to begin.
        """
        self._model, self._given, self._ending = model, enumerate(requests), ending
        self._governor: Governor = handle(model).session.governor
        self._at_once = at_once or _MOST_AT_ONCE
        self._most, self._rows = self._at_once, MOST_ROWS
        """The same as far as passes have fitted lately, and how many tokens they may have."""
        self._next: deque[_Wanted] = deque()
        self._running: dict[str, _Wanted] = {}

    @property
    def running(self) -> int:
        """How many run."""
        return len(self._running)

    def outcomes(self) -> Iterator[tuple[int, Any]]:
        """Each request's number, and its tokens, int64, `[1, tokens]`, as they end.

        A `MemoryError` in their place, where it does not fit even by itself.

        Raises:
            OptionError: the model's own settings ask for what is not served so.
            UnsupportedModelError: the model is not run so.
            PipeloadError: a pass failed, of all of them.
        """
        while self._look_ahead(self._most):
            running = self._running = dict[str, _Wanted]()
            gc.collect()  # the last session's room is in a circle of its parts
            trim_heap()
            if (refused := self._refused(self._next[0])) is not None:
                yield self._next.popleft().number, refused
                continue
            try:
                yield from self._session(running)
                self._most = min(2 * self._most, self._at_once)
                self._rows = min(2 * self._rows, MOST_ROWS)
            except MemoryError as error:  # a MemoryLimitError, or of an allocator
                if not running:
                    raise  # whoever gives requests has none
                if len(running) > 1:
                    self._most = len(running) // 2
                elif self._rows > _ROWS[-1]:
                    self._rows //= 2
                else:
                    (only,) = running.values()
                    running.clear()
                    yield only.number, error
                self._next.extendleft(reversed(running.values()))
                forget_locals(error)  # among them is the room of the session

    def _look_ahead(self, count: int) -> bool:
        """Have so many requests at hand, if there are; whether any is to begin."""
        if self._ending():
            return False
        while len(self._next) < count and (given := next(self._given, None)) is not None:
            self._next.append(_Wanted(*given))
        return bool(self._next)

    def _session(self, running: dict[str, _Wanted]) -> Iterator[tuple[int, Any]]:
        samples = self._next[0].samples
        # The first was let in just now, and what is free changes from moment to moment.
        first, *others = (wanted for wanted in self._next if wanted.samples == samples)
        room = self._room([first, *(one for one in others if self._refused(one) is None)])
        with closing(Batching(self._model, room, samples=samples)) as batching:
            while True:
                while len(running) < room.at_once and self._look_ahead(1):
                    wanted = self._next[0]
                    if wanted.samples != samples or wanted.pages > room.pages:
                        break
                    running[str(wanted.number)] = self._next.popleft()
                    arguments, pieces = wanted.arguments, bool(wanted.stops)
                    batching.add(str(wanted.number), wanted.ids, arguments, pieces=pieces)
                if not running:
                    return
                found = batching.made()
                if found is None or found.name not in running:  # it was ended before
                    continue
                wanted = running[found.name]
                ids = torch.cat((wanted.ids, torch.tensor([found.tokens], dtype=torch.int64)), 1)
                if found.ended or any(bool(stop(ids, None).all()) for stop in wanted.stops):
                    if not found.ended:
                        batching.cancel(found.name)
                    del running[found.name]
                    yield wanted.number, ids

    def _room(self, wanted: Sequence[_Wanted]) -> Room:
        """For as many of these as fit, and else for the first."""
        pages = sorted((one.pages for one in wanted), reverse=True)
        rows = [count for count in _ROWS if count <= self._rows]
        found = max(
            (self._most_that_fit(pages, count, samples=wanted[0].samples), count) for count in rows
        )
        at_once, rows_of_pass = found
        if not at_once:
            return Room(1, rows[-1], wanted[0].pages)
        return Room(at_once, rows_of_pass, max(wanted[0].pages, sum(pages[:at_once])))

    def _most_that_fit(self, pages: Sequence[int], rows: int, *, samples: bool) -> int:
        """How many requests, the longest first, with passes of so many tokens."""
        low, high = 0, min(len(pages), self._most, rows)
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(sum(pages[:middle]) * PAGE_TOKENS, rows, middle, samples=samples):
                low = middle
            else:
                high = middle - 1
        return low

    def _refused(self, wanted: _Wanted) -> MemoryLimitError | None:
        """The error of one that fits in no case; None for one that may.

        Room for it would be taken all the same, and before a pass is measured.
        """
        tokens, governor = wanted.pages * PAGE_TOKENS, self._governor
        spare = governor.spare_bytes()
        need = self._need(tokens, _ROWS[-1], 1, samples=wanted.samples)
        if need <= spare:
            return None
        return request_too_large(governor.plan.memory_limit, tokens, need, spare)

    def _fits(self, tokens: int, rows: int, at_once: int, *, samples: bool) -> bool:
        """Whether memory holds keys and values of so many tokens, and a pass that sees them all."""
        need = self._need(tokens, rows, at_once, samples=samples)
        return need <= _SHARE * self._governor.spare_bytes()

    def _need(self, tokens: int, rows: int, at_once: int, *, samples: bool) -> int:
        """What those take; without the pass where keys and values alone are too many."""
        governor, device = self._governor, "meta"
        spare = spare_pages(self._model, unused=True) * PAGE_TOKENS
        cache, _ = governor.bytes_alone(0, tokens + spare, 1)
        if cache > governor.spare_bytes():
            return cache
        call = {
            "input_ids": torch.empty(1, rows, dtype=torch.int64, device=device),
            "attention_mask": torch.empty(1, 1, rows, tokens + rows, device=device),
            "logits_to_keep": torch.empty(at_once, dtype=torch.int64, device=device),
            "logits_processor_args": torch.empty(int(samples), at_once, device=device),
            "use_cache": False,
        }
        return cache + governor.pass_need((), call)
