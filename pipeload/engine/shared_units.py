"""Units that several passes use one after the other, of which each is read once for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeload.engine.streamer import Streamer
    from pipeload.prefetch.prefetcher import Prefetcher


class SharedUnits:
    """A `UnitSource`: the first pass that needs a unit takes it, the last one gives it back.

    A unit stays until all passes of the round have used it, or until one needs another that is not
    there. So passes that go the same way read it once; those that go ways of their own, as an
    encoder's pass beside a decoder's, read as much as they would alone, and never hold more of the
    buffers than one pass does.
    """

    def __init__(self, streamer: Streamer, prefetcher: Prefetcher) -> None:
        self._streamer, self._prefetcher = streamer, prefetcher
        self._used_by: dict[int, set[int]] = {}
        """Which passes have used each unit that is there."""
        self._round: set[int] = set()
        """Passes that run, and may come to what others have used: `id`s of their states."""

    def begin(self, passing: int) -> None:
        """A pass runs from now on."""
        self._round.add(passing)

    def end(self, passing: int) -> None:
        """It needs no unit any more. Does nothing for one that does not run."""
        self._round.discard(passing)
        for index in [*self._used_by]:
            self._settle(index)

    def acquire(self, index: int) -> float:
        """Return once the unit is there; the seconds that were waited.

        Raises:
            ReadError: the disk failed. Whoever needs the unit next asks it once more.
        """
        held = self._streamer.now.held
        if index not in self._used_by:
            for other in [*self._used_by]:
                if other not in held:
                    self._give_back(other)
            try:
                waited = self._prefetcher.acquire(index)
            except BaseException:
                self._prefetcher.release(index)
                raise
            self._used_by[index] = set()
        else:
            waited = 0.0
        held.add(index)
        return waited

    def release(self, index: int) -> None:
        """The pass whose turn it is has used the unit."""
        now = self._streamer.now
        now.held.discard(index)
        self._used_by[index].add(id(now))
        self._settle(index)

    def _settle(self, index: int) -> None:
        if index not in self._streamer.now.held and self._round <= self._used_by[index]:
            self._give_back(index)

    def _give_back(self, index: int) -> None:
        del self._used_by[index]
        self._prefetcher.release(index)
