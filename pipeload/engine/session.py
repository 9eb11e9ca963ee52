"""One model that streams: its parts, and the way down.

[Note: one way down] Whatever is opened, started or put on for a model is entered on one `Undo` at
the moment it exists. A load that fails, `remove()`, and a model that is dropped take the same steps
in the same order: guards and hooks off, the account left, threads ended, files closed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeload.budget.governor import Governor
    from pipeload.checkpoint.file_reads import FileSet
    from pipeload.checkpoint.reader_threads import PinnedRead
    from pipeload.engine.expert_routing import Experts
    from pipeload.engine.passes import Passes
    from pipeload.engine.streamer import Streamer
    from pipeload.engine.teardown import Undo
    from pipeload.prefetch.prefetcher import Prefetcher
    from pipeload.weights.layout import Weight


@dataclass(frozen=True, slots=True)
class Session:
    """What a handle holds of a model that streams. The model's hooks hold its `passes`."""

    files: FileSet
    """The open checkpoint."""
    prefetcher: Prefetcher
    """Reads units ahead."""
    governor: Governor
    """Says what may stay in memory."""
    streamer: Streamer
    """Has weights there while their site runs."""
    experts: Experts
    """Has experts there that are routed to."""
    passes: Passes
    """Knows when a pass begins and ends."""
    pinned_read: PinnedRead
    """How the read went of what always stays."""
    away: Sequence[Weight]
    """Weights of modules that other ranks run."""
    close: Undo
    """Takes the model down: see [Note: one way down]."""
