"""The answer of `pipeload run`: shown as it comes, ended at a text that was asked for."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from transformers.generation.streamers import BaseStreamer

import pipeload
from pipeload.serving.answer_text import Cut, TextSoFar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


class Answer(BaseStreamer):
    """Writes text as soon as no later token can change it, and notes when tokens come.

    Nothing is shown from the first of `stops` on.
    """

    def __init__(
        self,
        tokenizer: Any,
        model: Any,
        *,
        write: bool,
        stops: Sequence[str],
        on_first_token: Callable[[], None],
    ) -> None:
        self.tokens = 0
        self.first_token_at = self.last_token_at = 0.0
        self.handle = pipeload.handle(model)
        self.first_stats = self.handle.stats()
        self._write = write
        self._on_first_token = on_first_token
        self._cut = Cut(stops)
        self._parts: list[str] = []
        self._prompt_seen = False
        self._so_far = TextSoFar(tokenizer)

    @property
    def text(self) -> str:
        """What was shown so far."""
        return "".join(self._parts)

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, and then tokens as they come: several at once where a draft is right."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        if not value.numel():
            return
        self.last_token_at = time.perf_counter()
        first = not self.tokens
        self.tokens += value.numel()
        if first:
            self.first_token_at = self.last_token_at
            self.first_stats = self.handle.stats()
            self._on_first_token()
        self._show(self._so_far.add(value.flatten().tolist()))

    def end(self) -> None:
        """Show what is left, and end the line."""
        self._show(self._so_far.end(), end=True)

    def _show(self, text: str, *, end: bool = False) -> None:
        shown = self._cut.add(text, end=end)
        self._parts.append(shown)
        if self._write:
            sys.stdout.write(shown + ("\n" if end else ""))
            sys.stdout.flush()
