"""Workers: what they do with jobs that fail, are refused, lost, or in the way of a shutdown."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from seawall import Breaker, Bulkhead, RateLimit, Retry, Shed, Timeout, current_deadline
from seawall.clock import SYSTEM, VirtualClock
from seawall.errors import Rejected, StoreUnavailable
from seawall.jobs import Claim, LocalQueue, Worker
from seawall.jobs.records import QueueCall
from seawall.models.shedding.codel import QueueShed
from seawall.redis.queue import PriorityQueue
from seawall.redis.store import RedisStore
from seawall.shedding import adaptive_lifo, by_queue, codel
from seawall.testing import no_leaked_permits, run_virtual, virtual_time
from tests.redis.support import Server
from tests.support import let_pass, new_guard


class Flaky(LocalQueue):
    """A queue whose store is away now and then: before it was asked, or after it has answered."""

    away: Callable[[QueueCall], str] = staticmethod(lambda _ask: "no")

    def _answering(self, kind: Any, ask: QueueCall) -> Callable[[], Any]:
        def answer() -> Any:
            word = self.away(ask)
            if word == "before":
                raise StoreUnavailable("away")
            reply = self._perform(ask)
            if word == "after":
                raise StoreUnavailable("away")
            return reply

        return answer


async def until(condition: Callable[[], bool], step: float = 0.1) -> None:
    """Let virtual time pass until it is so."""
    for _ in range(100_000):
        if condition():
            return
        await let_pass(step)
    raise AssertionError("it never came to be so")


async def working(worker: Worker, condition: Callable[[], bool], grace: float = 10.0) -> None:
    """Let `worker` run until something is so, then stop it."""
    task = asyncio.create_task(worker.run())
    try:
        await until(condition)
    finally:
        worker.stop(grace)
        await task


def test_jobs_are_done_in_order_and_their_results_kept() -> None:
    """The handler gets the claim; what it returns is the result; never too many run at once."""
    running = peak = 0

    async def handler(claim: Claim) -> int:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await let_pass(1.0)
        running -= 1
        return int(claim.payload) * 2

    async def main() -> None:
        queue = LocalQueue()
        ids = await queue.apush_many(range(10))
        worker = Worker(queue, handler, concurrency=3)
        assert "0 of 3" in repr(worker)
        await working(worker, lambda: queue.snapshot()["done"] == 10)
        assert [await queue.ajoin(id_) for id_ in ids] == [n * 2 for n in range(10)]
        assert worker.snapshot() == {
            "queue": "queue",
            "running": False,
            "concurrency": 3,
            "at_work": 0,
            "paused": False,
            "abandoned": 0,
            "done": 10,
            "failed": 0,
            "refused": 0,
            "lost": 0,
            "returned": 0,
            "shed": 0,
        }

    run_virtual(main())
    assert peak == 3


def _waits_of_an_overload(shed: QueueShed | None) -> tuple[list[float], LocalQueue, Worker]:
    """Let two workers at once, of 0.1 s a job, be asked for three times as much for 20 s."""
    waits: list[float] = []

    async def handler(claim: Claim) -> None:
        waits.append(claim.waited)
        await let_pass(0.1)

    async def main() -> tuple[list[float], LocalQueue, Worker]:
        queue = LocalQueue(max_dead=1000)
        worker = Worker(queue, handler, concurrency=2, shed=shed)
        task = asyncio.create_task(worker.run())
        for _ in range(1200):
            await queue.apush(None, priority=0)
            await let_pass(1 / 60)
        worker.stop(0.0)
        await task
        return waits, queue, worker

    return run_virtual(main())


def test_controlled_delay_of_a_worker_keeps_the_queue_at_its_target() -> None:
    """Jobs that waited for longer than the target are not begun; nobody loses work that is."""
    waits, queue, worker = _waits_of_an_overload(codel(0.25, interval=1.0, scale=0))
    assert sorted(waits)[len(waits) // 2] <= 2 * 0.25
    assert len(waits) >= 0.9 * 20 * 20
    shed = worker.snapshot()["shed"]
    assert shed == queue.snapshot()["dead"] > 0.5 * 1200
    assert all("in a queue that does not drain" in letter.reason for letter in queue.dead())


def test_without_it_jobs_wait_ever_longer() -> None:
    """The same worker, and nothing shed."""
    waits, queue, _ = _waits_of_an_overload(None)
    assert sorted(waits)[len(waits) // 2] > 5.0
    assert queue.snapshot()["dead"] == 0


def test_by_adaptive_lifo_a_worker_begins_nothing_that_waited_for_too_long() -> None:
    """In a queue that stands; the order stays that of the queue."""
    waits, _, worker = _waits_of_an_overload(adaptive_lifo(0.25, patience=1.0, scale=0))
    assert max(waits[60:]) <= 0.26
    assert worker.snapshot()["shed"] > 0


@pytest.mark.parametrize(
    "shed",
    [codel(0.25, interval=1.0, scale=0), adaptive_lifo(0.25, patience=1.0, scale=0)],
    ids=["codel", "adaptive_lifo"],
)
def test_urgent_jobs_hide_no_queue_that_stands(shed: QueueShed) -> None:
    """It is judged by its longest waiting job, not by those that pass it and never wait."""
    waits: dict[int, list[float]] = {0: [], 9: []}

    async def handler(claim: Claim) -> None:
        waits[claim.priority].append(claim.waited)
        await let_pass(0.1)

    async def main() -> int:
        queue = LocalQueue(max_dead=1000)
        worker = Worker(queue, handler, concurrency=2, shed=shed)
        task = asyncio.create_task(worker.run())
        for n in range(800):
            await queue.apush(None, priority=9 if n % 4 == 0 else 0)
            await let_pass(1 / 40)
        worker.stop(0.0)
        await task
        return int(worker.snapshot()["shed"])

    count = run_virtual(main())
    assert len(waits[9]) >= 199
    assert max(waits[9]) <= 0.2
    assert len(waits[0]) > 0.4 * 20 * 20
    late = sorted(waits[0][60:])
    assert late[len(late) // 2] <= 2 * 0.25
    assert count > 0.4 * 600


def test_a_job_that_was_delayed_or_tried_before_is_not_shed() -> None:
    """It counts how long a job could have been claimed, and its first attempt only."""

    async def main() -> None:
        queue = LocalQueue()
        seen: list[tuple[Any, float]] = []

        async def handler(claim: Claim) -> None:
            seen.append((claim.payload, claim.waited))
            if claim.attempt == 1:
                raise ValueError("not yet")

        await queue.apush("a", delay=5.0)
        always = adaptive_lifo(0.01, patience=0.01, scale=0)
        worker = Worker(queue, handler, backoff=[3.0], shed=always)
        await working(worker, lambda: queue.snapshot()["done"] == 1)
        assert [payload for payload, _ in seen] == ["a", "a"]
        assert seen[0][1] < 1.0
        assert worker.snapshot()["shed"] == 0

    run_virtual(main())


def test_a_local_queue_can_be_measured_by_a_rule() -> None:
    """`by_queue(of=queue)`: pushes are refused while so many jobs wait."""
    with virtual_time():
        queue = LocalQueue()
        pushes = new_guard(Shed(by_queue(2, of=queue)))
        assert [pushes.attempt(queue.push, n).ok for n in range(4)] == [True, True, False, False]
        queue.claim()
        assert pushes.attempt(queue.push, 5).ok


def test_a_plain_handler_runs_in_threads() -> None:
    """A plain function does not block the loop; its errors and results go the same way."""
    seen: list[int] = []

    def handler(claim: Claim) -> str:
        seen.append(threading.get_ident())
        if claim.attempt == 1:
            raise ValueError("not yet")
        return "ok"

    async def main() -> None:
        queue = LocalQueue()
        id_ = queue.push("x")
        with no_leaked_permits():
            worker = Worker(queue, handler, backoff=[2.0])
            await working(worker, lambda: queue.status(id_).state == "done")
        assert queue.status(id_).attempts == 2

    run_virtual(main())
    assert threading.get_ident() not in seen


def test_a_failed_job_is_tried_again_with_backoff_and_dies_in_the_end() -> None:
    """Each error gives the job back after its pause, until its attempts are spent."""
    begun: list[float] = []
    clock = VirtualClock()

    async def handler(_claim: Claim) -> None:
        begun.append(clock.now())
        raise KeyError("boo\n\x1b[31m")

    async def main() -> None:
        queue = LocalQueue(max_attempts=3)
        id_ = queue.push("x")
        await working(Worker(queue, handler, backoff=[5.0, 7.0]), lambda: bool(queue.dead()))
        (letter,) = queue.dead()
        assert (letter.id, letter.attempts, letter.payload) == (id_, 3, "x")
        assert letter.reason.startswith("KeyError: ")
        assert letter.reason.isprintable()

    run_virtual(main(), clock=clock)
    assert begun == pytest.approx([0.0, 5.0, 12.0], abs=1e-3)


def test_chance_is_injected() -> None:
    """The same seed gives the same pauses."""

    def begun(seed: int) -> list[float]:
        clock = VirtualClock()
        seen: list[float] = []

        async def handler(_claim: Claim) -> None:
            seen.append(clock.now())
            raise RuntimeError

        async def main() -> None:
            queue = LocalQueue(max_attempts=4)
            queue.push(1)
            await working(Worker(queue, handler, rng=Random(seed)), lambda: bool(queue.dead()))

        run_virtual(main(), clock=clock)
        return seen

    assert begun(1) == begun(1) != begun(2)


def test_a_refusal_by_the_guard_burns_no_attempt_and_pauses_claiming() -> None:
    """While the breaker is open nothing is claimed; afterwards each job is done once."""
    clock = VirtualClock()
    calls = 0

    async def handler(_claim: Claim) -> None:
        nonlocal calls
        calls += 1
        if calls <= 3:
            raise ConnectionError

    async def main() -> None:
        queue = LocalQueue(max_attempts=2)
        guard = new_guard(Breaker(consecutive=3, break_for=30.0))
        worker = Worker(queue, handler, guard=guard, concurrency=1, backoff=[0.0])
        ids = [queue.push(n) for n in range(4)]
        task = asyncio.create_task(worker.run())
        await until(lambda: worker.snapshot()["refused"] > 0)
        assert worker.snapshot()["paused"]
        before = worker.snapshot()["refused"]
        await let_pass(20.0)
        assert worker.snapshot()["refused"] == before == 1
        await until(lambda: queue.snapshot()["waiting"] + queue.snapshot()["delayed"] == 0)
        worker.stop()
        await task
        assert [queue.status(id_).state for id_ in ids].count("dead") <= 1
        assert queue.snapshot()["done"] >= 3

    run_virtual(main(), clock=clock)


def test_without_that_rule_a_refusal_would_kill_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """If refusals counted as attempts, an outage of the vendor would bury the queue."""

    def dead(*, spared: bool) -> int:
        if not spared:
            monkeypatch.setattr(Worker, "_refused", lambda _self, _run, _error: False)

        async def handler(_claim: Claim) -> None:
            raise AssertionError("never begun")

        async def main() -> int:
            queue = LocalQueue(max_attempts=3)
            breaker = Breaker(break_for=300.0)
            breaker.isolate()
            guard = new_guard(breaker)
            queue.push_many(range(5))
            worker = Worker(queue, handler, guard=guard, backoff=0.1)
            await working(worker, lambda: current() > 200.0)
            return len(queue.dead())

        clock = VirtualClock()
        current = clock.now
        return run_virtual(main(), clock=clock)

    assert dead(spared=True) == 0
    assert dead(spared=False) == 5


def attempts_of_a_poison_job(guard_of: str) -> int:
    """Return how often a handler ran that always fails, in an hour."""
    begun = 0

    async def inner() -> None: ...

    async def main() -> None:
        outside = [Retry(on=ConnectionError), RateLimit("1/s", burst=1)]
        guard = new_guard(*(outside if guard_of == "retries" else [Bulkhead(1)]))

        async def handler(_claim: Claim) -> None:
            nonlocal begun
            begun += 1
            if guard_of == "the handler":
                await guard.acall(inner)
            raise ConnectionError

        queue = LocalQueue(max_attempts=3)
        queue.push("poison")
        worker = Worker(queue, handler, guard=guard, backoff=1.0)
        await working(worker, lambda: bool(queue.dead()) or begun > 20)

    run_virtual(main())
    return begun


@pytest.mark.parametrize("guard_of", ["retries", "the handler"])
def test_a_refusal_after_the_handler_began_is_an_attempt(
    guard_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a retry that met the limit, or by the same guard inside: else it has no end."""
    assert attempts_of_a_poison_job(guard_of) == 3

    def by_type(_self: Worker, _run: Any, error: BaseException) -> bool:
        return isinstance(error, Rejected)

    monkeypatch.setattr(Worker, "_refused", by_type)
    if guard_of == "the handler":
        assert attempts_of_a_poison_job(guard_of) > 20


