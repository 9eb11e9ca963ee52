"""How far a model's predictions are from those of the first: `pipeload eval --compare`.

[Note: where logits wait] Models are measured one after the other, so what the first one predicts
has to wait somewhere: for 4,096 tokens of 128,256 words in bf16 that is 1 GB. It is written to a
file without a name, in the dtype that it has, so nothing is rounded; the limit says nothing of it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from pipeload.errors import OptionError

if TYPE_CHECKING:
    from pipeload.evaluate.text_windows import Window

_ITEMS = 1 << 19  # logits at once, of which some fp32 copies are held
_LARGE_FILES = Path("/var/tmp")  # noqa: S108 - without a name; /tmp may be memory


class Agreement(NamedTuple):
    """How alike the predictions of two models are, over all scored tokens."""

    divergence: float
    """Mean of the Kullback-Leibler divergence from the first model's distribution, in nats."""
    same_top: float
    """The share of tokens for which both have the same word on top."""


class FirstLogits:
    """What the first model predicts for each scored token, and others against it."""

    def __init__(self) -> None:
        """Open the file.

        Raises:
            OptionError: it cannot be made.
        """
        folder = None if os.environ.get("TMPDIR") or not _LARGE_FILES.is_dir() else _LARGE_FILES
        self._folder = str(folder or tempfile.gettempdir())
        try:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - it stays open
        except OSError as error:
            raise self._no_room(error) from error
        self._places: dict[Window, int] = {}
        self._words = 0
        self._dtype = torch.float32
        self._divergence = self._alike = 0.0
        self._count = 0

    def keep(self, window: Window, logits: torch.Tensor) -> None:
        """Write the first model's of the scored tokens of a window, `[tokens, words]`.

        Raises:
            OptionError: the disk is full.
        """
        self._words, self._dtype = logits.shape[-1], logits.dtype
        self._places[window] = self._file.tell()
        try:
            for part in logits.split(self._step):
                self._file.write(part.contiguous().cpu().view(torch.uint8).numpy().data)
            self._file.flush()
        except OSError as error:
            raise self._no_room(error) from error

    def compare(self, window: Window, logits: torch.Tensor) -> None:
        """Count how far another model's are from them."""
        if logits.shape[-1] != self._words:
            return  # other words: nothing can be said
        self._file.seek(self._places[window])
        for part in logits.split(self._step):
            first = self._read(len(part)).log_softmax(-1)
            other = part.float().cpu().log_softmax(-1)
            self._alike += int((first.argmax(-1) == other.argmax(-1)).sum())
            apart = first.exp().mul_(first - other)
            self._divergence += float(apart.sum(-1).double().sum())
            self._count += len(part)

    def agreement(self) -> Agreement | None:
        """What `compare` was told since this was called last; None if nothing could be said."""
        if not self._count:
            return None
        found = Agreement(self._divergence / self._count, self._alike / self._count)
        self._divergence = self._alike = 0.0
        self._count = 0
        return found

    def close(self) -> None:
        """Give the disk its room back. May be called again."""
        self._file.close()

    @property
    def _step(self) -> int:
        return max(1, _ITEMS // self._words)

    def _read(self, tokens: int) -> torch.Tensor:
        """fp32 of `[tokens, words]`."""
        nbytes = tokens * self._words * self._dtype.itemsize
        stored = torch.frombuffer(bytearray(self._file.read(nbytes)), dtype=self._dtype)
        return stored.view(tokens, self._words).float()

    def _no_room(self, error: OSError) -> OptionError:
        return OptionError(
            f"--compare keeps the first model's logits in a file in {self._folder!r}, which does "
            f"not take it: {error}. Set TMPDIR to a folder with room, or take less text by "
            "--max-tokens."
        )
