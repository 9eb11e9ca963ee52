"""A tokenizer and a chat template for tiny models, so that the command line can talk to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<answer>"


def add_letters(folder: Path) -> None:
    """Put a tokenizer of single bytes into a checkpoint's folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<pad>", "<bos>", "<eos>"]
    words = {token: index for index, token in enumerate([*specials, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def repeat_answers(folder: Path) -> None:
    """Give a checkpoint a template that repeats answers as they came: a turn goes on from one."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}<user>{{ m['content'] }}<answer>"
        "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
