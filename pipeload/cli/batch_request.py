"""What a request of `pipeload batch` asks of a model, and the answer in the form that it expects.

Every field is served, or says nothing, or makes the request an error: none is ignored.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeload.cli.answer import Cut, StopAt
from pipeload.cli.batch_file import LineError
from pipeload.cli.prompt import encode_messages, encode_text
from pipeload.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from pipeload.cli.batch_file import Line

_CHAT = "/v1/chat/completions"
_ROLES = {"system", "developer", "user", "assistant"}
_MOST_STOPS = 4
_MOST_ANSWERS = 128  # as of the API; a prompt is copied for each before any limit is looked at
_LABELS = {"user", "metadata", "safety_identifier", "prompt_cache_key"}
"""What says nothing about the answer."""
# What asks for nothing, of fields that could ask for what is not served.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "store": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
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


class Asked(NamedTuple):
    """A request, as the model gets it."""

    line: Line
    inputs: Mapping[str, torch.Tensor]
    options: Mapping[str, Any]
    """Those of `generate`, and the seed."""
    stops: tuple[str, ...]

    @property
    def arguments(self) -> dict[str, Any]:
        """All that `pipeload.generate_many` is given."""
        return {**self.inputs, **self.options}


def parse(line: Line, settings: Settings) -> Asked:
    """What a request asks for.

    Raises:
        LineError: it is none, or asks for what is not served.
    """
    if line.wrong is not None:
        raise line.wrong
    fields = {name: value for name, value in line.body.items() if value is not None}
    for name, nothing in _NOTHING.items():
        value = fields.pop(name, None)
        if value is not None and not any(_is_same(value, each) for each in nothing):
            raise LineError(f"{name}={value!r} is not served. Leave it out.", parameter=name)
    for name in _LABELS:
        fields.pop(name, None)
    model = fields.pop("model", settings.model)
    if not isinstance(model, str) or model not in settings.names:
        raise LineError(
            f"model {model!r} is not the one that answers, {settings.model!r}. Write that, or "
            "leave it out.",
            parameter="model",
        )
    inputs = _inputs(line.url, fields, settings.tokenizer)
    prompt_tokens = int(inputs["input_ids"].shape[1])
    options, stops = _options(fields, settings)
    if fields:
        name = min(fields)
        raise LineError(f"{name!r} is not served. Leave it out.", parameter=name)
    if stops:
        criterion = StopAt(settings.tokenizer, stops, prompt_tokens=prompt_tokens)
        options["stopping_criteria"] = [criterion]
    return Asked(line, inputs, options, stops)


def _is_same(value: object, nothing: object) -> bool:
    """Whether both say the same: 0 log probabilities are those of the chosen tokens, not none."""
    return value == nothing and isinstance(value, bool) == isinstance(nothing, bool)


def _inputs(url: str, fields: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    name = "messages" if url == _CHAT else "prompt"
    given = fields.pop(name, None)
    try:
        if url == _CHAT:
            return encode_messages(tokenizer, _messages(given))
        if isinstance(given, str):
            return encode_text(tokenizer, given)
    except OptionError as error:
        raise LineError(str(error), parameter=name) from error
    raise LineError("prompt is to be one text. Give each its own line.", parameter="prompt")


def _messages(given: object) -> list[dict[str, str]]:
    if not isinstance(given, list) or not given:
        raise LineError("messages is to be a list of them.", parameter="messages")
    return [_message(number, message) for number, message in enumerate(given)]


def _message(number: int, given: Any) -> dict[str, str]:
    where = f"messages[{number}]"
    if not isinstance(given, dict) or not any(given.get("role") == role for role in _ROLES):
        roles = ", ".join(sorted(_ROLES))
        raise LineError(f"{where} has no role that is served: {roles}.", parameter=where)
    unknown = sorted(given.keys() - {"role", "content", "name"})
    if unknown:
        raise LineError(f"{unknown[0]!r} in {where} is not served. Leave it out.", parameter=where)
    content = given.get("content")
    if isinstance(content, list) and all(_is_text(part) for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise LineError(f"content of {where} is to be text, alone.", parameter=where)
    named = {"name": str(given["name"])} if given.get("name") is not None else {}
    return {"role": given["role"], "content": content, **named}


def _is_text(part: object) -> bool:
    return (
        isinstance(part, dict)
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and isinstance(part["text"], str)
    )


def _options(fields: dict[str, Any], settings: Settings) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What `generate` is asked for, as `pipeload run` asks; takes it out of `fields`."""
    lengths = ("max_completion_tokens", "max_tokens")
    asked = [_whole(fields, name, least=1) for name in lengths]
    given = [length for length in asked if length is not None]
    if len(set(given)) > 1:
        raise LineError(
            f"{lengths[0]}={given[0]} and {lengths[1]}={given[1]} are two lengths. Give one.",
            parameter=lengths[1],
        )
    new = given[0] if given else settings.max_new_tokens
    temperature = _number(fields, "temperature", lambda value: value >= 0)
    drawn = {
        "temperature": temperature or None,
        "top_p": _number(fields, "top_p", lambda value: 0 < value <= 1),
        "top_k": _whole(fields, "top_k", least=1),
    }
    seed = _whole(fields, "seed", least=0)
    count = _whole(fields, "n", least=1) or 1
    if count > _MOST_ANSWERS:
        raise LineError(
            f"n={count} is more than {_MOST_ANSWERS} answers. Ask for fewer.", parameter="n"
        )
    samples = seed is not None or any(value is not None for value in drawn.values())
    if temperature == 0 and samples:
        raise LineError(
            "temperature 0 takes the likeliest token always. Leave out seed, top_p and top_k.",
            parameter="temperature",
        )
    if count > 1 and not samples:
        raise LineError(
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


def _whole(fields: dict[str, Any], name: str, *, least: int) -> int | None:
    value = fields.pop(name, None)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 63:
        raise LineError(f"{name}={value!r} is no whole number from {least}.", parameter=name)
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
        raise LineError(f"{name}={value!r} is out of range.", parameter=name)
    return number


def _stops(fields: dict[str, Any]) -> tuple[str, ...]:
    given = fields.pop("stop", None)
    stops = [given] if isinstance(given, str) else [] if given is None else given
    texts = isinstance(stops, list) and all(isinstance(one, str) and one for one in stops)
    if not texts or len(stops) > _MOST_STOPS:
        raise LineError(f"stop is to be a text, or up to {_MOST_STOPS} of them.", parameter="stop")
    return tuple(stops)


class Ends(NamedTuple):
    """What stands at the end of answers."""

    tokens: frozenset[int]
    """Each of which ends one."""
    padding: int | None
    """What follows in one that ended before others."""

    def cut(self, row: list[int], *, alone: bool) -> tuple[list[int], bool]:
        """The tokens of an answer, its end included, and whether it came to that."""
        for at, token in enumerate(row):
            if token in self.tokens:
                return row[: at + 1], True
        while row and not alone and row[-1] == self.padding:
            row = row[:-1]  # it came to a text that ends it
        return row, False


class Answered(NamedTuple):
    """What a model has made of a request."""

    body: dict[str, Any]
    tokens: int


def answer(asked: Asked, output: torch.Tensor, settings: Settings, ends: Ends) -> Answered:
    """The answer in the form that the request expects."""
    prompt_tokens, chat = int(asked.inputs["input_ids"].shape[1]), asked.line.url == _CHAT
    choices, tokens = [], 0
    for index, row in enumerate(output[:, prompt_tokens:].tolist()):
        made, ended = ends.cut(row, alone=len(output) == 1)
        whole = settings.tokenizer.decode(made, skip_special_tokens=True)
        text = Cut(asked.stops).add(whole, end=True)
        tokens += len(made)
        shown: dict[str, Any] = {"text": text}
        if chat:
            shown = {"message": {"role": "assistant", "content": text, "refusal": None}}
        # One that is short was ended by a text that is not shown: that of a special token.
        whole_length = len(made) >= asked.options["max_new_tokens"]
        reason = "stop" if ended or text != whole or not whole_length else "length"
        choices.append({"index": index, **shown, "logprobs": None, "finish_reason": reason})
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": settings.model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens + tokens,
        },
    }
    if "seed" in asked.options:
        body["seed"] = asked.options["seed"]
    return Answered(body, tokens)
