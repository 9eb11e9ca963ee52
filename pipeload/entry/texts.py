"""Texts that are given to a model: read from a file, and the tokenizer that they pass through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers

from pipeload.entry.sources import source_of
from pipeload.errors import CheckpointError, OptionError

if TYPE_CHECKING:
    from pathlib import Path


def read_text(path: Path) -> str:
    """Read the text of a file.

    Raises:
        OptionError: it cannot be read, is empty, or is no text.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise OptionError(
            f"cannot read the text {str(path)!r}: {error.strerror}. Check the path."
        ) from error
    if b"\0" in data:
        raise OptionError(
            f"{str(path)!r} is no text: there is a zero byte at {data.index(0)}. Give a UTF-8 file."
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionError(
            f"{str(path)!r} is no text in UTF-8: byte {error.start} is {data[error.start]:#04x}. "
            "Give a UTF-8 file."
        ) from error
    if not text.strip():
        raise OptionError(f"the text {str(path)!r} is empty. Give a UTF-8 file with some.")
    return text


def load_tokenizer(model: str, **options: Any) -> Any:
    """Load the tokenizer of a model, a GGUF file too; `options` are the library's, as `revision`.

    Raises:
        CheckpointError: the model has no tokenizer.
    """
    source, named = source_of(model)
    try:
        return transformers.AutoTokenizer.from_pretrained(
            source, **{"trust_remote_code": False, **named, **options}
        )
    except Exception as error:  # the library raises nearly anything here
        raise CheckpointError(
            f"{model!r} has no tokenizer that can be loaded ({first_line(error)}). It is needed to "
            "make tokens of text: put tokenizer.json and its like beside the weights."
        ) from error


def check_tokens(name: str, model: Any, largest: int) -> None:
    """Refuse a tokenizer that makes tokens which the model does not know.

    Raises:
        CheckpointError: `largest` is such a token.
    """
    known = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if known is not None and largest >= known:
        raise CheckpointError(
            f"the tokenizer of {name!r} is another model's: it makes token {largest}, and the "
            f"model knows {known}. Put its own tokenizer beside the weights."
        )


def first_line(error: BaseException) -> str:
    """What a message says in its first line, or in two where the first only announces."""
    kind = type(error).__name__
    lines = str(error).strip().splitlines()
    if not lines:
        return kind
    text = " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
    said = isinstance(error, (OSError, ValueError, ImportError))  # others say little by themselves
    return (text if said else f"{kind}: {text}").rstrip(" .:!")
