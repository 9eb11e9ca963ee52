"""Private parts of transformers: assisted generation, with guesses that somebody else counts.

The library asks a candidate generator for guesses before each pass, and tells it after the pass how
many were right. Ours stands between it and the library's own ones. Seen in 5.24.0.
"""

from __future__ import annotations

import copy
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import DynamicCache
from transformers.generation import candidate_generator as library

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAKES_CANDIDATES = "_get_candidate_generator"
"""The method of a model that is asked for one."""
_MODES = {"greedy_search", "sample"}
_CROPPED = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers whose cache can be cut back to what was kept."""
_NOT_BESIDE = (
    *("assistant_model", "assistant_tokenizer", "custom_generate", "inputs_embeds"),
    *("prefix_allowed_tokens_fn", "logits_processor", "negative_prompt_ids", "stop_strings"),
    "synced_gpus",
)
"""Arguments that mean another way to generate, or may remember what was only guessed."""


_CACHES = ("cache", "past_key_values")
_GROWN: tuple[tuple[str, tuple[bool, ...]], ...] = (
    ("_prepare_attention_mask", (False,)),
    ("_prepare_position_ids", (False,)),
    ("_prepare_token_type_ids", ()),
)
"""What the library makes its arguments as long as the text with; False: it is no encoder's. Older
versions lack one of them, and the argument."""


class Course(Protocol):
    """Who says how many guesses a pass checks, and hears what became of them."""

    def begin(self, room: int, tokens: int) -> int:
        """How many tokens to guess, `room` at most, after a text of so many."""

    def fits(self, inputs: Mapping[str, Any]) -> bool:
        """Whether there is memory for a pass with these arguments beside who guesses."""

    def make_way(self, tokens: int) -> None:
        """A pass does not fit beside who guesses, after a text of so many tokens."""

    def fail(self, error: Exception, tokens: int) -> None:
        """Who guesses has raised that, asked for what follows so many tokens."""

    def collect(self) -> None:
        """Have memory be free of who has gone."""

    @property
    def assistant(self) -> Any:
        """The model that guesses; None: the text so far is looked up."""

    def end(self, guessed: int, kept: int, seconds: float, guessing: float, *, first: bool) -> None:
        """A pass is over that took so long, as guessing did; `first`: it took the prompt, too."""


COURSE: ContextVar[Course | None] = ContextVar("pipeload_drafts", default=None)
"""Of the `generate` that runs in this context."""
_GROWING: ContextVar[list[Any]] = ContextVar("pipeload_assisted_caches")
"""The caches of the `generate` that runs in this context."""
UNASSISTED: ContextVar[bool] = ContextVar("pipeload_unassisted", default=False)
"""Whether nothing is to be guessed in this context."""


def hindrance(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Why a call of `generate` cannot be assisted; empty if it can.

    It can if it makes one token after another of one prompt: nothing else is different then.
    """
    names = ("inputs", "generation_config")
    if len(args) > len(names):
        return "arguments by place"
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    beside = next((name for name in _NOT_BESIDE if given.get(name) is not None), None)
    if beside is not None:
        return f"{beside}="
    ids = given.pop("inputs", None)
    if not _is_one_prompt(given.get("input_ids") if ids is None else ids):
        return "no single prompt of tokens"
    # A criterion that looks at the latest token alone would miss the rest.
    criteria = given.pop("stopping_criteria", None) or ()
    if not all(getattr(one, "takes_several", False) for one in criteria):
        return "criteria of the caller's"
    if not all(_is_fresh(given.get(name)) for name in _CACHES):
        return "a cache that is static or holds something"
    return _left_whole(model) or _special_way(model, given)


def _is_one_prompt(ids: object) -> bool:
    whole = isinstance(ids, torch.Tensor) and not ids.is_floating_point() and ids.dim() == 2
    return whole and len(ids) == 1  # type: ignore[arg-type]


