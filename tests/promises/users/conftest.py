"""Models that are new for each test, by each way in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.models import load_plain
from tests.support.users import WAYS, Pair, load_by

if TYPE_CHECKING:
    from tests.conftest import TinyCheckpoint


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def pair(way: str, tiny: TinyCheckpoint) -> Pair:
    """New for each test: the first pass of a model is unlike the later ones."""
    folder = tiny("llama")
    return Pair(load_plain(folder), load_by(way, folder))
