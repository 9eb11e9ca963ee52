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
    *("assistant_model", "custom_generate", "inputs_embeds", "prefix_allowed_tokens_fn"),
    *("logits_processor", "negative_prompt_ids", "stop_strings", "synced_gpus"),
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

    def begin(self, room: int) -> int:
        """How many tokens to guess, `room` at most."""

    @property
    def assistant(self) -> Any:
        """The model that guesses; None: the text so far is looked up."""

    def end(self, guessed: int, kept: int, seconds: float, guessing: float, *, first: bool) -> None:
        """A pass is over that took so long, as guessing did; `first`: it took the prompt, too."""


COURSE: ContextVar[Course | None] = ContextVar("pipeload_drafts", default=None)
"""Of the `generate` that runs in this context."""
UNASSISTED: ContextVar[bool] = ContextVar("pipeload_unassisted", default=False)
"""Whether nothing is to be guessed in this context."""


def is_usual(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of `generate` would make one token after another of one prompt.

    Such a call can be assisted without anything else about it being different.
    """
    names = ("inputs", "generation_config")
    if len(args) > len(names):
        return False
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if any(given.get(name) is not None for name in _NOT_BESIDE):
        return False
    ids = given.pop("inputs", None)
    return (
        _is_one_prompt(given.get("input_ids") if ids is None else ids)
        and _takes_several(given)
        and _can_be_cropped(model)
        and _is_plain(model, given)
    )


def _is_one_prompt(ids: object) -> bool:
    whole = isinstance(ids, torch.Tensor) and not ids.is_floating_point() and ids.dim() == 2
    return whole and len(ids) == 1  # type: ignore[arg-type]


def _takes_several(given: dict[str, Any]) -> bool:
    """Whether what is given can do with several tokens at once, and with some that are cut off.

    A criterion that looks at the latest token alone would miss the rest.
    """
    criteria = given.pop("stopping_criteria", None) or ()
    caches = (given.get(name) for name in _CACHES)
    return all(getattr(one, "takes_several", False) for one in criteria) and all(
        cache is None or isinstance(cache, DynamicCache) for cache in caches
    )


def _can_be_cropped(model: Any) -> bool:
    config = model.config.get_text_config(decoder=True)
    layers = getattr(config, "layer_types", None) or ()
    return not (
        model.config.is_encoder_decoder
        or getattr(model, "_is_stateful", False)
        or set(layers) - _CROPPED
    )


def _is_plain(model: Any, given: dict[str, Any]) -> bool:
    told = given.pop("generation_config", None)
    given.pop("streamer", None)
    config, _ = model._prepare_generation_config(told, **given)
    guided = getattr(config, "guidance_scale", None) not in (None, 1, 1.0)
    stops = getattr(config, "stop_strings", None)
    cached = getattr(config, "cache_implementation", None) in (None, "dynamic")
    return (
        str(getattr(config.get_generation_mode(None), "value", "")) in _MODES
        and (config.num_return_sequences or 1) == 1
        and config.use_cache is not False
        and cached
        and not guided
        and stops is None
    )


def _as_it_is(told: dict[str, Any], *_more: object) -> dict[str, Any]:
    return told


def assist(model: Any, course: Course, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Have the library generate, with the guesses that `course` asks for."""
    token = COURSE.set(course)
    try:
        # The library takes whoever is named here for the sign that tokens are guessed; who guesses
        # is what `candidates` makes.
        return type(model).generate(model, *args, **{**kwargs, "assistant_model": model})
    finally:
        COURSE.reset(token)


def candidates(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Answer for a model's `_get_candidate_generator`."""
    make: Callable[..., Any] = getattr(type(model), MAKES_CANDIDATES)
    course = COURSE.get()
    if course is None or args or kwargs.get("assistant_model") is not model:
        return make(model, *args, **kwargs)

    def inner(input_ids: torch.Tensor) -> Any:
        config = copy.copy(kwargs["generation_config"])
        if course.assistant is None:
            config.prompt_lookup_num_tokens = 1
        given = kwargs["model_kwargs"].items()
        told = {name: value for name, value in given if name not in _CACHES}
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

    return Guesses(course, inner, kwargs["generation_config"].max_length)


class Guesses(library.CandidateGenerator):
    """Asks the library's own generator for as many guesses as somebody says."""

    def __init__(self, course: Course, make: Callable[[torch.Tensor], Any], longest: int) -> None:
        """`make`: the library's, for a text so far; `longest`: tokens of prompt and answer."""
        self._course, self._make, self._longest = course, make, longest
        self._inner: Any = None
        self._of: Any = None
        """Who guesses in `_inner`."""
        self._first = True
        self._guessed, self._guessing, self._began = 0, 0.0, 0.0

    def get_candidates(self, input_ids: torch.Tensor, **_kwargs: Any) -> tuple[Any, Any]:
        """Guess: ids int64 `[1, tokens + guesses]`, and logits `[1, guesses, words]` of a draft."""
        count = self._course.begin(self._longest - input_ids.shape[1] - 1)
        began = time.perf_counter()
        ids, logits = input_ids, None
        if count > 0:
            if self._inner is None:
                self._inner, self._of = self._make(input_ids), self._course.assistant
            self._ask_for(count)
            ids, logits = self._inner.get_candidates(input_ids)
        self._began = time.perf_counter()
        self._guessing = self._began - began
        self._guessed = ids.shape[1] - input_ids.shape[1]
        return ids, logits

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
