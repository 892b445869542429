"""The rule of a lease: one holder at a time, and tokens that only rise."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.lease import Busy, LeaseGranted, LeaseModel
from tests.support import falsified

TTL = 10
HOLDERS = ("a", "b", "c")


class Step(NamedTuple):
    """Somebody asks for something: how long after the step before, and how slow the network is."""

    after: int
    what: str
    holder: str
    going: int
    coming: int
    lost: bool


STEPS = st.lists(
    st.builds(
        Step,
        st.integers(0, TTL),
        st.sampled_from(["take", "take", "renew", "release", "withdraw"]),
        st.sampled_from(HOLDERS),
        st.integers(0, 2),
        st.integers(0, 9),
        st.booleans(),
    ),
    max_size=30,
)


class Pod:
    """A holder: what it believes."""

    def __init__(self) -> None:
        self.token = self.until = self.attempt = self.heard = 0


def check_one_holder(steps, *, model=LeaseModel, since="sent"):
    """Let pods ask over a slow network, and see that never two believe that they hold the lease."""
    lease, pods, now = model(), {name: Pod() for name in HOLDERS}, 1000
    for step in steps:
        now += step.after
        pod, sent = pods[step.holder], now
        now += step.going
        granted = None
        if step.what == "take":
            pod.attempt += 1
            granted = lease.take(now, step.holder, pod.attempt, TTL)
            pod.heard = pod.heard if step.lost else pod.attempt
            assert isinstance(granted, (LeaseGranted, Busy))
        elif step.what == "renew":
            granted = lease.renew(now, pod.token, TTL) and LeaseGranted(pod.token)
        elif step.what == "withdraw":
            if pod.heard < pod.attempt:  # of its last attempt it has not heard
                lease.withdraw(now, step.holder, pod.attempt)
                pod.until = 0
        else:
            pod.until = 0  # it stops to believe before it says so
            lease.release(now, pod.token)
        now += step.coming
        if isinstance(granted, LeaseGranted) and not step.lost:
            pod.token = granted.token
            pod.until = {"sent": sent, "answered": now}[since] + TTL
        believers = [name for name, pod in pods.items() if now < pod.until]
        assert len(believers) <= 1, believers


@given(STEPS)
def test_never_do_two_believe_that_they_hold_it(steps):
    """Whoever counts from before its request was sent gives up before another is let in."""
    check_one_holder(steps)


def test_counting_from_the_answer_on_would_let_two_believe():
    """Without that caution a slow answer makes two holders."""
    assert falsified(lambda steps: check_one_holder(steps, since="answered"), STEPS)


class Generous(LeaseModel):
    """Lets an attempt through that arrives after a later one of the same holder."""

    def take(self, now, holder, attempt, ttl):
        return super().take(now, holder, max(attempt, self.attempt + 1), ttl)


class Stale(LeaseModel):
    """Renews for whoever was the last holder, even if its time is over."""

    def renew(self, now, token, ttl):
        self.until = max(self.until, now + 1)
        return super().renew(now, token, ttl)


class Rash(LeaseModel):
    """Withdraws whatever is held, whoever took it."""

    def withdraw(self, now, holder, attempt):
        return super().withdraw(now, self.holder, attempt)


def test_withdrawing_what_another_took_would_let_two_believe():
    """Only the holder of that attempt may say that nobody heard of it."""
    steps = [
        Step(0, "take", "b", 0, 0, lost=False),
        Step(0, "take", "a", 0, 0, lost=True),
        Step(0, "withdraw", "a", 0, 0, lost=False),
        Step(0, "take", "c", 0, 0, lost=False),
    ]
    check_one_holder(steps)
    with pytest.raises(AssertionError, match="'b', 'c'"):
        check_one_holder(steps, model=Rash)


def test_what_was_never_heard_of_is_withdrawn():
    """An attempt that was granted ends; a later one of the same holder, or another's, does not."""
    lease = LeaseModel()
    lease.take(100, "a", 2, TTL)
    assert not lease.withdraw(101, "a", 1)
    assert not lease.withdraw(101, "b", 2)
    assert lease.withdraw(101, "a", 2)
    assert not lease.withdraw(101, "a", 2)
    assert lease.take(101, "b", 1, TTL) == LeaseGranted(101)


MOMENTS = st.lists(
    st.tuples(st.integers(-50, 50), st.sampled_from(["take", "release", "forget all"])), max_size=30
)


