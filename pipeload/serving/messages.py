"""What is said in a conversation, and the tools that a model may call in it."""

from __future__ import annotations

import json
from typing import Any

from pipeload.serving.request_error import RequestError

_ROLES = {"system", "developer", "user", "assistant"}
_KEYS = {"role", "content", "name"}


def read_messages(given: object, *, tools: bool) -> list[dict[str, Any]]:
    """The messages of a request, for a chat template; `tools`: some may be calls, or results.

    Raises:
        RequestError: they are none, or say what is not served.
    """
    if not isinstance(given, list) or not given:
        raise RequestError("messages is to be a list of them.", parameter="messages")
    return [_message(number, message, tools=tools) for number, message in enumerate(given)]


def _message(number: int, given: Any, *, tools: bool) -> dict[str, Any]:
    where = f"messages[{number}]"
    roles = _ROLES | ({"tool"} if tools else set())
    if not isinstance(given, dict) or not any(given.get("role") == role for role in roles):
        named = ", ".join(sorted(roles))
        raise RequestError(f"{where} has no role that is served: {named}.", parameter=where)
    given = {name: value for name, value in given.items() if value is not None or name == "content"}
    more: dict[str, Any] = {}
    if tools and given["role"] == "assistant" and "tool_calls" in given:
        more["tool_calls"] = _calls(given.pop("tool_calls"), where)
        given = {"content": ""} | {
            name: value for name, value in given.items() if value is not None
        }
    if given["role"] == "tool" and "tool_call_id" in given:
        more["tool_call_id"] = str(given.pop("tool_call_id"))
    if unknown := sorted(given.keys() - _KEYS):
        raise RequestError(
            f"{unknown[0]!r} in {where} is not served. Leave it out.", parameter=where
        )
    if given.get("name") is not None:
        more["name"] = str(given["name"])
    return {"role": given["role"], "content": _text(given.get("content"), where), **more}


def _text(content: object, where: str) -> str:
    if isinstance(content, list) and all(map(_is_text, content)):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise RequestError(f"content of {where} is to be text, alone.", parameter=where)
    return content


def _is_text(part: object) -> bool:
    return (
        isinstance(part, dict)
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and isinstance(part["text"], str)
    )


def _calls(given: object, where: str) -> list[dict[str, Any]]:
    """Calls that the model has made, their arguments as templates take them."""
    try:
        return [_call(call) for call in given]  # type: ignore[attr-defined]
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise RequestError(
            f'tool_calls of {where} are to be {{"id", "type": "function", "function": {{"name", '
            '"arguments"}}}}, with arguments in JSON.',
            parameter=where,
        ) from error


def _call(given: Any) -> dict[str, Any]:
    function = given["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    named = {"name": str(function["name"]), "arguments": arguments}
    return {"id": str(given["id"]), "type": "function", "function": named}


def read_tools(fields: dict[str, Any], *, known: bool) -> list[dict[str, Any]]:
    """What the model may call; takes it out of `fields`.

    `known`: whether what it answers can be taken apart.

    Raises:
        RequestError: tools are asked for in a way that is not served.
    """
    tools, choice = fields.pop("tools", []), fields.pop("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise RequestError(
            f"tool_choice={choice!r} is not served: the model chooses. Leave it out.",
            parameter="tool_choice",
        )
    if not isinstance(tools, list) or not all(map(_is_function, tools)):
        raise RequestError(
            'tools is to be a list of {"type": "function", "function": {"name", ...}}.',
            parameter="tools",
        )
    if tools and not known:
        raise RequestError(
            "tools are not served: how this model writes a call of one is not known. Leave them "
            "out.",
            parameter="tools",
        )
    return tools if choice == "auto" else []


def _is_function(tool: object) -> bool:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return False
    function = tool.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str)
