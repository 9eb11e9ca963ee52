"""What the checks share: their model, what it computes, and the comparison with the plain one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.gpu.card import IDS, REHEARSED
from tests.tools.make_llama import LlamaShape

if TYPE_CHECKING:
    from pathlib import Path

    from tests.gpu.card import Card

# About 120 MB in bf16: large enough for segments of the allocator, small enough to be made at once.
SMALL = LlamaShape(768, 2048, 8, 12, 4, vocab=4096, dtype="bf16")
TINY = LlamaShape(256, 640, 6, 8, 4, vocab=512, dtype="bf16")
SHAPE = TINY if REHEARSED else SMALL


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(ids.to(model.device)).logits
    return result


def generate(model: Any, ids: torch.Tensor = IDS, **options: Any) -> list[list[int]]:
    torch.manual_seed(7)
    ids = ids.to(model.device)
    given = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0} | options
    given.setdefault("attention_mask", torch.ones_like(ids))
    tokens: list[list[int]] = model.generate(ids, **given).tolist()
    return tokens


def stream_at(card: Card, folder: Path, share: float, **options: Any) -> Any:
    """The model at a share of the way from its smallest limit to where everything fits."""
    least, whole = card.limits(folder, **options)
    return card.stream(folder, least + int(share * (whole - least)), **options)


def assert_equal(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.device == wanted.device
    assert not wanted.isnan().any(), "the reference is NaN"
    assert torch.equal(got, wanted), f"differs by {(got - wanted).abs().max().item()}"
