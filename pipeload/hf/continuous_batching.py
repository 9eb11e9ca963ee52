"""Private parts of transformers: its continuous batching, where requests are rows of one pass.

Seen in 5.24.0. It runs in a thread of its own, draws for all requests or for none, and with the
process's random numbers.
"""

from __future__ import annotations

import copy
import logging
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type

from pipeload.errors import OptionError, PipeloadError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE_TOKENS = 16
"""Tokens whose keys and values lie together: of its last page, a request wastes a part."""
_LOGGER = "ContinuousBatchingLogger"  # it shows what has failed, which we raise
_TICK_SECONDS = 0.2
_USUAL_TOP_K = 50
"""Of `generate`, where neither a request nor a model says."""
_NEUTRAL = {"temperature": 0.5, "top_k": 1, "top_p": 0.5}
"""What has the library make each of its processors; each request brings its own numbers."""
_UNUSED_SECTORS = 2
"""That the library adds for padding."""
_NO_MEMORY = ("not enough memory", "can't allocate memory", "No requests can be scheduled")
"""What errors say that mean as much: of torch's allocator, and of a cache that is in pieces."""
_HARMLESS = """
    do_sample temperature top_k top_p max_length max_new_tokens num_return_sequences
    bos_token_id eos_token_id pad_token_id decoder_start_token_id
    use_cache cache_implementation cache_config max_cache_len prefill_chunk_size low_memory
    compile_config disable_compile continuous_batching_config early_stopping length_penalty
    output_attentions output_hidden_states output_scores output_logits return_dict_in_generate
    is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    assistant_early_exit assistant_lookbehind target_lookbehind assistant_ensemble_weight
    prompt_lookup_num_tokens max_matching_ngram_size speculation_type use_mtp
    _from_model_config transformers_version
"""
"""A model's settings that a request brings itself, or that change no token of its answer."""
_OF_DRAWING = "min_p top_h typical_p epsilon_cutoff eta_cutoff"
# What asks for nothing, where the library's own default does not say so.
_NOTHING: dict[str, Any] = {
    "min_new_tokens": 0,
    "min_p": 0,
    "guidance_scale": 1,
    "penalty_alpha": 0,
    "renormalize_logits": False,
    "token_healing": False,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
}


class Room(NamedTuple):
    """What all requests together may take."""

    at_once: int
    """The most requests of one pass."""
    rows: int
    """The most tokens of one pass: those of prompts come in several."""
    pages: int
    """For keys and values, each of `PAGE_TOKENS` tokens."""


class Made(NamedTuple):
    """What has become of a request so far."""

    name: str
    tokens: list[int]
    """New ones."""
    ended: bool


