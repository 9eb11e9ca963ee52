"""What a plan has for experts that are read as a router chooses them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from pipeload._sizes import counted, format_size

_HITS = ((0.0, 0.0), (0.6, 0.29), (1.1, 0.39), (2.1, 0.57), (5.3, 0.85), (10.7, 0.97), (16.0, 1.0))
"""Share of experts found in a cache that holds those of so many tokens: by a replay, with the rule
of expert_cache.py, of the routing of Qwen3-30B-A3B that the project BigMoeOnEdge has published
(2026-07-15, six experts a token). Other models and texts differ."""


@dataclass(frozen=True, slots=True)
class ExpertsShare:
    """Experts beside the units of a plan. Frozen; sizes in bytes."""

    layers: int
    """Modules that hold experts."""
    experts: int
    """All experts of all of them."""
    total_bytes: int
    """What all of them take in memory."""
    window_bytes: int
    """What those that do not stay pass through, and working memory of the threads that read."""
    routed_bytes: int | None
    """What the experts of one token are; None where the configuration does not say how many."""
    cache_bytes: int
    """What those that stay may take."""
    read_share: float = 1.0
    """Bytes that are read for each byte of an expert in memory."""

    @property
    def fits(self) -> bool:
        """Whether all of them may stay."""
        return self.cache_bytes >= self.total_bytes

    @property
    def expected_hits(self) -> float | None:
        """Which share of a token's experts is likely to be there; None if it is not known."""
        if self.fits:
            return 1.0
        if not self.routed_bytes:
            return None
        cycles = self.cache_bytes / self.routed_bytes
        for (low, below), (high, above) in itertools.pairwise(_HITS):
            if cycles <= high:
                return below + (above - below) * (cycles - low) / (high - low)
        return 1.0

    @property
    def bytes_per_token(self) -> int:
        """What is likely to be read of experts for one token; at most, if that is not known."""
        hits = self.expected_hits
        if hits is None:
            missed: float = self.total_bytes - self.cache_bytes
        else:
            missed = (self.routed_bytes or 0) * (1 - hits)
        return round(missed * self.read_share)

    def rows(self) -> list[tuple[str, int, str]]:
        """Where its bytes go, for people."""
        of = f"of {format_size(self.total_bytes)}: {counted(self.experts, 'expert')}"
        hits = self.expected_hits
        if self.routed_bytes and hits is not None and not self.fits:
            of += f"; {format_size(self.routed_bytes)} a token, about {hits:.0%} found here"
        return [
            ("expert cache", self.cache_bytes, of),
            ("expert window", self.window_bytes, "experts that do not stay; their reads"),
        ]
