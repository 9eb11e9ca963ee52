"""What a plan says of experts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeload.budget.experts_in_plan import ExpertsShare

SHARE = ExpertsShare(
    layers=4,
    experts=64,
    total_bytes=6400,
    window_bytes=300,
    routed_bytes=400,
    cache_bytes=0,
)


def test_more_cache_more_hits() -> None:
    """None without a cache, all where all fit, and never fewer with more."""
    rates = [replace(SHARE, cache_bytes=size).expected_hits for size in range(0, 6401, 100)]
    assert rates[0] == 0
    assert rates[-1] == 1
    assert rates == sorted(rates, key=lambda rate: rate or 0.0)
    assert replace(SHARE, cache_bytes=400).expected_hits == pytest.approx(0.37, abs=0.02)


def test_bytes_of_a_token() -> None:
    assert SHARE.bytes_per_token == 400
    assert replace(SHARE, cache_bytes=6400).bytes_per_token == 0
    assert replace(SHARE, routed_bytes=None, cache_bytes=100).bytes_per_token == 6300


def test_rows_for_people() -> None:
    cache, window = replace(SHARE, cache_bytes=400).rows()
    assert cache[:2] == ("expert cache", 400)
    assert "64 experts" in cache[2]
    assert "found here" in cache[2]
    assert window[:2] == ("expert window", 300)
    assert "found" not in replace(SHARE, routed_bytes=None).rows()[0][2]
