"""The three ways in to a streamed model, each beside a plain one that is used alike."""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

import pipeload
from pipeload.budget import cut
from tests.support.exact import assert_same, prompt
from tests.support.streaming import WAIT_SECONDS, assert_nothing_held, smallest_limit, steady_floor

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator
    from pathlib import Path

# The library renamed it in 5.24.
CACHE = (
    "cache"
    if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    else "past_key_values"
)
WAYS = ("from_pretrained", "streaming", "wrap")


@contextlib.contextmanager
def small_ranges() -> Iterator[None]:
    """128 rows at a time: tiny matrices have several ranges, and tiny tables are read by rows."""
    with (
        mock.patch.object(cut, "CHUNKS", (1 << 14,)),
        mock.patch.object(cut, "_TABLE_BYTES", 1 << 12),
    ):
        yield


def load_by(
    way: str,
    folder: Path,
    auto_class: Any = AutoModelForCausalLM,
    *,
    ranges: bool = True,
    **options: Any,
) -> Any:
    """A model that streams at about the smallest limit.

    Each way cuts it otherwise: in ranges of rows, in modules, in blocks.

    Args:
        way: one of `WAYS`; "wrap" takes a plain model that has run already.
        folder: the checkpoint.
        auto_class: whose `from_pretrained` is called.
        ranges: whether that of "from_pretrained" are so small that tiny matrices have several.
        **options: its options.
    """
    options = {"dtype": "auto"} | options
    with contextlib.ExitStack() as stack:
        stack.enter_context(steady_floor(modules=way != "wrap"))
        if way == "from_pretrained" and ranges:
            stack.enter_context(small_ranges())
        limit = smallest_limit(folder, auto_class=auto_class, **options) + 8192
        if way == "from_pretrained":
            return pipeload.from_pretrained(
                folder, memory_limit=limit, auto_class=auto_class, **options
            )
        if way == "streaming":
            stack.enter_context(pipeload.streaming(limit))
            return auto_class.from_pretrained(folder, **options)
        used = auto_class.from_pretrained(folder, **options)
        with torch.no_grad():
            used(torch.arange(3, 9)[None])
        return pipeload.wrap(used, limit)


class Pair:
    """A plain model and a streamed one of the same checkpoint."""

    def __init__(self, plain: Any, model: Any) -> None:
        self.plain, self.model = plain, model

    def check(self, use: Callable[[Any], Any], *, seed: int = 0) -> Any:
        """Use both in the same way, from the same seed; returns what the plain one gave.

        It must be equal to the last bit, have been read from disk, and leave no pass open.
        """
        torch.manual_seed(seed)
        wanted = use(self.plain)
        before = self.model.pipeload.stats().bytes_read
        torch.manual_seed(seed)
        assert_same(use(self.model), wanted)
        assert self.model.pipeload.stats().bytes_read > before
        assert_nothing_held(self.model)
        return wanted


@torch.no_grad()
def scores(model: Any) -> list[torch.Tensor]:
    """Two passes, the second with the first one's cache."""
    first = model(prompt(2), use_cache=True)
    second = model(prompt(2, 3, seed=1), use_cache=True, **{CACHE: first[CACHE]})
    return [first.logits, second.logits]


def words() -> PreTrainedTokenizerFast:
    """One word for each token of the tiny models, and what encoders want around them."""
    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    names = [*special, *(f"w{number}" for number in range(len(special), 512))]
    inner = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="w4"))
    inner.pre_tokenizer = Whitespace()
    inner.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="w4",
        pad_token="[PAD]",
        bos_token="[CLS]",
        eos_token="[SEP]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def join(thread: threading.Thread) -> None:
    """Wait for its end, and fail if it does not come."""
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
