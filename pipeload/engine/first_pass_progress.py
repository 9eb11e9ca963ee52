"""Follows a model's first pass: the one that reads everything, and takes longest."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from pipeload_hooks import find_blocks

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle


class Display(Protocol):
    """Where it is shown how far the pass is."""

    def show(self, done: int, total: int) -> None:
        """Show that `done` of `total` blocks have run."""

    def close(self) -> None:
        """The pass is over. May be called again."""


class FirstPass:
    """Hooks on every block, until each has run or the next pass begins. Holds no model."""

    def __init__(self, model: nn.Module, display: Display) -> None:
        blocks = [block.module for block in find_blocks(model)]
        self._total = len(blocks)
        self._display = display
        self._done: set[int] = set()
        self._hooks: list[RemovableHandle] = [
            block.register_forward_hook(partial(self._block_done, index))
            for index, block in enumerate(blocks)
        ]

    def stop(self) -> None:
        """End the display and take the hooks off. May be called again."""
        while self._hooks:
            self._hooks.pop().remove()
        self._display.close()

    def _block_done(self, index: int, *_: object) -> None:
        if index in self._done:  # the pass died, or left blocks out: this is the next one
            self.stop()
            return
        self._done.add(index)
        self._display.show(len(self._done), self._total)
        if len(self._done) == self._total:
            self.stop()
