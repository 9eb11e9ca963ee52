"""wrap(model, ..., **kwargs): what finds a model's checkpoint is what it was loaded with."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import pipeload
from pipeload import CheckpointError, MemoryLimitError
from tests.promises.ways_in.test_loading_arguments import (
    ROWS,
    Source,
    folder,
    plainly,
    surroundings,
)
from tests.support.streaming import logits, steady_floor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["folder", "surroundings"]

NEEDED = {
    "subfolder": "is not what its checkpoint holds",
    "variant": "is not what its checkpoint holds",
    "key_mapping": "is not in its checkpoint",
    "revision branch": "is not what its checkpoint holds",
}
"""Rows whose arguments have to be said again, and what is wrong without them."""
KNOWN = ("config", "config by path", "trust_remote_code", "adapter_kwargs", "dtype text")
"""What the model tells itself; it may be said again."""


@pytest.fixture(autouse=True)
def floor() -> Iterator[None]:
    """Limits bite although the models are tiny."""
    with steady_floor(modules=True):
        yield


def loaded(name: str, folder: Path, empty: Path) -> tuple[Any, Source]:
    source = ROWS[name].source(folder, empty)
    return plainly(ROWS[name], source), source


def wrap_tightly(model: Any, **kwargs: Any) -> None:
    """At the smallest limit that works."""
    with pytest.raises(MemoryLimitError) as refusal:
        pipeload.wrap(model, 1, **kwargs)
    pipeload.wrap(model, refusal.value.smallest_limit, **kwargs)
    assert model.pipeload.plan.bytes_per_pass > 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", [*NEEDED, *KNOWN])
def test_said_again(name: str, folder: Path, tmp_path: Path) -> None:
    """As they were passed to plain `from_pretrained`."""
    model, source = loaded(name, folder, tmp_path)
    expected = logits(model)
    wrap_tightly(model, **source.kwargs)
    assert torch.equal(logits(model), expected)
    model.pipeload.remove()
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("name", NEEDED)
def test_not_said(name: str, folder: Path, tmp_path: Path) -> None:
    """Refused by a weight's name, with what may be missing; the model stays what it is."""
    model, source = loaded(name, folder, tmp_path)
    expected = logits(model)
    # The cache has another commit under the usual name.
    kwargs = source.kwargs | {"revision": "main"} if name == "revision branch" else {}
    hint = re.escape("(checkpoint=, revision=, subfolder=, variant=, key_mapping=)")
    with pytest.raises(CheckpointError, match=f"weight '[a-z].* {NEEDED[name]}.*{hint}"):
        pipeload.wrap(model, "100GB", **kwargs)
    assert "pipeload" not in vars(model)
    assert torch.equal(logits(model), expected)


def test_weights_that_no_checkpoint_has(folder: Path) -> None:
    """A head that is new stays in memory, and no word is lost about it."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected = model(ids).logits
        wrap_tightly(model)
        assert torch.equal(model(ids).logits, expected)
