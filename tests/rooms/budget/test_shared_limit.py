"""One limit, shared fairly by whoever streams; what is not theirs is measured."""

from __future__ import annotations

import gc
import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeload import MemoryLimitError, OptionError
from pipeload.budget import shared_limit as module
from pipeload.budget.shared_limit import Accountant, fair_shares, shares_by_use

WANTS = st.tuples(st.integers(0, 50), st.integers(0, 200)).map(lambda w: (w[0], w[0] + w[1]))


@dataclass(eq=False)
class FakeClient:
    """Sizes as they are set; it notes what it was asked for."""

    budget: int = 100
    name: str = "a model"
    wants: tuple[int, int] = (10, 100)
    held: int = 60
    running: int = 0
    disturbed: bool = True
    refuses_below: int = 0
    limits: list[int] = field(default_factory=list)

    def held_bytes(self) -> int:
        return self.held

    def promised_bytes(self) -> int:
        return max(self.held, self.budget)

    def least_bytes(self) -> int:
        return self.wants[0]

    def running_bytes(self) -> int:
        return self.running

    def shrink(self, budget: int) -> bool:
        if self.disturbed:
            self.budget = max(budget, self.wants[0])
        return self.disturbed

    def check_limit(self, limit: int) -> None:
        if limit < self.refuses_below:
            raise MemoryLimitError("no", limit=limit, smallest_limit=self.refuses_below)

    def take_limit(self, limit: int) -> None:
        self.limits.append(limit)


@given(st.lists(WANTS, min_size=1, max_size=6), st.integers(-50, 1200))
def test_shares_are_max_min_fair(wants: list[tuple[int, int]], pool: int) -> None:
    """Nobody could have more without taking it from somebody who has no more."""
    shares = fair_shares(wants, pool)
    leasts = sum(least for least, _ in wants)
    assert sum(shares) <= max(pool, leasts)
    for share, (least, most) in zip(shares, wants, strict=True):
        assert least <= share <= most
    left = max(pool, leasts) - sum(shares)
    hungry = [s for s, (_, most) in zip(shares, wants, strict=True) if s < most]
    assert left < max(1, len(hungry)) or not hungry  # what cannot be divided stays
    for share, (_, most) in zip(shares, wants, strict=True):
        # What others have above my share is no more than what they cannot do without.
        if share < most:
            for other, (least, _) in zip(shares, wants, strict=True):
                assert other <= max(share, least)


@given(st.lists(WANTS, min_size=2, max_size=5), st.integers(0, 900))
def test_shares_do_not_depend_on_the_order(wants: list[tuple[int, int]], pool: int) -> None:
    """Whoever wants the same gets the same."""
    there = dict(zip(wants, fair_shares(wants, pool), strict=True))
    back = dict(zip(wants[::-1], fair_shares(wants[::-1], pool), strict=True))
    assert there == back


def test_a_small_one_is_held_whole_before_a_large_one_gets_half() -> None:
    """A draft beside its target."""
    assert fair_shares([(10, 80), (100, 1000)], 500) == [80, 420]
    assert fair_shares([(10, 800), (100, 1000)], 500) == [250, 250]
    assert fair_shares([], 500) == []


@given(st.lists(st.tuples(WANTS, st.floats(0, 50)), max_size=6), st.integers(-50, 1200))
def test_who_runs_more_often_is_served_first(
    clients: list[tuple[tuple[int, int], float]], pool: int
) -> None:
    """Nobody has more than its least while somebody who runs clearly more often has not all."""
    wants, counts = [want for want, _ in clients], [count for _, count in clients]
    shares = shares_by_use(wants, counts, pool)
    assert sum(shares) <= max(pool, sum(least for least, _ in wants))
    assert all(least <= share <= most for share, (least, most) in zip(shares, wants, strict=True))
    for share, (_, most), count in zip(shares, wants, counts, strict=True):
        for other, (least, _), seldom in zip(shares, wants, counts, strict=True):
            if count >= module._CLEARLY * seldom + module._CHANCE and share < most:
                assert other < least + len(wants)  # bytes that could not be divided before it
    alike = [7.0] * len(wants)
    assert shares_by_use(wants, alike, pool) == fair_shares(wants, pool)


@pytest.fixture
def accountant() -> Accountant:
    return Accountant()


