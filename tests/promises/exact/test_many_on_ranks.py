"""Requests that share each reading on several ranks have the bits of a run alone on one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest

import pipeload
from pipeload.errors import MemoryLimitError
from tests.promises.exact.test_convoy import alone, light_threads, requests
from tests.promises.exact.test_generation import MODES
from tests.promises.exact.test_ranks import even_disks, much_patience, one_thread, small_tables
from tests.support.exact import ROOMY, assert_same, load, prompt, steady_floor
from tests.support.models import load_plain, save_random, tiny_config
from tests.support.ranks import on_ranks

if TYPE_CHECKING:
    from pathlib import Path

# Fixtures: every test here runs with them.
__all__ = ["even_disks", "light_threads", "much_patience", "small_tables", "steady_floor"]

pytestmark = pytest.mark.slow
SOME = ("greedy", "sampling", "beam search", "static cache", "hidden states")


@functools.cache
def wanted_of(folder: Path, modes: tuple[str, ...]) -> list[Any]:
    """What a plain model gives, with one thread, as in the ranks."""
    with one_thread():
        plain = load_plain(folder)
        return [alone(plain, request) for request in requests(modes)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of so many blocks that three of them stream on each of three ranks."""
    config = tiny_config("llama", num_hidden_layers=9)
    return save_random(config, tmp_path_factory.mktemp("llama"), "bf16", seed=8)


def smallest_on(size: int, folder: Path) -> int:
    """The smallest limit with which each rank has room for its share."""

    def refused(_rank: int) -> int:
        with pytest.raises(MemoryLimitError) as refusal:
            load(folder, 1, ranks=size)
        return refusal.value.smallest_limit

    return int(max(on_ranks(size, refused)))


@pytest.mark.parametrize("size", [2, 3])
def test_every_mode_at_once(folder: Path, size: int) -> None:
    """Streamed: equal on every rank, and results come in the same order on all of them."""
    modes = tuple(MODES) if size == 2 else SOME
    many, wanted = requests(modes), wanted_of(folder, modes)
    limit = smallest_on(size, folder)

    def act(_rank: int) -> list[int]:
        model, order = load(folder, limit, ranks="auto"), []
        for number, output in pipeload.generate_many(model, many, at_once=5):
            assert_same(output, wanted[number], f"request {number}")
            order.append(number)
        assert model.pipeload.plan.bytes_per_pass > 0
        return order

    found = on_ranks(size, act, seconds=200)
    assert all(order == found[0] for order in found)
    assert sorted(found[0]) == [*range(len(many))]


def test_one_streams_and_one_holds_all(folder: Path) -> None:
    """The one that has no site to wait at takes turns all the same, also as "auto" says.

    Between two results, and after them, the model can be called; the iterator can be closed.
    """
    many, wanted = requests(SOME), wanted_of(folder, SOME)
    limit = smallest_on(2, folder)

    def act(rank: int) -> list[int]:
        model, order = load(folder, ROOMY if rank else limit, ranks="auto"), []
        assert_same(alone(model, many[0]), wanted[0])
        for at_once in (3, "auto"):
            for number, output in pipeload.generate_many(model, many, at_once=at_once):
                assert_same(output, wanted[number], f"request {number}")
                order.append(number)
                if len(order) == 2:
                    assert_same(alone(model, many[1]), wanted[1])
        closed = pipeload.generate_many(model, many, at_once=3)
        next(closed)
        closed.close()  # type: ignore[attr-defined]
        assert_same(alone(model, many[1]), wanted[1])
        return order

    first, other = on_ranks(2, act, seconds=120)
    assert first == other
    assert sorted(first) == sorted([*range(len(many))] * 2)


def test_long_prompts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too large to be copied is sent from where it is; seeds are those of rank 0."""
    monkeypatch.setattr("pipeload.ring.outputs._LARGE_BYTES", 1 << 11)
    many: list[dict[str, Any]] = [
        {"input_ids": prompt(1, 40 - n, seed=n), "max_new_tokens": 5} for n in range(4)
    ]
    many[3] |= {"do_sample": True}
    with one_thread():
        plain = load_plain(folder)
        wanted = [plain.generate(**request).tolist() for request in many[:3]]

    def act(_rank: int) -> list[list[int]]:
        model = load(folder, ROOMY, ranks="auto")
        found = dict(pipeload.generate_many(model, many, at_once=4))
        return [found[number].tolist() for number in range(4)]

    first, other = on_ranks(2, act, seconds=60)
    assert first == other
    assert first[:3] == wanted
