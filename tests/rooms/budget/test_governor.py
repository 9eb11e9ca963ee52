"""Residents yield to passes and to the user before the need, and come back with patience."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeload import MemoryLimitError
from pipeload.budget import host_ledger
from pipeload.budget.governor import Governor
from pipeload.budget.host_ledger import HostLedger
from pipeload.budget.pass_shape import PassShape
from pipeload.budget.plan import Plan
from pipeload.budget.read_counters import Counters
from pipeload.budget.reserve import WARM_UP_BYTES, PassHint, page_table_bytes
from pipeload.budget.residency import Residency, UnitSpec
from pipeload.budget.shared_limit import ACCOUNTANT, Accountant
from pipeload.checkpoint.headers import TensorEntry
from pipeload.weights.layout import Weight
from tests.support.examples import examples

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeload.budget.make_plan import Build
    from pipeload.budget.pass_needs import PassNeeds

MB = 1_000_000
FLOOR, RESERVE, HINT_NEED = 100 * MB, 100 * MB, 30 * MB


class FakeNeeds:
    """A pass needs a megabyte per token."""

    def shape(self, args: tuple[int, ...], _kwargs: object) -> PassShape:
        return PassShape(args[0], 1)

    def for_pass(self, args: tuple[int, ...], _kwargs: object, _module: object = None) -> int:
        return args[0] * MB

    def for_shape(self, shape: PassShape) -> int:
        return shape.tokens * MB

    def longest_tokens(self, room: int, _batch: int) -> int:
        return room // MB

    def largest_batch(self, _room: int, _tokens: int) -> int:
        return 1

    def prefill_chunk(self, _room: int, _shape: PassShape) -> int | None:
        return None


def residency(units: int = 10, pieces: int = 4, nbytes: int = 10 * MB) -> Residency:
    """400 MB in units of 40 MB."""
    specs = []
    for unit in range(units):
        weights = []
        for piece in range(pieces):
            name, start = f"{unit}.{piece}", (unit * pieces + piece) * nbytes
            entry = TensorEntry(name, Path("file"), "U8", (nbytes,), start, start + nbytes)
            weights.append(Weight(name, "U8", (nbytes,), nbytes, (entry,)))
        specs.append(UnitSpec(str(unit), tuple(weights)))
    return Residency(specs, slots=2)


RESIDENCY = residency()


class Bench:
    """A governor whose plans are in force at once, and what the user holds beside the floor."""

    def __init__(self, spare: int = 100 * MB) -> None:
        self.user = 0
        self.counters = Counters()
        smallest = FLOOR + RESERVE + RESIDENCY.smallest + spare
        self.limit = smallest + page_table_bytes(smallest) + MB
        choice = RESIDENCY.choose(RESIDENCY.smallest)
        assert choice is not None
        plan = Plan(
            memory_limit=self.limit,
            smallest_limit=smallest,
            floor_bytes=FLOOR + ACCOUNTANT.promised_to_others(None),
            reserve_bytes=RESERVE + page_table_bytes(self.limit),
            pinned_bytes=0,
            units=RESIDENCY.plans(choice),
            scratch_bytes=0,
            readers=1,
            io_mode="direct",
            disk_rate=None,
        )
        parts = SimpleNamespace(conversion_bytes=0, passing_bytes=0)
        build = SimpleNamespace(plan=plan, residency=RESIDENCY, parts=parts, stream_mode="buffered")
        needs, hint = cast("PassNeeds", FakeNeeds()), PassHint(HINT_NEED // MB, 1)
        self.ledger = HostLedger(cast("Build", build), self.counters, pressure=False)
        self.governor = Governor(cast("Build", build), needs, hint, self.ledger)
        self.governor.adopt = self.adopt
        self.idle = True
        self.asked = 0
        self.taken = 0
        """What passes take on beside their estimate."""
        ACCOUNTANT.join(self.governor, self.limit)
        self.start = self.governor.budget

    def adopt(self, _plan: Plan) -> bool:
        self.asked += 1
        return self.idle

    def other(self) -> int:
        return FLOOR + WARM_UP_BYTES + self.user

    def run(self, tokens: int = 1, took: int | None = None) -> int:
        """One pass; the budget that it left."""
        governor = self.governor
        governor.before_pass((tokens,), {})
        self.check()
        more = tokens * MB if took is None else took
        self.user += more
        governor.inside_pass()
        self.check()
        self.user -= more
        governor.after_pass()
        return governor.budget

    def check(self) -> None:
        """The plan is what the budget buys."""
        governor = self.governor
        assert RESIDENCY.smallest <= governor.budget
        plan = governor.plan
        kept = sum(unit.resident_bytes for unit in plan.units)
        assert kept + plan.buffers <= governor.budget


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    ACCOUNTANT.forget_all()
    made = Bench()
    monkeypatch.setattr(Accountant, "other_bytes", lambda _self: made.other())
    yield made
    ACCOUNTANT.leave(made.governor)


def test_an_ordinary_pass_changes_nothing(bench: Bench) -> None:
    """What was planned for stays."""
    plan = bench.governor.plan
    for tokens in (1, 17, 30, 30, 1, 1, 1, 1, 1):
        assert bench.run(tokens) == bench.start
    assert bench.governor.plan is plan
    assert bench.asked == 0


def test_residents_yield_before_a_larger_pass(bench: Bench) -> None:
    """Not after it: `before_pass` has the room already."""
    bench.governor.before_pass((90,), {})
    room = bench.limit - bench.other() - bench.governor.budget
    assert room >= 90 * MB
    assert RESIDENCY.smallest < bench.governor.budget < bench.start


def test_holes_in_the_heap_go_before_residents(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are looked for where the process has taken on more than was planned for, once."""
    trims = []

    def trim() -> None:
        trims.append(bench.user)
        bench.user = min(bench.user, 9 * MB)

    monkeypatch.setattr(host_ledger, "trim_heap", trim)
    for bench.user in (7 * MB, 200 * MB, 16 * MB, 200 * MB):
        assert bench.run() == bench.start
    assert trims == [200 * MB, 200 * MB]
    bench.user = 8 * MB
    assert bench.run() == bench.start
    monkeypatch.setattr(host_ledger, "trim_heap", lambda: trims.append(0))
    bench.user = 90 * MB  # no holes
    left = [bench.run() for _ in range(3)]
    assert max(left) < bench.start
    assert len(trims) == 3


