"""The model's inputs for a text, or for a conversation in its chat template."""

from __future__ import annotations

from typing import Any

from pipeload.errors import OptionError

_PIECE = 1 << 16  # letters
_CUTS = 1.1
"""Times as many tokens may come of a text in pieces."""


def is_longer(tokenizer: Any, text: str, tokens: int) -> bool:
    """Whether a text makes more than so many tokens, for sure.

    Found out piece by piece: what a tokenizer takes meanwhile is some 300 bytes for each letter.
    """
    count = 0
    for start in range(0, len(text), _PIECE):
        piece = tokenizer(text[start : start + _PIECE], add_special_tokens=False)
        count += len(piece["input_ids"])
        if count > _CUTS * tokens:
            return True
    return False


def encode_text(tokenizer: Any, text: str) -> dict[str, Any]:
    """The model's inputs for a text that it is to go on with.

    Raises:
        OptionError: no token comes of it.
    """
    return _checked(tokenizer(text, return_tensors="pt"))


def encode_messages(
    tokenizer: Any, messages: list[dict[str, Any]], *, cure: str | None = None, **given: Any
) -> dict[str, Any]:
    """The model's inputs for a conversation, in its chat template.

    Args:
        tokenizer: the model's.
        messages: what was said so far.
        cure: what an error tells to do; None: to give others.
        given: what else the template is given, such as `tools`.

    Raises:
        OptionError: there is no template, it fails, or no token comes of it.
    """
    if not tokenizer.chat_template:
        raise OptionError(
            "the model's tokenizer has no chat template to put messages in. Give a prompt instead."
        )
    encoded = apply_template(
        tokenizer, messages, cure, return_tensors="pt", return_dict=True, **given
    )
    return _checked(encoded)


def _checked(encoded: Any) -> dict[str, Any]:
    if encoded["input_ids"].shape[1] == 0:
        raise OptionError("the tokenizer makes no token of this prompt. Give another one.")
    return {name: encoded[name] for name in ("input_ids", "attention_mask") if name in encoded}


def apply_template(
    tokenizer: Any, messages: list[dict[str, Any]], cure: str | None, **options: Any
) -> Any:
    """A conversation in the model's chat template, up to where the answer begins.

    Raises:
        OptionError: the template fails; `cure` says what to do, None: to give other messages.
    """
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    except Exception as error:  # a template is a program
        from pipeload.entry.texts import first_line

        told = "Give others." if cure is None else cure
        raise OptionError(
            f"the model's chat template does not take this ({first_line(error)}). {told}"
        ) from error
