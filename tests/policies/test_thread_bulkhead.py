from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

import pytest

from seawall import (
    BulkheadFull,
    DeadlineExceeded,
    Guard,
    Retry,
    ThreadBulkhead,
    TimedOut,
    current_deadline,
    deadline,
)
from seawall.testing import ScriptedService, answer, fail, run_virtual, virtual_time

WAIT = 150


class _Blocked:
    """Calls that block their thread until they are told to go on."""

    def __init__(self):
        self.started = threading.Semaphore(0)
        self.go_on = threading.Event()

    def __call__(self, value=None):
        self.started.release()
        assert self.go_on.wait(WAIT)
        return value


@pytest.fixture
def blocked():
    """Return a function that blocks, and let it go at the end."""
    blocked = _Blocked()
    yield blocked
    blocked.go_on.set()


def _in_threads(guard, function, count):
    results = []

    def call(number):
        results.append(guard.attempt(function, number))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads, results


def test_the_function_runs_in_a_thread_of_its_own():
    """It runs elsewhere, and value, error and context variables come through."""
    variable = ContextVar("variable", default="unset")
    guard = Guard("vendor", ThreadBulkhead(1))
    variable.set("mine")
    assert guard.call(threading.get_ident) != threading.get_ident()
    assert guard.call(variable.get) == "mine"
    assert guard.call(lambda: threading.current_thread().daemon)
    error = ConnectionError()
    with pytest.raises(ConnectionError) as raised:
        guard.call(ScriptedService(fail(error)).call)
    assert raised.value is error


def test_beyond_workers_and_queue_calls_are_refused(blocked):
    """`workers` run, `max_queue` wait, the next is refused at once."""
    guard = Guard("vendor", ThreadBulkhead(2, max_queue=1))
    threads, results = _in_threads(guard, blocked, 2)
    for _ in range(2):
        blocked.started.acquire(timeout=WAIT)
    pool = guard.policies[0].pool
    queued = threading.Thread(target=lambda: results.append(guard.attempt(blocked, 2)))
    queued.start()
    while not pool.queued:
        assert queued.is_alive()
    refused = guard.attempt(blocked)
    assert isinstance(refused.error, BulkheadFull)
    assert (refused.attempts, refused.reason) == (0, "bulkhead_full")
    assert (refused.error.guard, refused.error.policy) == ("vendor", "thread_bulkhead")
    snapshot = guard.snapshot()
    assert snapshot["rejected"] == 1
    assert snapshot["policies"][0] == {
        "policy": "thread_bulkhead",
        "workers": 2,
        "in_flight": 2,
        "waiting": 1,
        "abandoned": 0,
        "rejected": 1,
    }
    blocked.go_on.set()
    for thread in [*threads, queued]:
        thread.join(WAIT)
    assert sorted(result.value for result in results) == [0, 1, 2]
    assert (pool.in_use, pool.queued) == (0, 0)


def test_threads_and_tasks_share_the_workers(blocked):
    """A thread that holds the only worker leaves none for a task."""
    guard = Guard("vendor", ThreadBulkhead(1, max_queue=0))
    threads, _ = _in_threads(guard, blocked, 1)
    blocked.started.acquire(timeout=WAIT)
    assert run_virtual(guard.aattempt(blocked)).reason == "bulkhead_full"
    blocked.go_on.set()
    threads[0].join(WAIT)
    assert run_virtual(guard.acall(blocked, "free")) == "free"


def test_an_abandoned_call_keeps_its_worker_until_it_ends(blocked):
    """A cancelled task gives up on its thread: it is counted, and holds its worker."""
    guard = Guard("vendor", ThreadBulkhead(1, max_queue=0))
    pool = guard.policies[0].pool

    async def main():
        task = asyncio.ensure_future(guard.acall(blocked))
        await asyncio.get_running_loop().run_in_executor(None, blocked.started.acquire)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled(), (await guard.aattempt(blocked)).reason

    assert asyncio.run(main()) == (True, "bulkhead_full")
    assert (pool.abandoned, pool.in_use) == (1, 1)
    assert guard.snapshot()["abandoned"] == 1
    blocked.go_on.set()
    while pool.abandoned or pool.in_use or guard.snapshot()["abandoned"]:
        assert threading.active_count() > 1
    assert guard.call(lambda: "free") == "free"


def test_a_queued_call_that_nobody_waits_for_never_runs(blocked):
    """A cancelled call in the queue is withdrawn, and frees its place at once."""
    guard = Guard("vendor", ThreadBulkhead(1, max_queue=1))
    pool = guard.policies[0].pool
    ran = []
    threads, _ = _in_threads(guard, blocked, 1)
    blocked.started.acquire(timeout=WAIT)

    async def main():
        task = asyncio.ensure_future(guard.acall(ran.append, 1))
        while not pool.queued:
            await ScriptedService(answer()).acall()
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())
    assert pool.queued == 0
    blocked.go_on.set()
    threads[0].join(WAIT)
    guard.call(ran.append, 2)
    assert ran == [2]


def test_the_deadline_goes_along_and_ends_the_wait(blocked):
    """What runs in the thread sees the deadline; when it passes, nobody waits any more."""
    with virtual_time():
        guard = Guard("vendor", ThreadBulkhead(1, max_queue=1))
        with deadline(5.0):
            assert guard.call(lambda: current_deadline().remaining()) == 5.0
            with pytest.raises(TimedOut, match="in a thread"):
                guard.call(blocked)
        with deadline(5.0), pytest.raises(DeadlineExceeded, match="waiting for a thread") as late:
            guard.call(blocked)
    assert (late.value.guard, late.value.policy) == ("vendor", "thread_bulkhead")
    assert guard.snapshot()["rejected"] == 1


def test_retries_use_the_same_workers():
    """Attempts follow one another through one worker."""
    guard = Guard("vendor", Retry(on=ConnectionError, backoff=0.0), ThreadBulkhead(1, max_queue=0))
    result = guard.attempt(ScriptedService(fail(ConnectionError, times=2), answer("hello")).call)
    assert (result.value, result.attempts) == ("hello", 3)


def test_an_exit_in_the_thread_reaches_the_caller():
    """SystemExit in the function is the caller's, and the worker lives on."""
    guard = Guard("vendor", ThreadBulkhead(1, max_queue=0))

    def leave():
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        guard.call(leave)
    assert guard.call(lambda: 1) == 1


def test_the_repr_shows_the_sizes():
    """The queue is as long as there are workers, unless told otherwise."""
    assert repr(ThreadBulkhead(4)) == "ThreadBulkhead(4, max_queue=4)"
    assert repr(ThreadBulkhead(4, max_queue=0)) == "ThreadBulkhead(4, max_queue=0)"