def test_residents_yield_to_the_user_inside_a_pass(bench: Bench) -> None:
    """A list that grows while a pass runs."""
    bench.governor.before_pass((1,), {})
    bench.user = 90 * MB
    bench.governor.inside_pass()
    assert bench.limit - bench.other() >= bench.governor.budget
    bench.user = 500 * MB
    bench.governor.inside_pass()
    assert bench.governor.budget == RESIDENCY.smallest


def test_what_cannot_fit_is_refused_with_figures(bench: Bench) -> None:
    """Before it runs; a smaller one does."""
    with pytest.raises(
        MemoryLimitError, match=r"1 x 900 tokens after 0.*needs 900000000 bytes"
    ) as e:
        bench.governor.before_pass((900,), {})
    bench.governor.after_pass()
    assert e.value.limit == bench.limit
    assert e.value.smallest_limit > bench.limit + 500 * MB
    (longest,) = [int(part.split()[0]) for part in str(e.value).split("batch is ")[1:2]]
    assert bench.run(longest) < RESIDENCY.smallest + MB
    with pytest.raises(MemoryLimitError):
        bench.governor.before_pass((longest + 1,), {})


def test_pictures_are_refused_by_their_sizes(bench: Bench) -> None:
    """They have no tokens, and no prompt is shorter."""
    seen = PassShape(900, 1, sizes=(900, 3, 8, 8))
    with (
        mock.patch.object(FakeNeeds, "shape", return_value=seen),
        pytest.raises(MemoryLimitError) as caught,
    ):
        bench.governor.before_pass((900,), {})
    bench.governor.after_pass()
    told = str(caught.value)
    assert told.startswith("this pass (an input of 900 x 3 x 8 x 8) needs 900000000 bytes")
    assert "the largest batch that fits of the usual size is 1." in told
    assert "token" not in told
    assert "prompt" not in told


def test_a_limit_that_was_named_is_enough(bench: Bench) -> None:
    """For the pass that was refused."""
    with pytest.raises(MemoryLimitError) as caught:
        bench.governor.before_pass((300,), {})
    bench.governor.after_pass()
    ACCOUNTANT.set_limit(caught.value.smallest_limit)
    bench.run(300)


