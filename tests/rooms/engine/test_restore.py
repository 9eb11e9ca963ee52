"""What bringing weights back takes beside the weights themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeload.engine.restore import _making_bytes
from pipeload.weights.placement import scratch_bytes


@pytest.mark.parametrize(
    ("casts", "conversions", "more"),
    [
        pytest.param(0, [], 0, id="as files hold it"),
        pytest.param(1, [], scratch_bytes(1), id="cast"),
        pytest.param(0, ["F32"], 2 * 100, id="stacked"),
        pytest.param(0, ["F32", "F16"], 3 * 100, id="and cast first"),
    ],
)
def test_what_making_them_takes(casts: int, conversions: list[str], more: int) -> None:
    """The place where they are made, a scratch for casts, and what the largest conversion takes."""
    made = [
        SimpleNamespace(
            weights=[
                SimpleNamespace(
                    nbytes=100,
                    unpacking_bytes=0,
                    dtype="F32",
                    sources=[SimpleNamespace(dtype=stored)],
                )
            ]
        )
        for stored in conversions
    ]
    layout = SimpleNamespace(nbytes=4096, casts=[None] * casts, conversions=made)
    assert _making_bytes(cast("Any", layout)) == 4096 + more