def test_a_handler_that_its_guard_has_decorated_is_guarded_once() -> None:
    """With room for one, a second guard around it would refuse."""
    guard = new_guard(Bulkhead(1))

    @guard
    async def handler(_claim: Claim) -> str:
        return "done"

    async def main() -> None:
        queue = LocalQueue(max_attempts=1)
        id_ = queue.push(1)
        await working(
            Worker(queue, handler, guard=guard), lambda: queue.status(id_).state == "done"
        )

    run_virtual(main())


def test_who_is_told_to_come_again_at_once_does_not_spin() -> None:
    """A refusal always takes some time, or a worker would ask without end in one instant."""
    asked = 0

    class Refusing:
        def _plan_for(self, function: Any) -> tuple[None, Any]:
            return None, function

        async def acall(self, _function: Any, _claim: Claim) -> None:
            nonlocal asked
            asked += 1
            raise Rejected("not now", retry_after=0.0)

    async def handler(_claim: Claim) -> None: ...

    async def main() -> None:
        queue = LocalQueue()
        queue.push(1)
        guard: Any = Refusing()
        worker = Worker(queue, handler, guard=guard)
        await working(worker, lambda: asked >= 10)

    run_virtual(main())


def test_workers_that_are_refused_together_do_not_ask_again_together() -> None:
    """Refused for 5 s, a job is due a little later than that: not all at once, none too early."""
    again: list[float] = []

    class Refusing:
        def __init__(self) -> None:
            self._refused = False

        def _plan_for(self, function: Any) -> tuple[None, Any]:
            return None, function

        async def acall(self, _function: Any, _claim: Claim) -> None:
            if not self._refused:
                self._refused = True
                raise Rejected("not now", retry_after=5.0)
            again.append(clock.now() - began)

    async def handler(_claim: Claim) -> None: ...

    for seed in range(40):
        clock = VirtualClock()
        began = clock.now()

        async def main(rng: Random) -> None:
            queue = LocalQueue()
            queue.push(1)
            guard: Any = Refusing()
            done = len(again) + 1
            worker = Worker(queue, handler, guard=guard, rng=rng)
            await working(worker, lambda: len(again) >= done)

        run_virtual(main(Random(seed)), clock=clock)
    assert min(again) >= 5.0
    assert max(again) - min(again) >= 0.8


