"""The rules of jobs in a database: what may follow on what, whoever says what when."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.durable_jobs import (
    ENDED,
    FOLLOWS,
    STATES,
    DurableJob,
    poll_after,
)
from tests.support import falsified

LEASE, TTL, GONE, MOST = 10, 20, 15, 3

HISTORIES = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.sampled_from([1, 5, 10, 25])),
        st.tuples(st.just("claim"), st.sampled_from(["a", "b"])),
        st.tuples(
            st.sampled_from(["renew", "succeed", "fail", "give_back", "fail for good"]),
            st.integers(0, 9),
        ),
        st.tuples(st.sampled_from(["cancel", "expire", "retry"]), st.just(0)),
    ),
    max_size=40,
)


class Story:
    """A job, and all who ever had a claim on it."""

    def __init__(self) -> None:
        self.job = DurableJob(0, MOST)
        self.now = 0
        self.claims: list[tuple[str, int, int]] = []

    def do(self, operation: str, value: Any) -> bool:
        job, now = self.job, self.now
        if operation == "pass":
            self.now += value
            return False
        if operation == "claim":
            got = job.claim(now, value, LEASE, TTL)
            if got:
                self.claims.append((value, job.epoch, now))
            return got
        if operation == "retry":
            return job.retry(now)
        if operation in ("cancel", "expire"):
            return job.cancel(now, TTL) if operation == "cancel" else job.expire(now, GONE)
        return bool(self.claims) and self.tell(operation, self.claims[value % len(self.claims)])

    def tell(self, operation: str, claim: tuple[str, int, int]) -> bool:
        who = (self.now, claim[0], claim[1])
        if operation == "renew":
            return self.job.renew(*who, LEASE)
        if operation == "succeed":
            return self.job.succeed(*who, TTL)
        if operation == "give_back":
            return self.job.give_back(*who, TTL)
        return self.job.fail(*who, TTL, 5, "no", retry=operation == "fail")


def is_lawful(history: list[tuple[str, Any]]) -> None:
    """Check that every change is one of the table, an end is final, and attempts are bounded."""
    story = Story()
    for operation, value in history:
        job = story.job
        before, epoch, due = job.state, job.epoch, job.due
        effect = story.do(operation, value)
        if job.state != before:
            assert job.state in FOLLOWS[before]
        if before in ENDED and operation != "expire":
            assert job.state == before or (operation == "retry" and effect)
        if operation == "claim" and effect:
            assert due <= story.now
            assert job.epoch == epoch + 1
        else:
            assert job.epoch == epoch
        assert 0 <= job.attempts <= MOST
        assert (job.owner is not None) == (job.state == "running")
        assert (job.expires is None) == (job.state in {"queued", "running"})


def zombies_have_no_say(history: list[tuple[str, Any]]) -> None:
    """Check that a claim which is not the newest changes nothing, ever again."""
    story = Story()
    for operation, value in history:
        story.do(operation, value)
        for owner, epoch, _ in story.claims[:-1]:
            job = story.job
            assert not job.renew(story.now, owner, epoch, LEASE)
            assert not job.succeed(story.now, owner, epoch, TTL)
            assert not job.give_back(story.now, owner, epoch, TTL)
            assert not job.fail(story.now, owner, epoch, TTL, 0, "late", retry=True)


@given(HISTORIES)
def test_states_follow_the_table(history: list[tuple[str, Any]]):
    """Whatever is done in whatever order, a job goes its way by the table."""
    is_lawful(history)


@given(HISTORIES)
def test_a_zombie_has_no_say(history: list[tuple[str, Any]]):
    """Who was taken for dead is refused, whatever it says."""
    zombies_have_no_say(history)


@given(HISTORIES)
def test_a_job_ends(history: list[tuple[str, Any]]):
    """From wherever it is, a job whose workers all die ends after so many leases."""
    story = Story()
    for operation, value in history:
        story.do(operation, value)
    for _ in range(MOST + 1):
        story.now += LEASE + 5
        story.job.claim(story.now, "next", LEASE, TTL)
    assert story.job.state in ENDED | {"expired"}


@given(HISTORIES)
def test_a_cancelled_job_is_not_begun_again(history: list[tuple[str, Any]]):
    """After a cancellation nobody gets a claim."""
    story = Story()
    for operation, value in history:
        cancelled = story.job.cancelling
        got = story.do(operation, value)
        assert not (cancelled and operation == "claim" and got)


def test_without_the_epoch_zombies_have_a_say(monkeypatch: pytest.MonkeyPatch):
    """The epoch is what tells two claims of one owner apart."""
    assert not falsified(zombies_have_no_say, HISTORIES, most=500)
    monkeypatch.setattr(
        DurableJob, "held", lambda self, owner, epoch: self.owner == owner and epoch > 0
    )
    assert falsified(zombies_have_no_say, HISTORIES)


def test_without_the_bound_attempts_have_no_end(monkeypatch: pytest.MonkeyPatch):
    """`max_attempts` is what ends a job that kills its workers."""
    claim = DurableJob.claim

    def endless(self: DurableJob, *args: Any) -> bool:
        self.max_attempts += 1
        return claim(self, *args)

    monkeypatch.setattr(DurableJob, "claim", endless)
    crashes = st.lists(st.sampled_from([("pass", 25), ("claim", "a")]), max_size=40)
    assert falsified(is_lawful, crashes)


def test_every_state_is_in_the_table():
    """Nothing follows that is not known, and ended jobs can only expire."""
    assert {state for after in FOLLOWS.values() for state in after} <= STATES
    assert all(FOLLOWS[state] == {"expired"} for state in ENDED - {"failed"})
    assert FOLLOWS["failed"] == {"queued", "expired"}  # an operator begins anew


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_polls_become_rarer(age: float, more: float):
    """The older a job is, the longer the pause; never outside of its bounds."""
    assert 1.0 <= poll_after(age) <= poll_after(age + more) <= 30.0
    assert poll_after(age, 5, 7) in (5, 7) or 5 < poll_after(age, 5, 7) < 7
