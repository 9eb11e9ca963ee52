"""How long a request may be that is to fit in memory by itself."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeload.budget.governor import Governor
    from pipeload.entry.convoy_size import Sizes

MOST_TOKENS = 1 << 20
"""Longer requests are not thought of."""
_REMEMBERED = 4096
_CACHE_MARGIN = 1.05  # as of what a pass needs


class RequestRoom:
    """What calls of `generate` may take if nothing else runs and nothing is resident. In bytes."""

    def __init__(self, governor: Governor) -> None:
        """To be made while nothing runs."""
        self._governor = governor
        self._needed: dict[tuple[int, int], int] = {}
        """Of prompts, by their length and how many they are: to find out may take a trial."""
        self.measure()

    def measure(self, kept: int = 0) -> None:
        """Look again what there is; while nothing runs. `kept`: bytes that would make room."""
        self._spare = self._governor.spare_bytes() + kept

    def holds(self, sizes: Sizes) -> bool:
        """Whether there is room for its prompt's pass, and for that of its last token."""
        last = self._pass(1, sizes.batch)
        cache, _ = self._governor.bytes_alone(0, sizes.tokens, sizes.batch)
        need = max(self._pass(sizes.prompt, sizes.batch), last + int(cache * _CACHE_MARGIN))
        return self._governor.ledger.corrected(need) <= self._spare

    def _pass(self, prompt: int, batch: int) -> int:
        if (prompt, batch) not in self._needed:
            while len(self._needed) >= _REMEMBERED:  # the oldest go
                del self._needed[next(iter(self._needed))]
            _, self._needed[prompt, batch] = self._governor.bytes_alone(prompt, prompt, batch)
        return self._needed[prompt, batch]

    def longest_prompt(self, sizes: Sizes, *, most: int = MOST_TOKENS) -> int:
        """The longest prompt with which the same answer fits, `most` at most; 0 if none does."""
        new = sizes.tokens - sizes.prompt
        return self._largest(
            lambda prompt: sizes._replace(prompt=prompt, tokens=prompt + new), most
        )

    def longest_answer(self, sizes: Sizes, *, most: int = MOST_TOKENS) -> int:
        """The most new tokens that fit behind the same prompt, `most` at most; 0 if none do."""
        return self._largest(lambda new: sizes._replace(tokens=sizes.prompt + new), most)

    def _largest(self, of: Callable[[int], Sizes], most: int) -> int:
        lengths = range(1, most + 1)
        return bisect.bisect_left(lengths, True, key=lambda length: not self.holds(of(length)))
