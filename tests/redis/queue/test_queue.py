"""The queue that pods share, on a real server: pushing, claiming, waiting, and a hostile store."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import ANY
from weakref import ref

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    Criticality,
    Guard,
    RateLimit,
    Shed,
    TimedOut,
    criticality,
    deadline,
    subscribe,
)
from seawall.clock import SYSTEM, VirtualClock
from seawall.context import seconds_left
from seawall.errors import JobFailed, JobLost, QueueFull, Rejected, StoreUnavailable, UnknownJob
from seawall.events import DeadLetterDropped, JobDied, SettingsDiffer
from seawall.jobs import Claim, JobQueue, LocalQueue, Worker, WorkItem
from seawall.jobs import queue as _steps
from seawall.jobs.encoding import MOST_BYTES, decode, encode
from seawall.jobs.queue import POLL
from seawall.jobs.records import QueueCall
from seawall.jobs.wakeups import Wakeups
from seawall.redis import queue as module
from seawall.redis.queue import PARTS, PriorityQueue
from seawall.redis.store import RedisStore
from seawall.shedding import adaptive_lifo, by_queue
from seawall.testing import run_virtual
from tests.redis.support import FrozenClock, Server, eventually, keys_without_expiry, mutate
from tests.support import let_pass, new_guard

SECOND = 1_000_000
Make = Callable[..., JobQueue]


@pytest.fixture(params=["local", "shared"])
def make(request: pytest.FixtureRequest) -> Make:
    """Return a function that makes queues of one of the two sorts; both must do the same."""
    if request.param == "local":
        return lambda **options: LocalQueue("mails", **options)
    store: RedisStore = request.getfixturevalue("store")
    return lambda **options: PriorityQueue(store, "mails", **options)


# --- What both do ---


def test_a_job_goes_through_the_queue(make: Make) -> None:
    """Pushed, claimed, prolonged, acked; its result is there to be waited for."""
    queue = make()
    id_ = queue.push({"to": "ä", "n": [1, None, 2.5]}, priority=7)
    assert queue.status(id_).state == "waiting"
    (claim,) = queue.claim()
    assert (claim.id, claim.payload, claim.priority, claim.attempt) == (
        id_,
        {"to": "ä", "n": [1, None, 2.5]},
        7,
        1,
    )
    assert "attempt 1, priority 7" in repr(claim)
    assert claim.time_left > 600_000
    assert queue.claim() == []
    queue.heartbeat(claim)
    queue.heartbeat(claim, lease=60.0)
    assert claim.lease == 60.0
    queue.ack(claim, {"sent": True})
    assert queue.join(id_) == {"sent": True}
    status = queue.status(id_)
    assert (status.state, status.attempts, status.result) == ("done", 1, {"sent": True})
    queue.ack(claim, "again")  # its answer may have been lost
    assert queue.join(id_) == {"sent": True}
    with pytest.raises(JobLost, match="the job is done") as lost:
        queue.heartbeat(claim)
    assert (lost.value.job, lost.value.state, lost.value.reason) == (id_, "done", "job_lost")


def test_pushes_can_be_refused_by_how_many_jobs_wait(make: Make) -> None:
    """`by_queue(of=queue)` reads it without waiting; of a store, what that said lately."""
    queue = make()
    pushes = new_guard(Shed(by_queue(3, of=queue)))
    assert pushes.attempt(queue.push, 0).ok
    queue.push_many([1, 2])
    eventually(lambda: queue.waiting == 3)
    assert pushes.attempt(queue.push, 3).reason == "shed_by_queue"
    queue.claim()
    eventually(lambda: pushes.attempt(queue.push, 3).ok)


def test_a_worker_begins_no_job_that_waited_for_too_long(make: Make) -> None:
    """By the rule it was given; such jobs are dead letters, and can be requeued."""

    async def main() -> None:
        queue = make()
        await queue.apush_many(range(3))

        async def handler(claim: Claim) -> None:
            raise AssertionError(claim)

        worker = Worker(queue, handler, shed=adaptive_lifo(1e-6, patience=1e-6, scale=0))
        task = asyncio.create_task(worker.run())
        while worker.snapshot()["shed"] < 3:
            await let_pass(0.01)
        worker.stop()
        await task
        assert len(await queue.adead()) == 3

    asyncio.run(main())


def test_the_async_twin_does_the_same(make: Make) -> None:
    """Each method has its twin."""

    async def main() -> None:
        queue = make(max_attempts=1)
        one, two, three = await queue.apush_many(["a", "b", "c"], priority=1)
        four = await queue.apush("d", delay=60.0, dedupe="d")
        assert await queue.apush("d", dedupe="d") == four
        claims = await queue.aclaim(2)
        await queue.aheartbeat(claims[0])
        await queue.aack(claims[0], 1)
        assert await queue.anack(claims[1], reason="bad") == "dead"
        assert await queue.ajoin(one) == 1
        assert [letter.id for letter in await queue.adead()] == [two]
        assert [item.id for item in (await queue.abrowse()).items] == [two]
        assert await queue.ainspect("nothing") is None
        assert await queue.aretry(two)
        assert not await queue.adrop(one)
        assert await queue.acancel(three)
        assert (await queue.astatus(three)).state == "cancelled"
        snapshot = await queue.asnapshot()
        assert {k: snapshot[k] for k in ("waiting", "delayed", "claimed", "dead", "pushed")} == {
            "waiting": 1,
            "delayed": 1,
            "claimed": 0,
            "dead": 0,
            "pushed": 4,
        }
        assert snapshot["by_priority"][1] == 1
        if isinstance(queue, PriorityQueue):
            await queue.store.aclose()

    asyncio.run(main())


def test_priority_is_the_criticality_of_the_context(make: Make) -> None:
    """Unless it is given; a higher one goes first."""
    queue = make()
    queue.push("plain")
    with criticality(Criticality.CRITICAL_PLUS):
        queue.push("urgent")
    with criticality(Criticality.SHEDDABLE):
        queue.push("batch")
        queue.push("given", priority=9)
    claims = queue.claim(10)
    assert [(claim.payload, claim.priority) for claim in claims] == [
        ("given", 9),
        ("urgent", 3),
        ("plain", 2),
        ("batch", 0),
    ]


def test_a_job_without_result_raises_how_it_ended(make: Make) -> None:
    """Dead, cancelled, unknown, and not yet: four different errors."""
    queue = make(max_attempts=1)
    dead, cancelled, waiting = queue.push_many([1, 2, 3])
    queue.nack(queue.claim()[0], reason="it broke")
    queue.cancel(cancelled)
    assert not queue.cancel(cancelled)
    with pytest.raises(JobFailed, match="is dead: it broke") as failed:
        queue.join(dead)
    assert (failed.value.job, failed.value.state, failed.value.cause) == (dead, "dead", "it broke")
    with pytest.raises(JobFailed, match="is cancelled"):
        queue.join(cancelled)
    with pytest.raises(TimedOut, match="is waiting after 0 s"):
        queue.join(waiting, timeout=0)
    for ask in (queue.join, queue.status, queue.cancel, queue.retry, queue.drop):
        with pytest.raises(UnknownJob, match="knows no job 'nope'"):
            ask("nope")


def test_a_full_queue_refuses(make: Make) -> None:
    """`QueueFull` is a `Rejected`: nothing was pushed."""
    queue = make(max_size=2, max_attempts=1)
    assert queue.push_many([]) == []
    first, _second = queue.push_many([1, 2])
    with pytest.raises(QueueFull, match="2 jobs are allowed") as full:
        queue.push(3)
    assert isinstance(full.value, Rejected)
    assert (full.value.guard, full.value.policy) == ("mails", "queue")
    queue.nack(queue.claim()[0])
    queue.push(4)
    with pytest.raises(QueueFull):
        queue.retry(first)


def test_the_death_of_a_job_is_an_event(make: Make) -> None:
    """Told once, with the reason."""
    seen: list[JobDied] = []
    stop = subscribe(seen.append, JobDied)
    try:
        queue = make(max_attempts=1)
        id_ = queue.push(1)
        queue.nack(queue.claim()[0], reason="no\nway")
        queue.snapshot()
    finally:
        stop()
    assert [repr(event) for event in seen] == [
        f"JobDied(guard='mails', job={id_!r}, attempts=1, cause='no way', traceback='')"
    ]


def test_claim_waits_for_a_job(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits is woken by a push: here it would not look again for a minute."""
    monkeypatch.setattr(_steps, "POLL", 60.0)
    queue = make()
    assert queue.claim(wait=0.01) == []
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(queue.claim(wait=50.0)))
    thread.start()
    wait_until(lambda: queue._wakeups._wakeups)
    began = SYSTEM.now()
    queue.push("hello")
    thread.join(20.0)
    assert [claim.payload for claim in found] == ["hello"]
    assert SYSTEM.now() - began < 20.0


