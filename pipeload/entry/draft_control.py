"""Whether guessed tokens pay, and how many a pass should check: decided by what passes take.

[Note: when a draft pays] A pass that checks k guesses takes a + b (k + 1) seconds and the guesses
take k d; it keeps E(k) = (1 - p^(k+1)) / (1 - p) tokens where each guess is right with probability
p (Leviathan, Kalman and Matias, Fast Inference from Transformers via Speculative Decoding, 2023,
equation 1). All of a, b, d and p are measured while the model answers. b holds whatever grows with
the rows: their computing, and experts that only they are routed to. The number of guesses is the k
with the most tokens per second; a draft that is in memory stays there as long as that beats one
token per pass in the time that a pass takes without it, when its memory holds weights instead.

[Note: passes alone] How long that is was measured before the draft came, and the disk may have
changed since. So of the passes now, the share that would still be read is taken as well, whichever
says more; but no pass is slower alone than beside a draft.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

MOST = 16
"""Guesses that one pass checks at most: what it computes with grows with them."""
_WINDOW = 24
"""The latest passes, which count."""
_MARGIN = 1.03
"""Times as fast as alone that a draft has to be to stay."""
_WORTH_LOADING = 1.2
"""Times as fast as alone that one has to promise before it is loaded."""
_BEFORE_LOADING = 0.8
"""Guesses that are right, as long as nobody knows."""
_PASSES_ALONE = 2
_TRIES = 5
"""Guesses before their share of right ones says something."""
_PASSES_MEASURED = 12
_LOOK_AGAIN = 8
"""Passes without guesses after which some are checked all the same."""
_FEW = 2


def tokens_kept(right: float, count: int) -> float:
    """Tokens that a pass with `count` guesses keeps, each right with probability `right`."""
    return count + 1.0 if right >= 1 else (1 - right ** (count + 1)) / (1 - right)


class Took(NamedTuple):
    """One pass that checked guesses, or none. Times in seconds."""

    guessed: int
    kept: int
    """Of these; the token that the pass gives itself not counted."""
    seconds: float
    """Of the pass."""
    guessing: float
    """Before it."""


@dataclass
class DraftControl:
    """Of one model and what guesses for it."""

    right: float = _BEFORE_LOADING
    """The share of right guesses to begin with; it weighs as `_TRIES` of them."""
    alone: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    """Seconds of passes before the draft was there."""
    computing: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    """What of these was no waiting."""
    share_alone: float = 1.0
    """Of what a pass reads beside the draft, the part that is read without it."""
    _latest: deque[Took] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _since: int = 0
    """Passes without guesses."""

    @property
    def knows_alone(self) -> bool:
        """Whether passes without a draft have been timed."""
        return len(self.alone) >= _PASSES_ALONE

    def note_alone(self, seconds: float, computing: float) -> None:
        """A pass of a single token is over, before the draft was there; what it computed of it."""
        self.alone.append(seconds)
        self.computing.append(computing)

    def note(self, took: Took) -> None:
        """A pass is over."""
        self._since = 0 if took.guessed else self._since + 1
        self._latest.append(took)

    def forget(self) -> None:
        """The latest passes say nothing of those to come."""
        self._latest.clear()

    def promises(self, read_more: float, share: float) -> bool:
        """Whether a draft is worth loading.

        Args:
            read_more: what a pass would read in addition, over what it reads now.
            share: of the model's size, that of the draft.
        """
        now = median(self.alone)
        # Processor time of several threads at once may be longer than the pass.
        computing = min(map(min, self.computing, self.alone))
        guess, waiting = computing * share, max(0.0, now - computing)
        best = max(
            tokens_kept(self.right, count) / (now + waiting * read_more + count * guess)
            for count in range(1, MOST + 1)
        )
        return best * now > _WORTH_LOADING

    def count(self, room: int) -> int:
        """How many tokens are to be guessed for the next pass; `room`: how many may be."""
        if not any(took.guessed for took in self._latest):
            # Nothing is known yet, or nothing any more.
            known = not self._latest or self._since >= _LOOK_AGAIN
            return min(_FEW * 2, room) if known else 0
        best = max(range(MOST + 1), key=self._rate)
        if not best and self._since >= _LOOK_AGAIN:
            best = _FEW
        return max(0, min(best, room))

    @property
    def pays(self) -> bool:
        """Whether a draft in memory is to stay there: see [Note: when a draft pays]."""
        latest = self._latest
        alone = self.seconds_alone
        if alone is None or sum(took.guessed > 0 for took in latest) < _FEW:
            return True
        if self._tries < _TRIES:
            return True
        rate = max(map(self._rate, range(MOST + 1)))
        if len(latest) >= _PASSES_MEASURED:
            seconds = sum(took.seconds + took.guessing for took in latest)
            rate = min(rate, sum(took.kept + 1 for took in latest) / seconds)
        return rate * alone >= _MARGIN

    @property
    def seconds_alone(self) -> float | None:
        """What a pass would take without the draft: see [Note: passes alone]. None: unknown."""
        if not self.alone or not self._latest:
            return None
        start, slope = self._pass_seconds
        now = start + slope
        return max(now * self.share_alone, min(median(self.alone), now))

    @property
    def tokens_per_pass(self) -> float:
        """Of the latest passes; 0.0 before any."""
        latest = self._latest
        return sum(took.kept + 1 for took in latest) / len(latest) if latest else 0.0

    def _rate(self, count: int) -> float:
        """Tokens per second with so many guesses."""
        start, slope = self._pass_seconds
        seconds = start + slope * (count + 1) + count * self._per_guess
        return tokens_kept(self._right_now, count) / seconds

    @property
    def _tries(self) -> int:
        """Guesses that were judged: those behind a wrong one were not."""
        return sum(min(took.kept + 1, took.guessed) for took in self._latest)

    @property
    def _right_now(self) -> float:
        """The likeliest share of right guesses, with what was thought before as `_TRIES` more."""
        kept = sum(took.kept for took in self._latest)
        return min(0.99, (kept + self.right * _TRIES) / (self._tries + _TRIES))

    @property
    def _per_guess(self) -> float:
        """Seconds."""
        guessed = sum(took.guessed for took in self._latest)
        return sum(t.guessing for t in self._latest if t.guessed) / guessed if guessed else 0.0

    @property
    def _pass_seconds(self) -> tuple[float, float]:
        """Of a pass without rows, and for each row: least squares, drawn towards no slope.

        One square of a row is added to what rows vary by: passes of one length tell no slope.
        """
        latest = self._latest
        rows = sum(took.guessed + 1 for took in latest) / len(latest)
        seconds = sum(took.seconds for took in latest) / len(latest)
        varied = sum((took.guessed + 1 - rows) ** 2 for took in latest)
        together = sum((took.guessed + 1 - rows) * (took.seconds - seconds) for took in latest)
        slope = min(max(0.0, together / (varied + 1)), seconds / rows)
        return max(seconds - slope * rows, 1e-9), slope
