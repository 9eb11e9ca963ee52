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
        return _checked(_apply_template(tokenizer, messages, cure))
    if system is not None:
        raise OptionError(
            "--system was given, but the model's tokenizer has no chat template to put it in. "
            "Leave it out."
        )
    return encode_text(tokenizer, prompt)


def encode_text(tokenizer: Any, text: str) -> dict[str, Any]:
    """The model's inputs for a text that it is to go on with.

    Raises:
        OptionError: no token comes of it.
    """
    return _checked(tokenizer(text, return_tensors="pt"))


def encode_messages(tokenizer: Any, messages: list[dict[str, str]]) -> dict[str, Any]:
    """The model's inputs for a conversation, in its chat template.

    Raises:
        OptionError: there is no template, it fails, or no token comes of it.
    """
    if not tokenizer.chat_template:
        raise OptionError(
            "the model's tokenizer has no chat template to put messages in. Give a prompt instead."
        )
    return _checked(_apply_template(tokenizer, messages, "Give others."))


def _checked(encoded: Any) -> dict[str, Any]:
    if encoded["input_ids"].shape[1] == 0:
        raise OptionError("the tokenizer makes no token of this prompt. Give another one.")
    return {name: encoded[name] for name in ("input_ids", "attention_mask") if name in encoded}


def _apply_template(tokenizer: Any, messages: list[dict[str, str]], cure: str) -> Any:
    return apply_template(tokenizer, messages, cure, return_tensors="pt", return_dict=True)


def apply_template(
    tokenizer: Any, messages: list[dict[str, str]], cure: str, **options: Any
) -> Any:
    """A conversation in the model's chat template, up to where the answer begins.

    Raises:
        OptionError: the template fails; `cure` says what to do.
    """
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    except Exception as error:  # a template is a program
        from pipeload.entry.texts import first_line

        raise OptionError(
            f"the model's chat template does not take this ({first_line(error)}). {cure}"
        ) from error


def _refusal(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="PROMPT")
