"""How a model writes calls of tools and its thoughts, as far as the library knows it.

Seen in transformers 5.24: a tokenizer may carry a template of answers, and the library's own server
has some for models whose tokenizers carry none.
"""

from __future__ import annotations

import inspect
from typing import Any


def response_template(tokenizer: Any, model_type: str) -> dict[str, Any] | None:
    """What takes an answer apart; None where nobody knows how."""
    parse = getattr(tokenizer, "parse_response", None)
    if parse is None or "prefix" not in inspect.signature(parse).parameters:
        return None  # older ones have templates of another kind
    own: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
    if own is not None:
        return own
    try:
        from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS as KNOWN
    except ImportError:
        return None
    found: dict[str, Any] | None = next(
        (template for types, template in KNOWN.items() if model_type in types), None
    )
    return found


def parse_answer(
    tokenizer: Any,
    template: dict[str, Any],
    ids: list[int],
    *,
    prompt: list[int],
    tools: list[dict[str, Any]],
) -> dict[str, Any]:
    """The message that an answer is: `content`, and where it has them `tool_calls` and thoughts.

    Raises:
        Exception: of any kind, where it is not written as the template says.
    """
    prefix = tokenizer.decode(prompt)
    parsed: dict[str, Any] = tokenizer.parse_response(
        tokenizer.decode(ids), template, prefix=prefix, tools=tools
    )
    return parsed
