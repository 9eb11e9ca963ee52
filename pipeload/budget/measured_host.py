"""What a plan is made beside: this process and its machine, looked at and left as they are.

[Note: planning looks, loading acts] A plan counts on what loading will do first: libraries give
back the pages that only starting them needed. So these pages are counted as gone by a plan, and
dropped by a load; whoever only plans keeps them, and everything else, as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pipeload.budget.shared_limit import ACCOUNTANT
from pipeload.checkpoint.io_mode import direct_refusal
from pipeload.system.library_pages import droppable_bytes
from pipeload.system.memory import allowed_bytes, free_page_cache_bytes, rss_bytes
from pipeload.weights.mapped import MappedFiles
from pipeload.weights.whole_shape import WholeShape

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_GROWTH_BYTES = 6_000_000
_ASK_THE_DISK = ("auto", "direct")


@dataclass(frozen=True, slots=True)
class Measured:
    """What planning knows of the process, the machine and the disk. Frozen; sizes in bytes."""

    held_bytes: int
    """What the process holds; library pages that loading drops are not counted."""
    promised_bytes: int
    """What models that stream here already may come to hold, and do not hold yet."""
    leaving_bytes: int
    """What the process holds and will not once the model is streamed."""
    page_cache_bytes: int
    """How much of a file the system could keep in its page cache beside this process."""
    allowed_bytes: int
    """What the process may hold at most: control group, available and physical memory."""
    growth_bytes: int
    """What the same process, started again, may hold more: a limit that is reported as workable
    has that beyond what was needed when it was computed."""
    threads: int
    """Threads that torch computes with."""
    direct_refusal: str | None
    """Why the files cannot be read past the page cache; None where they can, or nobody asked."""
    maps_files: bool
    """Whether a mapped file can be read ahead here."""
    zeros_are_free: bool
    """Whether zeros that were never written take no memory here."""

    @property
    def floor_bytes(self) -> int:
        """What is there beside the model: everything that the process holds, or has promised."""
        return self.held_bytes + self.promised_bytes - self.leaving_bytes


def measure(
    files: Sequence[Path], io_mode: str, *, leaving_bytes: int = 0, code_bytes: int = 0
) -> Measured:
    """Look at what a plan is made beside. Changes nothing.

    Args:
        files: the checkpoint's.
        io_mode: how they are to be read; only where it matters, a page of the first one is.
        leaving_bytes: what the process holds and will not once the model is streamed.
        code_bytes: library pages that come back as soon as something is computed, in bytes.
    """
    droppable = droppable_bytes()
    return Measured(
        held_bytes=rss_bytes() - max(0, droppable - code_bytes),
        promised_bytes=ACCOUNTANT.untouched_bytes(),
        leaving_bytes=leaving_bytes,
        page_cache_bytes=free_page_cache_bytes(),
        allowed_bytes=allowed_bytes(),
        growth_bytes=_GROWTH_BYTES,
        threads=torch.get_num_threads(),
        direct_refusal=direct_refusal(files) if io_mode in _ASK_THE_DISK else None,
        maps_files=MappedFiles.supported(),
        zeros_are_free=WholeShape.is_free(),
    )