def check_tokens(moments, *, model=LeaseModel, back=True):
    """Take and release, with a clock that is set back or a memory that is lost, but not both."""
    lease, now, highest, attempt = model(), 1000, 0, 0
    for jump, what in moments:
        forgets = what == "forget all"
        now += jump if back else abs(jump) + 1
        if forgets and not back:
            lease = model()
        elif what == "release":
            lease.release(now, lease.token)
        elif not forgets:
            attempt += 1
            granted = lease.take(now, "a", attempt, TTL)
            assert isinstance(granted, LeaseGranted)
            assert granted.token > highest
            highest = granted.token


@given(MOMENTS)
def test_tokens_rise_though_the_clock_is_set_back(moments):
    """A clock that goes back does not take tokens with it."""
    check_tokens(moments)


@given(MOMENTS)
def test_tokens_rise_though_all_that_was_stored_is_lost(moments):
    """A store that was emptied goes on above what it gave before."""
    check_tokens(moments, back=False)


class ByClock(LeaseModel):
    """Takes the clock's reading alone for a token."""

    def take(self, now, holder, attempt, ttl):
        self.token = 0
        return super().take(now, holder, attempt, ttl)


class ByCount(LeaseModel):
    """Counts up, and forgets the clock."""

    def take(self, now, holder, attempt, ttl):
        before = self.token
        answer = super().take(now, holder, attempt, ttl)
        if isinstance(answer, LeaseGranted):
            self.token = before + 1
            return LeaseGranted(self.token)
        return answer


def test_neither_the_clock_nor_a_count_alone_would_do():
    """Each of the two is needed for what the other cannot."""
    assert falsified(lambda moments: check_tokens(moments, model=ByClock), MOMENTS)
    assert falsified(lambda moments: check_tokens(moments, model=ByCount, back=False), MOMENTS)


def test_a_holder_has_it_until_its_time_is_over():
    """Others are told how long it may take; renewing winds it up; the end belongs to the next."""
    lease = LeaseModel()
    assert lease.take(100, "a", 1, TTL) == LeaseGranted(100)
    assert lease.take(104, "b", 1, TTL) == Busy(100, 6)
    assert lease.renew(109, 100, TTL)
    assert lease.take(118, "b", 2, TTL) == Busy(100, 1)
    assert lease.take(119, "b", 3, TTL) == LeaseGranted(119)
    assert not lease.renew(120, 100, TTL)
    assert not lease.release(120, 100)
    assert lease.release(121, 119)
    assert not lease.release(121, 119)
    assert lease.take(121, "a", 2, TTL) == LeaseGranted(121)


def test_what_is_over_cannot_be_renewed():
    """Even if nobody else has taken it: its holder has had to believe that somebody might have."""
    lease = LeaseModel()
    lease.take(100, "a", 1, TTL)
    assert not lease.renew(110, 100, TTL)
    assert not lease.release(110, 100)
    stale = Stale()
    stale.take(100, "a", 1, TTL)
    assert stale.renew(110, 100, TTL), "the safeguard is what refuses it"


def test_a_holder_whose_answer_was_lost_takes_over_from_itself():
    """A later attempt succeeds with a new token, and one that arrives late cannot undo it."""
    lease = LeaseModel()
    assert lease.take(100, "a", 1, TTL) == LeaseGranted(100)
    assert lease.take(101, "a", 3, TTL) == LeaseGranted(101)
    assert lease.take(102, "a", 2, TTL) == Busy(101, 9)
    assert lease.renew(103, 101, TTL)
    generous = Generous()
    generous.take(100, "a", 3, TTL)
    assert isinstance(generous.take(101, "a", 2, TTL), LeaseGranted), (
        "the safeguard is what refuses it"
    )
    assert not generous.renew(102, 100, TTL)


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_a_clock_that_was_set_back_keeps_nobody_out_for_longer_than_a_lease_lasts(back, later):
    """A lease of a time that the clock has not reached yet ends after its own length."""
    lease = LeaseModel()
    lease.take(10**6, "a", 1, TTL)
    now = 10**6 - back
    answer = lease.take(now, "b", 1, TTL)
    assert isinstance(answer, Busy)
    assert answer.left <= TTL
    if later >= answer.left:
        assert isinstance(lease.take(now + later, "b", 2, TTL), LeaseGranted)
