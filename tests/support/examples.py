"""How many examples of its own hypothesis makes for a test that wants another number of them."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> int:
    """`count` of them, or as much less as the profile that is loaded makes fewer for all tests."""
    return max(1, count * settings().max_examples // 100)
