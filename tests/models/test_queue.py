"""The rules of a queue of jobs: each property, and what happens without its safeguard."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.queue.index import SLACK, Index
from seawall.models.queue.jobs import BATCH_BYTES, PRIORITIES, UNHEARD, NewJob, QueueRules
from seawall.models.queue.state import Queue
from tests.support import SEEDS, falsified

SECOND = 1_000_000
RULES = QueueRules(
    head_start=10 * SECOND,
    max_attempts=3,
    max_size=1000,
    max_dead=1000,
    max_ended=1000,
    keep=300 * SECOND,
    result_ttl=20 * SECOND,
    dedupe=0,
)
ENDS = {"done", "dead", "cancelled", "expired"}


def job(priority: int = 0, *, delay: int = 0, ttl: int = 0, dedupe: str = "") -> NewJob:
    return NewJob("n", b"1", priority, delay, ttl, dedupe)


_tokens = count()


def take(queue: Queue, now: int, most: int, lease: int, *, heard: bool = True) -> Any:
    """Claim jobs, and say that the answer was heard."""
    token = f"token-{next(_tokens)}"
    answer = queue.perform(now, "claim", most, lease, token)
    if heard:
        queue.perform(now, "heard", token)
    return answer


class History:
    """A random history of one queue, with notes of what happened."""

    def __init__(self, seed: int, make: Callable[[QueueRules], Queue] = Queue) -> None:
        self.rng = Random(seed)
        self.queue = make(RULES)
        self.now = 0
        self.ids: list[str] = []
        self.claims: list[tuple[str, int, int]] = []
        """id, fence, end of lease as first granted"""
        self.acks: list[tuple[str, int, int, bool]] = []
        """id, fence, when, accepted"""
        self.orders: list[tuple[str, list[str]]] = []
        """which job was claimed, and which others could have been"""
        self.tries: dict[str, int] = {}
        """How often each job was claimed by somebody who has heard of it."""
        self.unheard: dict[str, int] = {}
        self.lost: list[str] = []
        """Tokens of claims whose answers got lost."""

    def ask(self, operation: str, *args: Any) -> Any:
        return self.queue.perform(self.now, operation, *args)

    def step(self) -> None:
        acts = ["push", "push", "claim", "claim", "ack", "nack", "time", "cancel", "release"]
        act = self.rng.choice(acts)
        getattr(self, act)()

    def run(self, steps: int = 60) -> None:
        for _ in range(steps):
            self.step()

    def push(self) -> None:
        delay = self.rng.choice([0, 0, SECOND])
        ttl = self.rng.choice([0, 0, 40 * SECOND])
        new = job(self.rng.randrange(PRIORITIES), delay=delay, ttl=ttl)
        self.ids += self.ask("push", [new]) or []

    def claim(self) -> None:
        self.ask("counts")
        waiting = [id_ for id_ in self.ids if self.state(id_) == "waiting"]
        lease = self.rng.choice([SECOND, 10 * SECOND])
        token = f"token-{next(_tokens)}"
        for one in self.ask("claim", 1, lease, token)[0]:
            self.orders.append((one.id, [id_ for id_ in waiting if id_ != one.id]))
            if self.rng.random() < 0.2:
                self.lost.append(token)
                self.unheard[one.id] = self.unheard.get(one.id, 0) + 1
                continue
            self.ask("heard", token)
            self.claims.append((one.id, one.fence, self.now + lease))
            self.tries[one.id] = self.tries.get(one.id, 0) + 1

    def release(self) -> None:
        if self.lost:
            self.ask("release", self.rng.choice(self.lost), 10 * SECOND)

    def state(self, id_: str) -> str:
        known = self.queue._jobs.get(id_)
        return "gone" if known is None else known.state

    def _some_claim(self) -> tuple[str, int, int] | None:
        return self.rng.choice(self.claims) if self.claims else None

    def ack(self) -> None:
        if claim := self._some_claim():
            id_, fence, _end = claim
            self.acks.append((id_, fence, self.now, self.ask("ack", id_, fence, b"1")[0]))

    def nack(self) -> None:
        if claim := self._some_claim():
            delay = self.rng.choice([0, 2 * SECOND])
            self.ask("nack", *claim[:2], delay, "no", "failed")

    def cancel(self) -> None:
        if self.ids and self.rng.random() < 0.2:
            self.ask("cancel", self.rng.choice(self.ids))

    def time(self) -> None:
        self.now += self.rng.choice([1, SECOND // 2, SECOND, 5 * SECOND, 30 * SECOND])


# --- Order: the wait of any job is bounded ---


def order_is_bounded(make: Callable[[QueueRules], Queue]) -> Callable[[int], None]:
    """Check that a job goes first only if no other is due by more than its lead in head start."""

    def check(seed: int) -> None:
        history = History(seed, make)
        history.run()
        jobs = history.queue._jobs
        for first, others in history.orders:
            for other in others:
                if first in jobs and other in jobs:
                    one, two = jobs[first], jobs[other]
                    head = (one.priority - two.priority) * RULES.head_start
                    assert since(history, first) <= since(history, other) + head

    return check


def since(history: History, id_: str) -> int:
    """Return the instant since which a job could be claimed, by its first record."""
    return history.queue.first_ready[id_]  # type: ignore[attr-defined,no-any-return]


class Noting(Queue):
    """Notes when each job could first be claimed."""

    def __init__(self, rules: QueueRules) -> None:
        super().__init__(rules)
        self.first_ready: dict[str, int] = {}

    def _add(self, now: int, new: NewJob) -> str:
        id_ = super()._add(now, new)
        self.first_ready[id_] = now + new.delay
        return id_


class Strict(Noting):
    """Serves the highest priority first, whatever waits below it."""

    def _add(self, now: int, new: NewJob) -> str:
        self.rules = self.rules._replace(head_start=10**12)
        try:
            return super()._add(now, new)
        finally:
            self.rules = RULES


class Forgetful(Noting):
    """Gives a job that comes back a new place."""

    def _return_job(self, now: int, job: Any, *args: Any, **options: Any) -> None:
        job.score = now - job.priority * self.rules.head_start
        super()._return_job(now, job, *args, **options)


@given(SEEDS)
def test_a_job_is_overtaken_only_within_the_head_start(seed: int) -> None:
    """Also one that came back: so the wait of any job is bounded."""
    order_is_bounded(Noting)(seed)


def test_strict_priorities_and_lost_places_break_the_bound() -> None:
    """Without the bounded head start, or with a new place for what comes back, some job starves."""
    assert falsified(order_is_bounded(Strict), SEEDS)
    assert falsified(order_is_bounded(Forgetful), SEEDS)


def test_a_flood_of_higher_priority_does_not_starve_a_job() -> None:
    """One job of the lowest class, and a worker that is always busy with the highest."""
    queue = Queue(RULES)
    (lowest,) = queue.perform(0, "push", [job(0)]) or [""]
    for second in range(1, 1000):
        now = second * SECOND
        queue.perform(now, "push", [job(9), job(9)])
        ((claim,), _ahead) = take(queue, now, 1, 10 * SECOND)
        if claim.id == lowest:
            assert second <= 2 * 9 * 10 + 1  # served at half the rate at which the others come
            return
        queue.perform(now, "ack", claim.id, claim.fence, b"1")
    raise AssertionError("starved")


def test_first_in_first_out_within_a_priority() -> None:
    """Also among those that were pushed in the same microsecond."""
    queue = Queue(RULES)
    ids = queue.perform(0, "push", [job(3) for _ in range(12)])
    granted, _ahead = take(queue, 0, 12, SECOND)
    assert [one.id for one in granted] == ids


# --- Claims: no zombie acks, and back in time ---


def no_zombie_acks(make: Callable[[QueueRules], Queue]) -> Callable[[int], None]:
    """Check that an ack is accepted only from the latest claim, within its lease, and once."""

    def check(seed: int) -> None:
        history = History(seed, make)
        history.run(80)
        ends = {(id_, fence): end for id_, fence, end in history.claims}
        accepted: dict[tuple[str, int], int] = {}
        for id_, fence, when, ok in history.acks:
            if ok:
                accepted.setdefault((id_, fence), when)  # said again, it is so already
        assert len({id_ for id_, _fence in accepted}) == len(accepted)
        for (id_, fence), when in accepted.items():
            assert when < ends[id_, fence]
            assert fence == max(f for i, f, _end in history.claims if i == id_)

    return check


class Unfenced(Queue):
    """Does not look at the fence."""

    def _held_job(self, now: int, id_: str, fence: int) -> Any:
        job = self._current(now, id_)
        return super()._held_job(now, id_, fence if job is None else job.fence)


class Endless(Queue):
    """Lets a lease be good until somebody else wants the job."""

    def _process_due(self, now: int) -> None:
        super()._process_due(now)

    def _current(self, now: int, id_: str) -> Any:
        return self._jobs.get(id_)

    def perform(self, now: int, operation: str, *args: Any) -> Any:
        if operation == "ack":
            return self.ack(now, *args)
        return super().perform(now, operation, *args)


@given(SEEDS)
def test_no_zombie_ack_is_accepted(seed: int) -> None:
    """Whoever lost its claim cannot end the job."""
    no_zombie_acks(Queue)(seed)


def test_without_fence_or_lease_zombies_are_accepted() -> None:
    """Both safeguards are needed."""
    assert falsified(no_zombie_acks(Unfenced), SEEDS)
    assert falsified(no_zombie_acks(Endless), SEEDS)


# --- Ends: attempts bounded, nothing stuck, nothing begun too late ---


def everything_ends(make: Callable[[QueueRules], Queue]) -> Callable[[int], None]:
    """Check that time alone ends every job in the end, and that none is tried too often."""

    def check(seed: int) -> None:
        history = History(seed, make)
        history.run()
        for _ in range(80):  # who claims now never answers
            history.now += 11 * SECOND
            for id_ in history.ids:
                if history.state(id_) != "gone":
                    history.ask("status", id_)
            history.claim()
        history.now += RULES.keep
        history.ask("counts")
        assert {history.state(id_) for id_ in history.ids} <= ENDS | {"gone"}
        for id_ in history.ids:
            tries, unheard = history.tries.get(id_, 0), history.unheard.get(id_, 0)
            assert tries <= RULES.max_attempts
            assert tries + unheard <= RULES.max_attempts + UNHEARD + len(history.lost)
        assert history.queue._unfinished() == 0
        assert not history.queue._deadlines
        history.now += RULES.keep
        for _ in range(3):
            history.ask("counts")
        assert not history.queue._jobs  # and how they ended is forgotten too
        assert not history.queue._by_dedupe
        assert not history.queue._tokens

    return check


class Patient(Queue):
    """Never sweeps leases."""

    def _expire_lease(self, now: int, job: Any) -> None:
        pass


class Stubborn(Queue):
    """Tries for ever."""

    def _return_job(self, now: int, job: Any, *args: Any, **options: Any) -> None:
        options["counted"] = False
        super()._return_job(now, job, *args, **options)


@given(SEEDS)
def test_every_job_ends(seed: int) -> None:
    """Done, dead, cancelled or expired; with at most so many attempts."""
    everything_ends(Queue)(seed)


def test_without_leases_or_a_last_attempt_jobs_do_not_end() -> None:
    """A job whose worker died would be stuck; one that always fails would be tried for ever."""
    assert falsified(everything_ends(Patient), SEEDS)
    assert falsified(everything_ends(Stubborn), SEEDS)


def test_a_job_is_not_started_after_its_deadline() -> None:
    """At the very instant it is too late; a claim that began in time may still be acked."""
    queue = Queue(RULES)
    late, in_time = queue.perform(0, "push", [job(ttl=SECOND), job(ttl=2 * SECOND)])
    ((claim,), _ahead) = take(queue, SECOND, 5, 10 * SECOND)
    assert claim.id == in_time
    assert queue.perform(SECOND, "status", late).state == "expired"
    assert queue.perform(5 * SECOND, "ack", in_time, 1, b"1") == (True, "done")


def test_a_claimed_job_that_comes_back_after_its_deadline_is_expired() -> None:
    """Whether it is given back or lost."""
    queue = Queue(RULES)
    one, two = queue.perform(0, "push", [job(ttl=2 * SECOND), job(ttl=2 * SECOND)])
    take(queue, 0, 2, 3 * SECOND)
    assert queue.perform(2 * SECOND, "nack", one, 1, 0, "", "failed") == (True, "expired")
    assert queue.perform(3 * SECOND, "status", two).state == "expired"


def test_what_was_returned_is_no_attempt() -> None:
    """However often a job is returned, its attempts are all there; the fence grows nevertheless."""
    queue = Queue(RULES)
    (id_,) = queue.perform(0, "push", [job()])
    for fence in range(1, 20):
        ((claim,), _ahead) = take(queue, 0, 1, SECOND)
        assert (claim.attempt, claim.fence) == (1, fence)
        assert queue.perform(0, "nack", id_, fence, 0, "", "returned") == (True, "waiting")


# --- Answers that get lost ---


def heard_claims_count(make: Callable[[QueueRules], Queue]) -> Callable[[int], None]:
    """Check that no job dies before it was tried as often as it may be, and heard of."""

    def check(seed: int) -> None:
        history = History(seed, make)
        history.run(120)
        for id_, attempts, _reason in history.queue.died:
            assert attempts == RULES.max_attempts
            tried = history.tries.get(id_, 0) + max(0, history.unheard.get(id_, 0) - UNHEARD)
            assert tried >= attempts

    return check


class Strictly(Queue):
    """Counts every claim, heard of or not."""

    def _expire_lease(self, now: int, job: Any) -> None:
        job.heard = True
        super()._expire_lease(now, job)


class Stingy(Queue):
    """Takes back what nobody has heard of, and the attempt with it."""

    def _return_job(self, now: int, job: Any, *args: Any, **options: Any) -> None:
        if args[1] == "nobody heard of the claim":
            job.attempts += 1
            options["counted"] = True
        super()._return_job(now, job, *args, **options)


@given(SEEDS)
def test_a_claim_that_nobody_heard_of_is_no_attempt(seed: int) -> None:
    """Whether its lease is over or it is taken back."""
    heard_claims_count(Queue)(seed)


def test_if_it_were_one_jobs_would_die_that_nobody_has_begun() -> None:
    """Both ways."""
    assert falsified(heard_claims_count(Strictly), SEEDS)
    assert falsified(heard_claims_count(Stingy), SEEDS)


def test_a_job_whose_claims_nobody_hears_of_does_not_go_round_for_ever() -> None:
    """A handler that kills its process at once may be too fast to say that it has heard."""
    queue = Queue(RULES._replace(max_attempts=1))
    (id_,) = queue.perform(0, "push", [job()])
    for turn in range(UNHEARD + 1):
        (((claimed,), _ahead)) = take(queue, turn * SECOND, 1, SECOND, heard=False)
        assert claimed.attempt == 1
    assert queue.perform((UNHEARD + 1) * SECOND, "status", id_).state == "dead"


def test_who_asks_again_gets_the_same_claim() -> None:
    """With a new lease, and only what is still its own."""
    queue = Queue(RULES)
    one, two, _three = queue.perform(0, "push", [job(), job(), job()])
    first, _ahead = queue.perform(0, "claim", 2, 2 * SECOND, "t")
    queue.perform(0, "cancel", two)
    again, _ahead = queue.perform(SECOND, "claim", 2, 2 * SECOND, "t")
    assert [(c.id, c.fence, c.attempt) for c in again] == [(one, 1, 1)]
    assert first[0].id == one
    assert queue.perform(2 * SECOND, "status", one).state == "claimed"
    assert queue.perform(3 * SECOND, "status", one).state == "waiting"


def test_what_was_released_is_granted_no_more() -> None:
    """A claim that comes after its own release, from a connection that was held up, is empty."""
    queue = Queue(RULES)
    (id_,) = queue.perform(0, "push", [job()])
    queue.perform(0, "release", "t", 5 * SECOND)
    assert queue.perform(SECOND, "claim", 1, SECOND, "t") == ([], -1)
    assert queue.perform(SECOND, "claim", 1, 9 * SECOND, "other")[0][0].id == id_
    assert queue.perform(SECOND, "release", "other", SECOND) == (True, "released")
    assert queue.perform(SECOND, "status", id_)[:3] == ("waiting", 0, 0)
    queue.perform(20 * SECOND, "counts")
    assert not queue._tokens


def test_what_was_heard_of_is_not_taken_back() -> None:
    """By no release, whatever has happened on the way."""
    queue = Queue(RULES)
    queue.perform(0, "push", [job()])
    ((claimed,), _ahead) = queue.perform(0, "claim", 1, SECOND, "t")
    queue.perform(0, "extend", claimed.id, 1, SECOND)
    queue.perform(0, "release", "t", SECOND)
    assert queue.perform(0, "ack", claimed.id, 1, b"1") == (True, "done")


def test_an_ack_may_be_said_again() -> None:
    """By the claim that ended the job; its first result stays."""
    queue = Queue(RULES)
    (id_,) = queue.perform(0, "push", [job()])
    take(queue, 0, 1, SECOND)
    take(queue, SECOND, 1, SECOND)
    assert queue.perform(SECOND, "ack", id_, 2, b"1") == (True, "done")
    assert queue.perform(9 * SECOND, "ack", id_, 2, b"2") == (True, "done")
    assert queue.perform(9 * SECOND, "ack", id_, 1, b"3") == (False, "done")
    assert queue.perform(9 * SECOND, "status", id_).result == b"1"


def test_one_claim_brings_so_many_bytes() -> None:
    """A large payload comes alone, so that the answer comes in time."""
    queue = Queue(RULES)
    large = job()._replace(payload=b"x" * (BATCH_BYTES - 1))
    queue.perform(0, "push", [job(), large, large, large])
    assert [len(take(queue, 0, 9, SECOND)[0]) for _ in range(3)] == [2, 1, 1]


# --- Ends ---


def test_a_cancelled_job_ends_at_once() -> None:
    """Also if somebody works on it: that claim is not good any more."""
    queue = Queue(RULES)
    (id_,) = queue.perform(0, "push", [job()])
    take(queue, 0, 1, SECOND)
    assert queue.perform(0, "cancel", id_) == (True, "cancelled")
    assert queue.perform(0, "extend", id_, 1, SECOND) == (False, "cancelled")
    assert queue.perform(0, "cancel", id_) == (False, "cancelled")
    assert queue.ended == [id_]


def test_a_dead_letter_begins_anew_or_is_dropped() -> None:
    """Requeued it has all its attempts, and no older claim of it is good."""
    queue = Queue(RULES)
    one, two = queue.perform(0, "push", [job(), job()])
    take(queue, 0, 2, SECOND)
    for id_ in (one, two):
        assert queue.perform(0, "nack", id_, 1, 0, "bad", "fatal") == (True, "dead")
    assert [letter.reason for letter in queue.perform(1, "dead", 5)] == ["bad", "bad"]
    assert queue.perform(1, "requeue", one) == (True, "waiting")
    assert queue.perform(1, "requeue", one) == (False, "waiting")
    ((claim,), _ahead) = take(queue, 1, 1, SECOND)
    assert (claim.id, claim.attempt, claim.fence, claim.payload) == (one, 1, 2, b"1")
    assert queue.perform(1, "ack", one, 1, b"1") == (False, "claimed")
    assert queue.perform(1, "drop", one) == (False, "claimed")
    assert queue.perform(1, "drop", two) == (True, "dropped")
    assert queue.perform(1, "status", two) is None
    assert queue.perform(1, "requeue", two) == queue.perform(1, "drop", two) == (False, "unknown")


# --- Room, dedupe ids, news ---


def test_there_is_room_for_so_many_and_a_batch_is_all_or_nothing() -> None:
    """A claimed job takes room until it has ended; a known dedupe id needs none."""
    queue = Queue(RULES._replace(max_size=2))
    (first,) = queue.perform(0, "push", [job(dedupe="a")])
    assert queue.perform(0, "push", [job(), job()]) is None
    assert queue.perform(0, "counts").waiting[0] == 1
    assert queue.perform(0, "push", [job(), job(dedupe="a")])[1] == first
    take(queue, 0, 2, SECOND)
    assert queue.perform(0, "push", [job()]) is None
    assert queue.perform(0, "push", [job(dedupe="a")]) == [first]
    queue.perform(0, "nack", first, 1, 0, "", "fatal")
    assert queue.perform(0, "push", [job()]) is not None
    assert queue.perform(0, "requeue", first) == (False, "full")


@pytest.mark.parametrize("window", [0, 5 * SECOND])
def test_a_dedupe_id_is_taken_until_the_window_is_over(window: int) -> None:
    """While the job lives, and `dedupe` longer; twice in one batch is one job."""
    queue = Queue(RULES._replace(dedupe=window))
    one, same = queue.perform(0, "push", [job(dedupe="a"), job(dedupe="a")])
    assert one == same
    take(queue, 0, 1, SECOND)
    assert queue.perform(0, "push", [job(dedupe="a")]) == [one]
    queue.perform(0, "ack", one, 1, b"1")
    if window:
        assert queue.perform(window - 1, "push", [job(dedupe="a")]) == [one]
    (other,) = queue.perform(window, "push", [job(dedupe="a")])
    assert other != one
    queue.perform(RULES.result_ttl, "counts")  # the first is forgotten; the id is the second's
    assert queue.perform(RULES.result_ttl, "push", [job(dedupe="a")]) == [other]


def test_a_dead_job_is_not_begun_anew_beside_another_of_its_dedupe_id() -> None:
    """While that one lives; afterwards the id is its own again."""
    queue = Queue(RULES)
    (one,) = queue.perform(0, "push", [job(dedupe="a")])
    take(queue, 0, 1, SECOND)
    queue.perform(0, "nack", one, 1, 0, "", "fatal")
    (two,) = queue.perform(0, "push", [job(dedupe="a")])
    assert queue.perform(0, "requeue", one) == (False, "taken")
    queue.perform(0, "cancel", two)
    assert queue.perform(0, "requeue", one) == (True, "waiting")
    assert queue.perform(0, "push", [job(dedupe="a")]) == [one]


def ended_are_bounded(make: Callable[[QueueRules], Queue]) -> Callable[[int], None]:
    """Check that a queue never knows more jobs than its settings say."""

    def check(seed: int) -> None:
        history = History(seed, make)
        rules = history.queue.rules = RULES._replace(max_size=5, max_dead=2, max_ended=3)
        for _ in range(150):
            history.step()
            history.ids = [id_ for id_ in history.ids if history.state(id_) != "gone"]
            assert len(history.queue._jobs) <= 5 + 2 + 3
            assert len(history.queue._dead) <= rules.max_dead

    return check


class Hoarding(Queue):
    """Makes no room."""

    def _make_room(self, line: Any, most: int) -> list[str]:
        return []


@given(SEEDS)
def test_what_has_ended_is_kept_within_bounds(seed: int) -> None:
    """Whatever the history: the first to be forgotten make room."""
    ended_are_bounded(Queue)(seed)


def test_without_making_room_memory_grows() -> None:
    """Until all is forgotten by time."""
    assert falsified(ended_are_bounded(Hoarding), SEEDS)


def test_the_oldest_dead_letter_makes_room() -> None:
    """It is told, and counted."""
    queue = Queue(RULES._replace(max_dead=2))
    ids = queue.perform(0, "push", [job(), job(), job()])
    take(queue, 0, 3, SECOND)
    for now, id_ in enumerate(ids):
        queue.perform(now, "nack", id_, 1, 0, "", "fatal")
    assert [letter.id for letter in queue.perform(5, "dead", 9)] == ids[1:]
    assert queue.dropped == ids[:1]
    assert queue.perform(5, "counts").totals[-1] == 1
    assert queue.perform(5, "status", ids[0]) is None


def test_a_clock_that_was_set_back_changes_no_order() -> None:
    """What comes later is still later, and no age is below nothing."""
    queue = Queue(RULES)
    now = 100 * SECOND
    (high,) = queue.perform(now, "push", [job(1)])
    (low,) = queue.perform(0, "push", [job(0)])
    assert queue.perform(0, "status", high).age == 0
    assert queue.perform(0, "counts").oldest == 0
    granted, _ahead = take(queue, 0, 2, SECOND)
    assert [(one.id, one.age) for one in granted] == [(high, 0), (low, 0)]
    queue.perform(10**15, "push", [job()])
    queue.perform(now, "push", [job()])  # more ahead than any job is kept: that was no clock
    assert queue._latest == now


def test_who_waits_is_told_when_there_may_be_a_job() -> None:
    """The first in a line stirs; a claim that finds nothing learns when to look again."""
    queue = Queue(RULES)
    assert take(queue, 0, 1, SECOND) == ([], -1)
    queue.perform(0, "push", [job(delay=5 * SECOND)])
    assert queue.stirred
    assert take(queue, 0, 1, SECOND) == ([], 5 * SECOND)
    queue.stirred = False
    queue.perform(0, "push", [job(delay=6 * SECOND)])
    assert not queue.stirred
    queue.perform(0, "push", [job()])
    assert queue.stirred
    take(queue, 0, 1, 2 * SECOND)
    assert take(queue, SECOND, 1, SECOND) == ([], SECOND)


# --- The index ---


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=300))
def test_the_index_is_a_sorted_dict(changes: list[tuple[int, int]]) -> None:
    """Whatever is set and discarded, the order is that of number and id, and it does not grow."""
    index, plain = Index(), {}
    for id_, number in changes:
        if number == 9:
            index.discard(str(id_))
            plain.pop(str(id_), None)
        else:
            index.set(str(id_), number)
            plain[str(id_)] = number
        wanted = sorted((number, id_) for id_, number in plain.items())
        assert index.first() == (wanted[0] if wanted else None)
        assert index.behind(0, "", 3) == wanted[:3]
        assert len(index) == len(plain)
        assert len(index._heap) <= 2 * len(plain) + SLACK + 1
    due = [id_ for number, id_ in wanted if number <= 4] if changes else []
    assert index.take(2, 4) == due[:2]
