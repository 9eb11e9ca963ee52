"""How long a request may be that is to fit in memory by itself."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeload.budget.governor import Governor
    from pipeload.entry.convoy_size import Sizes

_MOST_TOKENS = 1 << 24
_CACHE_MARGIN = 1.05  # as of what a pass needs


class RequestRoom:
    """What calls of `generate` may take if nothing else runs and nothing is resident. In bytes."""

    def __init__(self, governor: Governor) -> None:
        """To be made while nothing runs."""
        self._governor = governor
        self.measure()

    def measure(self) -> None:
        """Look again what there is; while nothing runs."""
        self._spare = self._governor.spare_bytes()

    def holds(self, sizes: Sizes, *, beside: int = 0) -> bool:
        """Whether there is room for its prompt's pass, and for that of its last token.

        `beside`: what else would make room.
        """
        cache, first = self._governor.bytes_alone(*sizes)
        _, last = self._governor.bytes_alone(1, 1, sizes.batch)
        need = max(first, last + int(cache * _CACHE_MARGIN))
        return self._governor.ledger.corrected(need) <= self._spare + beside

    def longest_prompt(self, sizes: Sizes) -> int:
        """The longest prompt with which the same answer fits; 0 if none does."""
        new = sizes.tokens - sizes.prompt
        return self._largest(lambda prompt: sizes._replace(prompt=prompt, tokens=prompt + new))

    def longest_answer(self, sizes: Sizes) -> int:
        """The most new tokens that fit behind the same prompt; 0 if none does."""
        return self._largest(lambda new: sizes._replace(tokens=sizes.prompt + new))

    def _largest(self, of: Callable[[int], Sizes]) -> int:
        lengths = range(1, _MOST_TOKENS)
        return bisect.bisect_left(lengths, True, key=lambda length: not self.holds(of(length)))
