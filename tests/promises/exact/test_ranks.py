"""Several ranks give what one plain model gives, bit for bit, on each of them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from pipeload.budget import cut
from pipeload.errors import MemoryLimitError
from pipeload.ring import head_rows, joining
from pipeload.weights import row_cuts
from tests.promises.exact.test_generation import MODES, generate
from tests.support.exact import (
    ROOMY,
    assert_same,
    load,
    prompt,
    steady_floor,
    step_logits,
)
from tests.support.experts import moe_config
from tests.support.models import load_plain, random_model, save_random, tiny_config
from tests.support.ranks import on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Use = Callable[[Any], Any]
    Plain = tuple[dict[str, Use], dict[str, Any]]

__all__ = ["steady_floor"]  # a fixture: every test here runs with it

FAMILIES = {"llama": "fp32", "qwen3": "bf16", "gemma3": "bf16"}
FEW = {"max_new_tokens": 4, "do_sample": False}
"""Each token is a pass, and in it each block a message to every rank."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """As ranks compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _uses(family: str) -> Iterator[tuple[str, Use]]:
    """What people do with a model: its name, and what to compare."""
    for name, (rows, options) in MODES.items():
        few = {key: 4 for key in ("max_new_tokens", "min_new_tokens") if key in options}
        yield name, _generating(prompt(rows), **options | few)
    ids, mask = prompt(3, 12), torch.ones(3, 12, dtype=torch.long)
    for row, padding in enumerate((0, 5, 9)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    yield "padded", _generating(ids, attention_mask=mask, **FEW)
    yield "padded beams", _generating(ids, attention_mask=mask, **FEW, num_beams=2)
    yield "logits", lambda model: step_logits(model, prompt(2), 3)
    # Gemma's is of 16 tokens.
    yield "past the window", _generating(prompt(1, 13), **FEW | {"max_new_tokens": 8})
    draft = random_model(tiny_config(family, num_hidden_layers=2), torch.float32, seed=5)
    yield "assistant", _generating(prompt(1), assistant_model=draft, **FEW)
    yield "continued", _continued


def _generating(ids: torch.Tensor, **options: Any) -> Use:
    return lambda model: generate(model, ids, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_removed_where_weights_are_made(tmp_path: Path, kind: str) -> None:
    """Cast as they are loaded, and stacked by the library: those of others are there, too."""
    config = tiny_config(kind) if kind == "llama" else moe_config(kind)
    folder, ids = save_random(config, tmp_path, "bf16", seed=3), prompt()
    with one_thread():
        wanted = load_plain(folder, dtype=torch.float32)(ids, logits_to_keep=2).logits

    @torch.no_grad()
    def act(_rank: int) -> list[bool]:
        model = load(folder, ROOMY, ranks=2, dtype=torch.float32)
        same = [torch.equal(model(ids, logits_to_keep=2).logits, wanted)]
        model.pipeload.remove()
        return [*same, torch.equal(model(ids, logits_to_keep=2).logits, wanted)]

    assert on_ranks(2, act, seconds=60) == [[True, True]] * 2


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """One after the other, so that its checkpoint is made once."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of so many blocks that three of them stream on each of three ranks."""
    config = tiny_config(family, num_hidden_layers=9)
    return save_random(config, tmp_path_factory.mktemp(family), FAMILIES[family], seed=8)


@pytest.fixture(scope="module")
def plain(family: str, folder: Path) -> Plain:
    """The uses, and what a plain model gives; with one thread, as in the ranks."""
    with one_thread():
        uses, model = dict(_uses(family)), load_plain(folder)
        return uses, {name: use(model) for name, use in uses.items()}


@pytest.fixture(autouse=True)
def even_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all disks were equally fast: so all ranks get as much."""
    monkeypatch.setattr(joining, "disk_rate", lambda _files: 1e9)


@pytest.fixture(autouse=True)
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of tiny models are read by rows, so a head that shares one is dealt out, too."""
    monkeypatch.setattr(cut, "_TABLE_BYTES", 1 << 12)


@pytest.fixture(autouse=True)
def much_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is lost here, and a busy machine may keep a rank silent for seconds."""
    monkeypatch.setenv("PIPELOAD_RANK_PATIENCE", "60")


def _continued(model: Any) -> Any:
    first = generate(model, prompt(1), **FEW)
    name = next(name for name in ("cache", "past_key_values") if name in first)
    ids = torch.cat([first.sequences, prompt(1, 3)], 1)
    return generate(model, ids, **FEW, **{name: first[name]})


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_every_use(folder: Path, plain: Plain, size: int) -> None:
    """Tokens, scores, hidden states and logits are equal on every rank, and each reads its own.

    Of the head some rows each, where this host's kernels give the whole one's bits by rows.
    """

    def refused(_rank: int) -> int:
        with pytest.raises(MemoryLimitError) as refusal:
            load(folder, 1, ranks=size)
        return refusal.value.smallest_limit

    def act(_rank: int) -> Any:
        tried: list[bool] = []

        def asked(cut: row_cuts.Cut) -> bool:
            tried.append(row_cuts.can_cut_rows(cut))
            return tried[-1]

        with mock.patch.object(head_rows, "can_cut_rows", asked):
            model = load(folder, limit, ranks="auto")
        for name, use in uses.items():
            assert_same(use(model), wanted[name], name)
        handle = model.pipeload
        assert handle.plan.bytes_per_pass > 0
        own = {unit.name.partition("[")[0] for unit in handle.plan.units}
        handle.remove()
        assert_same(uses["logits"](model), wanted["logits"], "removed")
        return sorted(own), tried

    uses, wanted = plain
    limit = max(on_ranks(size, refused))  # of each for its share
    found = on_ranks(size, act, seconds=300)
    assert all(isinstance(one, list) for one in found), found
    names = [name for own, _ in found for name in own]
    assert all(tried for _, tried in found)
    by_rows = any(all(answers) for answers in zip(*(tried for _, tried in found), strict=True))
    assert names.count("lm_head") == (size if by_rows else 1)
    assert len(set(names)) == len(names) - names.count("lm_head") + 1
