"""A limit buys all it can, never more, and the smallest one is exact."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import TYPE_CHECKING
from unittest import mock

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeload import MemoryLimitError
from pipeload import _build as build
from pipeload._build import Options, Parts, make_plan
from pipeload._layout import PAGE, Weight
from pipeload._reserve import page_table_bytes
from pipeload._residency import (
    Choice,
    UnitSpec,
    _hold_bytes,
    choose,
    is_tiny,
    smallest_budget,
    split,
)
from tests.core.weights import Writer, unit_lists, weight_lists

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeload._plan import Plan

SLOTS = 2
FLOOR = 300_000_000


def everything(units: Sequence[UnitSpec]) -> int:
    """A budget that holds all."""
    return sum(w.nbytes + 3 * PAGE + w.read_bytes + PAGE for unit in units for w in unit.weights)


def streamed_bytes(choice: Choice) -> int:
    return sum(_hold_bytes([weight]) for part in choice.streamed for weight in part)


def memory_of(units: Sequence[UnitSpec], choice: Choice, slots: int) -> int:
    """What the layouts really take."""
    plans = [split(unit, part) for unit, part in zip(units, choice.streamed, strict=True)]
    slot = max(plan.streamed.nbytes for plan in plans)
    assert slot <= choice.slot_bytes
    return sum(plan.resident.nbytes for plan in plans) + slots * slot


@given(unit_lists(), st.floats(0, 1.2), st.integers(1, 3))
def test_any_choice(units: list[UnitSpec], share: float, slots: int) -> None:
    """Every weight stays or is streamed, once; conversions stay whole; the budget is kept."""
    budget = int(everything(units) * share)
    choice = choose(units, budget, slots=slots)
    if choice is None:
        assert budget < smallest_budget(units, slots=slots)
        return
    assert budget >= smallest_budget(units, slots=slots)
    assert memory_of(units, choice, slots) <= budget
    for unit, part in zip(units, choice.streamed, strict=True):
        plan = split(unit, part)
        both = [w.name for w in (*plan.resident.weights, *plan.streamed.weights)]
        assert sorted(both) == sorted(weight.name for weight in unit.weights)
        gone = {weight.group for weight in part} - {None}
        assert gone.isdisjoint(weight.group for weight in plan.resident.weights)


@given(unit_lists(), st.integers(1, 3))
def test_the_smallest_budget_is_exact(units: list[UnitSpec], slots: int) -> None:
    """It works, and one byte less does not."""
    least = smallest_budget(units, slots=slots)
    assert choose(units, least, slots=slots) is not None
    assert choose(units, least - 1, slots=slots) is None


@settings(max_examples=300)
@given(unit_lists(kinds=("raw",)), st.floats(0, 1), st.floats(0, 1))
def test_more_memory_never_reads_more(units: list[UnitSpec], one: float, other: float) -> None:
    """Counted as the plan counts, with a page for the borders of each weight."""
    low, high = (int(everything(units) * share) for share in sorted((one, other)))
    less, more = (choose(units, budget, slots=SLOTS) for budget in (low, high))
    assume(less is not None and more is not None)
    assert less is not None
    assert more is not None
    assert streamed_bytes(more) <= streamed_bytes(less)


@given(weight_lists(max_size=30))
def test_many_weights_in_one_block(weights: list[Weight]) -> None:
    """Only a dozen pieces are weighed; the rest go together, and none is forgotten."""
    assume(weights)
    unit = UnitSpec("block", tuple(weights))
    for share in (0.3, 0.6, 0.9):
        choice = choose([unit] * 4, int(4 * everything([unit]) * share), slots=SLOTS)
        if choice is not None:
            names = {weight.name for weight in weights}
            assert {w.name for part in choice.streamed for w in part} <= names


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
    choice = choose(units, budget, slots=SLOTS)
    assert choice is not None
    plans = [split(unit, part) for unit, part in zip(units, choice.streamed, strict=True)]
    held = sum(plan.resident.nbytes for plan in plans)
    assert held >= 0.9 * (budget - SLOTS * choice.slot_bytes)


def test_every_block_keeps_a_part() -> None:
    """Buffers shrink with what each block keeps: see [Note: why every block keeps a part]."""
    units = alike(22, *LLAMA)
    choice = choose(units, everything(units) // 4, slots=SLOTS)
    assert choice is not None
    sizes = [sum(weight.nbytes for weight in part) for part in choice.streamed]
    assert max(sizes) < sum(2 * items for items in LLAMA)
    assert max(sizes) <= 2 * min(sizes)


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


def planned(units: list[UnitSpec], pinned: list[Weight], limit: int, reserve: int) -> Plan:
    options = Options(limit, "buffered", None, 1e9)
    with (
        mock.patch.object(build, "rss_bytes", return_value=FLOOR),
        mock.patch.object(build, "SMALLEST_SLACK_BYTES", 0),
    ):
        return make_plan(
            Parts([], units, pinned, 0), [], reserve + page_table_bytes(limit), options
        )


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
