"""`draft=`: a small copy of a model guesses tokens for it, while that pays.

The draft is loaded between two passes, once these have been timed, and dropped between two passes:
see [Note: when a draft pays] in draft_control.py.
"""

from __future__ import annotations

import functools
import gc
import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import transformers

from pipeload._sizes import format_size
from pipeload.budget.shared_limit import ACCOUNTANT
from pipeload.entry.draft_control import DraftControl, Took
from pipeload.entry.draft_search import held_bytes
from pipeload.entry.loading import Loading
from pipeload.entry.sources import source_of
from pipeload.entry.texts import first_line
from pipeload.errors import MemoryLimitError
from pipeload.hf.takeover import intercept_loading

if TYPE_CHECKING:
    import weakref
    from collections.abc import Mapping

    from pipeload.entry.request import Request

_log = logging.getLogger("pipeload")
AUTO: Final = "auto"
LOOKUP: Final = "lookup"
_LEAST_ROOM = 16
"""Tokens that may still come: for fewer, a draft is not loaded."""
_LOOKED_UP_RIGHT = 0.5


class Drafting:
    """What guesses for one model. A `Course`, of one `generate` at a time."""

    def __init__(self, named: str | None, request: Request, model: weakref.ref[Any]) -> None:
        """`named`: the draft's folder or hub id; None looks tokens up in the text."""
        self._named, self._request, self._reference = named, request, model
        self.assistant: Any = None
        """The draft while it is in memory."""
        self.control = DraftControl()
        if named is None:
            self.control.right = _LOOKED_UP_RIGHT
        self.busy = threading.Lock()
        """Held by the `generate` that it guesses for."""
        self.given_up = False
        """Whether the draft was, for good, or will never be loaded."""
        self._garbage = False
        """Whether a draft has gone that may still be there: models are cycles."""
        self._computed = 0.0
        """Seconds, when the latest pass was over."""
        self._widest = 0
        """The most bytes for weights of the model that there were: a long text leaves fewer."""
        self._too_long: int | None = None
        """Tokens of a text that did not fit beside the draft: shorter ones may."""
        self._told: set[str] = set()
        """Why calls were not assisted, as far as it was said."""

    @property
    def _model(self) -> Any:
        """Whose `generate` this is: it is running."""
        return self._reference()

    def is_wanted(self, model: Any) -> bool:
        """Whether guesses could be of use: something is read in each pass, and nothing settled."""
        if self.given_up or not model.pipeload.plan.bytes_per_pass:
            return False
        self._widest = max(self._widest, model.pipeload.session.governor.budget)
        return True

    def tell(self, why: str) -> None:
        """Say, once, that a call is not assisted."""
        if why not in self._told:
            self._told.add(why)
            _log.info("nothing is guessed for this answer: draft= does not go with %s", why)

    def step_aside(self) -> None:
        """Give the draft's memory to a call that is not assisted; it comes back when one is."""
        if self.assistant is not None and self.busy.acquire(blocking=False):
            try:
                self._drop()
                self.collect()
            finally:
                self.busy.release()

    def begin(self, room: int, tokens: int) -> int:
        """How many to guess: see `Course`."""
        self.collect()
        if self._named is not None and self.assistant is None:
            if self._too_long is not None and tokens >= self._too_long:
                return 0
            if self.given_up or room < _LEAST_ROOM or not self.control.knows_alone:
                return 0
            self._load(tokens)
            if self.assistant is None:
                return 0
        return 0 if self.given_up else self.control.count(room)

    def fits(self, inputs: Mapping[str, Any]) -> bool:
        """Whether a pass would be admitted: see `Course`."""
        return self._model.pipeload.session.governor.pass_bytes((), inputs) is not None

    def make_way(self, tokens: int) -> None:
        """The draft goes, until a shorter text comes: see `Course`."""
        if self.assistant is not None:
            _log.info(
                "the draft %s makes way: a pass after %d tokens does not fit beside it",
                self._named,
                tokens,
            )
            self._too_long = tokens
            self._drop()

    def fail(self, error: Exception, tokens: int) -> None:
        """The draft goes: see `Course`."""
        if isinstance(error, MemoryLimitError):
            self.make_way(tokens)
            return
        what = self._named or "the text so far"
        _log.warning("no more drafts by %s, the answer goes on: %s", what, first_line(error))
        self.given_up = True
        self._drop()

    def end(self, guessed: int, kept: int, seconds: float, guessing: float, *, first: bool) -> None:
        """A pass is over: see `Course`."""
        if first:  # it took the prompt, and the draft did
            self._computed = self._model.pipeload.stats().compute_seconds
            return
        if self._named is not None and self.assistant is None:
            if not self.given_up:
                self._time_alone(seconds)
            return
        self.control.note(Took(guessed, kept, seconds, guessing))
        if self.assistant is not None and not self.control.pays:
            alone = self.control.seconds_alone or 0.0
            _log.info(
                "the draft %s is given up: %.1f tokens per pass take longer than one by one, which "
                "takes %.2g s each; its memory holds weights of the model again",
                self._named,
                self.control.tokens_per_pass,
                alone,
            )
            self.given_up = True
            self._drop()

    def _time_alone(self, seconds: float) -> None:
        computed = self._model.pipeload.stats().compute_seconds
        if self._computed:
            self.control.note_alone(seconds, computed - self._computed)
        self._computed = computed

    def collect(self) -> None:
        """Have the memory of a draft that has gone be free."""
        if self._garbage:
            self._garbage = False
            gc.collect()

    def end_for_good(self) -> None:
        """The model is not streamed any more."""
        self.given_up = True
        self._drop()

    def _drop(self) -> None:
        draft, self.assistant, self._computed = self.assistant, None, 0.0
        if draft is not None:
            self._garbage = True
            draft.pipeload.session.close()

    def _load(self, tokens: int) -> None:
        """Load the draft, unless it does not fit, or cannot be worth it, after such a text."""
        model = self._model
        plan, governor = model.pipeload.plan, model.pipeload.session.governor
        self._widest = max(self._widest, governor.budget)
        try:
            # First, as loading and planning take some memory themselves; what is over comes back.
            if not self._may_come(model) or not governor.shrink(governor.budget - self._nbytes):
                return  # or a pass of another thread runs: after the next one
            draft = self._loaded()
        except Exception as error:  # the library raises nearly anything; the answer goes on
            self._garbage = True
            found = self._request.draft == AUTO
            self._refuse(first_line(error), logging.INFO if found else logging.WARNING)
            return
        except BaseException:
            self._garbage = True
            raise
        if draft.pipeload.plan.bytes_per_pass > 0:
            wants = draft.pipeload.session.governor.wants[1]
            draft.pipeload.session.close()
            self._garbage = True
            if wants <= self._widest - governor.wants[0]:
                self._too_long = tokens
                return
            self._refuse("it does not fit beside the model")
            return
        after = model.pipeload.plan.bytes_per_pass
        self.control.share_alone = min(1.0, plan.bytes_per_pass / max(after, 1))
        self.control.forget()
        self.assistant = draft
        _log.info("drafts by %s, in memory", self._named)

    def _refuse(self, why: str, level: int = logging.INFO) -> None:
        self.given_up = True
        _log.log(level, "no drafts by %s: %s", self._named, why)

    def _may_come(self, model: Any) -> bool:
        """Whether the draft is to be loaded now. One that never fits never will be."""
        governor, plan = model.pipeload.session.governor, model.pipeload.plan
        nbytes, least = self._nbytes, governor.wants[0]
        if nbytes > (room := self._widest - least):
            self._refuse(
                f"it takes {format_size(nbytes)}, and the limit leaves {format_size(room)} for it"
            )
            return False
        whole = governor.wants[1] + plan.pinned_bytes
        return nbytes <= governor.budget - least and self.control.promises(
            nbytes / max(1, plan.bytes_per_pass), min(1.0, nbytes / whole)
        )

    @functools.cached_property
    def _nbytes(self) -> int:
        """About what the draft takes; 0 of a file, or one on the hub: it shows when it is there."""
        folder = Path(self._named or "")
        return held_bytes(folder) if folder.is_dir() else 0

    def _loaded(self) -> Any:
        request = self._request
        limit = ACCOUNTANT.limit or request.options.memory_limit
        options = replace(request.options, memory_limit=limit)
        source, named = source_of(self._named or "")
        loading = Loading(replace(request, options=options, draft=None), lenient=False)
        auto: Any = transformers.AutoModelForCausalLM
        with ACCOUNTANT.serving_first(), intercept_loading(loading):
            return auto.from_pretrained(source, dtype="auto", trust_remote_code=False, **named)
