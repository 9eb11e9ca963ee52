"""The checks of a card, one test each; skipped where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.gpu.card import find_card
from tests.gpu.checks import CHECKS

if TYPE_CHECKING:
    from tests.gpu.card import Card

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Card:
    """The card of this machine, or a skip."""
    found = find_card(tmp_path_factory.mktemp("card"))
    if found is None:
        pytest.skip("no accelerator: torch.accelerator finds neither CUDA, ROCm nor XPU")
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_on_the_card(card: Card, name: str) -> None:
    """See the function of that name in exactness.py or memory.py."""
    CHECKS[name](card)
    card.forget()
