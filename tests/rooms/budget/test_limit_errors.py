"""Refused limits: their words stand in one file; those of a pass are known to batch searches."""

from __future__ import annotations

import ast
import copy
import pickle
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from accelerate.utils import find_executable_batch_size  # type: ignore[import-untyped]

import pipeload
from pipeload.budget.limit_errors import PassMemoryLimitError
from tests.support.streaming import load_streamed

if TYPE_CHECKING:
    from tests.conftest import TinyCheckpoint

ROOT = Path(pipeload.__file__).parent
ONES = torch.ones(1, 1, dtype=torch.long)


@pytest.mark.slow
def test_a_search_ends_at_a_batch_that_fits(tiny: TinyCheckpoint) -> None:
    """Accelerate's, which others use, too: it halves what does not fit."""
    model = load_streamed(tiny("llama"), spare=0)
    tried: list[int] = []

    def halve() -> int:
        return tried[-1] // 2

    def score(batch_size: int) -> int:
        tried.append(batch_size)
        with torch.no_grad():
            model(ONES.expand(batch_size, 400))
        return batch_size

    search = find_executable_batch_size(
        score, starting_batch_size=1 << 16, reduce_batch_size_fn=halve
    )
    assert 1 <= search() < 1 << 16
    assert len(tried) > 2


def test_it_is_all_of_what_it_replaces(tiny: TinyCheckpoint) -> None:
    """Python's error, torch's, and ours; its copies say the same."""
    model = load_streamed(tiny("llama"), spare=0)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError) as caught:
        model(ONES.expand(1 << 16, 400))
    error = caught.value
    assert isinstance(error, pipeload.MemoryLimitError)
    assert isinstance(error, MemoryError)
    assert "out of memory." in str(error)
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is PassMemoryLimitError
        assert (str(other), vars(other)) == (str(error), vars(error))
    plain = pipeload.MemoryLimitError("small", limit=1, smallest_limit=2, device="cuda")
    assert vars(pickle.loads(pickle.dumps(plain))) == vars(plain)


def test_the_words_stand_in_one_file() -> None:
    """Those of a model that streams; one command has words of its own."""
    kinds = {"MemoryLimitError", "PassMemoryLimitError"}
    made = {
        file.relative_to(ROOT).as_posix()
        for file in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds
    }
    assert made == {"budget/limit_errors.py", "cli/evaluate.py"}
