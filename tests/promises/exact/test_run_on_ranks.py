"""`pipeload run --ranks`: rank 0 answers, and all draw the same tokens, drafts too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.commands import start
from tests.support.models import save_random
from tests.support.ranks import free_port
from tests.support.talking import add_letters

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_tokens_are_drawn_by_one_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None was given: one is drawn for all. Rank 0 alone prints, and each has its own trace."""
    model, draft, trace = (tmp_path / name for name in ("model", "draft", "trace"))
    for number, folder in enumerate((model, draft)):
        save_random("llama", folder, "fp32", seed=number)
        add_letters(folder)
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in {**group, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    asked: list[object] = ["--memory-limit", "4GB", "--max-new-tokens", 12, "--temperature", 1.5]
    asked += ["--draft", draft, "--ranks", "auto", "--trace", trace]
    ranks = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        ranks.append(start("run", model, "Say.", *asked))
    texts = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], texts
    seeds = [
        next(line for line in errors.splitlines() if "sampling, as --seed" in line)
        for _, errors in texts
    ]
    assert seeds[0] == seeds[1]
    (first, _), (other, _) = texts
    assert first  # the end of a line at least: what is drawn may be nothing
    assert not other
    assert trace.stat().st_size > 0
    assert trace.with_name("trace.rank1").stat().st_size > 0


@pytest.mark.sweep
def test_a_rank_of_a_group_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leftover RANK does not silence the only one that answers."""
    save_random("llama", tmp_path, "fp32", seed=1)
    add_letters(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "3")
    asked = ["--memory-limit", "4GB", "--max-new-tokens", "4", "--ranks", "auto"]
    said, errors = start("run", tmp_path, "Say.", *asked).communicate(timeout=120)
    assert said.strip(), errors
