"""Tests that show again what others show: `make sweep` runs them, `make test` does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


def few(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Parameters of which those in `kept` are always tried, and the others with `make sweep`."""
    values = list(values)
    assert all(one in values for one in kept)
    return [
        one
        if one in kept
        else pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.sweep)
        for one in values
    ]
