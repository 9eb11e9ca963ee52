"""Shows how far a measurement is, and how long the rest will take."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from pipeload_hooks import find_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from pipeload.engine.first_pass_progress import Display


@contextlib.contextmanager
def all_passes(model: nn.Module, display: Display, tokens: int) -> Iterator[AllPasses]:
    """Show how many of `tokens` are done, while passes of `model` run inside."""
    blocks = [block.module for block in find_blocks(model)]
    shown = AllPasses(display, tokens, len(blocks))
    hooks = [block.register_forward_hook(shown.block_done) for block in blocks]
    try:
        yield shown
    finally:
        for hook in hooks:
            hook.remove()
        shown.close()


class AllPasses:
    """Counts tokens; inside a pass, each block is worth an equal part of them."""

    def __init__(self, display: Display, tokens: int, blocks: int) -> None:
        self._tokens, self._blocks = tokens, blocks
        self._before = self._coming = self._blocks_done = 0
        self._display = display

    def pass_begins(self, done: int, coming: int) -> None:
        """Tokens that are done, and those of the pass that comes now."""
        self._before, self._coming, self._blocks_done = done, coming, 0

    def block_done(self, *_: object) -> None:
        """Forward hook of every block."""
        self._blocks_done += 1
        share = min(1.0, self._blocks_done / self._blocks)
        self._display.show(self._before + int(self._coming * share), self._tokens)

    def close(self) -> None:
        """Nothing is shown any more."""
        self._display.close()
