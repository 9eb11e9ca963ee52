"""Tools that a model may call: what is asked of it, and what becomes of its answer."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from pipeload.entry.texts import load_tokenizer
from pipeload.hf.response_parsing import response_template
from pipeload.serving.reply import Ends, Pieces, answer
from pipeload.serving.request import CHAT, Asked, Settings, parse
from pipeload.serving.request_error import RequestError
from tests.support.talking import add_letters

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t['function']['name'] }}]{% endfor %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ c['function']['arguments']['city'] }}{% endfor %}"
    "{% endfor %}<answer>"
)
WRITTEN = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<answer>",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<eos>", "content": "text"},
    },
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}
DEEP = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "[" * 99_999}}
MANY_BRACKETS = [{"role": "assistant", "content": None, "tool_calls": [DEEP]}]
ASKED = {"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL], "max_tokens": 99}


OLD = "prefix" not in inspect.signature(PreTrainedTokenizerBase.parse_response).parameters
new_library = pytest.mark.skipif(OLD, reason="this transformers has templates of another kind")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder: Path = tmp_path_factory.mktemp("letters")
    add_letters(folder)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = TEMPLATE
    return Settings(tokenizer, "talker", frozenset({"talker"}), 8, WRITTEN, streams=True)


def prompt_of(asked: Asked, settings: Settings) -> str:
    text: str = settings.tokenizer.decode(asked.inputs["input_ids"][0])
    return text


def answered(text: str, settings: Settings, **fields: Any) -> tuple[Asked, dict[str, Any]]:
    """The answer of a model that writes `text` and its end."""
    asked = parse(CHAT, ASKED | fields, settings)
    new = settings.tokenizer(text, return_tensors="pt")["input_ids"]
    end = torch.tensor([[2]])
    output = torch.cat([asked.inputs["input_ids"], new, end], dim=1)
    return asked, answer(asked, output, settings, Ends(frozenset({2}), 0)).body


def test_the_model_is_told_of_them(settings: Settings) -> None:
    """Unless it is not to call any; calls and results of before are in their places."""
    assert prompt_of(parse(CHAT, ASKED, settings), settings) == "[weather]<user>Hi<answer>"
    none = parse(CHAT, ASKED | {"tool_choice": "none"}, settings)
    assert prompt_of(none, settings) == "<user>Hi<answer>"
    assert none.tools == []
    said = [
        *ASKED["messages"],  # type: ignore[misc]
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    asked = parse(CHAT, ASKED | {"messages": said, "parallel_tool_calls": True}, settings)
    assert prompt_of(asked, settings) == "[weather]<user>Hi<assistant>Rome<tool>sunny<answer>"


@new_library
def test_calls(settings: Settings) -> None:
    """Are taken out of the text, as are thoughts; in pieces, all comes at once."""
    call = '<call>{"name": "weather", "arguments": {"city": "Rome"}}</call>'
    asked, body = answered(f"<think>hm</think>{call}{call}", settings, stream=True)
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None
    assert message["reasoning_content"] == "hm"
    assert [json.loads(c["function"]["arguments"]) for c in message["tool_calls"]] == [
        {"city": "Rome"}
    ] * 2
    first, last = Pieces(asked, settings).last(body)
    delta = first["choices"][0]["delta"]
    assert delta["role"] == "assistant"
    assert [c["index"] for c in delta["tool_calls"]] == [0, 1]
    assert last["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("text", ["No.", "<call>no call</call>", "<call>{"])
def test_no_call(settings: Settings, text: str) -> None:
    """Text stays text, also where it looks like a call and is none."""
    asked, body = answered(text, settings)
    (choice,) = body["choices"]
    assert choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert Pieces(asked, settings).last(body)[0]["choices"][0]["delta"]["content"] == text


def test_a_text_that_ends_an_answer(settings: Settings) -> None:
    """It is shown no more than without tools."""
    _, body = answered("<think>hm</think>No.\nUser:", settings, stop="\nUser:")
    assert body["choices"][0]["message"]["content"] == "No."
    assert body["choices"][0]["finish_reason"] == "stop"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools is to be a list of"),
    ({"tools": ["weather"]}, "tools is to be a list of"),
    ({"messages": [*MANY_BRACKETS]}, "with arguments in JSON"),
    ({"tools": {"a": 1}}, "tools is to be a list of"),
    ({"tool_choice": "required"}, "tool_choice='required' is not served"),
    ({"tool_choice": {"type": "function"}}, "is not served: the model chooses"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls=False is not served"),
    ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "tool_calls of messages[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls of messages[0]"),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "function": {"name": "x", "arguments": "{"}}],
                }
            ]
        },
        "with arguments in JSON",
    ),
    ({"tools": [], "messages": [{"role": "tool", "content": "x"}]}, "has no role that is served"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_refused(settings: Settings, fields: dict[str, Any], words: str) -> None:
    """What is wrong with them."""
    with pytest.raises(RequestError) as error:
        parse(CHAT, ASKED | fields, settings)
    assert words in str(error.value)
    assert error.value.status == 400


def test_a_model_that_knows_none(settings: Settings) -> None:
    """Because nobody knows how it writes a call, or its chat template shows it none."""
    with pytest.raises(RequestError, match="how this model writes a call of one is not known"):
        parse(CHAT, ASKED, settings._replace(response_template=None))
    tokenizer = settings.tokenizer
    plain = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer)
    plain.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(RequestError, match="has no place for tools"):
        parse(CHAT, ASKED, settings._replace(tokenizer=plain))


@new_library
def test_how_models_write_them(settings: Settings) -> None:
    """By the tokenizer's own word, or by what the library knows of the kind of model."""
    assert response_template(settings.tokenizer, "llama") is None
    assert response_template(settings.tokenizer, "qwen3") is not None
    assert response_template(object(), "qwen3") is None
    tokenizer = type(settings.tokenizer)(tokenizer_object=settings.tokenizer.backend_tokenizer)
    tokenizer.response_template = WRITTEN
    assert response_template(tokenizer, "qwen3") == WRITTEN