class Batching:
    """One model's, until it is closed. For one thread, which waits for what is made in another."""

    def __init__(self, model: Any, room: Room, *, samples: bool) -> None:
        """`samples`: requests draw; else all take the likeliest token.

        Raises:
            OptionError: the model's own settings ask for what is not served so.
            UnsupportedModelError: the model is not run so.
        """
        self._model, self._samples = model, samples
        settings = copy.deepcopy(model.generation_config)
        drawn = _NEUTRAL if samples else dict.fromkeys(_NEUTRAL)
        settings.update(do_sample=samples, num_return_sequences=1, **drawn)
        if settings.eos_token_id is None:
            settings.eos_token_id = -1  # none, and no warning of it
        _check(settings, samples=samples)
        config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=room.pages + spare_pages(model),
            max_batch_tokens=room.rows,
            max_requests_per_batch=room.at_once,
            max_blocks_per_request=0,
            use_async_batching=False,  # it would take twice the memory
            use_cuda_graph=False,
            safety_margin=0.0,
            auto_switch_to_flash=False,
            per_request_processors=samples,
        )
        try:
            self._manager = model.init_continuous_batching(
                generation_config=settings, continuous_batching_config=config
            )
        except ValueError as error:
            raise _refused(model, error) from error
        self._log = logging.getLogger(_LOGGER)
        self._level = self._log.level
        self._log.setLevel(logging.CRITICAL)
        self._manager.start()

    def add(
        self, name: str, ids: torch.Tensor, options: Mapping[str, Any], *, pieces: bool
    ) -> None:
        """Have a request run; `ids` is int64, `[1, tokens]`, `options` are those of `generate`.

        `pieces`: each of its tokens is told when it comes, else all at its end.
        """
        drawn = self._drawn(options) if self._samples else {}
        self._manager.add_request(
            ids[0].tolist(),
            request_id=name,
            max_new_tokens=options["max_new_tokens"],
            streaming=pieces,
            **drawn,
        )

    def _drawn(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """As `generate` draws: what a request leaves out is the model's, or the library's."""
        own = self._model.generation_config
        given = {name: options.get(name) or getattr(own, name, None) for name in _NEUTRAL}
        most = self._model.config.get_text_config().vocab_size
        top_k = _USUAL_TOP_K if given["top_k"] is None else given["top_k"]
        return {
            "temperature": float(given["temperature"] or 1.0),
            "top_k": min(int(top_k) or most, most),
            "top_p": float(given["top_p"] or 1.0),
        }

    def cancel(self, name: str) -> None:
        """Have a request end of which enough is there."""
        self._manager.cancel_request(name)

    def made(self) -> Made | None:
        """What one request has made; None where nothing new came for a moment.

        Raises:
            MemoryError: there was none for a pass with so many requests.
            PipeloadError: what ended the passes of all requests.
            UnsupportedModelError: anything else did.
        """
        status = self._manager.background_thread_status
        if (error := status.fatal_error) is not None:
            if isinstance(error, PipeloadError):
                raise error
            if _lacks_memory(error):
                raise MemoryError(
                    f"no memory for a pass: {str(error).rstrip('.')}. Give a smaller "
                    "--memory-limit, or end what else runs."
                ) from error
            raise _refused(self._model, error) from error
        found = self._manager.get_result(timeout=_TICK_SECONDS)
        if found is None:
            return None
        if found.error is None:
            return Made(found.request_id, list(found.generated_tokens), found.is_finished())
        if status.can_accept_new_requests() is None:  # else all have ended, and it says why
            raise _refused(self._model, found.error)
        return None

    def close(self) -> None:
        """End all requests, once the pass is over that runs."""
        try:
            self._manager.stop(block=True, hard_stop=True)
        finally:
            self._log.setLevel(self._level)


def spare_pages(model: Any, *, unused: bool = False) -> int:
    """How many pages there are to be beside those that requests come to.

    The library gives memory to each kind of layer, sliding and full ones, in sectors, which are
    whole blocks of either kind. So all kinds but one may leave nearly a sector of theirs empty.
    `unused`: also of sectors that no request is given.

    Raises:
        UnsupportedModelError: there is a kind that the library does not know.
    """
    try:
        kinds = group_layers_by_attn_type(model.config.get_text_config())
    except ValueError as error:
        raise _refused(model, error) from error
    counts = [len(layers) for layers in kinds.values()]
    sectors = len(counts) - 1 + (_UNUSED_SECTORS if unused else 0)
    return -(-sectors * math.lcm(*counts) // sum(counts))


def _lacks_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def _check(settings: Any, *, samples: bool) -> None:
    """Refuse settings of the model that would be left out without a word."""
    nothing = settings._get_default_generation_params() | _NOTHING
    harmless = (_HARMLESS if samples else _HARMLESS + _OF_DRAWING).split()
    for name in vars(GenerationConfig()):  # what else there is nobody reads
        value = getattr(settings, name, None)
        if value is not None and name not in harmless and value != nothing.get(name):
            raise OptionError(
                f"the model's own settings for answers ask for {name}={value!r}, which continuous "
                "batching does not apply. Take it out of its generation_config.json, or leave "
                "--batched out."
            )


def _refused(model: Any, error: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the library's continuous batching does not run {type(model).__name__}: "
        f"{str(error).rstrip('.')}. Leave --batched out."
    )
