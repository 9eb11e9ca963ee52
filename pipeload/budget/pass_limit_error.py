"""The error of a pass that does not fit, as those who search for a batch size know it."""

from __future__ import annotations

import torch

from pipeload.errors import MemoryLimitError


class PassMemoryLimitError(MemoryLimitError, torch.OutOfMemoryError):
    """A pass does not fit within the limit.

    Searches for a batch size catch torch's own error, or a RuntimeError that speaks of being out of
    memory. Not made where the other errors are: they are there without torch.
    """
