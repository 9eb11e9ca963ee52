"""Budgets go at once and come back with patience; estimates are raised and believed again."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeload.budget.eviction_policy import (
    MIN_STEP_BYTES,
    MOST_ERROR,
    PATIENCE,
    STEPS,
    WARM_PASSES,
    Correction,
    Patience,
    step_bytes,
)

LIMIT = 1 << 30
STEP = step_bytes(LIMIT)


def test_steps_are_a_part_of_the_limit() -> None:
    """But never so small that a process's own ups and downs are one."""
    assert step_bytes(LIMIT) == LIMIT // STEPS > MIN_STEP_BYTES
    assert step_bytes(1000) == MIN_STEP_BYTES


def settled(room: int, passes: int = PATIENCE) -> Patience:
    patience = Patience()
    for _ in range(passes):
        patience.note(room)
    return patience


@given(st.integers(0, LIMIT), st.integers(1, LIMIT))
def test_less_is_taken_at_once(room: int, budget: int) -> None:
    """Down to a step at or below what is allowed, whatever the passes before allowed."""
    target = settled(LIMIT).aim(room, budget, lambda: LIMIT, LIMIT)
    if room < budget:
        assert target is not None
        assert room - STEP < target <= room
        assert target % STEP == 0


def test_more_is_given_when_enough_passes_agree() -> None:
    """And no more than the least of them allowed; one that allowed less inside counts as that."""
    most = 20 * STEP
    for passes in range(PATIENCE):
        assert settled(12 * STEP, passes).aim(12 * STEP, STEP, lambda: most, LIMIT) is None
    patience = settled(12 * STEP)
    assert patience.aim(12 * STEP, STEP, lambda: most, LIMIT) == 12 * STEP
    patience.lower(7 * STEP)
    assert patience.aim(12 * STEP, STEP, lambda: most, LIMIT) == 7 * STEP
    patience.forget()
    assert patience.aim(12 * STEP, STEP, lambda: most, LIMIT) is None


def test_a_little_more_is_not_worth_it() -> None:
    """Under two steps, unless that is all there can be."""
    patience = settled(5 * STEP - 1)
    assert patience.aim(LIMIT, 3 * STEP, lambda: LIMIT, LIMIT) is None
    assert patience.aim(LIMIT, 3 * STEP, lambda: 4 * STEP, LIMIT) == 5 * STEP - 1


def test_an_estimate_that_fell_short_is_raised() -> None:
    """By what was measured, up to a bound, and not by what a fresh process takes on."""
    correction = Correction()
    for _ in range(WARM_PASSES):
        correction.learn(300, 100, steady=True)
        assert correction.factor == 1.0
    correction.learn(300, 100, steady=False)
    assert correction.factor == 1.0
    correction.learn(300, 100, steady=True)
    assert correction.factor == pytest.approx(3.0)
    correction.learn(10_000, 100, steady=True)
    assert correction.factor == MOST_ERROR


def test_an_error_fades() -> None:
    """With every pass that its estimate covered, down to none at all."""
    correction = Correction()
    factors = []
    for number in range(200):
        correction.learn(400 if number == WARM_PASSES else 1, 100, steady=True)
        factors.append(correction.factor)
    later = factors[WARM_PASSES:]
    assert later[0] == MOST_ERROR
    assert all(then < now or then == 1.0 for now, then in itertools.pairwise(later))
    assert later[-1] == 1.0
