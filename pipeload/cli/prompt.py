"""The prompt of `pipeload run`: typed, from a file, or from standard input. Loads no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

_NO_TEXT = "the prompt is no text in UTF-8"


def read_prompt(prompt: str) -> str:
    """What the argument names: itself, standard input for "-", the text of FILE for "@FILE".

    "@@" stands for a prompt that begins with "@".

    Raises:
        BadParameter: there is no such file, or what was given is empty or no text.
    """
    text = _named(prompt)
    if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
        # How Python shows bytes of an argument that are no text.
        raise _refusal(f"{_NO_TEXT}.")
    if not text.strip():
        raise _refusal("the prompt is empty.")
    return text


def _named(prompt: str) -> str:
    try:
        if prompt == "-":
            return _typed_in()
        if prompt.startswith("@@"):
            return prompt[1:]
        if prompt.startswith("@"):
            return Path(prompt[1:]).read_text(encoding="utf-8-sig")
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
    if sys.stdin.isatty():
        end = "Ctrl-Z and Enter" if os.name == "nt" else "Ctrl-D"
        typer.echo(f"Type the prompt, then {end} on a line of its own.", err=True)
    return sys.stdin.read()


def _refusal(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="PROMPT")
