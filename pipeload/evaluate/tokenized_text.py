"""A text as a model's tokenizer reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a text."""

    ids: torch.Tensor
    """int64, `[tokens]`."""
    bytes_added: torch.Tensor | None
    """int64, `[tokens]`: by how many bytes of UTF-8 each token takes the text further; 0 for what
    is not in the text. None where the tokenizer does not tell."""

    def same_tokens(self, other: Encoded) -> bool:
        """Whether both are the same sequence."""
        return torch.equal(self.ids, other.ids)

    def bytes_of(self, chosen: torch.Tensor) -> int | None:
        """Bytes of text that the chosen tokens stand for; `chosen` is bool, `[tokens]`."""
        return None if self.bytes_added is None else int(self.bytes_added[chosen].sum())


def encode(tokenizer: Any, text: str, *, most: int | None) -> Encoded:
    """The first `most` tokens, with what the tokenizer puts before a text."""
    with_places = bool(tokenizer.is_fast)
    found = tokenizer(text, return_offsets_mapping=with_places, verbose=False)
    ids = torch.tensor(found["input_ids"][:most], dtype=torch.int64)
    if not with_places:
        return Encoded(ids, None)
    ends = [end for _, end in found["offset_mapping"][:most]]
    return Encoded(ids, _bytes_added(text, ends))


def _bytes_added(text: str, ends: list[int]) -> torch.Tensor:
    """Ends of tokens, in characters, may repeat: a character can be several tokens."""
    added, reached = [], 0
    for end in ends:
        added.append(len(text[reached:end].encode()) if end > reached else 0)
        reached = max(reached, end)
    return torch.tensor(added, dtype=torch.int64)
