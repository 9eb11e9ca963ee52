"""Models on a device: exact, in order, within both limits. The device is made of host memory."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

import pipeload
from pipeload.budget.shared_limit import ACCOUNTANT
from pipeload.devices.device_buffers import DevicePlacement, DeviceSlot
from pipeload.devices.device_parameters import DeviceSeat
from pipeload.devices.shared_device_limit import account_of
from tests.support.exact import prompt
from tests.support.fake_device import FakeDevice, lend
from tests.support.models import load_plain
from tests.support.streaming import (
    IDS,
    Reference,
    check,
    finish_reads,
    generated,
    hooked_sites,
    logits,
    our_threads_of_passes,
    prefetcher_of,
    session_of,
    wait_for_threads,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pipeload.budget.plan import Plan
    from tests.conftest import TinyCheckpoint

HOST = "8GB"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """The one that `device="fake"` names."""
    yield from lend(monkeypatch, hosting=False)


def smallest(folder: Path, **options: Any) -> int:
    """The smallest limit of the device."""
    options = {"dtype": "auto", "host_memory_limit": HOST, "device": "fake"} | options
    with pytest.raises(pipeload.MemoryLimitError) as refusal:
        pipeload.plan(folder, memory_limit=1, **options)
    return refusal.value.smallest_limit


def load(folder: Path, *, spare: int = 0, **options: Any) -> Any:
    """A model with `spare` bytes over the device's smallest limit."""
    options = {"dtype": "auto", "host_memory_limit": HOST, "device": "fake"} | options
    hints = {name: options[name] for name in ("tokens", "batch") if name in options}
    return pipeload.from_pretrained(
        folder, memory_limit=smallest(folder, **hints) + spare, **options
    )


def plan_for(folder: Path, **options: Any) -> Plan:
    """What `from_pretrained` would do."""
    options = {"dtype": "auto", "host_memory_limit": HOST, "device": "fake"} | options
    plan = pipeload.plan(folder, **options)
    assert plan.device_share is not None
    return plan


def freshly_allocated(folder: Path) -> Any:
    """The plain model as it lies on a device: each weight at an address of the allocator's."""
    plain = load_plain(folder)
    for parameter in plain.parameters():
        parameter.data = parameter.data.clone()
    return plain


def reference(folder: Path) -> Reference:
    plain = freshly_allocated(folder)
    return logits(plain), generated(plain)


# -- exact -----------------------------------------------------------------------------------------

PART = 500_000
"""Bytes over the smallest limit with which some of a tiny model stays."""
EVERYTHING = 10_000_000


@pytest.mark.parametrize("spare", [0, PART, EVERYTHING])
def test_many_requests_at_once(tiny: TinyCheckpoint, device: FakeDevice, spare: int) -> None:
    """Each has the tokens of a run alone; nothing is written to while it is computed with."""
    folder = tiny("llama")
    plain = freshly_allocated(folder)
    many = [{"input_ids": IDS[:1, : 3 + n], "max_new_tokens": 3 + n % 3} for n in range(4)]
    model = load(folder, spare=spare)
    for at_once in (4, "auto"):
        for number, output in pipeload.generate_many(model, many, at_once=at_once):
            assert torch.equal(output, plain.generate(**many[number]))
    assert device.torn == []
    assert device.errors == []


@pytest.mark.parametrize(
    ("family", "spare"),
    [
        ("llama", 0),
        ("llama", PART),
        ("llama", EVERYTHING),
        ("qwen3", 0),
        ("gpt2", PART),
        ("gemma3", PART),
    ],
)
def test_the_same_output(tiny: TinyCheckpoint, device: FakeDevice, family: str, spare: int) -> None:
    """Whatever stays on the device: logits and tokens, three times over."""
    folder = tiny(family)
    expected = reference(folder)
    model = load(folder, spare=spare)
    assert model.pipeload.plan.fits is (spare == EVERYTHING)
    for _ in range(3):
        check(model, expected)
    assert (model.pipeload.stats().misses == 0) or spare < EVERYTHING


