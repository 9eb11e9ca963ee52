"""What the first model predicts waits in a file for the others."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
import torch

from pipeload.errors import OptionError
from pipeload.evaluate.compare import FirstLogits
from pipeload.evaluate.text_windows import Window

if TYPE_CHECKING:
    from collections.abc import Iterator

WINDOW = Window(0, 9, 1)


@pytest.fixture
def first() -> Iterator[FirstLogits]:
    """A file with nothing in it."""
    made = FirstLogits()
    yield made
    made.close()


def test_nothing_is_rounded(first: FirstLogits) -> None:
    """The same logits are no way apart, in whatever dtype."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        logits = torch.randn(8, 97).to(dtype)
        first.keep(WINDOW, logits)
        first.compare(WINDOW, logits)
        assert first.agreement() == (0.0, 1.0)


def test_other_words(first: FirstLogits) -> None:
    """A model with more of them: nothing can be said."""
    first.keep(WINDOW, torch.randn(8, 97))
    first.compare(WINDOW, torch.randn(8, 98))
    assert first.agreement() is None


def test_a_full_disk(first: FirstLogits, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says where there is no room, and what to set."""

    class Full:
        def tell(self) -> int:
            return 0

        def write(self, _content: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            pass

    monkeypatch.setattr(first, "_file", Full())
    with pytest.raises(OptionError, match=r"No space left on device\. Set TMPDIR"):
        first.keep(WINDOW, torch.randn(8, 97))
