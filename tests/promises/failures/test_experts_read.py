"""Experts that cannot be read: one error that names the module, and a model that goes on after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import pipeload
from pipeload.checkpoint.file_reads import FileSet
from tests.support.experts import experts_of, save_moe
from tests.support.models import load_plain
from tests.support.streaming import assert_nothing_held, load_streamed, logits

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("spare", [1_000, 1_000_000])
def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: int) -> None:
    """Wherever among the reads of a pass it does."""
    folder = save_moe(tmp_path)
    expected = logits(load_plain(folder))
    model = load_streamed(folder, spare=spare)
    assert torch.equal(logits(model), expected)
    read_pages = FileSet.read_pages
    for good in (0, 1, 7, 40):
        left = good

        def fail(files: FileSet, path: Path, *args: Any) -> int:
            nonlocal left
            left -= 1
            if left < 0:
                raise pipeload.ReadError(f"reading {str(path)!r} failed")
            return read_pages(files, path, *args)

        monkeypatch.setattr(FileSet, "read_pages", fail)
        with pytest.raises(pipeload.ReadError, match=r"block 'model\.layers\.\d"):
            logits(model)
        monkeypatch.setattr(FileSet, "read_pages", read_pages)
        assert torch.equal(logits(model), expected)
        assert_nothing_held(model)
        assert experts_of(model)._cache.used <= experts_of(model)._cache.budget
