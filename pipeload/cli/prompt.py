"""The prompt of `pipeload run`: typed, from a file, or from standard input; then as tokens.

Loads no torch by itself: a prompt that cannot be read is refused at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import typer

from pipeload.errors import OptionError
from pipeload.serving.encoding import encode_messages, encode_text

_NO_TEXT = "the prompt is no text in UTF-8"


def read_prompt(prompt: str) -> str:
    """What the argument names: itself, standard input for "-", the text of FILE for "@FILE".

    "@@" stands for a prompt that begins with "@". What is read loses its last line end:
    `echo` and editors add it, and it would be a token of its own.

    Raises:
        BadParameter: there is no such file, or what was given is empty or no text.
    """
    text = _named(prompt)
    if not is_text(text):
        raise _refusal(f"{_NO_TEXT}.")
    if not text.strip():
        raise _refusal("the prompt is empty.")
    return text


def is_text(typed: str) -> bool:
    """Whether it holds none of the letters by which Python shows bytes that are no text."""
    return typed.isprintable() or not any("\ud800" <= letter <= "\udfff" for letter in typed)


def _named(prompt: str) -> str:
    try:
        if prompt == "-":
            return _typed_in()
        if prompt.startswith("@@"):
            return prompt[1:]
        if prompt.startswith("@"):
            return Path(prompt[1:]).read_text(encoding="utf-8-sig").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise _refusal(f"{_NO_TEXT} ({error}).") from None
    except (OSError, ValueError) as error:  # no path may hold a zero byte
        cause = getattr(error, "strerror", None) or error
        raise _refusal(
            f"cannot read the file {prompt[1:]!r}: {cause}. A prompt that begins with @ is typed "
            "with two of them."
        ) from None
    return prompt


def _typed_in() -> str:
    if sys.stdin is None:  # as in a shell's `<&-`, and under some supervisors
        raise _refusal("standard input is closed. Type the prompt behind the model, or @FILE.")
    if sys.stdin.isatty():
        end = "Ctrl-Z and Enter" if os.name == "nt" else "Ctrl-D"
        typer.echo(f"Type the prompt, then {end} on a line of its own.", err=True)
    return sys.stdin.read().removesuffix("\n")


def encode(
    tokenizer: Any, prompt: str, *, system: str | None, chat_template: bool
) -> dict[str, Any]:
    """The model's inputs for a prompt, in the model's chat template if it has one.

    Args:
        tokenizer: the model's.
        prompt: what the user says.
        system: what the system says before; None: nothing.
        chat_template: whether to use a template.

    Raises:
        OptionError: there is no place for `system`, the template fails, or no token comes of it.
    """
    if chat_template and tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        cure = "Leave --system out, or pass --no-chat-template."
        return encode_messages(tokenizer, messages, cure=cure)
    if system is not None:
        raise OptionError(
            "--system was given, but the model's tokenizer has no chat template to put it in. "
            "Leave it out."
        )
    return encode_text(tokenizer, prompt)


def _refusal(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="PROMPT")
