"""Reads one stored tensor as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipeload._arena import DTYPES

if TYPE_CHECKING:
    from pipeload._checkpoint import TensorEntry


def read_whole(entry: TensorEntry) -> torch.Tensor:
    """A stored tensor, in memory of its own."""
    with entry.file.open("rb") as file:
        file.seek(entry.start)
        data = bytearray(file.read(entry.nbytes))
    return torch.frombuffer(data, dtype=DTYPES[entry.dtype]).view(entry.shape)
