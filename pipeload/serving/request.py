"""What a request asks of a model: a line of `pipeload batch`, or one to `pipeload serve`.

Every field is served, or says nothing, or makes the request an error: none is ignored.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeload.errors import OptionError
from pipeload.serving.answer_text import StopAt
from pipeload.serving.encoding import encode_messages, encode_text
from pipeload.serving.messages import read_messages, read_tools
from pipeload.serving.request_error import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_MOST_STOPS = 4
_MOST_ANSWERS = 128  # as of the API; a prompt is copied for each before any limit is looked at
_LABELS = {"user", "metadata", "safety_identifier", "prompt_cache_key"}
"""What says nothing about the answer."""
# What asks for nothing, of fields that could ask for what is not served.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}


class Settings(NamedTuple):
    """What holds for all requests."""

    tokenizer: Any
    model: str
    """What answers are said to be from."""
    names: frozenset[str]
    """What requests may call the model."""
    max_new_tokens: int
    """Of answers that are given no length."""
    response_template: dict[str, Any] | None = None
    """How the model writes calls of tools; None where nobody knows: then tools are refused."""
    streams: bool = False
    """Whether answers may be asked for in pieces."""
    positions: int | None = None
    """For how many tokens the model was made, where more are to be refused."""


class Asked(NamedTuple):
    """A request, as the model gets it."""

    url: str
    inputs: Mapping[str, torch.Tensor]
    options: Mapping[str, Any]
    """Those of `generate`, and the seed."""
    stops: tuple[str, ...]
    tools: list[dict[str, Any]]
    """What the model may call."""
    streams: bool
    """Whether the answer is to come in pieces."""
    counts: bool
    """Whether the last of them is to say how many tokens there were."""

    @property
    def arguments(self) -> dict[str, Any]:
        """All that `pipeload.generate_many` is given."""
        return {**self.inputs, **self.options}

    @property
    def prompt_tokens(self) -> int:
        """How long the prompt is."""
        return int(self.inputs["input_ids"].shape[1])

    @property
    def answers(self) -> int:
        """How many are asked for."""
        return int(self.options.get("num_return_sequences", 1))


def parse(url: str, body: Mapping[str, Any], settings: Settings) -> Asked:
    """What the `body` of a request to `url` asks for.

    Raises:
        RequestError: it asks for what is not served.
    """
    fields = {name: value for name, value in body.items() if value is not None}
    for name, nothing in _NOTHING.items():
        value = fields.pop(name, None)
        if value is not None and not any(_is_same(value, each) for each in nothing):
            raise RequestError(f"{name}={value!r} is not served. Leave it out.", parameter=name)
    for name in _LABELS:
        fields.pop(name, None)
    model = fields.pop("model", settings.model)
    if not isinstance(model, str) or model not in settings.names:
        raise RequestError(
            f"model {model!r} is not the one that answers, {settings.model!r}. Write that, or "
            "leave it out.",
            parameter="model",
            code="model_not_found",
        )
    tools = read_tools(fields, known=settings.response_template is not None) if url == CHAT else []
    inputs = _inputs(url, fields, settings.tokenizer, tools)
    room = None
    if settings.positions is not None:
        room = settings.positions - int(inputs["input_ids"].shape[1])
    options, stops = _options(fields, settings, room)
    streams, counts = _pieces(fields, settings, answers=options.get("num_return_sequences", 1))
    if fields:
        name = min(fields)
        raise RequestError(f"{name!r} is not served. Leave it out.", parameter=name)
    asked = Asked(url, inputs, options, stops, tools, streams, counts)
    if stops:
        criterion = StopAt(settings.tokenizer, stops, prompt_tokens=asked.prompt_tokens)
        options["stopping_criteria"] = [criterion]
    return asked


def _is_same(value: object, nothing: object) -> bool:
    """Whether both say the same: 0 log probabilities are those of the chosen tokens, not none."""
    return value == nothing and isinstance(value, bool) == isinstance(nothing, bool)


def _inputs(
    url: str, fields: dict[str, Any], tokenizer: Any, tools: list[dict[str, Any]]
) -> dict[str, Any]:
    name = "messages" if url == CHAT else "prompt"
    given = fields.pop(name, None)
    try:
        if url == CHAT:
            return _chat_inputs(tokenizer, read_messages(given, tools=bool(tools)), tools)
        if isinstance(given, str):
            return encode_text(tokenizer, given)
    except OptionError as error:
        raise RequestError(str(error), parameter=name) from error
    raise RequestError("prompt is to be one text. Send each by itself.", parameter="prompt")


def _chat_inputs(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> dict[str, Any]:
    if not tools:
        return encode_messages(tokenizer, messages)
    inputs = encode_messages(tokenizer, messages, tools=tools)
    if encode_messages(tokenizer, messages)["input_ids"].equal(inputs["input_ids"]):
        raise RequestError(
            "the model's chat template has no place for tools. Leave them out.", parameter="tools"
        )
    return inputs


def _pieces(fields: dict[str, Any], settings: Settings, *, answers: int) -> tuple[bool, bool]:
    """Whether the answer is to come in pieces, and its length with the last one."""
    streams, options = fields.pop("stream", False), fields.pop("stream_options", None)
    if not isinstance(streams, bool) or (streams and not settings.streams):
        raise RequestError(f"stream={streams!r} is not served. Leave it out.", parameter="stream")
    if streams and answers > 1:
        raise RequestError(
            f"n={answers} answers are not served in pieces. Leave stream out.", parameter="n"
        )
    if options is None:
        return streams, False
    known = isinstance(options, dict) and options.keys() <= {"include_usage"}
    counts = options.get("include_usage", False) if known else None
    if not streams or not isinstance(counts, bool):
        raise RequestError(
            f"stream_options={options!r} is not served. With stream, write "
            '{"include_usage": true}; else leave it out.',
            parameter="stream_options",
        )
    return streams, counts


def _options(
    fields: dict[str, Any], settings: Settings, room: int | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What `generate` is asked for, as `pipeload run` asks; takes it out of `fields`.

    `room`: how many tokens the model has positions for, None: as many as are asked for.
    """
    new = _new_tokens(fields, settings, room)
    temperature = _number(fields, "temperature", lambda value: value >= 0)
    drawn = {
        "temperature": temperature or None,
        "top_p": _number(fields, "top_p", lambda value: 0 < value <= 1),
        "top_k": _whole(fields, "top_k", least=1),
    }
    seed = _whole(fields, "seed", least=0)
    count = _whole(fields, "n", least=1) or 1
    if count > _MOST_ANSWERS:
        raise RequestError(
            f"n={count} is more than {_MOST_ANSWERS} answers. Ask for fewer.", parameter="n"
        )
    samples = seed is not None or any(value is not None for value in drawn.values())
    if temperature == 0 and samples:
        raise RequestError(
            "temperature 0 takes the likeliest token always. Leave out seed, top_p and top_k.",
            parameter="temperature",
        )
    if count > 1 and not samples:
        raise RequestError(
            f"n={count} answers would all be the same. Give a temperature or a seed.", parameter="n"
        )
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": samples}
    if samples:
        options["seed"] = secrets.randbelow(1 << 32) if seed is None else seed
    if count > 1:
        options["num_return_sequences"] = count
    penalty = _number(fields, "repetition_penalty", lambda value: value > 0)
    options |= {name: value for name, value in drawn.items() if value is not None}
    if penalty is not None:
        options["repetition_penalty"] = penalty
    return options, _stops(fields)