def test_a_rate_limited_worker_keeps_to_the_limit() -> None:
    """The pause is the one that the limit asks for."""

    async def handler(_claim: Claim) -> None:
        return None

    async def main() -> float:
        queue = LocalQueue(max_attempts=1)
        queue.push_many(range(20))
        guard = new_guard(RateLimit("1/s", burst=1))
        await working(Worker(queue, handler, guard=guard), lambda: queue.snapshot()["done"] == 20)
        return clock.now()

    clock = VirtualClock()
    assert 19.0 <= run_virtual(main(), clock=clock) <= 60.0


def test_heartbeats_keep_a_long_job() -> None:
    """A job that takes ten leases is done once."""
    begun = 0

    async def handler(_claim: Claim) -> None:
        nonlocal begun
        begun += 1
        await let_pass(50.0)

    async def main() -> None:
        queue = LocalQueue()
        queue.push(1)
        await working(Worker(queue, handler, lease=5.0), lambda: queue.snapshot()["done"] == 1)
        assert queue.snapshot()["lost"] == 0

    run_virtual(main())
    assert begun == 1


def test_without_heartbeats_a_long_job_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing prolonged the claim, the lease would be over long before the job."""

    async def never(_self: Worker) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(Worker, "_beat", never)

    async def handler(_claim: Claim) -> None:
        await let_pass(50.0)

    async def main() -> None:
        queue = LocalQueue()
        queue.push(1)
        worker = Worker(queue, handler, lease=5.0)
        await working(worker, lambda: queue.snapshot()["lost"] > 0, grace=0.0)

    run_virtual(main())


@pytest.mark.parametrize("how", ["cancelled", "taken over"])
def test_a_lost_job_is_stopped(how: str) -> None:
    """A job that was cancelled, or is another's, is stopped at the next heartbeat; no ack of it."""
    stopped: list[float] = []
    clock = VirtualClock()

    async def handler(_claim: Claim) -> None:
        try:
            await let_pass(100.0)
        except asyncio.CancelledError:
            stopped.append(clock.now())
            raise

    async def main() -> None:
        queue = LocalQueue(max_attempts=1)
        id_ = queue.push(1)
        worker = Worker(queue, handler, lease=9.0)
        task = asyncio.create_task(worker.run())
        await let_pass(1.0)
        if how == "cancelled":
            assert queue.cancel(id_)
        else:
            queue._queue._jobs[id_].fence += 1
        await let_pass(3.0)
        assert stopped == [3.0]
        worker.stop()
        await task
        assert worker.snapshot()["lost"] == 1
        assert queue.status(id_).state == ("cancelled" if how == "cancelled" else "claimed")

    run_virtual(main(), clock=clock)