def test_the_hinted_pass_is_promised(bench: Bench) -> None:
    """Whatever the process took on, as long as the limit holds; a larger one is not."""
    bench.user = bench.limit - bench.governor.least_bytes() - 30 * MB - FLOOR - WARM_UP_BYTES
    assert bench.run(30, took=0) == RESIDENCY.smallest
    with pytest.raises(MemoryLimitError):
        bench.governor.before_pass((31,), {})
    bench.user += MB
    with pytest.raises(MemoryLimitError, match=r"the process holds \d+ .* free what you can\. A"):
        bench.governor.before_pass((30,), {})
    bench.user -= MB
    bench.run(30, took=0)


def test_residents_come_back_after_some_passes(bench: Bench) -> None:
    """And to no more than was planned."""
    low = bench.run(90)
    budgets = [bench.run(1) for _ in range(8)]
    assert budgets[0] == budgets[1] == budgets[2] == low
    assert budgets[-1] == bench.start == max(budgets)


@pytest.mark.parametrize("inside", [False, True])
def test_pressure_that_comes_and_goes_moves_nothing(bench: Bench, inside: bool) -> None:
    """One step down, and none up as long as it comes back."""
    budgets = []
    for number in range(60):
        much = 90 if number % 3 == 0 else 1
        if inside:
            budgets.append(bench.run(1, took=much * MB))
        else:
            bench.user = much * MB
            budgets.append(bench.run(1))
    settled = budgets[10:]
    assert len(set(settled)) == 1, budgets
    assert settled[0] < bench.start


def test_growth_inside_every_pass_is_learned(bench: Bench) -> None:
    """Estimates that fall short are raised, so that residents do not swing."""
    plans = []
    for _ in range(60):
        bench.run(30, took=110 * MB)
        plans.append(bench.governor.plan)
    changes = sum(a is not b for a, b in itertools.pairwise(plans[10:]))
    assert changes <= 2
    assert bench.ledger.correction.factor > 1


def test_an_error_is_forgotten(bench: Bench) -> None:
    """When passes are as estimated again, in the end all comes back."""
    for _ in range(20):
        bench.run(30, took=110 * MB)
    assert bench.governor.budget < bench.start
    for _ in range(120):
        bench.run(30)
    assert bench.governor.budget == bench.start
    assert bench.ledger.correction.factor == 1.0


def test_what_was_learned_revokes_no_promise(bench: Bench) -> None:
    """A pass within the hint is never refused, whatever the process took on during others."""
    for _ in range(20):
        bench.run(30, took=110 * MB)
    assert bench.ledger.correction.factor > 1
    bench.user = bench.limit - bench.governor.least_bytes() - 30 * MB - FLOOR - WARM_UP_BYTES
    with pytest.raises(MemoryLimitError):
        bench.run(60)
    bench.run(30)


def fits(bench: Bench, tokens: int) -> bool:
    """Run a pass of so many, and say whether it was not refused."""
    try:
        bench.run(tokens)
    except MemoryLimitError:
        return False
    return True


def test_what_ran_once_runs_again_as_long_as_the_limit_holds(bench: Bench) -> None:
    """Who has looked for the largest batch that fits may run it, though some more is held now."""
    largest = next(tokens for tokens in range(100, 300) if not fits(bench, tokens))
    bench.user += 4 * MB  # of the kernel's own memory, there are 16 set aside
    bench.run(largest - 1)
    with pytest.raises(MemoryLimitError):
        bench.run(largest)
    bench.user += 20 * MB  # over the limit in truth
    with pytest.raises(MemoryLimitError):
        bench.run(largest - 1)


def test_another_limit_asks_anew_what_fits(bench: Bench) -> None:
    """What ran at a larger limit is no promise at this one."""
    bench.run(100)
    bench.governor.take_limit(bench.limit - 50 * MB)
    bench.user += 4 * MB
    free = bench.governor.spare_bytes() // MB
    with pytest.raises(MemoryLimitError):
        bench.run(free + 2)


def test_a_fresh_process_teaches_nothing(bench: Bench) -> None:
    """Its first passes take on libraries, too."""
    bench.run(5, took=50 * MB)
    assert bench.ledger.correction.factor == 1.0


def test_weights_on_their_way_teach_nothing(bench: Bench) -> None:
    """What is counted before it is there would look like somebody else's."""
    for _ in range(5):
        bench.run(1)
    bench.governor.before_pass((1,), {})
    bench.counters.resident_bytes += 50 * MB
    bench.user = 50 * MB
    bench.governor.inside_pass()
    bench.governor.after_pass()
    assert bench.ledger.correction.factor == 1.0