def test_without_a_ring_it_would_wait_on(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nobody rang the bell, a push would be found by the next look only."""
    monkeypatch.setattr(_steps, "POLL", 1.0)
    monkeypatch.setattr(Wakeups, "ring", lambda _self, _topic: None)
    queue = make()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(queue.claim(wait=0.5)))
    thread.start()
    wait_until(lambda: queue._wakeups._wakeups)
    SYSTEM.sleep(0.1)  # it has looked
    queue.push("hello")
    SYSTEM.sleep(0.2)
    assert found == []
    thread.join(20.0)


def wait_until(condition: Callable[[], Any]) -> None:
    """Wait for something that another thread does."""
    until = SYSTEM.now() + 10.0
    while not condition():
        assert SYSTEM.now() < until
        SYSTEM.sleep(0.005)


def test_threads_and_tasks_share_a_queue(make: Make) -> None:
    """Four threads and four tasks push and claim at once: each job is done by one of them."""
    queue = make()
    done: list[int] = []

    def work() -> None:
        queue.push_many(range(10))
        while claims := queue.claim(3):
            for claim in claims:
                queue.ack(claim)
                done.append(claim.payload)

    async def awork() -> None:
        await queue.apush_many(range(10))
        while claims := await queue.aclaim(3):
            for claim in claims:
                await queue.aack(claim)
                done.append(claim.payload)

    async def main() -> None:
        threads = [asyncio.to_thread(work) for _ in range(4)]
        await asyncio.gather(*threads, *(awork() for _ in range(4)))
        if isinstance(queue, PriorityQueue):
            await queue.store.aclose()

    asyncio.run(main())
    assert sorted(done) == sorted([*range(10)] * 8)


def test_who_waits_and_is_cancelled_leaves_nothing_behind(make: Make) -> None:
    """Neither a claim that waits nor a wait for an end is rung any more."""

    async def main() -> None:
        queue = make()
        id_ = await queue.apush(1, delay=60.0)
        tasks = [
            asyncio.create_task(work)
            for work in (queue.aclaim(wait=60.0), queue.ajoin(id_), queue.ajoin(id_, 60.0))
        ]
        await let_pass(0.05)
        assert len(queue._wakeups._wakeups) == 2
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert queue._wakeups._wakeups == {}
        if isinstance(queue, PriorityQueue):
            await queue.store.aclose()

    asyncio.run(main())


def test_waiting_ends_with_the_deadline(make: Make) -> None:
    """Neither a claim nor a wait goes on beyond the deadline of the context."""
    queue = make()
    id_ = queue.push(1, delay=60.0)
    with deadline(0.05):
        assert queue.claim(wait=60.0) == []
    for timeout in (60.0, None):
        with deadline(0.05):
            left = seconds_left()  # a busy machine has spent some of it already
            with pytest.raises(TimedOut, match=r"is delayed after 0\.0\d+ s") as late:
                queue.join(id_, timeout=timeout)
        assert late.value.seconds == pytest.approx(left, abs=0.01)


@pytest.mark.parametrize(
    "call",
    [
        lambda q: q.push(object()),
        lambda q: q.push(float("nan")),
        lambda q: q.push("x" * 300_000),
        lambda q: q.push(1, dedupe="\ud800"),
        lambda q: q.status("\ud800"),
        lambda q: q.cancel("\ud800"),
        lambda q: q.push(json.loads("[" * 65 + "]" * 65)),
        lambda q: q.push(1, priority=10),
        lambda q: q.push(1, priority=True),
        lambda q: q.push(1, delay=-1),
        lambda q: q.push(1, delay=1e9),
        lambda q: q.push(1, ttl=0),
        lambda q: q.push(1, ttl=1.0, delay=1.0),
        lambda q: q.push(1, dedupe=""),
        lambda q: q.push(1, dedupe="x" * 501),
        lambda q: q.push_many(range(501)),
        lambda q: q.claim(0),
        lambda q: q.claim(501),
        lambda q: q.claim(lease=0),
        lambda q: q.claim(wait=-1),
        lambda q: q.ack("0000000000000001-x"),
        lambda q: q.nack("0000000000000001-x"),
        lambda q: q.heartbeat(None),
        lambda q: q.status(7),
        lambda q: q.join(""),
        lambda q: q.join("x", timeout=-1),
        lambda q: q.dead(0),
        lambda _: LocalQueue(""),
        lambda _: LocalQueue(max_attempts=0),
        lambda _: LocalQueue(max_dead=0),
        lambda _: LocalQueue(max_payload=2**30),
        lambda _: LocalQueue(head_start=-1),
        lambda _: LocalQueue(dedupe_window=10, result_ttl=5),
        lambda _: LocalQueue(keep=1e12),
        lambda _: PriorityQueue("redis://localhost", "mails"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments_raise_and_say_why(call: Callable[[Any], Any]) -> None:
    """Nothing odd gets into a queue."""
    queue = LocalQueue()
    with pytest.raises((TypeError, ValueError), match=r"\w+"):
        call(queue)
    assert queue.snapshot()["pushed"] == 0


def test_half_a_character_is_a_value_error_and_no_failure_of_the_store(store: RedisStore) -> None:
    """Neither for the store's health nor for those who ask at the same moment."""

    async def main() -> None:
        queue = PriorityQueue(store, "mails")
        half = json.loads('"\\ud800"')
        asked = (queue.apush(n, dedupe=half if n == 3 else None) for n in range(6))
        came = await asyncio.gather(*asked, return_exceptions=True)
        assert [isinstance(one, ValueError) for one in came] == [n == 3 for n in range(6)]
        with pytest.raises(ValueError, match="cannot be written as JSON"):
            await queue.apush([half])
        for _ in range(5):
            with pytest.raises(ValueError, match="half a character"):
                await queue.astatus(half)
        assert store.up
        await store.aclose()

    asyncio.run(main())


def browsed(queue: JobQueue, state: str, **asked: Any) -> list[WorkItem]:
    """Return every page of a list, one behind the other."""
    found: list[WorkItem] = []
    after = None
    while True:
        page = queue.browse(state, after=after, **asked)
        found += page.items
        after = page.next
        if after is None:
            return found


def died(queue: JobQueue, *payloads: Any) -> list[str]:
    """Return the ids of jobs that died, the first to die first."""
    ids = queue.push_many(payloads)
    claims = sorted(queue.claim(len(ids)), key=lambda claim: ids.index(claim.id))
    for claim in claims:
        assert queue.nack(claim, reason=f"ValueError: {claim.payload}", retry=False) == "dead"
    return ids


def test_jobs_of_each_state_are_listed(make: Make) -> None:
    """A page at a time, each job once, though others come and go meanwhile; as it is."""
    queue = make(max_attempts=1)
    waiting = queue.push_many(range(5), priority=3)
    assert [item.id for item in browsed(queue, "waiting", limit=2)] == waiting
    page = queue.browse("waiting", limit=2)
    assert queue.drop(waiting[1])  # the last of that page
    urgent = queue.push("urgent", priority=9)
    after = queue.browse("waiting", limit=9, after=page.next)
    assert [item.id for item in after.items] == waiting[2:]
    first = queue.browse("waiting", limit=1).items[0]
    assert (first.id, first.priority, first.payload) == (urgent, 9, b'"urgent"')
    assert (first.state, first.attempts, first.acts) == ("waiting", 0, ("drop",))
    later = queue.push("later", delay=60)
    (delayed,) = browsed(queue, "delayed")
    assert (delayed.id, delayed.state) == (later, "delayed")
    assert -60 <= delayed.since < 0
    (claim,) = queue.claim()
    (claimed,) = browsed(queue, "claimed")
    assert (claimed.id, claimed.attempts, claimed.state) == (claim.id, 1, "claimed")
    assert queue.nack(claim, reason="ValueError: no") == "dead"
    (dead,) = browsed(queue, "dead")
    assert (dead.id, dead.error, dead.acts) == (claim.id, "ValueError: no", ("retry", "drop"))
    assert queue.inspect(dead.id) == dead._replace(age=ANY, since=ANY)
    assert queue.inspect("nothing") is None


def test_dead_letters_are_listed_from_the_latest(make: Make) -> None:
    """Also those that died at one instant, and behind one that is gone by now."""
    queue = make(max_attempts=1)
    ids = died(queue, *range(7))
    assert [item.id for item in browsed(queue, "dead", limit=3)] == ids[::-1]
    page = queue.browse("dead", limit=3)
    queue.drop(ids[4])
    died(queue, "new")
    rest = queue.browse("dead", limit=9, after=page.next)
    assert ([item.id for item in rest.items], rest.next) == (ids[3::-1], None)


def test_dead_letters_of_one_instant_are_each_listed_once(
    store: RedisStore, frozen: FrozenClock
) -> None:
    """Time stands still: pages go on by the id, also behind one that is gone."""
    clock = VirtualClock(frozen.now_us / SECOND)
    queues: list[JobQueue] = [LocalQueue(clock=clock), PriorityQueue(store, "still")]
    for queue in queues:
        ids = died(queue, *range(9))
        assert [item.id for item in browsed(queue, "dead", limit=2)] == ids[::-1]
        page = queue.browse("dead", limit=4)
        for id_ in ids[4:7]:
            queue.drop(id_)
        rest = queue.browse("dead", after=page.next)
        assert [item.id for item in rest.items] == ids[3::-1]


def test_jobs_are_found_by_a_text(make: Make) -> None:
    """In id, reason and payload, as it is written; without payloads these are not searched."""
    queue = make(max_attempts=1)
    ids = died(queue, {"to": "Ann"}, {"to": "bob%"}, {"to": "Größe"}, "x.*[")
    for search, wanted in (
        ("ANN", [ids[0]]),
        ("valueerror: x.*[", [ids[3]]),
        ("b%", [ids[1]]),
        ("größe", [ids[2]]),
        (ids[2], [ids[2]]),
        ("nobody", []),
    ):
        found = [item.id for item in browsed(queue, "dead", search=search, limit=1)]
        assert found == wanted, search
    assert browsed(queue, "dead", search='"to":', payloads=False) == []
    hidden = browsed(queue, "dead", payloads=False)
    assert [(item.id, item.payload) for item in hidden] == [(id_, b"") for id_ in ids[::-1]]


def test_a_page_of_jobs_is_bounded(make: Make) -> None:
    """By how many are looked at, and by how large they are; the search goes on from there."""
    queue = make(max_payload=600_000)
    queue.push_many(range(450))
    pages = [queue.browse("waiting", search="nowhere")]
    while pages[-1].next is not None:
        pages.append(queue.browse("waiting", search="nowhere", after=pages[-1].next))
    assert len(pages) == 3
    for _ in range(4):
        queue.push("x" * 500_000, priority=9)
    page = queue.browse("waiting", limit=100)
    assert [(len(item.payload), item.size) for item in page.items] == [(512, 500_002)] * 2
    assert page.next is not None
    opened = queue.inspect(page.items[0].id)
    assert opened is not None
    assert len(opened.payload) == 65_536
    assert len(browsed(queue, "waiting", limit=100)) == 454


def test_a_job_is_retried_or_dropped_once(make: Make) -> None:
    """Said again, it has no effect; what has ended otherwise is left alone."""
    queue = make(max_attempts=1)
    (one, two) = died(queue, 1, 2)
    assert queue.retry(one)
    assert not queue.retry(one)
    assert queue.drop(two)
    for act in (queue.retry, queue.drop):
        with pytest.raises(UnknownJob):
            act(two)
    assert queue.drop(one)  # it waits: it is cancelled
    assert queue.status(one).state == "cancelled"
    assert not queue.drop(one)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"state": "done"}, ValueError),
        ({"state": None}, ValueError),
        ({"search": 5}, TypeError),
        ({"search": "x" * 201}, ValueError),
        ({"search": "\ud800"}, ValueError),
        ({"after": "x"}, ValueError),
        ({"after": 5}, ValueError),
        ({"after": "1:\n"}, ValueError),
        ({"limit": 0}, ValueError),
        ({"limit": 101}, ValueError),
        ({"payloads": 1}, TypeError),
    ],
)
def test_what_a_list_is_asked_for_is_checked(make: Make, wrong: Any, error: type[Exception]):
    """Before the store is asked."""
    with pytest.raises(error):
        make().browse(**wrong)