def test_shutdown_finishes_what_it_can_and_returns_the_rest() -> None:
    """Within the grace jobs are finished; the others are free at once, with all their attempts."""

    async def handler(claim: Claim) -> str:
        await let_pass(float(claim.payload))
        return "done"

    async def main() -> None:
        queue = LocalQueue(max_attempts=1)
        quick, slow, waiting = (queue.push(seconds) for seconds in (2.0, 50.0, 1.0))
        worker = Worker(queue, handler, concurrency=2)
        task = asyncio.create_task(worker.run())
        await let_pass(1.0)
        worker.stop(grace=5.0)
        await task
        assert clock.now() == 6.0
        assert [queue.status(id_).state for id_ in (quick, slow, waiting)] == [
            "done",
            "waiting",
            "waiting",
        ]
        assert queue.status(slow).attempts == 0
        assert queue.claim()[0].id == slow
        await worker.run()  # what is stopped stays so
        assert worker.snapshot()["returned"] == 1

    clock = VirtualClock()
    run_virtual(main(), clock=clock)


def test_a_cancelled_run_returns_what_it_has() -> None:
    """Cancelling `run` is a shutdown without grace, and is not swallowed."""

    async def handler(_claim: Claim) -> None:
        await let_pass(100.0)

    async def main() -> None:
        queue = LocalQueue()
        id_ = queue.push(1)
        task = asyncio.create_task(Worker(queue, handler).run())
        await let_pass(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (queue.status(id_).state, queue.status(id_).attempts) == ("waiting", 0)

    run_virtual(main())


def test_a_handler_that_turns_its_interruption_into_an_error_loses_no_attempt() -> None:
    """A stop interrupts it; whatever it raises then is no failure of the job."""

    async def handler(_claim: Claim) -> None:
        try:
            await let_pass(100.0)
        except asyncio.CancelledError:
            raise RuntimeError("the connection was closed in the middle") from None

    async def main() -> None:
        queue = LocalQueue(max_attempts=1)
        id_ = queue.push(1)
        worker = Worker(queue, handler)
        await working(worker, lambda: worker.snapshot()["at_work"] == 1, grace=0.0)
        assert (queue.status(id_).state, queue.status(id_).attempts) == ("waiting", 0)
        assert worker.snapshot()["returned"] == 1

    run_virtual(main())


def test_a_stop_while_claiming_loses_nothing() -> None:
    """A worker that waits for jobs stops at once, also from another thread."""

    async def handler(_claim: Claim) -> None:
        raise AssertionError("there is no job")

    async def main() -> float:
        worker = Worker(LocalQueue(), handler)
        task = asyncio.create_task(worker.run())
        await let_pass(1.0)
        await asyncio.to_thread(worker.stop)
        await task
        return clock.now()

    clock = VirtualClock()
    assert run_virtual(main(), clock=clock) == 1.0


@pytest.mark.parametrize("at_work", ["done", "slow", "stubborn"])
@pytest.mark.parametrize("how", ["stop", "cancel"])
def test_stopping_takes_no_longer_than_it_may(at_work: str, how: str) -> None:
    """Though the store is away and the lease long: the grace, and two seconds for telling."""
    refusals = 2 if at_work == "stubborn" else 0

    async def handler(_claim: Claim) -> None:
        nonlocal refusals
        while at_work != "done":
            try:
                await let_pass(1e6)
            except asyncio.CancelledError:
                refusals -= 1
                if refusals < 0:
                    raise

    async def main() -> None:
        queue = Flaky()
        queue.push(1)
        worker = Worker(queue, handler, lease=600.0)
        task = asyncio.create_task(worker.run())
        queue.away = lambda ask: "no" if ask.operation in ("claim", "heard") else "before"
        await let_pass(0.5)
        began = clock.now()
        if how == "stop":
            worker.stop(grace=1.0)
        else:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert clock.now() - began <= (1.0 if how == "stop" else 0.0) + 2.0 + 0.2
        assert task.cancelled() == (how == "cancel")
        assert asyncio.all_tasks() == {asyncio.current_task()}  # what is abandoned is nobody's
        assert worker.snapshot()["lost"] == (at_work != "stubborn")

    clock = VirtualClock()
    run_virtual(main(), clock=clock)


def test_a_later_stop_may_shorten_the_wait() -> None:
    """And a longer grace does not lengthen it."""

    async def handler(_claim: Claim) -> None:
        await let_pass(1e6)

    async def main() -> None:
        queue = LocalQueue()
        queue.push(1)
        worker = Worker(queue, handler)
        task = asyncio.create_task(worker.run())
        await let_pass(1.0)
        worker.stop(100.0)
        await let_pass(1.0)
        worker.stop(3.0)
        worker.stop(50.0)
        await task
        assert clock.now() == pytest.approx(5.0)
        assert queue.snapshot()["waiting"] == 1

    clock = VirtualClock()
    run_virtual(main(), clock=clock)


def test_a_plain_handler_that_goes_on_keeps_its_job_until_the_lease_is_over() -> None:
    """Its thread cannot be stopped, so nobody else may begin; an attempt is spent."""
    go_on = threading.Event()

    def handler(_claim: Claim) -> None:
        go_on.wait(20.0)

    async def main() -> None:
        queue = LocalQueue(clock=SYSTEM)
        id_ = queue.push(1)
        worker = Worker(queue, handler, lease=30.0)
        task = asyncio.create_task(worker.run())
        while not worker.snapshot()["at_work"]:
            await let_pass(0.01)
        await let_pass(0.05)
        worker.stop(0.0)
        await task
        status = queue.status(id_)
        assert (status.state, status.attempts) == ("claimed", 1)
        assert (worker.snapshot()["lost"], worker.snapshot()["returned"]) == (1, 0)
        go_on.set()

    asyncio.run(main())


def test_a_plain_handler_that_a_guard_gave_up_on_is_alone_with_its_job() -> None:
    """Its thread goes on, so nobody else may begin the same job before it ends."""
    go_on = threading.Event()
    at_work: list[int] = []

    def handler(claim: Claim) -> None:
        at_work.append(claim.attempt)
        go_on.wait(20.0)

    async def main() -> None:
        queue = LocalQueue(clock=SYSTEM, max_attempts=1000)
        id_ = queue.push(1)
        worker = Worker(queue, handler, guard=new_guard(Timeout(0.01)), backoff=0.0)
        task = asyncio.create_task(worker.run())
        # On a busy machine the time of an attempt may be over before its thread begins.
        while not (at_work and worker.snapshot()["abandoned"]):
            await let_pass(0.01)
        await let_pass(0.1)
        (first,) = at_work
        assert queue.status(id_).state == "claimed"
        go_on.set()
        while not worker.snapshot()["done"]:
            await let_pass(0.01)
        assert at_work[1] > first
        worker.stop(0.0)
        await task

    asyncio.run(main())


def test_one_key_over_its_limit_does_not_stop_the_others() -> None:
    """What is refused waits for its time; claiming pauses only if nobody gets through."""
    done: list[str] = []

    async def handler(claim: Claim) -> None:
        done.append(claim.payload)

    async def main() -> None:
        queue = LocalQueue(clock=clock)
        limit = RateLimit("1/min", key=lambda claim: claim.payload)
        for tenant in ("a", "a", "a", "b", "c"):
            queue.push(tenant)
        worker = Worker(queue, handler, guard=new_guard(limit), concurrency=3)
        task = asyncio.create_task(worker.run())
        while len(done) < 3:
            await let_pass(0.1)
        assert sorted(done) == ["a", "b", "c"]
        assert clock.now() < 30.0
        worker.stop(0.0)
        await task

    clock = VirtualClock()
    run_virtual(main(), clock=clock)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("an error inside the error")


@pytest.mark.parametrize("trouble", ["error", "backoff", "result"])
def test_trouble_in_the_error_path_loses_no_job(
    trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that cannot say what it is, or a backoff that raises: it is told at once."""

    class Odd(dict[str, int]):
        def items(self) -> Any:
            raise KeyError("odd")

    async def handler(_claim: Claim) -> Any:
        if trouble == "result":
            return Odd(a=1)
        raise Unspeakable

    async def main() -> None:
        queue = LocalQueue(max_attempts=2)
        queue.push(1)
        wrong: Any = (lambda _attempt: -1.0) if trouble == "backoff" else 0.1
        worker = Worker(queue, handler, lease=600.0, backoff=wrong)
        await working(worker, lambda: bool(queue.dead()))
        assert clock.now() < 10.0
        (letter,) = queue.dead()
        assert ("Unspeakable" in letter.reason) != (trouble == "result")

    clock = VirtualClock()
    run_virtual(main(), clock=clock)
    assert ("backoff failed" in caplog.text) == (trouble == "backoff")


def test_an_unreadable_payload_takes_no_neighbour_along() -> None:
    """If the queue cannot even be told of it, the others are claimed all the same."""
    queue = Flaky()
    ids = queue.push_many([1, 2, 3])
    queue._queue._jobs[ids[1]].payload = b"?"
    queue.away = lambda ask: "before" if ask.operation == "nack" else "no"
    assert [claim.payload for claim in queue.claim(3)] == [1, 3]


def test_only_what_the_queue_took_is_counted_as_done() -> None:
    """A job that was cancelled while the ack got lost is not; one that was acked is."""

    def counted(*, cancelled: bool) -> dict[str, Any]:
        async def handler(_claim: Claim) -> None: ...

        async def main() -> dict[str, Any]:
            queue = Flaky(max_attempts=1)
            id_ = queue.push(1)
            acks = 0

            def away(ask: QueueCall) -> str:
                nonlocal acks
                if ask.operation != "ack":
                    return "no"
                acks += 1
                if acks == 1 and cancelled:
                    queue._perform(QueueCall("cancel", (id_,)))
                return "after" if acks == 1 else "no"

            queue.away = away
            worker = Worker(queue, handler)
            await working(worker, lambda: not worker.snapshot()["at_work"] and acks > 1)
            return worker.snapshot()

        return run_virtual(main())

    assert counted(cancelled=False)["done"] == 1
    assert (counted(cancelled=True)["done"], counted(cancelled=True)["lost"]) == (0, 1)


def stopped_under_load(
    new_store: Callable[..., RedisStore], monkeypatch: pytest.MonkeyPatch
) -> int:
    """Stop workers in the middle of their claims; return how many jobs they left claimed."""
    monkeypatch.setattr(PriorityQueue, "_undo", lambda *_args: None)  # a worker needs none
    rng = Random(1)

    async def handler(_claim: Claim) -> None: ...

    async def one(name: str) -> int:
        store = new_store()
        queue = PriorityQueue(store, name)
        await queue.apush_many(range(200))
        worker = Worker(queue, handler, lease=600.0)
        task = asyncio.create_task(worker.run())
        await let_pass(rng.uniform(0.001, 0.02))
        worker.stop(grace=10.0)
        await task
        claimed = int((await queue.asnapshot())["claimed"])
        await store.aclose()
        return claimed

    return sum(asyncio.run(one(f"queue-{turn}")) for turn in range(20))


def test_a_graceful_stop_leaves_nothing_claimed(
    new_store: Callable[..., RedisStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that is being asked for is waited for, and what it brings given back."""
    assert stopped_under_load(new_store, monkeypatch) == 0


def test_a_cancelled_claim_would_leave_its_jobs(
    new_store: Callable[..., RedisStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If stopping did not wait for it, whole batches would be nobody's for the lease."""
    wind_up = Worker._wind_up

    async def impatient(
        self: Worker, fetching: asyncio.Task[None], *aside: asyncio.Task[Any]
    ) -> None:
        fetching.cancel()
        await wind_up(self, fetching, *aside)

    monkeypatch.setattr(Worker, "_wind_up", impatient)
    # A stop has to meet a claim on its way: not each round of stops does.
    assert any(stopped_under_load(new_store, monkeypatch) > 0 for _ in range(5))


def test_a_worker_ends_when_its_store_is_closed(store: RedisStore) -> None:
    """That is no outage: there will be no answer any more."""
    begun = threading.Event()

    async def handler(_claim: Claim) -> None:
        begun.set()
        await let_pass(60.0)

    queue = PriorityQueue(store, "mails")
    queue.push(1)
    came: list[BaseException] = []

    def work() -> None:
        try:
            Worker(queue, handler, lease=600.0).run_sync()
        except StoreUnavailable as error:
            came.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(10.0)
    store.close()
    thread.join(10.0)
    assert "was closed" in str(came[0])


def test_while_the_store_is_away_nothing_is_lost() -> None:
    """Claims, heartbeats and acks are tried again; each job is done, and none twice."""
    begun: list[int] = []
    rng = Random(5)

    async def handler(claim: Claim) -> None:
        begun.append(claim.payload)
        await let_pass(2.0)

    async def main() -> None:
        queue = Flaky()
        ids = queue.push_many(range(30))
        queue.away = lambda ask: (
            rng.choice(["before", "after", "no"]) if ask.operation in ("extend", "ack") else "no"
        )
        worker = Worker(queue, handler, lease=30.0, rng=Random(6))
        await working(worker, lambda: queue._queue._totals["done"] == 30)
        queue.away = lambda _ask: "no"
        assert {queue.status(id_).state for id_ in ids} == {"done"}
        assert worker.snapshot()["done"] == 30

    run_virtual(main())
    assert sorted(begun) == list(range(30))


def test_an_ack_is_given_up_when_the_lease_is_over() -> None:
    """A store that stays away costs the job its attempt, not the worker its life."""

    async def handler(_claim: Claim) -> None:
        return None

    async def main() -> None:
        queue = Flaky()
        queue.away = lambda ask: "before" if ask.operation in ("ack", "extend") else "no"
        id_ = queue.push(1)
        worker = Worker(queue, handler, lease=3.0)
        await working(worker, lambda: worker.snapshot()["lost"] == 1, grace=0.0)
        queue.away = lambda _ask: "no"
        assert queue.status(id_).reason == "the lease was over"

    run_virtual(main())


def test_a_result_that_cannot_be_kept_makes_a_dead_letter() -> None:
    """Repeating the work would not make it JSON."""

    async def handler(_claim: Claim) -> object:
        return object()

    async def main() -> None:
        queue = LocalQueue()
        queue.push(1)
        await working(Worker(queue, handler), lambda: bool(queue.dead()))
        assert "cannot be kept" in queue.dead()[0].reason

    run_virtual(main())


def test_a_handler_that_cancels_itself_has_failed() -> None:
    """A CancelledError that nobody asked for is an error like another."""

    async def handler(_claim: Claim) -> None:
        raise asyncio.CancelledError

    async def main() -> None:
        queue = LocalQueue(max_attempts=1)
        queue.push(1)
        await working(Worker(queue, handler), lambda: bool(queue.dead()))

    run_virtual(main())


def test_the_jobs_deadline_is_the_handlers() -> None:
    """What the handler calls sees how much time the job has left."""
    seen: list[float] = []

    async def handler(_claim: Claim) -> None:
        deadline = current_deadline()
        seen.append(-1.0 if deadline is None else deadline.remaining())

    async def main() -> None:
        queue = LocalQueue()
        queue.push(1, ttl=20.0)
        await working(Worker(queue, handler), lambda: queue.snapshot()["done"] == 1)

    run_virtual(main())
    assert seen == [20.0]


def test_worker_says_what_is_wrong() -> None:
    """Bad arguments are told where they are given."""

    async def handler(_claim: Claim) -> None: ...

    def stream(_claim: Claim) -> Any:
        yield 1

    queue: Any = LocalQueue()
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        (("queue", handler), {}),
        ((queue, "handler"), {}),
        ((queue, stream), {}),
        ((queue, handler), {"guard": "vendor"}),
        ((queue, handler), {"rng": Random}),
    ]
    for args, options in wrong:
        with pytest.raises(TypeError, match="pass a"):
            Worker(*args, **options)
    with pytest.raises(ValueError, match="concurrency"):
        Worker(queue, handler, concurrency=0)

    async def twice() -> None:
        worker = Worker(queue, handler)
        task = asyncio.create_task(worker.run())
        await let_pass(0.1)
        with pytest.raises(RuntimeError, match="runs already"):
            await worker.run()
        worker.stop()
        await task

    run_virtual(twice())


def test_a_sync_program_runs_a_worker_on_the_shared_queue(store: RedisStore) -> None:
    """`run_sync` in a thread, `push` and `wait` in another; the same with a real store."""
    queue = PriorityQueue(store, "mails")
    worker = Worker(queue, lambda claim: claim.payload + 1, concurrency=4)
    thread = threading.Thread(target=worker.run_sync)
    thread.start()
    try:
        ids = queue.push_many(range(40))
        assert [queue.join(id_, 10.0) for id_ in ids] == list(range(1, 41))
    finally:
        worker.stop()
        thread.join(10.0)
    assert not thread.is_alive()
    assert worker.snapshot()["done"] == 40


def test_a_worker_survives_the_death_of_its_store(
    server: Server, new_store: Callable[..., RedisStore]
) -> None:
    """When the server dies and comes back empty, the worker goes on by itself."""
    store = new_store(url=server.url, timeout=0.2)
    queue = PriorityQueue(store, "mails")

    async def handler(claim: Claim) -> Any:
        return claim.payload

    async def main() -> None:
        worker = Worker(queue, handler, lease=2.0)
        task = asyncio.create_task(worker.run())
        assert await queue.ajoin(await queue.apush("before"), 5.0) == "before"
        server.kill()
        with pytest.raises(StoreUnavailable):
            await queue.apush("meanwhile")
        server.start()
        async with asyncio.timeout(10.0):
            while True:
                try:
                    id_ = await queue.apush("after")
                    break
                except StoreUnavailable:
                    await let_pass(0.05)
        assert await queue.ajoin(id_, 10.0) == "after"
        worker.stop()
        await task
        await store.aclose()

    asyncio.run(main())