def _is_fresh(cache: Any) -> bool:
    """Whether there is no cache yet, or an empty one that grows.

    On top of one that holds something the library's first assisted pass reads the whole text again.
    """
    return cache is None or (isinstance(cache, DynamicCache) and cache.get_seq_length() == 0)


def _left_whole(model: Any) -> str:
    """What of the model's cache cannot be cut back, if anything."""
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ()) - _CROPPED
    if model.config.is_encoder_decoder:
        return "an encoder"
    if kinds or getattr(model, "_is_stateful", False):
        return f"states that cannot be cut back ({', '.join(sorted(kinds)) or 'recurrent'})"
    return ""


def _special_way(model: Any, given: dict[str, Any]) -> str:
    """What a generation config says that guesses do not go with, if anything."""
    told = given.pop("generation_config", None)
    given.pop("streamer", None)
    config, _ = model._prepare_generation_config(told, **given)
    mode = str(getattr(config.get_generation_mode(None), "value", ""))
    cache = getattr(config, "cache_implementation", None)
    ways = (
        (mode not in _MODES, mode.replace("_", " ")),
        ((config.num_return_sequences or 1) != 1, "several answers"),
        (config.use_cache is False, "use_cache=False"),
        (cache not in (None, "dynamic"), f"cache_implementation={cache!r}"),
        (getattr(config, "guidance_scale", None) not in (None, 1, 1.0), "guidance_scale="),
        (getattr(config, "stop_strings", None) is not None, "stop_strings="),
        # The library's assisted loop reads a prompt whole.
        (getattr(config, "prefill_chunk_size", None) is not None, "prefill_chunk_size="),
        # It would mix the draft's words into the answer.
        (getattr(config, "assistant_ensemble_weight", None), "assistant_ensemble_weight="),
        # Some watermarks remember what they have seen, and that would be guesses, too.
        (getattr(config, "watermarking_config", None) is not None, "watermarking_config="),
    )
    return next((why for hinders, why in ways if hinders), "")


def _as_it_is(told: dict[str, Any], *_more: object) -> dict[str, Any]:
    return told


