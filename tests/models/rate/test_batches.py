"""Batches: the bound over random histories of several pods, and each rule that it stands on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.rate import batches as rate_batches
from seawall.models.rate.batches import (
    NOTHING,
    Lot,
    Purse,
    batch_for,
    excess_of,
    lease_of,
)
from seawall.models.rate.buckets import LeakyBucket, TokenBucket
from seawall.models.rate.rates import Rate
from seawall.models.rate.rule import RateRule
from seawall.models.rate.windows import FixedWindow, SlidingCounter, SlidingLog
from tests.support import examples, falsified

SECOND = 1_000_000
Taken = list[tuple[float, int]]


class Shared:
    """The limit itself, as the store keeps it."""

    def __init__(self, rule: RateRule[Any]) -> None:
        self.rule = rule
        self.state = rule.fresh(0.0)
        self.grants: list[int] = []

    def grant(self, now: float, want: int, least: int) -> tuple[int, float] | None:
        """Take what is left, from `least` up to `want`; return how much, and its mark."""
        count = max(least, min(self.rule.left(self.state, now), want))
        if self.rule.wait(self.state, now, count) != 0:
            return None
        self.state, mark = self.rule.take(self.state, now, count)
        self.grants.append(count)
        return count, mark

    def give_back(self, now: float, taken: int, used: int, mark: float) -> None:
        """Count less."""
        self.state = self.rule.give_back(self.state, now, taken, used, mark)


class Pod:
    """One process, which spends what it was granted; answers take a while to come."""

    def __init__(self, shared: Shared, batch: int, lease: float | None = None) -> None:
        self.shared = shared
        self._lease = lease_of(shared.rule) if lease is None else lease
        self.purse = Purse(batch)
        self.spent: Taken = []
        self._asked: tuple[float, int, int] | None = None
        self._answer: tuple[float, tuple[int, float] | None] | None = None
        self.most_held = 0

    def call(self, now: float, cost: int) -> bool:
        """Spend for one call, from the lot that lies open if it is enough, else as by the lock."""
        purse, lot = self.purse, self.purse.lot
        left = lot.left - cost
        if left >= lot.floor and now < lot.until:
            lot.left = left
            self.spent.append((now, cost))
            return True
        self.give_back(purse.drop(now), now)
        spent = purse.spend(now, cost)
        if spent is None and not purse.asked and cost <= purse.batch:
            self._ask(now, cost)
        if spent is not None:
            self.spent.append((now, cost))
            if purse.low():
                self._ask(now, 0)
        return spent is not None

    def _ask(self, now: float, cost: int) -> None:
        self._asked = (now, *self.purse.ask(cost))

    def give_back(self, lots: Iterable[Lot], now: float) -> None:
        """Give back what is left of lots."""
        for lot in lots:
            self.shared.give_back(now, lot.taken, lot.taken - lot.left, lot.mark)
            lot.left = 0

    def travel(self, now: float) -> None:
        """Let the question reach the store, or the answer come back."""
        if self._asked is not None:
            asked, want, least = self._asked
            self._answer = asked, self.shared.grant(now, want, least)
            self._asked = None
        elif self._answer is not None:
            (asked, grant), self._answer = self._answer, None
            if grant is None:
                self.purse.refused()
            else:
                count, mark = grant
                self.purse.granted(count, asked + self._lease, mark)
                for lot, part in self.purse.trim():
                    self.shared.give_back(now, part, 0, lot.mark)
                self.most_held = max(self.most_held, self.purse.held)

    def settle(self, now: float) -> None:
        """Let everything that is under way arrive."""
        for _ in range(2):
            self.travel(now)


RULES: list[RateRule[Any]] = [
    TokenBucket(Rate(20, SECOND), 20),
    TokenBucket(Rate(30, 60 * SECOND), 30),
    FixedWindow(Rate(20, SECOND)),
    SlidingCounter(Rate(20, SECOND)),
    SlidingLog(Rate(20, SECOND)),
    SlidingLog(Rate(40, 10 * SECOND)),
]
Step = tuple[int, int, int, int]


def steps_of(
    passes: list[int], fewest: int, calls: int, at_least: int = 0
) -> st.SearchStrategy[list[Step]]:
    """Return histories: time passes, one of three pods makes some calls of some cost."""
    costs = st.sampled_from([1, 1, 1, 2, 3])
    step = st.tuples(st.sampled_from(passes), st.integers(0, 2), costs, st.integers(fewest, calls))
    return st.lists(step, min_size=at_least, max_size=40)


STEPS = steps_of([0, 0, 10_000, 100_000, 400_000, SECOND], 1, 30)
CASES = st.tuples(st.integers(0, len(RULES) - 1), st.integers(1, 8), STEPS)
Case = tuple[int, int, list[Step]]


def play(case: Case, lease: float | None = None) -> tuple[RateRule[Any], int, list[Pod]]:
    """Let three pods live through a history."""
    which, batch, steps = case
    shared = Shared(RULES[which])
    pods = [Pod(shared, batch, lease) for _ in range(3)]
    now = 5.0 * SECOND
    for passed, who, cost, calls in steps:
        now += passed
        for number in range(calls):
            pods[who].call(now, cost)
            pods[(who + number) % 3].travel(now)
    return shared.rule, batch, pods


def within_the_bound(case: Case, lease: float | None = None) -> None:
    """No stretch of time sees more than the algorithm's own bound and the excess."""
    rule, batch, pods = play(case, lease)
    spent = sorted(taking for pod in pods for taking in pod.spent)
    over = most_over(rule, spent)
    assert over <= excess_of(rule, batch, 3), over


