"""How much memory to keep free beside the weights: for the process, and for the hinted pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pipeload._pass_needs import PassNeeds, PassShape

if TYPE_CHECKING:
    from torch import nn

# What a streaming process takes on between loading and its first generated token: code pages of the
# kernels that run, thread stacks, tokenizer and sampling objects. Measured: 13 to 20 MB.
_WARM_UP_BYTES = 24_000_000
# A memory control group also counts page tables and other kernel memory of the process.
_KERNEL_BYTES = 16_000_000
_PAGES_PER_TABLE = 512  # eight bytes of page table per 4 kB page


class PassHint(NamedTuple):
    """The largest pass that must fit."""

    tokens: int
    """Tokens in the cache of one sequence, prompt included."""
    batch: int
    """Sequences at once."""


def reserve_bytes(model: nn.Module, config: Any, hint: PassHint, limit: int) -> int:
    """Memory to keep free for a pass of the hint, in bytes."""
    # The plain forward gives logits for every position.
    shape = PassShape(hint.tokens, hint.batch)
    return process_bytes(limit) + PassNeeds(model, config).for_shape(shape, kept=hint.tokens)


def process_bytes(limit: int) -> int:
    """What the process takes on beside weights and passes: warm-up and the kernel's own tables."""
    return _WARM_UP_BYTES + _KERNEL_BYTES + page_table_bytes(limit)


def page_table_bytes(limit: int) -> int:
    """Page tables of a process that holds `limit` bytes."""
    return limit // _PAGES_PER_TABLE


def limit_for(nbytes: int) -> int:
    """The smallest limit that leaves `nbytes` beside its own page tables."""
    return nbytes + (nbytes - 1) // (_PAGES_PER_TABLE - 1)