def test_other_bytes_are_what_nobody_could_give_back(
    accountant: Accountant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured: what the process holds, less weights."""
    monkeypatch.setattr(module, "rss_bytes", lambda: 1000)
    first, second = FakeClient(held=60), FakeClient(held=40)
    assert accountant.other_bytes() == 1000
    accountant.join(first, 500)
    accountant.join(second, 500)
    assert accountant.other_bytes() == 900
    accountant.leave(second)
    accountant.leave(second)
    assert accountant.other_bytes() == 940


def test_promises_to_others(accountant: Accountant) -> None:
    """What they may come to hold counts as held, and so does a running pass."""
    first, second = FakeClient(budget=100, held=60, running=7), FakeClient(budget=20, held=40)
    accountant.join(first, 500)
    accountant.join(second, 500)
    assert accountant.promised_to_others(first) == 40
    assert accountant.promised_to_others(second) == 107
    assert accountant.promised_to_others(None) == 147
    assert accountant.least_of_others(second) == 17
    assert accountant.untouched_bytes() == 147 - 100


def test_a_share_of_one_is_all_of_it(accountant: Accountant) -> None:
    """With others, their memory is divided as well."""
    first, second = FakeClient(budget=30), FakeClient(budget=70)
    accountant.join(first, 500)
    assert accountant.share(first, 33) == 33
    accountant.join(second, 500)
    assert accountant.share(first, 30) == 50
    assert accountant.share(second, 500) == 100


def test_room_for_a_newcomer(accountant: Accountant) -> None:
    """Only those above their share give back; a running one does not, and says so."""
    large, small = FakeClient(budget=90), FakeClient(budget=10, wants=(5, 10))
    accountant.join(large, 500)
    accountant.join(small, 500)
    assert accountant.make_room((20, 100), 0)
    assert (large.budget, small.budget) == (45, 10)
    assert not accountant.make_room((20, 100), 45), "it has its share"
    large.disturbed = small.disturbed = False
    assert not accountant.make_room((60, 60), 0)
    assert large.budget == 45


def test_a_draft_is_held_whole_once_it_has_run_more_often(accountant: Accountant) -> None:
    """And no more than that: when both run as often again, they share as before."""
    draft, target = FakeClient(wants=(10, 80)), FakeClient(wants=(20, 500))
    accountant.join(draft, 500)
    accountant.join(target, 500)
    draft.budget, target.budget = 50, 70
    assert accountant.share(draft, 50) == 60
    for _ in range(8):
        for _ in range(5):
            accountant.note_pass(draft)
        accountant.note_pass(target)
    assert accountant.share(draft, 50) == 80
    assert accountant.share(target, 70) == 40
    assert accountant.make_room((10, 20), 0), "a newcomer takes part as the busiest do"
    assert (draft.budget, target.budget) == (50, 20)
    for _ in range(200):
        accountant.note_pass(draft)
        accountant.note_pass(target)
    draft.budget, target.budget = 50, 70
    assert accountant.share(target, 70) == 60
    accountant.leave(draft)
    others = FakeClient()
    accountant.join(others, 500)
    accountant.note_pass(target)
    assert accountant._passes.keys() == {id(target), id(others)}


def test_a_pass_reclaims_no_more_than_it_lacks(accountant: Accountant) -> None:
    """From as many as it takes, and never from itself."""
    clients = [FakeClient(), FakeClient(), FakeClient()]
    for client in clients:
        accountant.join(client, 500)
    me, *others = clients
    assert accountant.reclaim(me, 120) == 120
    assert me.budget == 100
    assert sorted(other.budget for other in others) == [10, 70]
    assert accountant.reclaim(me, 1000) == 60
    assert accountant.reclaim(me, 1000) == 0


def test_another_limit_is_refused(accountant: Accountant) -> None:
    """As long as somebody streams with the first one."""
    accountant.check_limit(1)
    client = FakeClient()
    accountant.join(client, 500)
    accountant.check_limit(500)
    with pytest.raises(OptionError, match=r"memory_limit=501 .* 500 bytes"):
        accountant.check_limit(501)
    accountant.leave(client)
    accountant.check_limit(501)


def test_a_limit_for_all_or_for_none(accountant: Accountant) -> None:
    """One that does not fit changes nothing for anybody."""
    first, second = FakeClient(), FakeClient(refuses_below=300)
    accountant.join(first, 500)
    accountant.join(second, 500)
    with pytest.raises(MemoryLimitError):
        accountant.set_limit(299)
    assert accountant.limit == 500
    assert first.limits == second.limits == []
    accountant.set_limit(300)
    assert accountant.limit == 300
    assert first.limits == second.limits == [300]


def test_who_is_forgotten_is_not_counted(accountant: Accountant) -> None:
    """Nor does its limit bind the next one."""
    accountant.join(FakeClient(), 500)
    gc.collect()
    assert accountant.clients == []
    assert accountant.limit is None
    accountant.join(FakeClient(), 700)
    accountant.forget_all()
    accountant.check_limit(800)


def test_a_draft_is_served_first_when_it_comes(accountant: Accountant) -> None:
    """Before it has run: the others give back all that it wants, down to their least."""
    target, draft = FakeClient(wants=(20, 500)), FakeClient(wants=(10, 80))
    accountant.join(target, 500)
    target.budget = 120
    with accountant.serving_first():
        assert accountant.make_room((10, 80), 0)
        assert target.budget == 40
        accountant.join(draft, 500)
    draft.budget = 80
    assert accountant.share(target, 40) == 40
    later = FakeClient(wants=(0, 500))
    accountant.join(later, 500)
    assert accountant._passes[id(later)] == 0


def test_another_thread_brings_no_draft() -> None:
    """Who is loaded elsewhere meanwhile is counted as ever; inside twice, it holds for both."""
    accountant = Accountant()
    other, first, second = (FakeClient(wants=(0, 500)) for _ in range(3))
    with accountant.serving_first():
        thread = threading.Thread(target=accountant.join, args=(other, 500))
        thread.start()
        thread.join()
        with accountant.serving_first():
            accountant.join(first, 500)
        accountant.join(second, 500)
    assert accountant._passes[id(other)] == 0
    assert accountant._passes[id(first)] > 0
    assert accountant._passes[id(second)] > 0