def most_over(rule: RateRule[Any], spent: Taken) -> float:
    """Return by how much what was spent exceeds the algorithm's own bound, at most."""
    limit, period = rule.rate
    most = 0.0
    if isinstance(rule, (FixedWindow, SlidingCounter)):
        windows: dict[float, int] = {}
        for at, cost in spent:
            windows[at // period] = windows.get(at // period, 0) + cost
        return max((total - limit for total in windows.values()), default=0)
    for first in range(len(spent)):
        total = 0
        for at, cost in spent[first:]:
            length = at - spent[first][0]
            total += cost
            if isinstance(rule, TokenBucket):
                most = max(most, total - (rule.capacity + limit * length / period + 1))
            elif length < period:
                most = max(most, total - limit)
    return most


@examples(400)
@given(CASES)
def test_the_excess_is_within_the_bound(case: Case) -> None:
    """Whatever the pods do, the total stays within the limit's own bound and what is printed."""
    within_the_bound(case)


@examples(200)
@given(CASES)
def test_a_pod_never_holds_more_than_a_batch(case: Case) -> None:
    """What was held and what came together are a batch at most."""
    _rule, batch, pods = play(case)
    assert all(pod.most_held <= batch for pod in pods)


def test_spending_expired_lots_breaks_the_bound() -> None:
    """Ablation: with leases that never end, a slow bucket's tokens are saved up for a burst."""
    slowly = steps_of([0, 0, 20 * SECOND, 60 * SECOND], 1, 12)
    cases = st.tuples(st.just(1), st.just(8), slowly)
    assert not falsified(within_the_bound, cases, most=500)
    assert falsified(lambda case: within_the_bound(case, lease=float("inf")), cases)


def test_spending_what_was_given_back_breaks_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ablation: a lot that is given back and still spent counts twice."""

    def keep(self: Purse, now: float) -> list[Lot]:
        old = [lot for lot in (self.lot, *self._later) if now >= lot.until and lot.left]
        copies = []
        for lot in old:
            copy = Lot(lot.taken, lot.until, lot.mark)
            copy.left = lot.left
            copies.append(copy)
            lot.until = float("inf")
        return copies

    cases = st.tuples(st.just(5), st.just(4), steps_of([0, SECOND], 1, 8, at_least=20))
    assert not falsified(within_the_bound, cases, most=500)
    monkeypatch.setattr(Purse, "drop", keep)
    assert falsified(within_the_bound, cases)


def test_asking_for_a_batch_beside_what_is_held_breaks_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ablation: who asks for more than there is room for holds more than a batch."""
    ask = Purse.ask

    def ask_for_more(self: Purse, cost: int = 0) -> tuple[int, int]:
        _want, least = ask(self, cost)
        self.asked = 10 * self.batch
        return 10 * self.batch, least

    monkeypatch.setattr(Purse, "ask", ask_for_more)
    monkeypatch.setattr(Purse, "trim", lambda _self: [])
    steps = steps_of([0, 100_000, 400_000], 1, 8, at_least=10)
    assert falsified(within_the_bound, st.tuples(st.just(2), st.just(1), steps))


# Under pressure


def saturated(batch: int) -> list[int]:
    """Return the grants that three pods get which ask for much more than the limit has."""
    shared = Shared(TokenBucket(Rate(1000, SECOND), 100))
    pods = [Pod(shared, batch) for _ in range(3)]
    now = 5.0 * SECOND
    for tick in range(4000):
        now += 500
        for pod in pods:
            pod.call(now, 1)
            pod.call(now, 1)
            if tick % 2:
                pod.settle(now)
    return shared.grants[20:]


def test_who_asks_gets_a_quarter_of_a_batch_at_least() -> None:
    """When the limit is under most pressure, requests stay rare."""
    grants = saturated(40)
    assert grants
    assert min(grants) >= 10


def test_without_a_minimum_grants_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ablation: who takes whatever there is comes for a token or two at a time."""
    monkeypatch.setattr(rate_batches, "_LEAST", 10**9)
    grants = saturated(40)
    assert sum(grants) / len(grants) < 5


# One purse


def holding(batch: int, *lots: tuple[int, float]) -> Purse:
    """Return a purse that was granted `lots`: how much, until when."""
    purse = Purse(batch)
    for count, until in lots:
        purse.granted(count, until)
    return purse


def test_the_oldest_is_spent_first_and_a_cost_may_span_lots() -> None:
    """All or nothing: what does not fit changes nothing."""
    purse = holding(10, (2, 5.0), (4, 6.0))
    assert purse.spend(0.0, 7) is None
    assert purse.held == 6
    spent = purse.spend(0.0, 3)
    assert spent is not None
    assert [part for _lot, part in spent] == [2, 1]
    assert repr(purse) == "Purse(3 of 10, 0 asked for)"
    assert repr(purse.lot) == "Lot(3 of 4 until 6)"


def test_what_is_too_old_is_dropped_and_told() -> None:
    """Only what is left of it is to be given back."""
    purse = holding(10, (2, 5.0), (4, 6.0), (3, 7.0))
    purse.spend(0.0, 2)
    assert [lot.left for lot in purse.drop(6.0)] == [4]
    assert purse.held == 3


def test_what_was_not_used_goes_back_to_its_own_lot_only() -> None:
    """A token never lives longer than the lot it was granted in."""
    purse = holding(10, (2, 5.0), (4, 6.0))
    spent = purse.spend(0.0, 3)
    assert spent is not None
    rest = purse.put_back(spent, 1.0)
    assert [part for _lot, part in rest] == [2]  # the first lot was used up
    assert purse.held == 4
    late = purse.spend(1.0, 1)
    assert late is not None
    assert purse.put_back(late, 6.0) == late


def test_putting_back_never_makes_more_than_a_batch() -> None:
    """What is on its way counts as held."""
    purse = holding(4, (4, 5.0))
    spent = purse.spend(0.0, 3)
    assert spent is not None
    purse.size = 3
    want, _least = purse.ask(0)
    assert want == 3
    assert [part for _lot, part in purse.put_back(spent, 1.0)] == [3]
    purse.granted(want, 6.0)
    assert purse.held == 4


def test_more_is_asked_for_before_it_is_needed() -> None:
    """At half of what is used in a lease; and only one asks."""
    purse = holding(8, (8, 5.0))
    purse.size = 8
    purse.watch()
    assert purse.lot.floor == 5
    assert not purse.low()
    purse.spend(0.0, 4)
    assert purse.low()
    assert purse.ask() == (4, 2)
    assert not purse.low()
    assert purse.lot.floor == 0
    purse.refused()
    assert purse.low()


def test_how_much_is_asked_for_follows_what_is_used() -> None:
    """Twice as much after a lot that was used up, and twice what was used of one that was not."""
    purse = Purse(100)
    assert purse.ask() == (25, 25)
    purse.granted(25, 5.0)
    purse.spend(0.0, 25)
    assert purse.ask() == (50, 25)
    purse.granted(50, 6.0)
    purse.spend(1.0, 50)
    assert purse.ask() == (100, 25)
    purse.granted(100, 7.0)
    purse.spend(2.0, 20)
    purse.drop(7.0)
    assert purse.ask() == (40, 25)


def test_who_waits_is_asked_for_too() -> None:
    """All who wait are served by one request, and what is left then is a batch at most."""
    purse = holding(8, (2, 5.0))
    purse.size = 8
    assert purse.ask(3, 20) == (26, 2)
    purse.granted(26, 5.0)
    purse.spend(0.0, 13)  # the rest have gone
    assert purse.held == 15
    assert [part for _lot, part in purse.trim()] == [7]
    assert purse.held == 8
    assert purse.trim() == []


def test_where_little_is_left_for_long_any_of_it_will_do() -> None:
    """A quarter of a batch is worth waiting for, but not for a day."""
    purse = Purse(20)
    assert purse.ask(2, any_=True) == (7, 2)
    assert purse.ask(7) == (12, 7)


def test_a_purse_is_idle_when_nothing_is_left_or_on_its_way() -> None:
    """Clearing it returns what was left."""
    purse = holding(8, (3, 5.0), (2, 6.0))
    assert [lot.left for lot in purse.clear()] == [3, 2]
    assert purse.idle
    assert purse.lot is NOTHING
    purse.ask()
    assert not purse.idle


@pytest.mark.parametrize(
    ("rule", "pods", "batch", "excess"),
    [
        (TokenBucket(Rate(100, SECOND), 100), 4, 5, 20),
        (TokenBucket(Rate(100, SECOND), 3), 1, 3, 3),
        (TokenBucket(Rate(60, 60 * SECOND), 60), 4, 3, 2),
        (FixedWindow(Rate(100, SECOND)), 1, 20, 20),
        (SlidingLog(Rate(100, SECOND)), 50, 1, 50),
        (SlidingCounter(Rate(1000, 60 * SECOND)), 10, 20, 200),
    ],
)
def test_the_usual_batch_and_its_bound(
    rule: RateRule[Any], pods: int, batch: int, excess: int
) -> None:
    """A fifth of the limit over all pods; a slow bucket is exceeded by what it refills at most."""
    assert batch_for(rule, pods) == batch
    assert excess_of(rule, batch, pods) == excess


def test_a_lease_is_no_longer_than_the_period() -> None:
    """So what is granted in one period is spent in that or the next."""
    assert lease_of(FixedWindow(Rate(5, 100_000))) == 100_000
    assert lease_of(FixedWindow(Rate(5, 100 * SECOND))) == SECOND
    assert batch_for(LeakyBucket(Rate(100, SECOND)), 1) == 20