def _new_tokens(fields: dict[str, Any], settings: Settings, room: int | None) -> int:
    lengths = ("max_completion_tokens", "max_tokens")
    asked = [_whole(fields, name, least=1) for name in lengths]
    given = [length for length in asked if length is not None]
    if len(set(given)) > 1:
        raise RequestError(
            f"{lengths[0]}={given[0]} and {lengths[1]}={given[1]} are two lengths. Give one.",
            parameter=lengths[1],
        )
    new = given[0] if given else settings.max_new_tokens
    if room is None:
        return new
    new = new if given else max(1, min(new, room))
    if new > room:
        raise RequestError(
            f"the model was made for {settings.positions} tokens: there is room for "
            f"{max(0, room)} behind this prompt, and not for {new}. Give less.",
            parameter=lengths[1],
            code="context_length_exceeded",
        )
    return new


def _whole(fields: dict[str, Any], name: str, *, least: int) -> int | None:
    value = fields.pop(name, None)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 63:
        raise RequestError(f"{name}={value!r} is no whole number from {least}.", parameter=name)
    return value


def _number(fields: dict[str, Any], name: str, allowed: Callable[[float], bool]) -> float | None:
    value = fields.pop(name, None)
    if value is None:
        return None
    number = math.nan
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # of a whole number that no float can be
            number = float(value)
    if not math.isfinite(number) or not allowed(number):
        raise RequestError(f"{name}={value!r} is out of range.", parameter=name)
    return number


def _stops(fields: dict[str, Any]) -> tuple[str, ...]:
    given = fields.pop("stop", None)
    stops = [given] if isinstance(given, str) else [] if given is None else given
    texts = isinstance(stops, list) and all(isinstance(one, str) and one for one in stops)
    if not texts or len(stops) > _MOST_STOPS:
        raise RequestError(
            f"stop is to be a text, or up to {_MOST_STOPS} of them.", parameter="stop"
        )
    return tuple(stops)
