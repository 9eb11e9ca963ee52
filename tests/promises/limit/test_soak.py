"""Mixed work under a kernel cap equal to the limit; `tests/tools/soak.py` does half an hour."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.tools.soak import soak

if TYPE_CHECKING:
    from pathlib import Path

CAP = 600_000_000


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.cgroup
def test_a_short_soak(smollm2_bf16: Path) -> None:
    """Two threads, other limits, passes that are broken off: nothing wrong, nobody killed."""
    result = soak(smollm2_bf16, CAP, 15)
    assert (result["wrongs"], result["kills"]) == (0, 0), result
    assert result["left"] == []
    assert result["peak"] <= CAP
    assert result["counts"]["whole"] > 4  # those at its end are not all
    assert result["read"] > result["passes"] * 1_000_000  # it streams
