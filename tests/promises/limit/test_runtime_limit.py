"""The limit may change while a model runs, and so may what others need of it."""

from __future__ import annotations

import gc
import itertools
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

import pipeload
from pipeload import MemoryLimitError
from pipeload.budget import eviction_policy
from pipeload.budget.reserve import WARM_UP_BYTES
from pipeload.budget.shared_limit import ACCOUNTANT, Accountant
from tests.promises.failures.test_interrupts import interrupt, places_of
from tests.support.models import load_plain
from tests.support.streaming import (
    FLOOR_BYTES,
    IDS,
    WAIT_SECONDS,
    assert_nothing_held,
    finish_messages,
    generated,
    hooked_sites,
    in_thread,
    load_streamed,
    logits,
    prefetcher_of,
    session_of,
    smallest_limit,
    steady_floor,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

ALL = 10_000_000
"""Bytes over the smallest limit with which everything fits."""


class Pressure:
    """What everybody else in the process holds; above the planned floor it is pressure."""

    nbytes = 0


@pytest.fixture(autouse=True)
def pressure(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pressure]:
    made = Pressure()
    monkeypatch.setattr(Accountant, "other_bytes", lambda _self: made.nbytes)
    yield made
    ACCOUNTANT.forget_all()


@pytest.fixture(scope="module")
def folder(tiny: TinyCheckpoint) -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return load_plain(folder)


def held(model: Any) -> int:
    """Residents and buffers now, once all messages are handled."""
    finish_messages(prefetcher_of(model))
    counters = prefetcher_of(model).counters
    return counters.resident_bytes + counters.buffer_bytes


def most_beside(model: Any) -> int:
    """Bytes that others may hold: nothing is left for residents, and passes are not refused yet."""
    governor = session_of(model).governor
    return int(governor.plan.memory_limit - governor.least_bytes() - governor._hint_need)


def check_right(model: Any, plain: Any) -> None:
    assert torch.equal(logits(model), logits(plain))
    assert generated(model) == generated(plain)
    assert_nothing_held(model)


@pytest.mark.parametrize("spare", [700_000, ALL])
def test_down_and_up_between_passes(folder: Path, plain: Any, spare: int) -> None:
    """Memory is given back before the call returns, and comes back as weights stream by."""
    model = load_streamed(folder, spare=spare)
    limit = model.pipeload.plan.memory_limit
    check_right(model, plain)
    before = held(model)
    model.pipeload.set_memory_limit(limit - spare)
    governor = session_of(model).governor
    assert held(model) <= governor.budget < before
    assert model.pipeload.plan.memory_limit == model.pipeload.stats().memory_limit == limit - spare
    check_right(model, plain)
    assert held(model) <= governor.budget
    model.pipeload.set_memory_limit(limit)
    check_right(model, plain)
    assert held(model) >= before * 0.9


def test_the_plan_says_how_it_is_read_now(folder: Path, plain: Any) -> None:
    """A model that fitted was mapped; once it streams it is read, and mapped again when it fits."""
    model = load_streamed(folder, spare=10_000_000)
    limit = model.pipeload.plan.memory_limit
    assert model.pipeload.plan.io_mode == "mapped"
    model.pipeload.set_memory_limit(limit - 9_900_000)
    assert model.pipeload.plan.bytes_per_pass > 0
    assert model.pipeload.plan.io_mode in {"direct", "buffered"}
    check_right(model, plain)
    model.pipeload.set_memory_limit(limit)
    check_right(model, plain)
    assert model.pipeload.plan.io_mode == "mapped"


def test_an_impossible_limit_changes_nothing(folder: Path, plain: Any) -> None:
    """And says one that works."""
    model = load_streamed(folder, spare=700_000)
    check_right(model, plain)
    plan, before = model.pipeload.plan, held(model)
    for limit in (1, plan.memory_limit - 2_000_000, "1GB"):
        with pytest.raises(MemoryLimitError) as caught:
            model.pipeload.set_memory_limit(limit)
        assert model.pipeload.plan is plan
        assert ACCOUNTANT.limit == plan.memory_limit
        assert held(model) == before
    model.pipeload.set_memory_limit(caught.value.smallest_limit)
    check_right(model, plain)
    with pytest.raises(pipeload.OptionError):
        model.pipeload.set_memory_limit("much")


class Callback(BaseStreamer):
    """Calls back for each token of `generate`."""

    def __init__(self, calls: Callable[[], object]) -> None:
        self._calls = calls

    def put(self, _value: object) -> None:
        self._calls()

    def end(self) -> None:
        """Nothing to flush."""


@pytest.mark.parametrize("modules", [False, True])
def test_inside_generate(folder: Path, plain: Any, modules: bool) -> None:
    """From a streamer's callback: another limit for every token."""
    # Cut into modules where whole blocks would not fit; and never cut anew.
    model = load_streamed(folder, spare=100_000, modules=modules)
    low = model.pipeload.plan.memory_limit
    limits = itertools.cycle([low + ALL, low, low + 600_000, low - 100_000])
    change = Callback(lambda: model.pipeload.set_memory_limit(next(limits)))
    for _ in range(2):
        tokens = model.generate(IDS, max_new_tokens=6, do_sample=False, streamer=change)
        assert tokens[0].tolist() == generated(plain)
    check_right(model, plain)


@pytest.mark.parametrize("spare", [700_000, ALL])
def test_from_another_thread(folder: Path, plain: Any, spare: int) -> None:
    """As often as it can, while this one generates."""
    model = load_streamed(folder, spare=spare)
    top = model.pipeload.plan.memory_limit
    expected = generated(plain)
    going = True

    def swing() -> int:
        count = 0
        for limit in itertools.cycle([top - spare, top]):
            model.pipeload.set_memory_limit(limit)
            count += 1
            time.sleep(0.005)
            if not going:
                return count
        return count

    other = in_thread(swing)
    try:
        for _ in range(4):
            assert generated(model) == expected
            assert torch.equal(logits(model), logits(plain))
    finally:
        going = False
    assert other.result(WAIT_SECONDS) > 1
    check_right(model, plain)


@pytest.mark.parametrize("inner", [False, True])
def test_a_settled_pass_keeps_its_weights(folder: Path, plain: Any, inner: bool) -> None:
    """While a thread computes without hooks, another one's limit waits, also for inner modules."""
    model = load_streamed(folder, spare=ALL)
    logits(model)
    assert session_of(model).passes._replan.settled
    low = model.pipeload.plan.memory_limit - ALL

    def call(model: Any) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = model.model(IDS)[0] if inner else model(IDS).logits
        return result

    expected = call(plain)
    changed: list[bool] = []

    def change(*_args: object) -> None:
        if not changed:
            changed.append(True)
            in_thread(model.pipeload.set_memory_limit, low).result(WAIT_SECONDS)

    hook = model.model.layers[2].register_forward_pre_hook(change)
    assert torch.equal(call(model), expected)
    hook.remove()
    assert changed
    check_right(model, plain)
    assert held(model) <= session_of(model).governor.budget


def test_a_limit_from_inside_the_own_pass(folder: Path, plain: Any) -> None:
    """A hook of the user's that changes the limit under its own model."""
    for spare in (700_000, ALL):
        model = load_streamed(folder, spare=spare)
        logits(model)
        low = model.pipeload.plan.memory_limit - spare
        hook = model.model.layers[2].mlp.register_forward_pre_hook(
            lambda *_args, m=model, to=low: m.pipeload.set_memory_limit(to)
        )
        assert torch.equal(logits(model), logits(plain))
        hook.remove()
        check_right(model, plain)
        assert held(model) <= session_of(model).governor.budget


def test_two_settled_passes_that_both_want_memory(
    folder: Path, plain: Any, pressure: Pressure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for each other's weights to be free, and not for ever."""
    monkeypatch.setattr(eviction_policy, "STEPS", 1 << 40)
    monkeypatch.setattr(eviction_policy, "MIN_STEP_BYTES", 4096)
    model = load_streamed(folder, spare=ALL)
    logits(model)
    passes = session_of(model).passes
    governor, adopt = session_of(model).governor, passes.adopt
    floor: int = governor.ledger._floor  # type: ignore[attr-defined]
    least, most = governor.wants
    need = governor._needs.for_pass((IDS,), {})
    spare = governor._room(governor._limit, 0) - need
    tries = itertools.count()
    threads: list[Any] = []

    def slow(new: Any, **options: Any) -> bool:
        if next(tries) == 0:
            # A second thread comes while this one waits, and wants even more.
            pressure.nbytes += (most - least) // 4
            threads.append(in_thread(logits, model))
            # What this process has learnt of its passes may let that one run as it is.
            deadline = time.monotonic() + WAIT_SECONDS / 3
            while len(passes._waiting) < 2 and time.monotonic() < deadline:
                time.sleep(0.001)
        return adopt(new, **options)

    monkeypatch.setattr(passes, "adopt", slow)
    pressure.nbytes = floor + WARM_UP_BYTES + spare - (least + most) // 2
    threads.append(in_thread(logits, model))
    threads[0].result(WAIT_SECONDS)
    results = [thread.result(WAIT_SECONDS) for thread in threads]
    assert len(results) == 2
    assert all(torch.equal(result, logits(plain)) for result in results)
    check_right(model, plain)


def test_it_settles_again(folder: Path, plain: Any) -> None:
    """No hooks and no threads while it fits; back to streaming and again."""
    model = load_streamed(folder, spare=ALL)
    limit = model.pipeload.plan.memory_limit
    for _ in range(3):
        check_right(model, plain)
        assert hooked_sites(model) == 0
        model.pipeload.set_memory_limit(limit - ALL)
        assert hooked_sites(model) > 0
        check_right(model, plain)
        model.pipeload.set_memory_limit(limit)
    check_right(model, plain)
    assert hooked_sites(model) == 0


def test_user_memory_takes_residents(folder: Path, plain: Any, pressure: Pressure) -> None:
    """They yield in the middle of a pass, and come back some passes after it is gone."""
    model = load_streamed(folder, spare=ALL)
    check_right(model, plain)
    full = held(model)
    pressure.nbytes = most_beside(model)
    check_right(model, plain)
    low = session_of(model).governor
    assert held(model) <= low.budget == low.wants[0] < full
    pressure.nbytes = 0
    for _ in range(6):
        check_right(model, plain)
    assert held(model) >= full * 0.9


def test_a_pass_too_large_is_refused(folder: Path, plain: Any, pressure: Pressure) -> None:
    """Before anything runs; and the model goes on."""
    model = load_streamed(folder, spare=0, tokens=32)
    check_right(model, plain)
    ran = []
    hook = model.model.embed_tokens.register_forward_pre_hook(lambda *_a: ran.append(1))
    pressure.nbytes = FLOOR_BYTES + 60_000_000
    with pytest.raises(
        MemoryLimitError, match=r"\. A limit of \d+ bytes \(.*\) makes it fit(\.|, and so)"
    ) as caught:
        logits(model, torch.ones(40, 200, dtype=torch.long))
    assert not ran
    assert caught.value.smallest_limit > caught.value.limit
    hook.remove()
    check_right(model, plain)


def test_two_share_and_one_gives_back(folder: Path, plain: Any) -> None:
    """A newcomer gets its share; whoever is removed or forgotten leaves all to the other."""
    with steady_floor():
        limit = smallest_limit(folder) + 1_500_000
        first = pipeload.from_pretrained(folder, memory_limit=limit, dtype="auto")
        check_right(first, plain)
        alone = session_of(first).governor.budget
        second = pipeload.from_pretrained(folder, memory_limit=limit, dtype="auto")
    shared = session_of(first).governor.budget
    assert shared < alone
    for _ in range(2):
        check_right(first, plain)
        check_right(second, plain)
    assert held(first) + held(second) <= alone + 1_500_000
    second.pipeload.remove()
    assert len(ACCOUNTANT.clients) == 1
    for _ in range(6):
        check_right(first, plain)
    assert session_of(first).governor.budget > shared
    del first
    gc.collect()
    assert ACCOUNTANT.clients == []


def test_a_draft_is_known_to_run_more_often(folder: Path, plain: Any) -> None:
    """Streamed or all in memory: so its share is what is given up last."""
    wanted = logits(plain)
    target = load_streamed(folder, spare=0)
    draft = pipeload.from_pretrained(folder, memory_limit=target.pipeload.plan.memory_limit)
    for more in (0, ALL):
        if more:
            ACCOUNTANT.set_limit(target.pipeload.plan.memory_limit + more)
        for _ in range(12):
            for _ in range(5):
                assert torch.equal(logits(draft), wanted)
            assert torch.equal(logits(target), wanted)
        often, seldom = (
            ACCOUNTANT._passes[id(session_of(model).governor)] for model in (draft, target)
        )
        assert often > 4 * seldom > 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_anywhere_in_a_resplit(folder: Path, plain: Any, pressure: Pressure) -> None:
    """From settled to streaming, cut off at any instruction: the next pass is right and small."""
    expected = logits(plain)

    def settled() -> Any:
        pressure.nbytes = 0
        model = load_streamed(folder, spare=ALL)
        logits(model)
        pressure.nbytes = most_beside(model)
        return model

    found = places_of(partial(logits, settled()))
    files = (
        "engine/passes.py",
        "engine/replan.py",
        "engine/streamer.py",
        "prefetch/prefetcher.py",
        "budget/governor.py",
        "prefetch/unit.py",
        "engine/site_parameters.py",
    )
    places = [place for place in found if place[0].co_filename.endswith(files)]
    struck = 0
    for place in places[::8]:
        model = settled()
        struck += interrupt(partial(logits, model), place, 1)
        where = f"{place[0].co_name} at {place[1]}"
        assert torch.equal(in_thread(logits, model).result(WAIT_SECONDS), expected), where
        assert torch.equal(logits(model), expected), where
        assert_nothing_held(model)
        assert held(model) <= session_of(model).governor.wants[0], where
    assert struck > 5