def test_casts_and_other_dtypes(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """What is cast while it is read is so before it is copied, resident or not."""
    folder = tiny("llama")
    plain = load_plain(folder, dtype=torch.bfloat16)
    expected = logits(plain), generated(plain)
    for spare in (0, 300_000, EVERYTHING):
        model = load(folder, spare=spare, dtype=torch.bfloat16)
        check(model, expected)
        model.pipeload.remove()


def test_the_real_model(smollm2_bf16: Path, device: FakeDevice) -> None:
    """SmolLM2 at a limit that holds some of its blocks."""
    plain = load_plain(smollm2_bf16)
    expected = logits(plain), generated(plain)
    device.slow = 0.0005
    blocks = sum(p.numel() * 2 for p in plain.model.layers.parameters())
    del plain
    model = load(smollm2_bf16, spare=int(0.4 * blocks))
    check(model, expected)
    assert model.pipeload.plan.bytes_per_pass > 0


def test_generation_modes(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """Batches, beams, sampling, prompt lookup, assisted: the library's own, on the device."""
    folder = tiny("llama")
    plain, model = freshly_allocated(folder), load(folder, spare=200_000, batch=4)
    draft = freshly_allocated(folder)
    rows = prompt(rows=3, length=9)
    modes: list[dict[str, Any]] = [
        {"do_sample": False},
        {"num_beams": 3, "do_sample": False},
        {"do_sample": True, "top_k": 20},
        {"do_sample": False, "cache_implementation": "static"},
    ]
    single: list[dict[str, Any]] = [
        {"prompt_lookup_num_tokens": 3, "do_sample": False},
        {"assistant_model": draft, "do_sample": False},
    ]
    for ids, options in [*((rows, m) for m in modes), *((rows[:1], m) for m in single)]:
        given = {"max_new_tokens": 7, "attention_mask": torch.ones_like(ids), **options}
        torch.manual_seed(3)
        wanted = plain.generate(ids, **given)
        torch.manual_seed(3)
        assert torch.equal(model.generate(ids, **given), wanted), options


def test_where_the_model_is(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """Pipelines ask for the map; nothing of the model is elsewhere."""
    model = load(tiny("llama"))
    assert model.device == device.where
    assert model.hf_device_map == {"": device.where}
    every = [*model.parameters(), *model.buffers()]
    assert {tensor.device for tensor in every} == {device.where}


# -- order -----------------------------------------------------------------------------------------


def assert_ordered(device: FakeDevice) -> int:
    """Each copy into a buffer waits for the last computing with it; returns how many did."""
    last: dict[int, Any] = {}
    behind = 0
    for did in device.log:
        for address in did.memory:
            if did.what == "computed":
                last[address] = did.event
            elif address in last:
                assert did.after is last[address], "copied over what was computed with"
                behind += 1
    return behind


def test_a_buffer_is_written_behind_the_computing_with_it(
    tiny: TinyCheckpoint, device: FakeDevice
) -> None:
    """With computing that ends late, and a slow link."""
    device.slow = 0.004
    folder = tiny("llama")
    expected = reference(folder)
    model = load(folder)
    check(model, expected)
    device.synchronize()
    assert assert_ordered(device) > 20
    assert {len(did.memory) for did in device.log if did.what == "copy"} == {1}


def test_the_fake_sees_a_missing_event(
    tiny: TinyCheckpoint, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail: without its event, memory is torn, or the order is wrong."""
    device.slow_computing = 0.03
    copy = device.copy
    monkeypatch.setattr(device, "copy", lambda pairs, _after: copy(pairs, None))
    model = load(tiny("llama"))
    logits(model)
    logits(model)
    device.synchronize()
    with pytest.raises(AssertionError, match="copied over"):
        assert_ordered(device)
    assert device.torn
    device.torn.clear()


def test_the_fake_sees_a_staging_that_is_reused_too_soon(
    tiny: TinyCheckpoint, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the wait for the copy, blocks get each other's weights."""
    device.slow = 0.02
    folder = tiny("llama")
    expected = reference(folder)
    monkeypatch.setattr(DeviceSlot, "wait_until_free", lambda _slot: None)
    monkeypatch.setattr(DeviceSeat, "bind", _bind_without_waiting)
    model = load(folder)
    outputs = [logits(model) for _ in range(3)]
    assert not all(torch.equal(output, expected[0]) for output in outputs)
    device.synchronize()
    device.torn.clear()


def _bind_without_waiting(seat: DeviceSeat, unit: Any) -> None:
    super(DeviceSeat, seat).bind(unit)


def test_the_model_waits_for_no_copy_but_its_own(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """One wait for each block that streams and pass, for the last copy into its buffer."""
    model = load(tiny("llama"))
    logits(model)
    device.synchronize()
    start = len(device.log)
    logits(model)
    waits = [did.event for did in device.log[start:] if did.what == "wait"]
    streamed = sum(unit.streamed.nbytes > 0 for unit in model.pipeload.plan.units)
    assert len(waits) == streamed
    copies = {did.event for did in device.log if did.what == "copy"}
    assert set(waits) <= copies


# -- what fits -------------------------------------------------------------------------------------


def test_what_fits_leaves_no_hook_on_what_follows(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """After the first pass nothing is read or copied, no thread and no buffer is left."""
    folder = tiny("llama")
    expected = reference(folder)
    model = load(folder, spare=EVERYTHING)
    logits(model)
    assert hooked_sites(model) == 0
    assert not our_threads_of_passes()
    wait_for_threads(set())
    read, done = model.pipeload.stats().bytes_read, len(device.log)
    check(model, expected)
    assert model.pipeload.stats().bytes_read == read
    assert len(device.log) == done
    assert device.pinned == {}
    hooks = [h for m in model.modules() for h in (*m._forward_pre_hooks, *m._forward_hooks)]
    assert len(hooks) == 3  # where a pass may begin: both models, and the first block


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spare", [0, 300_000, PART, EVERYTHING])
def test_the_plan_holds_what_is_taken(tiny: TinyCheckpoint, device: FakeDevice, spare: int) -> None:
    """Weights and buffers take no more of the device than the plan says, at any time."""
    model = load(tiny("llama"), spare=spare)
    for _ in range(3):
        logits(model)
    plan = model.pipeload.plan
    assert device.peak <= plan.resident + plan.buffers
    assert device.peak <= plan.memory_limit - plan.reserve_bytes


def test_staging_is_exact_and_locked(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """As many bytes as the plan says, not a power of two; let go with the model."""
    model = load(tiny("llama"))
    logits(model)
    plan = model.pipeload.plan
    assert list(device.pinned.values()) == [plan.slot_bytes] * plan.slots
    del model
    gc.collect()
    assert device.pinned == {}


def test_a_device_that_locks_nothing(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """Staging stays pageable; the output is the same, and the statistics say so."""
    device.pins = False
    folder = tiny("llama")
    expected = reference(folder)
    model = load(folder)
    check(model, expected)
    assert device.pinned == {}
    stats = model.pipeload.stats()
    assert not stats.locked
    assert stats.copied_bytes >= stats.passes * model.pipeload.plan.link_bytes_per_pass


def test_nothing_is_left_of_a_model_that_is_gone(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """Neither memory of the device nor a place in its account, nor a copy that is under way."""
    device.slow = 0.05
    model = load(tiny("llama"), spare=PART)
    logits(model)
    assert device.allocated_bytes() > 0
    del model
    gc.collect()
    assert device.allocated_bytes() == 0
    assert account_of(device).clients == []
    assert device.capped[-1] is None, "the allocator still has its limit"


def test_the_allocators_limit_goes_with_the_last_model(
    tiny: TinyCheckpoint, device: FakeDevice
) -> None:
    """And not before, whichever way they go."""
    first = load(tiny("llama"), spare=EVERYTHING)
    limit = first.pipeload.plan.memory_limit
    options: dict[str, Any] = {"dtype": "auto", "host_memory_limit": HOST, "device": "fake"}
    second: Any = pipeload.from_pretrained(tiny("llama"), memory_limit=limit, **options)
    assert device.capped == [limit, limit]
    del first
    gc.collect()
    assert device.capped[-1] == limit
    second.pipeload.set_memory_limit(limit - PART)
    assert device.capped[-1] == limit - PART
    second.pipeload.remove()
    assert device.capped[-1] is None


# -- failures --------------------------------------------------------------------------------------


class Boom(BaseException):
    """Like a KeyboardInterrupt: torch runs no hooks after it."""


@pytest.mark.parametrize("error", [Boom, RuntimeError])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_pass_that_died(
    tiny: TinyCheckpoint, device: FakeDevice, error: type[BaseException], when: str
) -> None:
    """The next one is right, and no buffer is written to while the dead one's work still runs."""
    device.slow = 0.004
    folder = tiny("llama")
    expected = reference(folder)
    model = load(folder, spare=100_000)
    for index in (0, 3, 5):

        def die(*_args: object) -> None:
            raise error("died")

        block = model.model.layers[index]
        inner = block.mlp
        hook = (
            inner.register_forward_pre_hook(die)
            if when == "before"
            else inner.register_forward_hook(die)
        )
        with pytest.raises(error):
            logits(model)
        hook.remove()
        check(model, expected)
    device.synchronize()
    assert_ordered(device)


def test_an_interrupt_at_every_step(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """Between any two steps of a bind or an unbind."""
    folder = tiny("llama")
    expected = reference(folder)
    model = load(folder)
    logits(model)
    wait, computed = device.wait, device.computed
    for target in range(0, 12, 2):
        count = [0]

        def dies(call: Callable[..., Any], count: list[int], target: int, *args: Any) -> Any:
            count[0] += 1
            if count[0] == target + 1 and threading.current_thread() is threading.main_thread():
                raise Boom
            return call(*args)

        device.wait = partial(dies, wait, count, target)  # type: ignore[method-assign]
        device.computed = partial(dies, computed, count, target)  # type: ignore[method-assign]
        with pytest.raises(Boom):
            logits(model)
        device.wait, device.computed = wait, computed  # type: ignore[method-assign]
        check(model, expected)


def test_a_copy_that_fails(
    tiny: TinyCheckpoint, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the error of the block that waits; the next pass tries again."""
    folder = tiny("llama")
    expected = reference(folder)
    model = load(folder)
    logits(model)
    copy = device.copy

    def fail(*_args: object) -> Any:
        raise RuntimeError("the link is down")

    monkeypatch.setattr(device, "copy", fail)
    for unit in session_of(model).prefetcher.units[2:]:  # the others may be there
        with pytest.raises(pipeload.ReadError, match=r"could not be put on cpu.*the link is down"):
            session_of(model).prefetcher.acquire(session_of(model).prefetcher.units.index(unit))
    monkeypatch.setattr(device, "copy", copy)
    check(model, expected)


@pytest.mark.parametrize("fails", ["copy", "allocate"])
def test_what_a_failed_pass_held_goes_with_its_error(
    tiny: TinyCheckpoint, device: FakeDevice, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Activations, buffers and halves of residents: none waits for the garbage collector."""
    model = load(tiny("llama"), spare=100_000)
    logits(model)
    least = model.pipeload.plan.memory_limit
    seen: list[weakref.ref[torch.Tensor]] = []
    hook = model.model.embed_tokens.register_forward_hook(
        lambda _module, _args, output: seen.append(weakref.ref(output))
    )
    gc.collect()
    gc.disable()
    try:
        model.pipeload.set_memory_limit(least + PART)
        with monkeypatch.context() as failing:
            failing.setattr(device, fails, _refuse)
            for _ in range(2):
                with contextlib.suppress(pipeload.ReadError):
                    logits(model)
                    raise AssertionError("it did not fail")
                finish_reads(prefetcher_of(model))
        hook.remove()
        assert [made() for made in seen] == [None, None]
        model.pipeload.set_memory_limit(least)
        for _ in range(2):
            logits(model)
        plan = model.pipeload.plan
        assert device.allocated_bytes() <= plan.resident + plan.buffers
    finally:
        gc.enable()


def _refuse(*_args: object) -> Any:
    raise torch.OutOfMemoryError("full")


# -- removal ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16])
def test_remove_gives_the_plain_model_on_the_device(
    tiny: TinyCheckpoint, device: FakeDevice, dtype: Any
) -> None:
    """All weights there, no hook, no thread, no locked memory; refused where they do not fit."""
    folder = tiny("llama")
    plain = freshly_allocated(folder) if dtype == "auto" else load_plain(folder, dtype=dtype)
    expected = logits(plain), generated(plain)
    model = load(folder, spare=100_000, dtype=dtype, tokens=16)
    check(model, expected)
    handle = model.pipeload
    limit = handle.plan.memory_limit
    device.others = limit - device.allocated_bytes()
    with pytest.raises(pipeload.MemoryLimitError, match=r"must hold .* on cpu") as caught:
        handle.remove()
    assert caught.value.device == "cpu"
    del caught  # its frames hold the model
    device.others = 0
    check(model, expected)
    handle.remove()
    assert not our_threads_of_passes()
    wait_for_threads(set())
    assert torch.equal(logits(model), expected[0])
    assert generated(model) == expected[1]
    gc.collect()
    assert device.pinned == {}
    assert not hasattr(model, "hf_device_map")
    assert device.allocated_bytes() >= sum(p.numel() * p.element_size() for p in model.parameters())


def test_remove_waits_for_no_pass(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """While one is running it is refused."""
    model = load(tiny("llama"))
    refused: list[BaseException] = []

    def remove(*_args: object) -> None:
        with pytest.raises(
            pipeload.UnsupportedOperationError, match="a forward pass is running"
        ) as e:
            model.pipeload.remove()
        refused.append(e.value)

    hook = model.model.layers[1].mlp.register_forward_hook(remove)
    logits(model)
    hook.remove()
    assert len(refused) == 1
    logits(model)


def test_a_placement_shows_its_own_memory(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """Views of a unit in a buffer are all in the buffer's memory, at multiples of the alignment."""
    model = load(tiny("llama"))
    logits(model, IDS)
    for unit in session_of(model).prefetcher.units:
        for place in unit.slots.values():
            assert isinstance(place, DevicePlacement)
            assert {view.data_ptr() % 512 for view in place.views.values()} == {0}


# -- limits ----------------------------------------------------------------------------------------


def test_other_limits(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """Up until everything fits, and down again: exact, and within it at every time."""
    folder = tiny("llama")
    expected = reference(folder)
    model = load(folder)
    least = model.pipeload.plan.memory_limit
    for spare in (0, PART, 100_000, EVERYTHING, 300_000, 0):
        model.pipeload.set_memory_limit(least + spare)
        device.peak = 0
        check(model, expected)
        check(model, expected)
        plan = model.pipeload.plan
        assert plan.memory_limit == least + spare
        assert device.allocated_bytes() <= plan.memory_limit - plan.reserve_bytes
        assert plan.fits is (spare == EVERYTHING)
        assert len(our_threads_of_passes()) == (0 if plan.fits else 1 + plan.readers)
    host = model.pipeload.plan.host_memory_limit
    model.pipeload.set_memory_limit(least, host_memory_limit=host - 1)
    assert model.pipeload.plan.host_memory_limit == host - 1
    with pytest.raises(pipeload.MemoryLimitError, match="of cpu is too small for this model as it"):
        model.pipeload.set_memory_limit(least - 1_000_000, host_memory_limit=host)
    assert model.pipeload.plan.host_memory_limit == ACCOUNTANT.limit == host - 1
    check(model, expected)


def test_residents_are_put_together_again(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """What an allocator holds between those that stayed counts against the limit."""
    device.slack_bytes = 100_000
    folder = tiny("llama")
    expected = reference(folder)
    model = load(folder, spare=3 * PART)
    check(model, expected)
    limit = model.pipeload.plan.smallest_limit + PART
    model.pipeload.set_memory_limit(limit)
    check(model, expected)
    reads, resident = [], model.pipeload.stats().resident_bytes
    for between in (40_000, 60_000):
        before = model.pipeload.stats().bytes_read
        device.fragments = between
        model.pipeload.set_memory_limit(limit)
        device.fragments = 0
        check(model, expected)
        assert model.pipeload.stats().resident_bytes == resident > 0
        reads.append(model.pipeload.stats().bytes_read - before)
    assert reads[1] > reads[0] + resident // 2, "residents were not read into other memory"


def test_a_larger_limit_is_the_allocators_first(
    tiny: TinyCheckpoint, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may stay from then on is read at once; and a refused limit changes nothing."""
    model = load(tiny("llama"))
    account = account_of(device)
    limit = model.pipeload.plan.memory_limit
    seen: list[int | None] = []
    governor = session_of(model).governor
    take = governor.take_limit

    def look(limit: int) -> None:
        seen.append(device.capped[-1])
        take(limit)

    monkeypatch.setattr(governor, "take_limit", look)
    for other in (limit + PART, limit):
        model.pipeload.set_memory_limit(other)
        assert seen.pop() == limit + PART, "residents came before there was room for them"
        assert device.capped[-1] == account.limit == other
    with pytest.raises(pipeload.MemoryLimitError):
        model.pipeload.set_memory_limit(1000)
    assert device.capped[-1] == account.limit == limit


def test_a_device_that_is_full(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """Whoever waits for a block is told; once there is memory, it goes on."""
    folder = tiny("llama")
    expected = reference(folder)
    model = load(folder)
    logits(model)
    least = model.pipeload.plan.memory_limit
    device.nbytes = device.allocated_bytes() + 1000
    model.pipeload.set_memory_limit(least + PART)
    with pytest.raises(pipeload.ReadError, match="could not be put on cpu: OutOfMemoryError"):
        logits(model)
    finish_reads(prefetcher_of(model))  # one that began before there is memory fails as well
    device.nbytes = 1 << 40
    check(model, expected)


def test_caches_of_others_take_residents(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """What anybody has on the device is measured before each pass, and given way to."""
    folder = tiny("llama")
    expected = reference(folder)
    model = load(folder, spare=PART)
    check(model, expected)
    before = model.pipeload.plan.resident
    need = session_of(model).governor._needs.for_pass((IDS,), {})
    device.others = model.pipeload.plan.reserve_bytes - need + PART // 2
    check(model, expected)
    assert model.pipeload.plan.resident < before
    assert device.allocated_bytes() <= model.pipeload.plan.memory_limit
    device.others = 0
    for _ in range(6):
        check(model, expected)
    device.others = 20_000_000
    with pytest.raises(pipeload.MemoryLimitError, match=r"this pass .* on cpu .*largest batch"):
        model(torch.arange(400)[None] % 500)
    device.others = 0
    check(model, expected)


def test_scores_that_are_written_out(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """Where no kernel computes attention without: a long prompt takes more, and that is planned."""
    folder = tiny("llama", dtype="bf16")
    hint: dict[str, Any] = {"memory_limit": "1GB", "tokens": 1024, "batch": 2}
    fused = plan_for(folder, **hint)
    device.fuses = False
    written = plan_for(folder, **hint)
    heads = 6
    assert written.reserve_bytes - fused.reserve_bytes > 2 * heads * 1024 * 1024 * 8
    plain = load_plain(folder)
    limit = written.smallest_limit
    wrapped: Any = pipeload.wrap(
        plain, limit, tokens=1024, batch=2, device="fake", host_memory_limit=HOST
    )
    assert wrapped.pipeload.plan.reserve_bytes == written.reserve_bytes


def test_both_limits_are_refused_before_anything_is_read(
    tiny: TinyCheckpoint, device: FakeDevice
) -> None:
    """With the smallest that works: a plan at that limit is made."""
    folder = tiny("llama")
    least = smallest(folder)
    plan = pipeload.plan(folder, memory_limit=least, device="fake", host_memory_limit=HOST)
    assert plan.smallest_limit == least
    with pytest.raises(pipeload.MemoryLimitError, match="host_memory_limit=1000 bytes") as refusal:
        pipeload.plan(folder, memory_limit=least, device="fake", host_memory_limit=1000)
    assert refusal.value.device is None
    works = refusal.value.smallest_limit
    plan = plan_for(folder, memory_limit=least, host_memory_limit=works)
    assert plan.host_memory_limit == works
    with pytest.raises(pipeload.MemoryLimitError, match="of cpu is too small") as refusal:
        pipeload.plan(folder, memory_limit=least - 1, device="fake", host_memory_limit=HOST)
    assert refusal.value.device == "cpu"


def test_the_plan_shows_both_limits(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """Rows of each add up to it, and name the device."""
    plan = plan_for(tiny("llama"), memory_limit=smallest(tiny("llama")))
    text = plan.table()
    for name in ("device limit", "host limit", "staging", "copied to cpu"):
        assert name in text
    on_device = plan.floor_bytes + plan.reserve_bytes + plan.resident + plan.buffers
    assert on_device + plan.between_bytes + plan.unused == plan.memory_limit
    share = plan.device_share
    assert share is not None
    on_host = share.host_floor_bytes + share.host_reserve_bytes + plan.staging_bytes
    assert on_host + share.staging_scratch_bytes + plan.host_unused == plan.host_memory_limit


def test_models_on_one_device_share_its_limit(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """Another limit is refused; the same one is shared, and both are exact."""
    llama, qwen = tiny("llama"), tiny("qwen3")
    expected = reference(llama), reference(qwen)
    limit = smallest(llama) + smallest(qwen) + PART
    options: dict[str, Any] = {"device": "fake", "host_memory_limit": HOST, "dtype": "auto"}
    first = pipeload.from_pretrained(llama, memory_limit=limit, **options)
    with pytest.raises(pipeload.OptionError, match="the limit is the whole device's"):
        pipeload.from_pretrained(qwen, memory_limit=limit + 1, **options)
    second = pipeload.from_pretrained(qwen, device="fake", dtype="auto")
    assert second.pipeload.plan.memory_limit == limit
    for _ in range(2):
        check(first, expected[0])
        check(second, expected[1])
    assert device.allocated_bytes() <= limit