def test_another_limit(bench: Bench) -> None:
    """Down and up, and what is too small changes nothing."""
    governor = bench.governor
    ACCOUNTANT.set_limit(bench.limit - 50 * MB)
    assert governor.plan.memory_limit == bench.limit - 50 * MB
    low = governor.budget
    assert bench.start - 51 * MB <= low <= bench.start - 49 * MB
    assert bench.asked == 1
    with pytest.raises(MemoryLimitError) as caught:
        ACCOUNTANT.set_limit(bench.limit - 300 * MB)
    assert (governor.budget, governor.plan.memory_limit) == (low, bench.limit - 50 * MB)
    ACCOUNTANT.set_limit(caught.value.smallest_limit)
    assert RESIDENCY.smallest <= governor.budget < RESIDENCY.smallest + 2 * MB
    with pytest.raises(MemoryLimitError):
        ACCOUNTANT.set_limit(caught.value.smallest_limit - MB)
    ACCOUNTANT.set_limit(bench.limit + 1000 * MB)
    assert governor.budget == RESIDENCY.everything
    assert governor.plan.fits


def test_a_limit_in_the_middle_of_a_pass(bench: Bench) -> None:
    """It is planned for; the pass puts it into force before its next site."""
    bench.idle = False
    bench.governor.before_pass((1,), {})
    ACCOUNTANT.set_limit(bench.limit - 50 * MB)
    assert bench.governor.budget < bench.start
    bench.check()


def test_a_pass_that_died_frees_no_memory(bench: Bench) -> None:
    """Nobody said that it ended; a limit is not accepted on the strength of what it never took."""
    with pytest.raises(MemoryLimitError) as caught:
        ACCOUNTANT.set_limit(1 * MB)
    bench.governor.before_pass((30,), {})
    with pytest.raises(MemoryLimitError):
        ACCOUNTANT.set_limit(caught.value.smallest_limit - 10 * MB)


def test_shrinking_is_refused_while_a_pass_runs(bench: Bench) -> None:
    """And then nothing has changed."""
    plan = bench.governor.plan
    bench.idle = False
    assert not bench.governor.shrink(0)
    assert (bench.governor.plan, bench.governor.budget) == (plan, bench.start)
    bench.idle = True
    assert bench.governor.shrink(0)
    assert bench.governor.budget == RESIDENCY.smallest


def test_two_share_and_one_limit_holds_both(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit at which both must shrink is no reason to refuse it."""
    first = bench.governor
    ACCOUNTANT.set_limit(bench.limit + 400 * MB)
    second = Bench(spare=600 * MB)
    monkeypatch.setattr(Accountant, "other_bytes", lambda _self: bench.other())
    assert first.budget == RESIDENCY.everything
    low = bench.limit + RESIDENCY.smallest + 120 * MB
    ACCOUNTANT.set_limit(low)
    assert abs(first.budget - second.governor.budget) < 40 * MB
    spent = first.promised_bytes() + second.governor.promised_bytes()
    assert spent + FLOOR + RESERVE <= low
    assert first.budget < RESIDENCY.everything


@settings(deadline=None, max_examples=examples(40))
@given(
    st.lists(
        st.tuples(st.integers(1, 90), st.integers(0, 250), st.integers(0, 150)),
        min_size=1,
        max_size=25,
    )
)
def test_the_limit_holds_whenever_it_can(passes: list[tuple[int, int, int]]) -> None:
    """Before a pass and at every site, unless nothing resident is left to give."""
    ACCOUNTANT.forget_all()
    bench = Bench()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Accountant, "other_bytes", lambda _self: bench.other())
        for tokens, user, grown in passes:
            bench.user = user * MB
            try:
                bench.governor.before_pass((tokens,), {})
            except MemoryLimitError:
                bench.governor.after_pass()
                continue
            _holds(bench, tokens * MB)
            bench.user += grown * MB
            bench.governor.inside_pass()
            _holds(bench, 0)
            bench.governor.after_pass()
    ACCOUNTANT.leave(bench.governor)


def _holds(bench: Bench, need: int) -> None:
    bench.check()
    governor: Any = bench.governor
    fits = bench.other() + need + governor.budget <= bench.limit
    assert fits or governor.budget == RESIDENCY.smallest
    assert governor.budget <= max(governor._cap(bench.limit), RESIDENCY.smallest)