def assist(model: Any, course: Course, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Have the library generate, with the guesses that `course` asks for."""
    token, caches = COURSE.set(course), _GROWING.set([])
    try:
        # The library takes whoever is named here for the sign that tokens are guessed; who guesses
        # is what `candidates` makes.
        return type(model).generate(model, *args, **{**kwargs, "assistant_model": model})
    finally:
        for cache in _GROWING.get():
            _record_no_more(cache)
        _GROWING.reset(caches)
        COURSE.reset(token)


def _record_no_more(cache: Any) -> None:
    """Have layers of a window drop again what is behind it, in passes that are not taken back."""
    for layer in getattr(cache, "layers", ()):
        if hasattr(layer, "record_past"):
            layer.record_past = False


def candidates(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Answer for a model's `_get_candidate_generator`."""
    make: Callable[..., Any] = getattr(type(model), MAKES_CANDIDATES)
    course = COURSE.get()
    if course is None or args or kwargs.get("assistant_model") is not model:
        return make(model, *args, **kwargs)
    given = kwargs["model_kwargs"]
    _GROWING.get().extend(given.get(name) for name in _CACHES)

    def inner(input_ids: torch.Tensor) -> Any:
        config = copy.copy(kwargs["generation_config"])
        if course.assistant is None:
            config.prompt_lookup_num_tokens = 1
        told = {name: value for name, value in given.items() if name not in _CACHES}
        length = input_ids.shape[1]  # the text has grown since the library was asked
        for name, more in _GROWN:
            told = getattr(library, name, _as_it_is)(told, length, *more)
        changed = {"generation_config": config, "input_ids": input_ids, "model_kwargs": told}
        made = make(model, **{**kwargs, **changed, "assistant_model": course.assistant})
        if course.assistant is not None:
            # A model's own copy is as unsure of a word as the model, and guesses it all the same:
            # no guess is the last because it is unlikely.
            for config in (made.assistant_generation_config, made.generation_config):
                config.assistant_confidence_threshold = 0.0
        return made

    return Guesses(course, inner, kwargs["generation_config"].max_length, given)


class Guesses(library.CandidateGenerator):
    """Asks the library's own generator for as many guesses as somebody says."""

    def __init__(
        self,
        course: Course,
        make: Callable[[torch.Tensor], Any],
        longest: int,
        given: Mapping[str, Any],
    ) -> None:
        """`make`: the library's, for a text so far; `longest`: tokens of prompt and answer.

        `given`: what the model's passes are given beside the text; its cache grows with them.
        """
        self._course, self._make, self._longest = course, make, longest
        self._given = given
        self._cache = next((given[name] for name in _CACHES if given.get(name) is not None), None)
        self._inner: Any = None
        self._of: Any = None
        """Who guesses in `_inner`."""
        self._first = True
        self._guessed, self._guessing, self._began = 0, 0.0, 0.0

    def get_candidates(self, input_ids: torch.Tensor, **_kwargs: Any) -> tuple[Any, Any]:
        """Guess: ids int64 `[1, tokens + guesses]`, and logits `[1, guesses, words]` of a draft.

        Whatever becomes of the guesses, the answer goes on: without any, if it has to.
        """
        tokens = input_ids.shape[1]
        count = self._course.begin(self._longest - tokens - 1, tokens)
        began = time.perf_counter()
        ids, logits = input_ids, None
        if count > 0 or self._course.assistant is not None:
            fits = self._fits(tokens, max(0, count))
            if fits and count > 0:
                ids, logits = self._guess(input_ids, count)
                # What the draft took on meanwhile counts.
                fits = self._fits(tokens, ids.shape[1] - tokens)
            if not fits:
                ids, logits = input_ids, None
                self._inner = self._of = None  # its cache goes before the pass
                self._course.make_way(tokens)
            self._course.collect()
        self._began = time.perf_counter()
        self._guessing = self._began - began
        self._guessed = ids.shape[1] - tokens
        return ids, logits

    def _guess(self, input_ids: torch.Tensor, count: int) -> tuple[Any, Any]:
        try:
            if self._inner is None:
                self._inner, self._of = self._make(input_ids), self._course.assistant
            self._ask_for(count)
            ids, logits = self._inner.get_candidates(input_ids)
        except Exception as error:  # a draft is a model: anything may go wrong in it
            self._inner = self._of = None
            self._course.fail(error, input_ids.shape[1])
            return input_ids, None
        return ids, logits

    def _fits(self, tokens: int, guessed: int) -> bool:
        """Whether there is memory for the pass that checks guesses behind a text of `tokens`."""
        seen = 0 if self._cache is None else self._cache.get_seq_length()
        text = torch.ones((1, tokens + guessed), dtype=torch.long)
        rows = text[:, min(seen, tokens + guessed - 1) :]
        mask = self._given.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == len(text.shape):
            text[:, : mask.shape[1]] = mask[:, : text.shape[1]]  # padding takes a written mask
        given: dict[str, Any] = {"input_ids": rows, "attention_mask": text, "position_ids": rows}
        given |= {"cache": self._cache, "logits_to_keep": guessed + 1, "use_cache": True}
        return self._course.fits(given)

    def _ask_for(self, count: int) -> None:
        if self._of is None:
            self._inner.num_output_tokens = count
        else:
            self._inner.num_assistant_tokens = count

    def update_candidate_strategy(
        self, _input_ids: torch.Tensor, _scores: torch.Tensor, num_matches: Any
    ) -> None:
        """The pass is over, and so many guesses were right."""
        seconds = time.perf_counter() - self._began
        kept = min(int(num_matches), self._guessed)
        self._course.end(self._guessed, kept, seconds, self._guessing, first=self._first)
        self._first = False
        if self._of is not self._course.assistant:
            self._inner = self._of = None  # it has been given up: its memory goes with it
