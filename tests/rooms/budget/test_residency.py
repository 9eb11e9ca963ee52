"""A limit buys all it can, never more, and the smallest one is exact."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeload import MemoryLimitError
from pipeload.budget.buffer_count import BUFFER_COUNT
from pipeload.budget.cut import Divider, Grain, Touched
from pipeload.budget.cut_fineness import Cuttings
from pipeload.budget.host_memory import HostMemory
from pipeload.budget.make_plan import make_plan
from pipeload.budget.model_parts import Parts
from pipeload.budget.plan_options import Options
from pipeload.budget.reserve import page_table_bytes
from pipeload.budget.residency import Choice, Residency, UnitSpec, is_tiny
from pipeload.budget.unit_menus import hold_bytes
from pipeload.system.pages import PAGE
from pipeload.weights.layout import Weight
from tests.support.examples import examples
from tests.support.measuring import as_measured
from tests.support.weights import Writer, unit_lists, weight_lists

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeload.budget.plan import Plan

FLOOR = 300_000_000


def everything(units: Sequence[UnitSpec]) -> int:
    """A budget that holds all."""
    return sum(w.nbytes + 3 * PAGE + w.read_bytes + PAGE for unit in units for w in unit.weights)


def streamed_bytes(residency: Residency, choice: Choice) -> int:
    weights = (w for plan in residency.plans(choice) for w in plan.streamed.weights)
    return sum(hold_bytes([weight]) for weight in weights)


def memory_of(residency: Residency, choice: Choice, slots: int) -> int:
    """What the layouts really take."""
    plans = residency.plans(choice)
    slot = max(plan.streamed.nbytes for plan in plans)
    assert slot <= choice.slot_bytes
    return sum(plan.resident_bytes for plan in plans) + slots * slot


@given(unit_lists(), st.floats(0, 1.2), st.integers(1, 3))
def test_any_choice(units: list[UnitSpec], share: float, slots: int) -> None:
    """Every weight stays or is streamed, once; conversions stay whole; the budget is kept."""
    budget = int(everything(units) * share)
    residency = Residency(units, slots=slots)
    choice = residency.choose(budget)
    if choice is None:
        assert budget < residency.smallest
        return
    assert budget >= residency.smallest
    assert memory_of(residency, choice, slots) <= budget
    for unit, plan in zip(units, residency.plans(choice), strict=True):
        both = [w.name for w in (*plan.resident_weights, *plan.streamed.weights)]
        assert sorted(both) == sorted(weight.name for weight in unit.weights)
        gone = {weight.group for weight in plan.streamed.weights} - {None}
        assert gone.isdisjoint(weight.group for weight in plan.resident_weights)
    assert all(
        again is plan
        for again, plan in zip(residency.plans(choice), residency.plans(choice), strict=True)
    )


@settings(max_examples=examples(200))
@given(unit_lists(kinds=("packed", "packed", "raw")), st.floats(0, 1.2), st.integers(1, 3))
def test_what_may_stay_as_it_is_stored(units: list[UnitSpec], share: float, slots: int) -> None:
    """The budget is kept, no more is read than without, and nothing at all if all can stay so."""
    budget = int(everything(units) * share)
    residency = Residency(units, slots=slots, keeps_stored=True)
    choice, plain = residency.choose(budget), Residency(units, slots=slots).choose(budget)
    assert (choice is None) == (plain is None)
    if choice is None or plain is None:
        return
    assert memory_of(residency, choice, slots) <= budget
    plans = residency.plans(choice)
    for unit, plan in zip(units, plans, strict=True):
        both = [w.name for w in (*plan.resident_weights, *plan.streamed.weights)]
        assert sorted(both) == sorted(weight.name for weight in unit.weights)
        stored = [weight.name for layout in plan.stored for weight in layout.weights]
        assert stored in ([], sorted(stored, key=both.index))
        assert not stored or sorted(stored) == sorted(w.name for w in plan.streamed.weights)
    reads = sum(plan.streamed_bytes for plan in plans)
    before = sum(plan.streamed_bytes for plan in Residency(units, slots=slots).plans(plain))
    assert reads <= 1.1 * before + 2 * PAGE * len(plans)


def test_more_memory_never_reads_what_less_did_not() -> None:
    """Whether there is room for all as it is stored is told by the largest buffer, too."""
    writer = Writer()
    sizes = [33_000, 34_000, 36_000] * 5
    units = [
        UnitSpec(f"{i}", tuple(writer.weight(f"{i}", 100 * size, kind="packed")))
        for i, size in enumerate(sizes)
    ]
    residency = Residency(units, slots=2, keeps_stored=True)
    stored = sum(w.read_bytes + 2 * PAGE for unit in units for w in unit.weights)
    least = stored + 2 * 4 * 100 * (max(sizes) + 50)
    step = (residency.everything - least) // 40
    for budget in range(least, residency.everything, step):
        choice = residency.choose(budget)
        assert choice is not None
        assert not any(plan.streamed_bytes for plan in residency.plans(choice)), budget


@given(unit_lists(), st.integers(1, 3))
def test_the_smallest_budget_is_exact(units: list[UnitSpec], slots: int) -> None:
    """It works, and one byte less does not."""
    residency = Residency(units, slots=slots)
    assert residency.choose(residency.smallest) is not None
    assert residency.choose(residency.smallest - 1) is None
    everything = residency.choose(residency.everything)
    assert everything is not None
    assert streamed_bytes(residency, everything) == 0


@settings(max_examples=examples(300))
@given(unit_lists(kinds=("raw",)), st.floats(0, 1), st.floats(0, 1))
def test_more_memory_hardly_reads_more(units: list[UnitSpec], one: float, other: float) -> None:
    """A tenth at most, where that takes less time. Counted as the plan counts."""
    low, high = (int(everything(units) * share) for share in sorted((one, other)))
    residency = Residency(units, slots=BUFFER_COUNT)
    less, more = map(residency.choose, (low, high))
    if less is None or more is None:
        assert less is None
        return
    assert streamed_bytes(residency, more) <= 1.1 * streamed_bytes(residency, less)


@given(weight_lists(max_size=30))
def test_many_weights_in_one_block(weights: list[Weight]) -> None:
    """Only a dozen pieces are weighed; the rest go together, and none is forgotten."""
    assume(weights)
    unit = UnitSpec("block", tuple(weights))
    residency = Residency([unit] * 4, slots=BUFFER_COUNT)
    for share in (0.3, 0.6, 0.9):
        choice = residency.choose(int(4 * everything([unit]) * share))
        for plan in () if choice is None else residency.plans(choice):
            names = [w.name for w in (*plan.resident_weights, *plan.streamed.weights)]
            assert sorted(names) == sorted(weight.name for weight in weights)


def alike(count: int, *items: int) -> list[UnitSpec]:
    """Blocks of raw weights, in file order."""
    writer = Writer()
    return [
        UnitSpec(
            f"block.{number}",
            tuple(
                w for place, n in enumerate(items) for w in writer.weight(f"{number}.{place}", n)
            ),
        )
        for number in range(count)
    ]


LLAMA = (400_000, 130_000, 130_000, 400_000, 1_100_000, 1_100_000, 1_100_000)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9, 0.98])
def test_most_of_the_budget_is_used(share: float) -> None:
    """With 22 blocks of seven matrices, at least nine tenths of what buffers leave is held."""
    units = alike(22, *LLAMA)
    budget = int(everything(units) * share * 0.5)
    residency = Residency(units, slots=BUFFER_COUNT)
    choice = residency.choose(budget)
    assert choice is not None
    held = sum(plan.resident_bytes for plan in residency.plans(choice))
    assert held >= 0.9 * (budget - BUFFER_COUNT * choice.slot_bytes)


def test_every_block_keeps_a_part() -> None:
    """Buffers shrink with what each block keeps: see [Note: why every block keeps a part]."""
    units = alike(22, *LLAMA)
    residency = Residency(units, slots=BUFFER_COUNT)
    choice = residency.choose(everything(units) // 4)
    assert choice is not None
    sizes = [plan.streamed_bytes for plan in residency.plans(choice)]
    assert max(sizes) < sum(2 * items for items in LLAMA)
    assert max(sizes) <= 2 * min(sizes)


def test_a_head_streams_no_more_of_itself_than_blocks() -> None:
    """Small units that follow each other must not all stream: see [Note: even shares].

    Nothing computes long enough to hide their reading.
    """
    blocks, head = alike(22, *LLAMA), alike(16, 400_000)
    units = [*blocks, *(UnitSpec(f"head[{i}]", unit.weights) for i, unit in enumerate(head))]
    residency = Residency(units, slots=BUFFER_COUNT)
    choice = residency.choose(everything(units) * 43 // 100)  # counts every byte twice
    assert choice is not None
    plans = residency.plans(choice)
    assert sum(plan.streamed_bytes for plan in plans) > 0
    least = min(plan.streamed_bytes for plan in plans[:22])
    assert least > 0
    of_head = sum(plan.streamed_bytes for plan in plans[22:])
    assert of_head <= sum(plan.streamed_bytes for plan in plans) / 10


@pytest.mark.parametrize(
    ("nbytes", "shape", "tiny"),
    [
        (16 << 10, (64, 128), True),
        ((16 << 10) + 2, (64, 128), False),
        (64 << 10, (32_768,), True),
        ((64 << 10) + 2, (32_769,), False),
        (2, (), True),
    ],
)
def test_what_is_tiny(nbytes: int, shape: tuple[int, ...], tiny: bool) -> None:
    """Matrices of 16 kB and vectors of 64 kB stay."""
    assert is_tiny(Weight("w", "BF16", shape, nbytes, ())) is tiny


class Cut:
    """A divider that has cut already."""

    largest_block = 0
    unknown = staticmethod(Touched)

    def __init__(self, units: list[UnitSpec], pinned: list[Weight]) -> None:
        self._parts = Parts([], units, [], pinned, 0)

    def divide(self, _grain: Grain, _touched: Touched) -> Parts:
        return self._parts


def planned(units: list[UnitSpec], pinned: list[Weight], limit: int, reserve: int) -> Plan:
    options = Options(limit, "buffered", None, 1e9)
    measured = as_measured(held_bytes=FLOOR)
    memory = HostMemory(measured, options, reserve + page_table_bytes(limit))
    cuttings = Cuttings(cast("Divider", Cut(units, pinned)), None)
    return make_plan(cuttings, measured, options, memory, []).plan


@given(unit_lists(), weight_lists(), st.floats(0, 1.1), st.integers(0, 10_000_000))
def test_any_plan(units: list[UnitSpec], pinned: list[Weight], share: float, reserve: int) -> None:
    """All parts together are within the limit; slots hold every unit; a refusal's limit works."""
    pinned = [weight for weight in pinned if weight.group is None]
    limit = FLOOR + reserve + int(share * (everything(units) + 30_000_000))
    refusal: MemoryLimitError | None = None
    try:
        plan = planned(units, pinned, limit, reserve)
    except MemoryLimitError as error:
        refusal = error
        plan = planned(units, pinned, error.smallest_limit, reserve)
    if refusal is not None:
        assert refusal.limit == limit < refusal.smallest_limit == plan.smallest_limit
    used = plan.floor_bytes + plan.reserve_bytes + plan.resident + plan.buffers
    assert used + plan.scratch_bytes <= plan.memory_limit
    assert plan.reserve_bytes >= reserve
    assert all(unit.streamed.nbytes <= plan.slot_bytes for unit in plan.units)
    assert plan.fits == (plan.bytes_per_pass == 0) == (plan.slots == 0)
    assert [unit.name for unit in plan.units] == [unit.name for unit in units]
    seconds = plan.seconds_per_pass
    assert seconds == plan.bytes_per_pass / 1e9
    assert plan.table().count("\n") == 8


def test_a_plan_is_frozen() -> None:
    """It says what was planned, for good."""
    plan = planned(alike(3, 100_000), [], 10**9, 0)
    with pytest.raises(FrozenInstanceError):
        plan.readers = 5  # type: ignore[misc]
    assert "memory limit" in plan.table()
    assert "smallest that works" in plan.table()
