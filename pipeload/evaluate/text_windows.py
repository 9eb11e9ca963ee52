"""Cuts a text into overlapping windows, so that each token is judged once and with context.

The strided sliding window as the transformers documentation describes it ("Perplexity of
fixed-length models", huggingface.co/docs/transformers/perplexity): a window of a fixed length moves
on by a stride, and only the tokens that the window before did not reach are scored. A stride as
long as the window makes separate windows, as papers on quantisation use them; the first token of
each then has no context and is not scored. Pure: numbers in, numbers out.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


DEFAULT_WINDOW = 1024
"""Tokens seen at once where nobody says."""


def default_window(positions: int) -> int:
    """Tokens seen at once by models of which one was made for no more than `positions`."""
    return min(DEFAULT_WINDOW, positions)


def default_stride(window: int) -> int:
    """Tokens that a window of so many moves on by where nobody says: each has half as context."""
    return max(1, window // 2)


class Window(NamedTuple):
    """Tokens `begin` to `end` of a text, of which those from `first` on are scored."""

    begin: int
    end: int
    first: int

    @property
    def tokens(self) -> int:
        """All that the model sees."""
        return self.end - self.begin

    @property
    def scored(self) -> int:
        """Those that no window before has scored."""
        return self.end - self.first


def slide(tokens: int, *, window: int, stride: int) -> list[Window]:
    """All windows over a text of that many tokens, in order.

    Every token but the first is scored once, after at least `window - stride` others or, near the
    beginning, all there are; with `stride == window`, the first of each window is not.

    Args:
        tokens: of the text.
        window: the most tokens that are seen at once; at least 2.
        stride: tokens from one window's beginning to the next one's; 1 to `window`.
    """
    found = []
    seen = 0
    for begin in range(0, tokens, stride):
        end = min(begin + window, tokens)
        one = Window(begin, end, max(seen, begin + 1))
        if one.scored > 0:
            found.append(one)
        seen = end
        if end == tokens:
            break
    return found


def groups(windows: Sequence[Window]) -> list[list[Window]]:
    """Neighbours that can run in one batch: equally long, with equally many scored tokens.

    A shorter one is not padded: kernels round otherwise for another length.
    """
    alike = itertools.groupby(windows, key=lambda window: (window.tokens, window.scored))
    return [list(group) for _, group in alike]


def choose_batch(count: int, most: int, bytes_streamed: Callable[[int], int | None]) -> int:
    """Windows per pass with which least is streamed in all; of equal ones the smallest.

    Args:
        count: windows that are to run.
        most: the largest batch to consider.
        bytes_streamed: by a pass over so many windows; None where it does not fit.

    Returns:
        1 also where nothing fits: whoever tries learns why.
    """
    # Passes of equal size: of 9 windows, 5 and 4 rather than 8 and 1.
    even = {math.ceil(count / passes) for passes in range(1, count + 1)}
    best, least = 1, math.inf
    for batch in sorted(size for size in even if size <= max(1, most)):
        nbytes = bytes_streamed(batch)
        if nbytes is None:
            break
        if (total := nbytes * math.ceil(count / batch)) < least:
            best, least = batch, total
    return best
