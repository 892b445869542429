"""Claims whose answers get lost: by a store that pauses, and by callers that are gone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seawall import subscribe
from seawall.clock import SYSTEM, VirtualClock
from seawall.errors import StoreUnavailable
from seawall.events import JobDied
from seawall.jobs import Claim, Worker
from seawall.jobs.records import QueueCall
from seawall.redis import queue as releases
from seawall.redis.queue import PriorityQueue
from seawall.redis.store import RedisStore
from tests.redis.queue.test_queue import fork, wait_until
from tests.redis.support import FrozenClock, Server, mutate
from tests.support import let_pass

JOBS = 30
SECOND = 1_000_000


async def work_through_a_pause(
    server: Server, new_store: Callable[..., RedisStore], *, pause: float, lease: float, last: float
) -> tuple[set[int], dict[str, Any]]:
    """Let the server stand still while a worker claims; return what was begun, and the counts."""
    begun: set[int] = set()

    async def handler(claim: Claim) -> None:
        begun.add(claim.payload)

    store, other = new_store(url=server.url, timeout=0.05), new_store(url=server.url)
    queue = PriorityQueue(store, "mails", max_attempts=1)
    look = PriorityQueue(other, "mails", max_attempts=1)
    worker = Worker(queue, handler, lease=lease)
    running = asyncio.create_task(worker.run())
    await let_pass(0.2)
    await look.apush_many(range(JOBS), delay=0.2)
    server.freeze()
    try:
        await let_pass(pause)
    finally:
        server.thaw()
    until = SYSTEM.now() + last
    counts = await look.asnapshot()
    while SYSTEM.now() < until and counts["done"] + counts["dead"] < JOBS:
        await let_pass(0.05)
        counts = await look.asnapshot()
    worker.stop(0.0)
    await running
    await store.aclose()
    await other.aclose()
    return begun, counts


@pytest.mark.parametrize("pause", [0.5, 1.3])
def test_what_was_claimed_for_nobody_is_free_when_the_store_is_back(
    server: Server, new_store: Callable[..., RedisStore], pause: float
) -> None:
    """Also if the pause was so long that the connections were given up; no attempt is spent."""
    trial = work_through_a_pause(server, new_store, pause=pause, lease=600.0, last=10.0)
    begun, counts = asyncio.run(trial)
    assert begun == set(range(JOBS))
    assert (counts["done"], counts["dead"], counts["claimed"]) == (JOBS, 0, 0)


def test_if_nobody_said_so_it_would_be_claimed_for_the_whole_lease(
    server: Server, new_store: Callable[..., RedisStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a claim that was done when who had asked was gone."""
    monkeypatch.setattr(PriorityQueue, "_undo", lambda *_args: None)
    trial = work_through_a_pause(server, new_store, pause=0.5, lease=600.0, last=0.8)
    _begun, counts = asyncio.run(trial)
    assert counts["claimed"] > 0


@pytest.mark.parametrize("rule", ["is no attempt", "is one"])
def test_a_lease_that_nobody_heard_of_buries_no_job(
    server: Server,
    new_store: Callable[..., RedisStore],
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
) -> None:
    """Whose process died before it could say anything, say; if it did, jobs would die unbegun."""
    monkeypatch.setattr(PriorityQueue, "_undo", lambda *_args: None)
    if rule == "is one":
        mutate(monkeypatch, "queue", "local counted = job.heard or", "local counted = true or")
    trial = work_through_a_pause(server, new_store, pause=0.5, lease=1.0, last=6.0)
    begun, counts = asyncio.run(trial)
    if rule == "is one":
        assert counts["dead"] > 0
        assert len(begun) < JOBS
    else:
        assert begun == set(range(JOBS))
        assert counts["dead"] == 0


def test_a_release_is_tried_until_the_store_answers(
    server: Server, new_store: Callable[..., RedisStore]
) -> None:
    """While the store is away it is kept."""
    store = new_store(url=server.url, timeout=0.2)
    queue = PriorityQueue(store, "mails")
    queue.push(1)
    server.freeze()
    try:
        with pytest.raises(StoreUnavailable):
            queue.claim()
        SYSTEM.sleep(releases.RELEASE_EVERY + 0.2)
        assert len(queue._releases) == 1
    finally:
        server.thaw()
    wait_until(lambda: not len(queue._releases))
    assert queue.snapshot()["waiting"] == 1


def test_who_died_is_told_by_a_release_too(store: RedisStore) -> None:
    """Whatever a call settles, its answer is read."""
    died: list[JobDied] = []
    stop = subscribe(died.append, JobDied)
    try:
        queue = PriorityQueue(store, "mails", max_attempts=1)
        id_ = queue.push(1)
        (claim,) = queue.claim()
        queue.heartbeat(claim, lease=0.001)
        SYSTEM.sleep(0.01)
        queue._undo(QueueCall("release", ("of nobody", SECOND)), SECOND)
        wait_until(lambda: died)
    finally:
        stop()
    assert [event.job for event in died] == [id_]


@pytest.mark.parametrize("told", [True, False])
def test_a_claim_that_was_heard_of_is_an_attempt(
    store: RedisStore, frozen: FrozenClock, monkeypatch: pytest.MonkeyPatch, *, told: bool
) -> None:
    """Though its holder never says anything else; if it were not told, none would count."""
    if not told:
        ask_for_real = PriorityQueue._answering

        def deaf(self: PriorityQueue, kind: Any, ask: QueueCall) -> Any:
            return (lambda: None) if ask.operation == "heard" else ask_for_real(self, kind, ask)

        monkeypatch.setattr(PriorityQueue, "_answering", deaf)
    queue = PriorityQueue(store, "mails", max_attempts=1)
    id_ = queue.push(1)
    queue.claim(lease=5.0)
    queue.snapshot()  # goes after what was told
    frozen.advance(5 * SECOND)
    assert queue.status(id_).state == ("dead" if told else "waiting")