def test_a_requeue_beside_another_of_its_dedupe_id_is_refused(make: Make) -> None:
    """There are never two live jobs of one dedupe id."""
    queue = make(max_attempts=1)
    dead = queue.push(1, dedupe="a")
    queue.nack(queue.claim()[0])
    queue.push(2, dedupe="a")
    assert not queue.retry(dead)
    assert queue.status(dead).state == "dead"


def test_dead_letters_are_bounded(make: Make) -> None:
    """The oldest is dropped, and an event tells which."""
    seen: list[DeadLetterDropped] = []
    stop = subscribe(seen.append, DeadLetterDropped)
    try:
        queue = make(max_attempts=1, max_dead=2)
        ids = queue.push_many([1, 2, 3])
        for claim in queue.claim(3):
            queue.nack(claim)
    finally:
        stop()
    assert [letter.id for letter in queue.dead()] == ids[1:]
    assert [repr(event) for event in seen] == [f"DeadLetterDropped(guard='mails', job={ids[0]!r})"]
    assert queue.snapshot()["dropped"] == 1


def test_how_jobs_ended_is_kept_within_bounds(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as may wait, and not fewer than a thousand."""
    assert make().rules.max_ended == 100_000
    assert make(max_size=10).rules.max_ended == 1000
    monkeypatch.setattr(_steps, "LEAST_ENDED", 2)
    queue = make(max_size=2)
    ids = [queue.push(n) for n in range(2)]
    for id_ in ids:
        queue.cancel(id_)
    queue.cancel(queue.push(3))
    with pytest.raises(UnknownJob):
        queue.status(ids[0])
    assert queue.status(ids[1]).state == "cancelled"


# --- JSON ---


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('ab\\"[]{}'), inner),
    max_leaves=20,
)  # fmt: skip


@given(JSON)
def test_what_is_json_comes_back_as_it_was(value: Any) -> None:
    """The payload that is claimed is the one that was pushed."""
    assert decode(encode("it", value, 10**6)) == value


@given(st.binary(max_size=200) | st.text('[]{}"\\,:0', max_size=300).map(str.encode))
def test_what_is_not_json_raises_a_value_error(data: bytes) -> None:
    """Whatever a store sends back, reading it ends in a value or a ValueError."""
    try:
        decode(data)
    except ValueError:
        pass


def test_deep_and_large_json_is_refused_in_linear_time() -> None:
    """Brackets inside strings do not count; those outside do, at any size."""
    quoted = json.dumps("[" * 1000)
    assert decode(quoted.encode()) == "[" * 1000
    with pytest.raises(ValueError, match="are allowed"):
        decode(b" " * (MOST_BYTES + 1))
    for hostile in ("[" * 10**6, '"' + '\\"' * 10**6, "{" * 10**5 + "}" * 10**5):
        began = SYSTEM.now()
        with pytest.raises(ValueError, match=r"\w"):
            decode(hostile.encode())
        assert SYSTEM.now() - began < 5.0


# --- The queue in memory ---


def fork() -> int:
    """Fork, though other threads run: that is what these tests are about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def test_waiting_takes_no_real_time_on_a_virtual_loop() -> None:
    """A claim wakes exactly when a delayed job is ready, or a lease is over."""

    async def main() -> None:
        queue = LocalQueue()
        now = queue.clock.now
        await queue.apush("later", delay=3600.0)
        (claim,) = await queue.aclaim(lease=100.0, wait=7200.0)
        assert now() == 3600.0
        (again,) = await queue.aclaim(wait=7200.0)
        assert (now(), again.attempt) == (3700.0, 2)
        with pytest.raises(JobLost):
            await queue.aack(claim)

    run_virtual(main())


def test_a_local_queue_begins_empty_in_a_child_process() -> None:
    """The jobs are the parent's."""
    queue = LocalQueue()
    queue.push(1)
    child = fork()
    if child == 0:
        os._exit(0 if queue.snapshot()["waiting"] == 0 and queue.push(2) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert queue.snapshot()["waiting"] == 1


# --- The queue in a store ---


def test_pods_share_the_queue(new_store: Callable[..., RedisStore], client: Any) -> None:
    """What one pushes another claims; all keys are in one slot, and none stays for ever."""
    here, there = (PriorityQueue(new_store(), "mails {odd} name") for _ in range(2))
    id_ = here.push("x", dedupe="once")
    there.push("y", delay=100.0, ttl=200.0)
    (claim,) = there.claim()
    here.claim(wait=0.01)
    there.ack(claim, "z")
    assert here.join(id_) == "z"
    keys = [key.decode() for key in client.scan_iter(match=f"{here.store._core.prefix}:*")]
    queue_keys = [key for key in keys if "{queue:" in key]
    assert len(queue_keys) > len(PARTS) / 2
    assert len({key[key.index("{") : key.index("}")] for key in queue_keys}) == 1
    assert keys_without_expiry(client, here.store._core.prefix) == []


def test_waiters_share_one_subscription_and_are_pushed(
    store: RedisStore, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hundred tasks wait, one connection listens, and an end is heard though nobody looks."""
    monkeypatch.setattr(_steps, "POLL", 60.0)

    async def main() -> None:
        queue = PriorityQueue(store, "mails")
        ids = await queue.apush_many(range(200))
        tasks = [asyncio.create_task(queue.ajoin(id_, 50.0)) for id_ in ids]
        while client.pubsub_numsub(queue._calls.ended)[0][1] == 0:
            await let_pass(0.01)
        assert client.pubsub_numsub(queue._calls.ended)[0][1] == 1
        await let_pass(0.1)
        began = SYSTEM.now()
        for claim in await queue.aclaim(200):
            await queue.aack(claim, claim.payload)
        assert await asyncio.gather(*tasks) == list(range(200))
        assert SYSTEM.now() - began < 20.0
        await store.aclose()

    asyncio.run(main())


def test_without_a_push_the_poll_finds_out(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If every message is lost, who waits for a job or its end is late by one poll at most."""
    monkeypatch.setattr(PriorityQueue, "_listen", lambda _self, _topic: None)
    queue = PriorityQueue(store, "mails")
    done: list[Any] = []

    def work() -> None:
        (claim,) = queue.claim(wait=20.0)
        queue.ack(claim, "done")

    id_ = queue.push(1, delay=0.2)
    threads = [
        threading.Thread(target=work),
        threading.Thread(target=lambda: done.append(queue.join(id_, 20.0))),
    ]
    began = SYSTEM.now()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert done == ["done"]
    assert SYSTEM.now() - began < 0.2 + 2 * POLL + 2.0


def test_a_cancelled_claim_has_taken_nothing(store: RedisStore, client: redis.Redis) -> None:
    """What was granted to somebody who is gone is given back at once, with its attempt."""

    async def main() -> None:
        queue = PriorityQueue(store, "mails", max_attempts=1)
        await queue.apush_many(range(20))
        for _ in range(20):
            client.client_pause(10_000, all=False)  # however slow we are, it answers later
            task = asyncio.create_task(queue.aclaim(lease=600.0))
            await let_pass(0)
            await let_pass(0)
            task.cancel()
            client.client_unpause()
            with pytest.raises(asyncio.CancelledError):
                await task
        async with asyncio.timeout(10.0):
            while (await queue.asnapshot())["waiting"] < 20:
                await let_pass(0.01)
        claims = await queue.aclaim(20)
        assert [claim.attempt for claim in claims] == [1] * 20
        assert max(claim.fence for claim in claims) > 1  # some had been granted
        await store.aclose()

    asyncio.run(main())


def test_without_giving_back_a_cancelled_claim_is_stuck(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If nobody gave it back, the job would be nobody's for the whole lease."""
    monkeypatch.setattr(PriorityQueue, "_undo", lambda *_args: None)
    with pytest.raises(TimeoutError):
        asyncio.run(_one_cancelled_claim(store))


async def _one_cancelled_claim(store: RedisStore) -> None:
    queue = PriorityQueue(store, "mails")
    await queue.apush(1)
    task = asyncio.create_task(queue.aclaim(lease=600.0))
    await let_pass(0)
    await let_pass(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    while not (await queue.asnapshot())["claimed"]:
        await let_pass(0.01)
    async with asyncio.timeout(0.3):
        while not (await queue.asnapshot())["waiting"]:
            await let_pass(0.01)


def test_leases_are_by_the_servers_clock(store: RedisStore, frozen: FrozenClock) -> None:
    """A claim is good until the very microsecond; then it is back in its old place."""
    queue = PriorityQueue(store, "mails")
    first, second = queue.push("first"), queue.push("second")
    (claim,) = queue.claim(lease=5.0)
    frozen.advance(5 * SECOND - 1)
    queue.heartbeat(claim)
    frozen.advance(5 * SECOND)
    with pytest.raises(JobLost, match="the job is waiting"):
        queue.ack(claim)
    assert [claim.id for claim in queue.claim(2)] == [first, second]


def test_when_the_server_forgets_everything_no_old_claim_is_good(
    store: RedisStore, client: Any
) -> None:
    """After FLUSHALL (here: of this queue) numbers begin anew, but ids are never the same again."""
    queue = PriorityQueue(store, "mails")
    old = queue.push("old")
    (claim,) = queue.claim()
    client.delete(*queue._calls._keys)
    with pytest.raises(UnknownJob):
        queue.join(old)
    new = queue.push("new")
    (other,) = queue.claim()
    assert (old[:16], claim.fence) == (new[:16], other.fence)
    with pytest.raises(JobLost, match="the job is unknown"):
        queue.ack(claim)
    queue.ack(other)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_was_evicted_is_no_catastrophe(
    store: RedisStore, client: Any, frozen: FrozenClock, part: str
) -> None:
    """A server that evicts keys loses jobs, but the queue goes on working."""
    queue = PriorityQueue(store, "mails", keep=60.0)
    queue.push_many([1, 2, 3])
    queue.push("late", delay=1.0, dedupe="a")
    queue.claim(lease=1.0)
    client.delete(store._core.key("queue", "mails", part))
    frozen.advance(2 * SECOND)
    queue.claim(10)
    id_ = queue.push("new", priority=9)
    (claim, *_rest) = queue.claim(10)
    queue.ack(claim, 1)
    assert queue.status(id_).state == "done"
    frozen.advance(200 * SECOND)
    queue.dead()
    queue.snapshot()


def test_a_payload_that_cannot_be_read_is_a_dead_letter(store: RedisStore, client: Any) -> None:
    """It harms neither the claimer nor the jobs beside it."""
    queue = PriorityQueue(store, "mails")
    ids = queue.push_many(["a", "b", "c"])
    client.hset(store._core.key("queue", "mails", "payloads"), ids[1], b"[" * 100_000)
    assert [claim.payload for claim in queue.claim(3)] == ["a", "c"]
    eventually(lambda: bool(queue.dead()))  # in the background
    (letter,) = queue.dead()
    assert (letter.id, letter.payload, letter.reason) == (
        ids[1],
        None,
        "the payload cannot be read",
    )


HOSTILE = st.recursive(
    st.none() | st.integers() | st.binary(max_size=8) | st.sampled_from([b"1", b"9" * 400]),
    lambda inner: st.lists(inner, max_size=8),
    max_leaves=25,
)


@given(HOSTILE, st.sampled_from(sorted(module._READERS)))
def test_a_reply_that_makes_no_sense_does_no_harm(reply: Any, operation: str) -> None:
    """Reading it raises an ordinary error, a failure of the store then; or gives plain values."""
    try:
        module._READERS[operation](reply)
    except (StoreUnavailable, ValueError, TypeError, IndexError, KeyError, AttributeError):
        pass


def test_such_a_reply_is_a_failure_of_the_store(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers see `StoreUnavailable`, whatever is wrong with it."""
    queue = PriorityQueue(store, "mails")
    unpack = queue._calls.unpack
    sent: list[Any] = []
    monkeypatch.setattr(queue._calls, "unpack", lambda _reply, items: unpack(sent[0], items))
    huge = [b"done", b"1", b"1", b"9" * 400, b"", b"1"]
    for wrong in (b"?", [], [[], [], []], [[b"x"], [], []], [[huge], [], []], [[None], [b"1"], []]):
        sent[:] = [wrong]
        with pytest.raises(StoreUnavailable, match="makes no sense"):
            queue.status("x")


def test_operations_of_one_moment_go_as_one_call(store: RedisStore) -> None:
    """Fifty tasks that push at once cost a few script calls."""

    async def main() -> None:
        queue = PriorityQueue(store, "mails")
        calls: list[int] = []
        pack = queue._additions.pack

        def counted(items: Any) -> Any:
            calls.append(len(items))
            return pack(items)

        queue._additions.pack = counted  # type: ignore[method-assign]
        ids = await asyncio.gather(*(queue.apush(n) for n in range(50)))
        assert len(set(ids)) == sum(calls) == 50
        assert len(calls) <= 5
        await store.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_pods_that_disagree_are_an_event(new_store: Callable[..., RedisStore], kind: str) -> None:
    """Two pods with other settings for the same queue are told of it, also one that only pushes."""
    told = threading.Event()
    seen: list[SettingsDiffer] = []

    def note(event: SettingsDiffer) -> None:
        seen.append(event)
        told.set()

    async def push(queue: PriorityQueue) -> None:
        await queue.apush(1)
        await asyncio.to_thread(told.wait, 10.0)
        await queue.store.aclose()

    stop = subscribe(note, SettingsDiffer)
    try:
        one, two = new_store(), new_store()
        PriorityQueue(one, "mails").push(1)
        one._core.call("settings", [one._core.key("queue", "mails", "settings")], ["other", 60_000])
        other = PriorityQueue(two, "mails", max_attempts=9)
        if kind == "sync":
            other.push(1)
        else:
            asyncio.run(push(other))
        assert told.wait(10.0)
    finally:
        stop()
    assert (seen[0].policy, seen[0].shared_name) == ("queue", "mails")


def test_a_queue_made_for_one_request_leaves_nothing_behind(store: RedisStore) -> None:
    """Neither a job in the background nor a listener, nor itself."""
    first = PriorityQueue(store, "mails")
    first.push(0)
    before = len(store._core._background._handles)
    queues: list[Any] = []
    for _ in range(20):
        queue = PriorityQueue(store, "mails")
        id_ = queue.push(1)
        queue.claim(wait=0.001)
        with pytest.raises(TimedOut):
            queue.join(id_, 0.001)
        queues.append(ref(queue))
    del queue
    gc.collect()
    assert [queue for queue in queues if queue() is not None] == []
    assert len(store._core._background._handles) == before
    assert store._core._subscriptions._listeners == {}


def test_who_only_claims_does_not_listen_to_ends(store: RedisStore) -> None:
    """Each end would be a message to every worker."""
    queue = PriorityQueue(store, "mails")
    queue.claim(wait=0.001)
    assert set(store._core._subscriptions._listeners) == {queue._calls.stirred}


def test_pods_with_other_limits_harm_no_job(new_store: Callable[..., RedisStore]) -> None:
    """What one may push another can claim and read, and no expiry is brought forward."""
    large = PriorityQueue(new_store(), "mails", max_payload=1_000_000)
    small = PriorityQueue(new_store(), "mails", max_payload=10, keep=0.05, result_ttl=0.05)
    id_ = large.push("x" * 1000)
    later = large.push("later", delay=3600.0)
    small.snapshot()
    SYSTEM.sleep(0.5)  # by the server's own clock
    assert large.status(later).state == "delayed"
    (claim,) = small.claim(lease=0.05)
    assert claim.payload == "x" * 1000
    large.ack(claim, "r" * 1000)
    assert small.join(id_) == "r" * 1000


def test_if_each_pod_set_the_expiry_the_shortest_would_win(
    new_store: Callable[..., RedisStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with it go the jobs of all others."""
    mutate(monkeypatch, "queue", "if redis.call('PTTL', key) < 0.9 * EXPIRY then", "if true then")
    long = PriorityQueue(new_store(), "mails")
    short = PriorityQueue(new_store(), "mails", keep=0.05, result_ttl=0.05)
    later = long.push("later", delay=3600.0)
    short.snapshot()
    SYSTEM.sleep(0.5)
    with pytest.raises(UnknownJob):
        long.status(later)


def test_a_result_that_cannot_be_read_is_not_none(store: RedisStore, client: Any) -> None:
    """Who waits is told so; who only looks sees none."""
    queue = PriorityQueue(store, "mails")
    id_ = queue.push(1)
    queue.ack(queue.claim()[0], 1)
    client.hset(store._core.key("queue", "mails", "results"), id_, b"[" * 100_000)
    with pytest.raises(JobFailed, match="its result cannot be read") as failed:
        queue.join(id_)
    assert failed.value.state == "done"
    assert queue.status(id_).result is None


def test_a_clock_that_is_set_back_lets_nobody_overtake(
    store: RedisStore, frozen: FrozenClock
) -> None:
    """An hour back on the server: what comes later is still later."""
    queue = PriorityQueue(store, "mails")
    old = queue.push("old", priority=9)
    frozen.set(frozen.now_us - 3600 * SECOND)
    queue.push("new", priority=0)
    assert queue.snapshot()["oldest"] == 0.0
    assert queue.status(old).age == 0.0
    assert [claim.payload for claim in queue.claim(2)] == ["old", "new"]


def test_a_full_server_refuses_pushes_and_can_be_emptied(
    server: Server, new_store: Callable[..., RedisStore]
) -> None:
    """Claims, heartbeats and acks go on, however many pushes fail: they are what makes room."""
    store = new_store(url=server.url)
    queue = PriorityQueue(store, "mails")
    queue.push_many(range(3))
    with server.client() as admin:
        admin.config_set("maxmemory", 1)
        for _ in range(5):
            with pytest.raises(StoreUnavailable, match=r"OOM.*maxmemory"):
                queue.push("more")
        for claim in queue.claim(2):
            queue.heartbeat(claim)
            queue.ack(claim, "done")
        (claim,) = queue.claim()
        assert queue.nack(claim, reason="later") == "waiting"
        assert store.up
        admin.config_set("maxmemory", 0)
        queue.push("more")
    assert queue.snapshot()["waiting"] == 2


def test_a_push_that_a_full_server_refuses_takes_no_ack_with_it(
    server: Server, new_store: Callable[..., RedisStore]
) -> None:
    """What is asked at one moment goes together, but a push needs memory and an ack does not."""
    store = new_store(url=server.url)

    async def main() -> None:
        queue = PriorityQueue(store, "mails")
        await queue.apush_many(range(3))
        claims = await queue.aclaim(3)
        with server.client() as admin:
            admin.config_set("maxmemory", 1)
        acks = [queue.aack(claim, "done") for claim in claims]
        pushes = [queue.apush("more") for _ in range(3)]
        pairs = [one for pair in zip(pushes, acks, strict=True) for one in pair]
        ended = await asyncio.gather(*pairs, return_exceptions=True)
        assert [type(one) for one in ended] == [StoreUnavailable, type(None)] * 3
        assert [(await queue.astatus(claim.id)).state for claim in claims] == ["done"] * 3
        await store.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_limits_do_without_a_full_server_and_the_queue_goes_on(
    server: Server, new_store: Callable[..., RedisStore], kind: str
) -> None:
    """Limits must write, so the store is down for them; jobs are claimed and ended all the same."""
    store = new_store(url=server.url)
    queue = PriorityQueue(store, "mails")
    limit = Guard("vendor", RateLimit("1000/s", shared=store, name="vendor"))
    ids = queue.push_many(range(4))
    with server.client() as admin:
        admin.config_set("maxmemory", 1)
        assert limit.call(int) == 0  # it goes on alone
        wait_until(lambda: not store.up)

        async def work() -> None:
            (claim,) = await queue.aclaim()
            await queue.aheartbeat(claim)
            await queue.aack(claim, "done")

        for _ in ids:
            if kind == "async":
                asyncio.run(work())
            else:
                (claim,) = queue.claim()
                queue.heartbeat(claim)
                queue.ack(claim, "done")
        with pytest.raises(StoreUnavailable, match="OOM"):
            queue.push("more")
        assert not store.up
        assert {queue.status(id_).state for id_ in ids} == {"done"}
        admin.config_set("maxmemory", 0)
        wait_until(lambda: store.up)
    queue.push("more")


def test_a_worker_may_start_while_the_server_is_full(
    server: Server, new_store: Callable[..., RedisStore]
) -> None:
    """That its settings are not remembered is no reason to do without the store."""
    id_ = PriorityQueue(new_store(url=server.url), "mails").push("x")
    with server.client() as admin:
        admin.config_set("maxmemory", 1)
        store = new_store(url=server.url)
        settings = store._core.key("queue", "other", "settings")
        assert store._core.call("settings", [settings], ["mine", 1000]) == b"mine"
        assert not admin.exists(settings)
        queue = PriorityQueue(store, "mails")
        (claim,) = queue.claim()
        queue.ack(claim, "done")
        assert queue.status(id_).state == "done"
        assert store.up


def test_dead_letters_come_in_answers_of_a_mebibyte(store: RedisStore) -> None:
    """Hundreds of large ones would be late; who has seen to the first ones asks again."""
    queue = PriorityQueue(store, "mails", max_attempts=1)
    ids = [queue.push("x" * 250_000) for _ in range(6)]
    huge = PriorityQueue(store, "mails", max_attempts=1, max_payload=3_000_000)
    ids.append(huge.push("x" * 2_000_000))
    while claims := queue.claim(10):
        for claim in claims:
            queue.nack(claim)
    seen: list[str] = []
    sizes: list[int] = []
    while letters := queue.dead(500):
        sizes.append(len(letters))
        for letter in letters:
            seen.append(letter.id)
            queue.drop(letter.id)
    assert sorted(seen) == sorted(ids)
    assert sizes == [4, 2, 1]


def test_several_jobs_of_one_push_have_a_bound_in_bytes(make: Make) -> None:
    """It says to push in parts; a single job has a bound of its own."""
    queue = make(max_payload=5_000_000)
    with pytest.raises(ValueError, match="push them in parts"):
        queue.push_many(["x" * 250_000] * 17)
    assert queue.snapshot()["waiting"] == 0
    assert len(queue.push_many(["x" * 250_000] * 16)) == 16
    assert len(queue.push_many(["x" * 4_500_000])) == 1


def test_a_store_that_is_closed_is_unavailable(store: RedisStore) -> None:
    """Every operation says so at once."""
    queue = PriorityQueue(store, "mails")
    id_ = queue.push(1)
    store.close()
    for call in (lambda: queue.push(1), queue.claim, lambda: queue.join(id_, 0.01), queue.snapshot):
        with pytest.raises(StoreUnavailable):
            call()
    assert "mails" in repr(queue)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_who_waits_ends_with_the_store(store: RedisStore, kind: str) -> None:
    """Once it is closed there will be no answer: that is not an outage."""
    queue = PriorityQueue(store, "mails")
    id_ = queue.push(1)
    came: list[type[BaseException]] = []

    def wait() -> None:
        try:
            queue.join(id_) if kind == "sync" else asyncio.run(queue.ajoin(id_))
        except StoreUnavailable as error:
            came.append(type(error))

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: queue._wakeups._wakeups)
    SYSTEM.sleep(0.05)
    store.close()
    thread.join(10.0)
    assert came == [StoreUnavailable]


def test_the_queue_works_in_a_child_process(store: RedisStore) -> None:
    """After a fork parent and child use it beside each other."""
    queue = PriorityQueue(store, "mails")
    queue.push("before")
    assert len(queue.claim(wait=1.0)) == 1
    child = fork()
    if child == 0:
        try:
            (claim,) = queue.claim(wait=10.0)
            queue.ack(claim, os.getpid())
        finally:
            os._exit(0)
    id_ = queue.push("after")
    assert queue.join(id_, 10.0) == child
    os.waitpid(child, 0)


def test_asks_are_plain(store: RedisStore) -> None:
    """What is sent holds no setting that a user could mistake for a key."""
    keys, args = PriorityQueue(store, "mails")._calls.pack([QueueCall("status", ("x",))])
    assert len(keys) == len(PARTS)
    assert args[-3:] == ["status", 1, "x"]
