"""Keeps account of tensors that come and go, where they need not have any memory behind them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


class Ledger:
    """Bytes of the storages that were made since it was opened, and of those the most at once."""

    def __init__(self) -> None:
        self.live = 0
        """Bytes that are there now."""
        self.peak = 0
        """The most that ever were."""
        self.kernels: set[object] = set()
        """What kernels are compiled for: convolutions, by their sizes."""
        self._known: set[int] = set()
        self._unknown: set[int] = set()
        self._shared: set[int] = set()
        self.began = 0
        """Bytes that were there at the last `begin`."""
        self.since = 0
        """The most at once since then."""
        self._ahead = 0

    def enter(self, made: Iterable[Tensor], known: Iterable[Tensor], beside: int = 0) -> None:
        """An operation made tensors; what shares memory with one of `known` is none of its making.

        `beside`: bytes that it held itself while it ran.
        """
        old = {tensor.untyped_storage()._cdata for tensor in known}
        for tensor in made:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in old and key not in self._known:
                nbytes = storage.nbytes()
                if nbytes < tensor.nbytes:
                    nbytes = tensor.nbytes
                    self._shared.add(key)
                self._known.add(key)
                self.live += nbytes
                weakref.finalize(storage, self._leave, key, nbytes).atexit = False
        self.since = max(self.since, self.live + beside)
        self.peak = max(self.peak, self.live + self._ahead + beside)

    def forget(self, tensor: Tensor) -> None:
        """It has memory behind it, but what should have been written there is not known."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._unknown:
            self._unknown.add(storage._cdata)
            weakref.finalize(storage, self._unknown.discard, storage._cdata).atexit = False

    def is_unknown(self, tensor: Tensor) -> bool:
        """Whether it has no values, or none that hold."""
        return tensor.is_meta or tensor.untyped_storage()._cdata in self._unknown

    def stands_for_many(self, tensor: Tensor) -> bool:
        """Whether it was made of one number: nothing can be written to it."""
        return tensor.untyped_storage()._cdata in self._shared

    def begin(self) -> None:
        """From here on `since` is measured anew."""
        self.began = self.since = self.live

    def repeat(self, more: Iterable[tuple[int, int, int]]) -> None:
        """Several things run so often again: (times, bytes left behind, the most bytes at once).

        Both are counted from where each began.
        """
        more = [one for one in more if one[0]]
        self._ahead += sum(times * left for times, left, _ in more)
        for _, left, most in more:
            self.peak = max(self.peak, self.live + self._ahead - left + most)

    @property
    def kept(self) -> int:
        """Bytes that are there now, with those that what is repeated left behind."""
        return self.live + self._ahead

    def _leave(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._shared.discard(key)
        self.live -= nbytes
