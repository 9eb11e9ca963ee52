"""Answers in the form that requests expect: whole, or in pieces."""

from __future__ import annotations

import json
import secrets
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeload.hf.response_parsing import parse_answer
from pipeload.serving.answer_text import Cut, end_tokens
from pipeload.serving.request import CHAT

if TYPE_CHECKING:
    import torch

    from pipeload.serving.request import Asked, Settings

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""What templates of answers may call them, the usual name first."""


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


def ends_of(model: Any) -> Ends:
    """What stands at the end of a model's answers."""
    return Ends(end_tokens(model), model.generation_config.pad_token_id)


class Answered(NamedTuple):
    """What a model has made of a request."""

    body: dict[str, Any]
    tokens: int


def answer(
    asked: Asked,
    output: torch.Tensor,
    settings: Settings,
    ends: Ends,
    *,
    cached: int = 0,
    exact: bool = True,
) -> Answered:
    """The answer as one object; `output` is int64, `[answers, tokens]`, with the prompt.

    `cached`: tokens of the prompt that were not computed again; `exact`: nothing is said of the
    bits, which are those of the request alone.
    """
    chat = asked.url == CHAT
    choices, tokens = [], 0
    for index, row in enumerate(output[:, asked.prompt_tokens :].tolist()):
        made, ended = ends.cut(row, alone=len(output) == 1)
        whole = settings.tokenizer.decode(made, skip_special_tokens=True)
        text = Cut(asked.stops).add(whole, end=True)
        tokens += len(made)
        # One that is short was ended by a text that is not shown: that of a special token.
        whole_length = len(made) >= asked.options["max_new_tokens"]
        reason = "stop" if ended or text != whole or not whole_length else "length"
        shown: dict[str, Any] = {"text": text}
        if chat:
            message = _message(asked, made, text, settings)
            reason = "tool_calls" if "tool_calls" in message else reason
            shown = {"message": message}
        choices.append({"index": index, **shown, "logprobs": None, "finish_reason": reason})
    body = _head(asked, settings, "chat.completion" if chat else "text_completion")
    body |= {
        "choices": choices,
        "usage": {
            "prompt_tokens": asked.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": asked.prompt_tokens + tokens,
        },
    }
    if cached:
        body["usage"]["prompt_tokens_details"] = {"cached_tokens": cached}
    if "seed" in asked.options:
        body["seed"] = asked.options["seed"]
    if not exact:
        body["pipeload"] = {"exact": False}
    return Answered(body, tokens)


def _head(asked: Asked, settings: Settings, kind: str) -> dict[str, Any]:
    return {
        "id": f"{'chatcmpl' if asked.url == CHAT else 'cmpl'}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": settings.model,
    }


def _message(asked: Asked, made: list[int], text: str, settings: Settings) -> dict[str, Any]:
    plain = {"role": "assistant", "content": text, "refusal": None}
    if not asked.tools or settings.response_template is None:
        return plain
    prompt = asked.inputs["input_ids"][0].tolist()
    try:
        parsed = parse_answer(
            settings.tokenizer, settings.response_template, made, prompt=prompt, tools=asked.tools
        )
        calls = [_call(call["function"]) for call in parsed.get("tool_calls") or []]
    except Exception:
        return plain
    content = Cut(asked.stops).add(parsed.get("content") or "", end=True)
    message = plain | {"content": content or (None if calls else "")}
    if thoughts := next((parsed[name] for name in _THOUGHTS if parsed.get(name)), None):
        message["reasoning_content"] = thoughts
    return message | ({"tool_calls": calls} if calls else {})


def _call(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    named = {"name": function["name"], "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": named}


class Pieces:
    """The objects in which an answer comes in pieces."""

    def __init__(self, asked: Asked, settings: Settings) -> None:
        self._asked, self._chat = asked, asked.url == CHAT
        self._head = _head(asked, settings, "chat.completion.chunk")
        if not self._chat:
            self._head["object"] = "text_completion"
        self._begun = False

    def piece(self, text: str) -> dict[str, Any]:
        """Some more text."""
        return self._of({"content": text} if self._chat else {"text": text})

    def last(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """What is left of the answer, which is `body` as a whole: why it ended, and its length."""
        (choice,) = body["choices"]
        made = []
        if self._asked.tools:  # nothing was shown, as a call may have been on its way
            message = {name: value for name, value in choice["message"].items() if value}
            for index, call in enumerate(message.get("tool_calls", ())):
                call["index"] = index
            made.append(self._of(message))
        last = self._of({} if self._chat else {"text": ""}, choice["finish_reason"])
        made.append(last | {name: body[name] for name in ("seed",) if name in body})
        if self._asked.counts:
            made.append(self._head | {"choices": [], "usage": body["usage"]})
        return made

    def _of(self, shown: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        if self._chat:
            role = {} if self._begun else {"role": "assistant"}
            shown = {"delta": role | shown}
        self._begun = True
        choice = {"index": 0, **shown, "logprobs": None, "finish_reason": reason}
        return self._head | {"choices": [choice]}
