"""How finely a model is cut, seen in its plan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import pipeload
from tests.support.streaming import steady_floor
from tests.tools.make_llama import PRESETS, make_llama

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 1.1 billion LLaMA, whose head takes 131 MB; no values."""
    shape = replace(PRESETS["1.1b"], headers_only=True)
    return make_llama(shape, tmp_path_factory.mktemp("llama") / "headers")


@pytest.mark.parametrize("spare", [0, 20_000_000, 60_000_000])
def test_no_range_of_the_head_is_why_buffers_are_large(headers: Path, spare: int) -> None:
    """It can be cut as finely as anything; two buffers of its ranges would be lost to blocks."""
    with steady_floor(modules=True):
        smallest = pipeload.smallest_limit(headers, tokens=32)
        plan = pipeload.plan(headers, memory_limit=smallest + spare, tokens=32)
    sizes = {unit.name: unit.weights_bytes for unit in plan.units}
    head = max(nbytes for name, nbytes in sizes.items() if name.startswith("lm_head"))
    assert head <= max(nbytes for name, nbytes in sizes.items() if "layers" in name)
