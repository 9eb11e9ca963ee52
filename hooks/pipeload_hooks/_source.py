"""What the hooks need from whoever holds the weights."""

from __future__ import annotations

from typing import Protocol


class WeightSource(Protocol):
    """Makes the weights of a block real while the block runs."""

    def acquire(self, block: int) -> None:
        """Return once every parameter of `block` holds its values. May wait for the disk."""

    def release(self, block: int) -> None:
        """The block has run. Must do nothing for a block that was never acquired."""

    def refuse_recording(self, block: int) -> None:
        """Autograd would record `block`, whose weights are gone by the time of backward: raise."""
