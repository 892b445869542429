"""`sharing="leased"`: who waits for a grant, in which thread or loop, and what comes too late."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from seawall import Bulkhead, RateLimit, RateLimited
from seawall.clock import SYSTEM
from seawall.errors import BulkheadFull, StoreUnavailable
from seawall.limits import Limit
from seawall.models.rate.batches import NOTHING
from seawall.redis.limits.leased import share as leased_share
from seawall.redis.limits.leased.purses import BatchRequest, BatchWaiter, GrantedBatch, PurseSection
from seawall.redis.limits.leased.share import LeasedLimits
from seawall.redis.store import RedisStore
from tests.redis.limits.test_leased import Pod, _nothing, left, quiet
from tests.redis.support import FrozenClock, Server
from tests.support import let_pass, new_guard


@pytest.mark.usefixtures("frozen")
def test_who_waits_is_served_in_order_and_together(store: RedisStore) -> None:
    """Fifty tasks that find the purse empty wait for one question, not for fifty."""

    async def main() -> None:
        pod = Pod(store, "10000/s", batch=10)
        order: list[int] = []

        async def one(number: int) -> None:
            await pod.guard.acall(_nothing)
            order.append(number)

        await asyncio.gather(*(one(number) for number in range(50)))
        assert sorted(order) == list(range(50))
        assert pod.share.asks <= 3
        assert pod.held[0] <= 10

    asyncio.run(main())


@pytest.mark.usefixtures("frozen")
def test_who_is_cancelled_takes_nothing_with_it(store: RedisStore) -> None:
    """What was granted for it is spent by others, or goes back."""

    async def main() -> None:
        pod = Pod(store, "1000/min", algorithm="sliding_log", batch=4)
        tasks = [asyncio.create_task(pod.call()) for _ in range(30)]
        await let_pass(0)
        for task in tasks[:25]:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(1 for one in ended if one == 1) == 5
        await quiet(pod)
        assert pod.held[0] <= 4
        assert await left(pod) == 1000 - 5 - pod.held[0]
        (holder,) = pod.share.holders[0].values()
        assert not holder.waiters

    asyncio.run(main())


def test_waiting_in_order_until_there_is_more(store: RedisStore) -> None:
    """With `max_wait` a call waits for its turn, in real time; the retry time is honest."""

    async def main() -> None:
        pod = Pod(store, "100/s", batch=5, burst=5, max_wait=1.0, clock=SYSTEM)
        admitted = await asyncio.gather(*(pod.call() for _ in range(25)))
        assert sum(admitted) == 25

    asyncio.run(main())


@pytest.mark.usefixtures("frozen")
def test_threads_lose_nothing(store: RedisStore) -> None:
    """Eight threads spend from one purse: each token once, and the rest is still there."""
    pod = Pod(store, "20000/s", batch=400, clock=SYSTEM)
    counts: list[int] = []

    def work() -> None:
        counts.append(sum(pod.guard.attempt(lambda: None).ok for _ in range(1500)))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) == 12000
    (holder,) = pod.share.holders[0].values()
    for _ in range(1000):
        if holder.grant is None:
            break
        threading.Event().wait(0.005)
    assert pod.spent == 12000


@pytest.mark.usefixtures("frozen")
def test_threads_and_tasks_share_a_purse(store: RedisStore) -> None:
    """Sync and async callers of one process spend from the same, and wait in one line."""
    pod = Pod(store, "20000/s", batch=50, clock=SYSTEM)
    counts: list[int] = []

    def work() -> None:
        counts.append(sum(pod.guard.attempt(lambda: None).ok for _ in range(400)))

    async def main() -> None:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        counts.extend(await asyncio.gather(*(pod.call(times=100) for _ in range(10))))
        for thread in threads:
            await asyncio.to_thread(thread.join)

    asyncio.run(main())
    assert sum(counts) == 1800


@pytest.mark.usefixtures("frozen")
def test_a_blocking_call_in_a_loop_does_not_wait_for_that_loop(store: RedisStore) -> None:
    """A question that the blocked loop carries cannot be answered; another is asked beside it."""

    async def main() -> None:
        pod = Pod(store, "1000/s", batch=2, on_store_failure="closed", clock=SYSTEM)
        task = asyncio.create_task(pod.call())
        await let_pass(0)  # its question is under way in this loop
        for _ in range(4):
            assert pod.guard.attempt(lambda: None).ok
        assert await task == 1

    asyncio.run(main())


def test_a_question_that_is_lost_is_asked_again(store: RedisStore, frozen: FrozenClock) -> None:
    """If its loop has ended nobody waits for it for ever; if it comes after all, it goes back."""
    pod = Pod(store, "100/min", algorithm="sliding_log", batch=8)
    asyncio.run(pod.call())
    (holder,) = pod.share.holders[0].values()
    lost = holder.grant = BatchRequest(pod.share, holder, 0.0, enough=False)
    holder.lost_at = pod.clock.now() + 5.0
    pod.clock.advance(6.0)
    frozen.advance(6_000_000)
    assert asyncio.run(pod.call()) == 1
    before = pod.held
    pod.share.arrived(holder, lost, GrantedBatch(3, frozen.now_us))
    assert pod.held == before
    pod.share.arrived(holder, lost, StoreUnavailable("no"))
    assert pod.held == before
    assert "waiting" in repr(holder)


# A store that is late, a loop that is busy


async def after_a_late_answer(server: Server) -> int:
    """Return what is left when a grant of an hour's window has come too late."""
    async with RedisStore(server.url, timeout=0.05) as store:
        pod = Pod(store, "1000/h", algorithm="fixed_window", batch=100, on_store_failure="closed")
        await store._core.pods.beat()
        server.freeze()
        assert sum(await asyncio.gather(*(pod.call() for _ in range(10)))) == 0
        server.thaw()
        for _ in range(100):
            await let_pass(0.005)
            if pod.share.granted:
                break
        await quiet(pod)
        return await left(pod) + pod.held[0]


