"""Requests that share each reading on several ranks have the bits of a run alone on one."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

import pipeload
from pipeload.errors import MemoryLimitError
from pipeload.ring.head_rows import HeadRows
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


def test_a_head_that_is_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its rows are not dealt, the rank that holds all has no hooks but those of passes."""
    monkeypatch.setattr(HeadRows, "is_exact", lambda _head, _rows: False)
    modes = ("greedy", "sampling")
    many, wanted = requests(modes), wanted_of(folder, modes)
    limit = smallest_on(2, folder)

    def act(rank: int) -> None:
        model = load(folder, ROOMY if rank else limit, ranks="auto")
        assert_same(alone(model, many[0]), wanted[0])
        for number, output in pipeload.generate_many(model, many, at_once=2):
            assert_same(output, wanted[number], f"request {number}")

    on_ranks(2, act, seconds=90)


def test_a_model_that_is_forgotten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all of it has become resident among the requests."""
    monkeypatch.setattr(HeadRows, "is_exact", lambda _head, _rows: False)
    many = requests(("greedy", "sampling"))

    def act(_rank: int) -> bool:
        model = load(folder, ROOMY, ranks="auto")
        assert len(list(pipeload.generate_many(model, many, at_once=2))) == 2
        known = weakref.ref(model)
        del model
        gc.collect()
        return known() is None

    assert on_ranks(2, act, seconds=60) == [True, True]


def test_hooks_that_change_outputs_in_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other ranks get is what the block gave: they have the same hooks."""
    monkeypatch.setattr("pipeload.ring.outputs._LARGE_BYTES", 1 << 11)
    request = {"input_ids": prompt(1, 40), "max_new_tokens": 4, "do_sample": False}

    def steered(model: Any) -> list[int]:
        for layer in model.model.layers:
            layer.register_forward_hook(lambda _module, _args, output: _add(output))
        return list(model.generate(**request)[0].tolist())

    with one_thread():
        wanted = steered(load_plain(folder))
    found = on_ranks(2, lambda _rank: steered(load(folder, ROOMY, ranks="auto")), seconds=60)
    assert found == [wanted, wanted]


def _add(output: Any) -> None:
    (output[0] if isinstance(output, tuple) else output).add_(0.25)


# PEFT asks for what is called otherwise now.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_in_a_wrapper(folder: Path) -> None:
    """As PEFT's, which is asked in the place of the model."""
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    many = requests(("greedy", "sampling", "beam search"))

    def adapted(model: Any) -> Any:
        torch.manual_seed(3)
        return peft.get_peft_model(model, options)

    with one_thread():
        plain = adapted(load_plain(folder))
        wanted = [alone(plain, request) for request in many]

    def act(_rank: int) -> None:
        model = adapted(load(folder, ROOMY, ranks="auto"))
        for number, output in pipeload.generate_many(model, many, at_once=3):
            assert_same(output, wanted[number], f"request {number}")

    on_ranks(2, act, seconds=60)


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
