"""MXFP4 unpacked by a table of pairs: the library's own values, or nothing is done."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations import mxfp4 as library

from pipeload.formats.mxfp4 import unpack


def _stored(experts: int, rows: int, groups: int) -> dict[str, torch.Tensor]:
    return {
        "w_blocks": torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8),
        "w_scales": torch.randint(0, 255, (experts, rows, groups), dtype=torch.uint8),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 70, 5), (2, 5000, 9)])
def test_the_librarys_values(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """All bytes and factors, rows that are no whole number of chunks, a part of a larger tensor."""
    stored = _stored(*shape)
    wanted = library.convert_moe_packed_tensors(*stored.values(), dtype=dtype)
    larger = torch.full((shape[0] + 1, *wanted.shape[1:]), 7.0, dtype=dtype)
    assert unpack.unpack(stored, larger[1:])
    assert torch.equal(larger[1:], wanted)
    assert bool((larger[0] == 7).all())


def test_what_it_does_not_know() -> None:
    """The library's operation is for these."""
    stored = _stored(1, 4, 2)
    out = torch.zeros(1, 64, 4)
    assert not unpack.unpack(stored, out.half())
    assert not unpack.unpack({"w_blocks": stored["w_blocks"]}, out)
    stored["w_scales"][0, 1, 1] = 255
    assert not unpack.unpack(stored, out)
    assert not out.any()


def test_another_operation_of_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at once, and what differs is not used."""
    operation = library.convert_moe_packed_tensors
    monkeypatch.setattr(
        library, "convert_moe_packed_tensors", lambda *a, **k: operation(*a, **k) * 2
    )
    unpack._is_the_librarys.cache_clear()
    try:
        assert not unpack.can_unpack(torch.bfloat16)
    finally:
        monkeypatch.undo()
        unpack._is_the_librarys.cache_clear()
    assert unpack.can_unpack(torch.bfloat16)
