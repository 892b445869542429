"""Hosts that do worse than they should: who is ejected, for how long, and how many at once."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.outliers import (
    ActionBound,
    Checked,
    HostRecord,
    OutlierModel,
    Outliers,
    worst_normal,
)
from tests.support import SEEDS, falsified


class Hosts:
    """A few records under one judge, driven one call at a time."""

    def __init__(self, count: int, **settings) -> None:
        self.model = OutlierModel(Outliers(**settings))
        self.records = [HostRecord(self.model.settings, 0.0) for _ in range(count)]

    @property
    def out(self) -> list[int]:
        return [index for index, record in enumerate(self.records) if record.until is not None]

    def turn(self, now: float) -> None:
        for record in self.records:
            if record.until is not None and now >= record.until:
                record.restore(self.model.settings, now)

    def call(self, index: int, now: float, *, ok: bool):
        self.turn(now)
        record = self.records[index]
        if ok:
            record.succeeded(now)
            return None
        record.failed(now)
        return self.model.judge(record, self.records, len(self.out), now)


# --- The rules ---


def test_failures_in_a_row_eject():
    """The fifth failure in a row ejects; a success in between begins the count anew."""
    hosts = Hosts(2)
    assert not any(hosts.call(0, 0.0, ok=False) for _ in range(4))
    hosts.call(0, 0.0, ok=True)
    assert not any(hosts.call(0, 0.0, ok=False) for _ in range(4))
    assert hosts.call(0, 0.0, ok=False) == ("5 failures in a row", 10.0)
    assert hosts.out == [0]


def test_a_share_of_failures_ejects():
    """Half of the calls of the window ejects, once there were enough of them."""
    hosts = Hosts(2, consecutive=None, deviations=None, min_calls=10)
    ejections = [hosts.call(0, n / 10, ok=n % 2 == 0) for n in range(10)]
    assert ejections == [None] * 9 + [("5 of 10 calls failed", 10.0)]


def test_old_failures_do_not_count():
    """What happened before the window is forgotten."""
    hosts = Hosts(2, consecutive=None, deviations=None, min_calls=10, window=5.0)
    assert not any(hosts.call(0, 0.0, ok=False) for _ in range(9))
    assert hosts.call(0, 100.0, ok=False) is None


def test_doing_worse_than_the_others_ejects():
    """A host with a fifth of failures among flawless ones goes, and with one in thirty stays."""
    hosts = Hosts(4, consecutive=None, failure_ratio=None)
    for _ in range(30):
        for index in (1, 2, 3):
            hosts.call(index, 0.0, ok=True)
    for _ in range(29):
        hosts.call(0, 0.0, ok=True)
    assert hosts.call(0, 0.0, ok=False) is None
    ejection = [hosts.call(0, 3.0 + n, ok=False) for n in range(9)]
    assert any(found and found.cause.endswith("more than elsewhere") for found in ejection)


def test_all_equally_bad_ejects_nobody_by_comparison():
    """Where all hosts fail a fifth of their calls, none of them is worse than the others."""
    hosts = Hosts(5, consecutive=None, failure_ratio=None)
    rng = Random(7)
    for n in range(1000):
        for index in range(5):
            hosts.call(index, n / 10, ok=rng.random() > 0.2)
    assert hosts.out == []


def test_normal_allows_for_chance_and_for_differences():
    """The lowest normal ratio is lower where the others differ, and where calls are few."""
    assert worst_normal([1.0, 1.0], 100, 3.0) == pytest.approx(0.95)
    assert worst_normal([0.9, 1.0], 100, 3.0) < worst_normal([0.95, 0.95], 100, 3.0) < 0.95
    assert worst_normal([0.9, 0.9], 20, 3.0) < worst_normal([0.9, 0.9], 2000, 3.0)


def test_comparing_is_not_done_at_each_failure():
    """Hosts are compared at most ten times in a window."""
    hosts = Hosts(3, consecutive=None, failure_ratio=None, window=10.0, min_calls=1)
    looks = []
    for n in range(1000):
        for record in hosts.records[1:]:
            record.succeeded(n / 100)
        before = hosts.model._next_look
        hosts.records[0].failed(n / 100)
        hosts.model.judge(hosts.records[0], hosts.records, 1, n / 100)  # no room: not ejected
        hosts.model._cause(hosts.records[0], hosts.records, n / 100)
        looks.append(hosts.model._next_look != before)
    assert sum(looks) == 10


@pytest.mark.parametrize("rule", ["consecutive", "failure_ratio", "deviations"])
def test_rules_can_be_switched_off(rule):
    """None switches a rule off; with all of them off nobody is ever ejected."""
    off = {"consecutive": None, "failure_ratio": None, "deviations": None}
    hosts = Hosts(3, **off)
    for n in range(100):
        hosts.call(1, n / 10, ok=True)
        hosts.call(2, n / 10, ok=True)
        assert hosts.call(0, n / 10, ok=False) is None
    del off[rule]
    hosts = Hosts(3, **off)
    for n in range(100):
        hosts.call(1, n / 10, ok=True)
        hosts.call(2, n / 10, ok=True)
        hosts.call(0, n / 10, ok=False)
    assert hosts.records[0].ejections


# --- How long ---


def test_ejections_grow_to_a_bound():
    """Each ejection lasts a base longer than the one before, up to the longest."""
    hosts = Hosts(2, consecutive=1, eject_for=10.0, max_eject_for=25.0)
    lasted, now = [], 0.0
    for _ in range(4):
        lasted.append(hosts.call(0, now, ok=False).seconds)
        now += lasted[-1]
    assert lasted == [10.0, 20.0, 25.0, 25.0]


def test_good_behaviour_is_rewarded():
    """For each base time in service one ejection is forgiven, and none before it happened."""
    hosts = Hosts(2, consecutive=1, eject_for=10.0)
    assert hosts.call(0, 1000.0, ok=False).seconds == 10.0
    assert hosts.call(0, 1010.0, ok=False).seconds == 20.0
    assert hosts.call(0, 1030.0 + 10.0, ok=False).seconds == 20.0
    assert hosts.call(0, 1060.0 + 1000.0, ok=False).seconds == 10.0


def test_who_comes_back_begins_with_a_clean_record():
    """After an ejection neither the failures before it nor those of late answers count."""
    hosts = Hosts(2)
    for _ in range(5):
        hosts.call(0, 0.0, ok=False)
    generation = hosts.records[0].generation
    hosts.turn(10.0)
    assert hosts.records[0].generation > generation
    assert not any(hosts.call(0, 10.0, ok=False) for _ in range(4))


# --- How many ---


@pytest.mark.parametrize(
    ("share", "hosts", "most"),
    [(0.5, 1, 0), (0.5, 2, 1), (0.5, 3, 1), (0.1, 9, 0), (0.1, 10, 1), (0.3, 10, 3), (1.0, 4, 3)],
)
def test_the_share_that_may_be_out(share, hosts, most):
    """At most the share is out, rounded down, and never the last host."""
    assert Outliers(max_ejected=share).most_out(hosts) == most


def never_too_many(case: tuple[int, float, list[tuple[int, bool, float]]]) -> None:
    """Assert that at no moment more hosts are out than may be, and that one always stays."""
    count, share, calls = case
    hosts = Hosts(count, consecutive=2, failure_ratio=0.5, min_calls=4, max_ejected=share)
    now = 0.0
    for index, ok, passed in calls:
        now += passed
        hosts.call(index % count, now, ok=ok)
        assert len(hosts.out) <= share * count + 1e-9
        assert len(hosts.out) < count


HISTORIES = st.tuples(
    st.integers(1, 6),
    st.sampled_from([0.0, 0.2, 0.5, 0.75, 1.0]),
    st.lists(
        st.tuples(st.integers(0, 5), st.booleans(), st.sampled_from([0.0, 0.1, 4.0, 30.0])),
        max_size=80,
    ),
)


@given(HISTORIES)
def test_never_too_many_are_out(case):
    """Whatever fails, no more than the share of the hosts is out, and never all."""
    never_too_many(case)


def test_never_too_many_needs_the_bound(monkeypatch):
    """Without the bound, a bad minute would put all hosts out."""
    monkeypatch.setattr(Outliers, "most_out", lambda _self, hosts: hosts)
    assert falsified(never_too_many, HISTORIES)


def comes_back(case: tuple[int, int]) -> None:
    """Assert that an ejected host is back after no longer than the longest ejection."""
    count, seed = case
    rng = Random(seed)
    hosts = Hosts(count, consecutive=2, max_eject_for=25.0)
    now = 0.0
    for _ in range(200):
        now += rng.random()
        hosts.call(rng.randrange(count), now, ok=rng.random() < 0.3)
        for record in hosts.records:
            assert record.until is None or record.until - record.since < 25.001
    hosts.turn(now + 25.0)
    assert hosts.out == []


@given(st.tuples(st.integers(2, 5), SEEDS))
def test_every_ejection_ends(case):
    """However often a host was ejected, it is back within the longest time."""
    comes_back(case)


def test_every_ejection_ends_needs_the_longest(monkeypatch):
    """Without the longest time, ejections would grow for ever."""
    monkeypatch.setattr(Outliers, "lasts", lambda self, ejections: self.eject_for * ejections)
    assert falsified(comes_back, st.tuples(st.integers(2, 5), SEEDS))


# --- Active checks ---


def test_checks_need_several_of_a_kind():
    """Two failures in a row put a host out, three passes back; a mixed run changes nothing."""
    checked = Checked()
    say = {"failures": 2, "successes": 3}
    results = [checked.take(passed=p, **say) for p in (False, True, False, False)]
    assert results == [False, False, False, True]
    assert checked.failing
    results = [checked.take(passed=p, **say) for p in (True, True, False, True, True, True)]
    assert results == [False] * 5 + [True]
    assert not checked.failing


# --- The bound of an action ---

NAMES = "abcdefghi"
ROUNDS = st.lists(
    st.tuples(st.lists(st.sampled_from(NAMES)), st.integers(0, 9), st.none() | st.integers(-2, 9)),
    max_size=10,
)


@given(ROUNDS, st.sampled_from([0.0, 0.2, 1 / 3, 0.5, 1.0]))
def test_an_action_takes_at_most_its_share_and_never_all(rounds, most):
    """In the order in which they are wanted; the others are held back, and counted once each."""
    bound = ActionBound(most)
    times, before = 0, set()
    for wanted, total, room in rounds:
        chosen = bound.choose(wanted, total, room)
        listed = list(dict.fromkeys(wanted))
        assert len(chosen) <= most * total + 1e-6
        assert len(chosen) <= max(0, total - 1)
        assert room is None or len(chosen) <= max(0, room)
        assert [*chosen, *bound.held_back] == listed
        times += len(set(bound.held_back) - before)
        before = set(bound.held_back)
        assert bound.times_held_back == times
        assert bound.snapshot()["acted_on"] == list(bound.acted_on) == list(chosen)


def test_an_action_uses_the_room_that_it_has():
    """A third of nine is three; of two it is none, and the default says so in its number."""
    bound = ActionBound()
    assert bound.choose(NAMES, 9) == ("a", "b", "c")
    assert bound.choose("ab", 2) == ()
    assert ActionBound(0.5).choose("ab", 2) == ("a",)


# --- Settings ---


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"consecutive": 0}, "write 1 or more"),
        ({"failure_ratio": 1.5}, "up to 1"),
        ({"deviations": 0.5}, "at least 1"),
        ({"window": 0.0}, "more than 0"),
        ({"eject_for": 10.0, "max_eject_for": 5.0}, "10.0 or more"),
        ({"max_ejected": -0.1}, "up to 1"),
    ],
)
def test_bad_settings_say_what_to_write(given, said):
    """A setting that makes no sense raises at once, and says what would."""
    with pytest.raises(ValueError, match=said):
        Outliers(**given)


def test_settings_show_themselves():
    """The settings are all in the repr."""
    assert "consecutive=5" in repr(Outliers())