def test_what_is_granted_too_late_goes_back(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it any more; ablation: else it is lost for the rest of the hour."""
    assert asyncio.run(after_a_late_answer(server)) == 1000
    with server.client() as client:
        client.flushall()
    monkeypatch.setattr(BatchRequest, "granted", lambda _self, _answer: None)
    assert asyncio.run(after_a_late_answer(server)) < 1000


async def calls_of_a_busy_loop(server: Server, name: str, *limits: Limit) -> int:
    """Return how many of 20 calls are admitted, by a loop that computes when the answer comes."""
    async with RedisStore(server.url, timeout=0.3) as store:
        failing = {"on_store_failure": "closed", "clock": SYSTEM}
        pod = Pod(store, *limits, batch=4, name=name, **failing)
        await pod.call()
        await pod.limit.apeek()
        await pod.share.return_all()
        server.freeze()
        tasks = [asyncio.create_task(pod.call()) for _ in range(20)]
        await let_pass(0.01)
        server.thaw()
        SYSTEM.sleep(0.4)  # the server has all of it for its answer
        return sum(await asyncio.gather(*tasks))


@pytest.mark.parametrize("several", [False, True])
def test_a_busy_loop_is_no_dead_store(
    server: Server, monkeypatch: pytest.MonkeyPatch, *, several: bool
) -> None:
    """What has arrived is read before anybody gives up; ablation: without a second look."""
    limits = [Limit("100000/s", name="a"), Limit("50000/s", name="b")][: 1 + several]
    assert asyncio.run(calls_of_a_busy_loop(server, "one", *limits)) == 20
    monkeypatch.setattr(leased_share.WaitTimer, "_look_again", leased_share.WaitTimer._give_up)
    assert asyncio.run(calls_of_a_busy_loop(server, "two", *limits)) < 20


def test_who_waits_too_long_is_told_in_time(store: RedisStore) -> None:
    """Also where each question has an answer, but one follows another."""

    async def main() -> None:
        pod = Pod(store, "1000/s", batch=10, on_store_failure="closed")
        pod.share.patience = 0.02
        holder = pod.share.holder(0, None)
        assert holder is not None
        holder.grant = BatchRequest(pod.share, holder, 0.0, enough=False)  # one that never ends
        holder.lost_at = float("inf")
        assert await pod.call() == 0
        tasks = [asyncio.create_task(pod.call()) for _ in range(5)]
        await let_pass(0.01)
        tasks.append(asyncio.create_task(pod.call()))
        assert await asyncio.wait_for(asyncio.gather(*tasks), 1.0) == [0] * 6
        assert not holder.waiters

    asyncio.run(main())


def calls_beside_a_blocked_loop(store: RedisStore) -> tuple[int, float]:
    """Return how many of 10 calls of a thread are admitted, and how long the slowest took."""
    pod = Pod(store, "100000/s", batch=4, on_store_failure="closed", clock=SYSTEM)
    assert pod.guard.attempt(lambda: None).ok
    took: list[float] = []
    admitted: list[bool] = []

    def work() -> None:
        for _ in range(10):
            began = SYSTEM.now()
            admitted.append(pod.guard.attempt(lambda: None).ok)
            took.append(SYSTEM.now() - began)

    async def main() -> None:
        (holder,) = pod.share.holders[0].values()
        while holder.grant is None or holder.grant.loop is None:
            call = asyncio.create_task(pod.call())
            await let_pass(0)  # until its question is under way in this loop
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        await call

    asyncio.run(main())
    return sum(admitted), max(took)


def test_a_blocked_loop_holds_up_no_other_thread(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its question is asked again by the background; ablation: else all wait for that loop."""
    with RedisStore(redis_url, prefix="blocked", timeout=2.0) as store:
        admitted, slowest = calls_beside_a_blocked_loop(store)
        assert admitted == 10
        assert slowest < 2.0
    with RedisStore(redis_url, prefix="starved", timeout=0.3) as store:
        monkeypatch.setattr(PurseSection, "_schedule_recheck", lambda *_args: None)
        assert calls_beside_a_blocked_loop(store)[0] == 0


def test_a_thread_does_not_wait_for_a_loops_next_question_either(
    store: RedisStore, frozen: FrozenClock
) -> None:
    """A loop gets an answer that is too little, asks for more, and then computes."""
    pod = Pod(store, "1000/s", cost=3, batch=4, clock=SYSTEM)
    holder = pod.share.holder(0, None)
    assert holder is not None
    store._core.start()
    buying, woken = (
        BatchWaiter(pod.share, "sync", pod.limit._charges((), {}), SYSTEM),
        threading.Event(),
    )
    buying.wake = lambda: woken.set() is None
    holder.waiters[buying] = 3
    buying.holders = [holder]

    async def main() -> None:
        grant = holder.grant = BatchRequest(pod.share, holder, SYSTEM.now(), enough=False)
        holder.lost_at = float("inf")
        pod.share.arrived(holder, grant, GrantedBatch(1, frozen.now_us))
        assert holder.grant is not grant
        assert woken.wait(5)  # in the loop's own thread: nothing goes on there meanwhile

    asyncio.run(main())
    assert buying.claim().wait == 0


@pytest.mark.usefixtures("frozen")
def test_a_loop_that_has_ended_holds_up_no_other(store: RedisStore) -> None:
    """Neither in the same thread: a question that nobody carries is asked again."""
    pod = Pod(store, "1000/s", batch=4, on_store_failure="closed", clock=SYSTEM)
    pod.share.holder(0, None)
    stopped = asyncio.new_event_loop()
    task = stopped.create_task(pod.call())
    (holder,) = pod.share.holders[0].values()
    while holder.grant is None:
        stopped.run_until_complete(let_pass(0))
    assert asyncio.run(pod.call(times=8)) == 8
    assert pod.guard.attempt(lambda: None).ok
    assert stopped.run_until_complete(task) == 1
    stopped.run_until_complete(stopped.shutdown_asyncgens())
    stopped.close()


@pytest.mark.usefixtures("frozen")
def test_the_verdict_is_there_before_anybody_can_look(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who stands in no line reads it without the lock, in whatever thread."""
    step_out, seen = BatchWaiter.leave_queues, []

    def watched(self: BatchWaiter) -> None:
        seen.append(self.verdict)
        step_out(self)

    monkeypatch.setattr(BatchWaiter, "leave_queues", watched)
    assert asyncio.run(Pod(store, "1000/s", batch=4).call()) == 1
    assert seen
    assert None not in seen


# What a gate may spend by itself


@pytest.mark.usefixtures("frozen")
def test_the_door_is_open_only_while_the_store_is_there(store: RedisStore) -> None:
    """And to nobody while somebody waits, or after the numbers have changed."""

    async def main() -> None:
        pod = Pod(store, "1000/min", batch=20)
        door = pod.share.spend_path
        assert door is not None
        assert door.open is NOTHING
        await pod.call()
        await quiet(pod)
        (holder,) = pod.share.holders[0].values()
        assert door.open is holder.purse.lot is not NOTHING
        lot = door.open
        lot.left -= 1
        pod.share.settle((lot, 1), [0])
        store._core.health.failed("it says so itself", certain=True)
        assert door.open is NOTHING
        while not store.up:
            await let_pass(0.01)
        pod.share.store_changed()
        assert door.open is lot
        pod.limit.update(limits="2000/min")
        assert door.open is NOTHING

    asyncio.run(main())
    assert Pod(store, "9/s", "90/min", batch=2, name="two").share.spend_path is None


@pytest.mark.usefixtures("frozen")
def test_the_shortest_way_follows_the_settings(store: RedisStore) -> None:
    """What a call costs, that nothing is counted, that the store is away: all hold at once."""

    async def main() -> None:
        pod = Pod(store, "1000/min", batch=20, on_store_failure="closed")

        async def spent() -> int:
            await pod.share.return_all()
            assert await pod.call() == 1  # so that there is something to spend
            await quiet(pod)
            before = pod.spent
            for _ in range(2):
                await pod.guard.acall(_nothing)
            return pod.spent - before

        assert await spent() == 2
        pod.limit.update(limits=Limit("1000/min", cost=2))
        assert await spent() == 4
        pod.limit.update(mode="off")
        assert await spent() == 0
        pod.limit.update(mode="enforce")
        assert await spent() == 4
        pod.guard.call(str)
        store._core.health.failed("it says so itself", certain=True)
        assert pod.held[0] > 0
        with pytest.raises(RateLimited):
            await pod.guard.acall(_nothing)
        with pytest.raises(RateLimited):
            pod.guard.call(str)

    asyncio.run(main())


@pytest.mark.usefixtures("frozen")
def test_the_shortest_way_loses_nothing(store: RedisStore) -> None:
    """Threads and tasks that take it spend each token once; what was refused further in is back."""
    limit = RateLimit("100000/s", shared=store, name="vendor", sharing="leased", batch=100)
    guard = new_guard(limit, Bulkhead(2), clock=SYSTEM)
    assert limit._sharing is not None
    share = limit._sharing.share
    assert isinstance(share, LeasedLimits)
    admitted: list[int] = []

    def work() -> None:
        for _ in range(500):
            try:
                guard.call(str)
            except BulkheadFull:
                continue
            admitted.append(1)

    async def main() -> None:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(500):
            result = await asyncio.gather(guard.acall(_nothing), return_exceptions=True)
            admitted.extend(1 for one in result if one is None)
        for thread in threads:
            await asyncio.to_thread(thread.join)
        (holder,) = share.holders[0].values()
        while holder.grant is not None:
            await let_pass(0.005)
        assert share.granted - share.returned - holder.purse.held == len(admitted)

    asyncio.run(main())


def test_what_nobody_uses_any_more_is_not_kept(store: RedisStore) -> None:
    """The store's list of what to do at the end does not grow with policies that are gone."""
    for number in range(5):
        RateLimit("9/s", shared=store, name=f"limit {number}", sharing="leased", batch=1)
        gc.collect()
    Pod(store, "9/s", batch=1)
    assert sum(known() is not None for known in store._core._closers) <= 3
    assert len(store._core._closers) <= 6
