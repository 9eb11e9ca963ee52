"""How much memory to keep free beside the weights: for the process, and for the hinted pass."""

from __future__ import annotations

from typing import NamedTuple

from pipeload.budget.pass_needs import PassNeeds, PassShape

# What a streaming process takes on between planning and its first generated tokens: thread stacks,
# tokenizer and sampling objects (20 to 27 MB), and the code pages of what runs, which come back
# after all of them were given back for the plan (30 to 40 MB, those that loading needs among them).
# Measured together, activations included: 37 to 58 MB.
WARM_UP_BYTES = 54_000_000
# A memory control group also counts page tables and other kernel memory of the process.
KERNEL_BYTES = 16_000_000
_PAGES_PER_TABLE = 512  # eight bytes of page table per 4 kB page


class PassHint(NamedTuple):
    """The largest pass that must fit."""

    tokens: int
    """Tokens in the cache of one sequence, prompt included."""
    batch: int
    """Sequences at once."""

    def pass_bytes(self, needs: PassNeeds) -> int:
        """What `generate` needs for a prompt of that length: logits of the last position alone.

        A plain forward gives them for every position; it is measured when it comes.
        """
        return needs.for_shape(PassShape(self.tokens, self.batch))

    def covers(self, shape: PassShape) -> bool:
        """Whether memory was kept free for a pass of that size."""
        return shape.tokens + shape.cached <= self.tokens and shape.batch <= self.batch


def reserve_bytes(needs: PassNeeds, hint: PassHint, limit: int) -> int:
    """Memory to keep free for a pass of the hint, in bytes."""
    return process_bytes(limit) + hint.pass_bytes(needs)


def process_bytes(limit: int) -> int:
    """What the process takes on beside weights and passes: warm-up and the kernel's own tables."""
    return WARM_UP_BYTES + KERNEL_BYTES + page_table_bytes(limit)


def page_table_bytes(limit: int) -> int:
    """Page tables of a process that holds `limit` bytes."""
    return limit // _PAGES_PER_TABLE


def limit_for(nbytes: int) -> int:
    """The smallest limit that leaves `nbytes` beside its own page tables."""
    return nbytes + (nbytes - 1) // (_PAGES_PER_TABLE - 1)