@pytest.mark.parametrize("how", ["cancelled", "the store is away"])
def test_who_cannot_say_that_it_has_heard_gets_no_claim(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The job is free at once, has lost no attempt, and nobody has begun it."""
    ask_for_real, asked = PriorityQueue._answering, asyncio.Event()

    class Never:
        """A wait without an end."""

        until = None

        def publish(self, _wake: Callable[[], bool]) -> None:
            asked.set()

        def claim(self) -> None: ...

        def abandon(self) -> None: ...

    def answering(self: PriorityQueue, kind: Any, ask: QueueCall) -> Any:
        if ask.operation != "heard":
            return ask_for_real(self, kind, ask)
        if how == "cancelled":
            return Never()
        raise StoreUnavailable("away")

    async def main() -> None:
        queue = PriorityQueue(store, "mails")
        id_ = await queue.apush(1)
        monkeypatch.setattr(PriorityQueue, "_answering", answering)
        claiming = asyncio.create_task(queue.aclaim(lease=600.0))
        if how == "cancelled":
            await asked.wait()
            claiming.cancel()
        with pytest.raises((asyncio.CancelledError, StoreUnavailable)):
            await claiming
        monkeypatch.setattr(PriorityQueue, "_answering", ask_for_real)
        while (seen := await queue.astatus(id_)).state != "waiting":
            await let_pass(0.01)
        assert seen.attempts == 0

    asyncio.run(main())


@pytest.mark.parametrize("waits", [True, False])
def test_a_handler_that_kills_its_process_is_begun_as_often_as_it_may_be(
    store: RedisStore,
    new_store: Callable[..., RedisStore],
    tmp_path: Path,
    *,
    waits: bool,
) -> None:
    """No handler begins before the store knows; if none waited for that, it would be more often."""
    begun, most = tmp_path / "begun", 2
    queue = PriorityQueue(store, "mails", max_attempts=most)
    id_ = queue.push(1)

    async def handler(_claim: Claim) -> None:
        with begun.open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)

    def live() -> None:
        ask_for_real = PriorityQueue._answering

        def without(self: PriorityQueue, kind: Any, ask: QueueCall) -> Any:
            return (lambda: None) if ask.operation == "heard" else ask_for_real(self, kind, ask)

        if not waits:  # what was told and not waited for dies with the process
            PriorityQueue._answering = without  # type: ignore[method-assign]
        own = PriorityQueue(new_store(), "mails", max_attempts=most)
        Worker(own, handler, lease=0.2).run_sync()

    for _ in range(most + 3):
        wait_until(lambda: queue.status(id_).state != "claimed")
        if queue.status(id_).state == "dead":
            break
        child = fork()
        if child == 0:
            try:
                live()
            finally:
                os._exit(1)
        os.waitpid(child, 0)
    wait_until(lambda: queue.status(id_).state != "claimed")
    assert (len(begun.read_text()) == most) is waits
    assert (queue.status(id_).state == "dead") is waits


def test_what_a_closed_store_owes_is_said_before(
    store: RedisStore, new_store: Callable[..., RedisStore]
) -> None:
    """A caller that is cancelled just before the end leaves no job claimed."""

    async def main() -> None:
        queue = PriorityQueue(store, "mails")
        await queue.apush_many(range(10))
        task = asyncio.create_task(queue.aclaim(10, lease=600.0))
        await let_pass(0)
        await let_pass(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await store.aclose()

    asyncio.run(main())
    assert PriorityQueue(new_store(), "mails").snapshot()["claimed"] == 0


def test_releases_are_bounded_in_number_and_time(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first are kept, since the later were never sent; and none for ever."""
    monkeypatch.setattr(releases, "MOST_RELEASES", 3)
    made = releases.ClaimReleases()
    for number in range(5):
        ask = QueueCall("release", (str(number), SECOND))
        made.add(PriorityQueue(store, "mails")._calls, ask, SECOND)
    assert [ask.args[0] for ask in made._waiting] == ["0", "1", "2"]
    monkeypatch.setattr(releases, "SYSTEM", VirtualClock(1e12))
    asyncio.run(made.flush())
    assert len(made) == 0


def test_a_child_leaves_to_its_parent_what_is_the_parents(store: RedisStore) -> None:
    """Who was forked has asked for nothing."""
    made = releases.releases_of(store._core)
    made._waiting[QueueCall("release", ("t", 1))] = (PriorityQueue(store, "m")._calls, 1e12)
    child = fork()
    if child == 0:
        os._exit(len(made))
    assert os.waitpid(child, 0)[1] == 0
    made._waiting.clear()


def test_queues_of_one_store_share_what_is_kept(new_store: Callable[..., RedisStore]) -> None:
    """And it keeps no store alive."""
    one, two = new_store(), new_store()
    assert PriorityQueue(one, "a")._releases is PriorityQueue(one, "b")._releases
    assert PriorityQueue(two, "a")._releases is not PriorityQueue(one, "a")._releases


def test_a_claim_comes_after_its_own_release(store: RedisStore) -> None:
    """Then it grants nothing, or it would be nobody's."""
    queue = PriorityQueue(store, "mails")
    queue.push(1)
    for ask in (QueueCall("release", ("t", 9 * SECOND)), QueueCall("claim", (1, 9 * SECOND, "t"))):
        reply = store._core.call("queue", *queue._calls.pack([ask]))
        (answer,) = queue._calls.unpack(reply, [ask])
    assert answer == ([], -1)
    assert queue.snapshot()["waiting"] == 1
