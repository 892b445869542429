from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seawall import (
    Bulkhead,
    BulkheadFull,
    DeadlineExceeded,
    Guard,
    Rejected,
    TimedOut,
    current_deadline,
    deadline,
    subscribe,
)
from seawall.events import CallRejected, ThreadAbandoned
from seawall.resources import CpuPool, IoPool
from seawall.resources.executors import executors
from seawall.resources.executors.thread_calls import ClosableThreads, ExecutorCall
from seawall.testing import run_virtual, virtual_time
from tests.support import falsified, let_pass, quarters
from tests.support_processes import in_thread, until

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


async def _until_async(condition):
    while not condition():
        await asyncio.get_running_loop().run_in_executor(None, lambda: None)


# --- How large ---


def test_an_io_pool_is_sized_by_littles_law():
    """Throughput times latency, with headroom; or as many as one says."""
    assert IoPool("a", throughput=200, latency=0.05).workers == 15
    assert IoPool("b", workers=3).workers == 3
    assert repr(IoPool("c", workers=3)) == "IoPool('c', workers=3, max_queue=3)"
    assert repr(IoPool("c", workers=3, max_queue=0)) == "IoPool('c', workers=3, max_queue=0)"


@pytest.mark.parametrize(("usable", "workers"), [(3.0, 3), (1.5, 2), (0.1, 1)])
def test_a_cpu_pool_has_as_many_workers_as_cores_may_be_used(
    usable: float, workers: int, monkeypatch: pytest.MonkeyPatch
):
    """Affinity and quota count; a part of a core is one more worker."""
    monkeypatch.setattr(executors, "usable_cores", lambda: usable)
    made = repr(CpuPool("cpu"))
    assert made == f"CpuPool('cpu', workers={workers}, kind='process', max_queue={workers})"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IoPool("a"), "write throughput= "),
        (lambda: IoPool("a", throughput=2.0), "write throughput= "),
        (lambda: IoPool("a", workers=2, latency=1.0), "write throughput= "),
        (lambda: IoPool("a", workers=2, throughput=1.0, latency=1.0), "write throughput= "),
        (lambda: IoPool("a", workers=0), "workers=0: write 1 or more"),
        (lambda: IoPool("a", throughput=-1.0, latency=1.0), "throughput=-1.0"),
        (lambda: IoPool("", workers=1), "name='': write a name, such as"),
        (lambda: CpuPool(3), "name=3: write a name, such as"),  # type: ignore[arg-type]
        (lambda: IoPool("a", throughput=1e9, latency=100), "150000000000 workers are too many"),
        (lambda: IoPool("a", workers=10_001), "write at most workers=10000"),
        (lambda: CpuPool("a", workers=10**9), "write at most workers=10000"),
        (lambda: IoPool("a", workers=1, max_queue=-1), "max_queue=-1: write 0 or more"),
        (lambda: IoPool("a", workers=1, clock=3), "clock=3: pass a clock"),  # type: ignore[arg-type]
        (lambda: CpuPool("a", kind="fibre"), "kind='fibre': write one of 'process', 'thread'"),  # type: ignore[arg-type]
        (lambda: CpuPool("a", start="fork"), "start='fork': write one of 'spawn', 'forkserver'"),  # type: ignore[arg-type]
        (lambda: CpuPool("a", context=["x"]), "context='x': list context variables"),  # type: ignore[list-item]
        (lambda: CpuPool("a", context=[ContextVar("x")]), "make it a global of a module"),
        (lambda: IoPool("a", workers=1).close(drain=-1), "drain=-1: write finite seconds"),
        (lambda: IoPool("a", workers=1).run(_until_async, 1), "pass a plain function"),
        (lambda: IoPool("a", workers=1).run("f"), "pass a plain function"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments_are_refused_with_advice(make, message):
    """A mistake raises at once, and says what to write instead."""
    with pytest.raises((TypeError, ValueError)) as raised:
        make()
    assert message in str(raised.value)


# --- In threads ---


@pytest.mark.parametrize(
    "make", [lambda: IoPool("io", workers=1), lambda: CpuPool("cpu", workers=1, kind="thread")]
)
def test_a_function_runs_in_a_thread_with_its_callers_context(make):
    """Value, error, context variables and deadline come through, for threads and tasks."""
    variable = ContextVar("variable", default="unset")
    error = ConnectionError()

    def fail():
        raise error

    async def left():
        with deadline(5.0):
            return await pool.arun(lambda: current_deadline().remaining())

    with virtual_time() as clock, make() as pool:
        variable.set("mine")
        assert pool.run(threading.get_ident) != threading.get_ident()
        assert pool.run(lambda: threading.current_thread().name) == f"seawall-{pool.name}-1"
        assert pool.run(variable.get) == "mine"
        assert pool.run(dict, a=1) == {"a": 1}
        assert run_virtual(left(), clock=clock) == 5.0
        with pytest.raises(ConnectionError) as raised:
            pool.run(fail)
        assert raised.value is error
        assert run_virtual(pool.arun(variable.get)) == "mine"
        with pytest.raises(ConnectionError):
            run_virtual(pool.arun(fail))
        snapshot = pool.snapshot()
    assert (snapshot["succeeded"], snapshot["failed"]) == (6, 2)
    assert snapshot["p50"] == pytest.approx(0.0, abs=1e-5)


def test_beyond_workers_and_queue_calls_are_refused_at_once(blocked):
    """`workers` run, `max_queue` wait, the next is refused, and counted."""
    pool = IoPool("io", workers=2, max_queue=1)
    events: list[CallRejected] = []
    unsubscribe = subscribe(events.append, CallRejected)
    calls = [in_thread(pool.run, blocked, number) for number in range(3)]
    for _ in range(2):
        assert blocked.started.acquire(timeout=WAIT)
    until(lambda: pool.snapshot()["waiting"] == 1)
    with pytest.raises(BulkheadFull, match="'io': all 2 workers are busy") as refused:
        pool.run(blocked)
    with pytest.raises(BulkheadFull):
        run_virtual(pool.arun(blocked))
    unsubscribe()
    assert (refused.value.guard, refused.value.policy) == ("io", "io_pool")
    assert [(event.guard, event.policy) for event in events] == [("io", "io_pool")] * 2
    snapshot = pool.snapshot()
    assert snapshot == {
        "name": "io",
        "workers": 2,
        "max_queue": 1,
        "in_flight": 2,
        "waiting": 1,
        "abandoned": 0,
        "replaced": 0,
        "rejected": 2,
        "succeeded": 0,
        "failed": 0,
        "cancelled": 0,
        "timed_out": 0,
        "p50": None,
        "p95": None,
        "p99": None,
    }
    blocked.go_on.set()
    for thread, _ in calls:
        thread.join(WAIT)
    assert sorted(result for _, (result,) in calls) == [0, 1, 2]
    assert pool.close()


def test_a_name_that_is_none_is_a_type_error():
    """As with a guard."""
    for make in (lambda: IoPool("", workers=1), lambda: CpuPool("")):
        with pytest.raises(TypeError, match="write a name"):
            make()


@pytest.mark.parametrize(
    "make", [lambda: IoPool("io", workers=1), lambda: CpuPool("cpu", workers=1, kind="thread")]
)
def test_a_function_that_returns_a_coroutine_is_refused(make):
    """Nobody would await it: it is closed, and the caller told."""
    with make() as pool:
        with pytest.raises(TypeError, match=r"<lambda>\(1\) returned a coroutine"):
            pool.run(lambda value: _until_async(value), 1)  # noqa: PLW0108 - no `async def` itself
        assert pool.snapshot()["failed"] == 1


def test_a_nested_call_of_a_full_pool_is_refused():
    """A call that would wait for its own thread is refused instead of waiting for ever."""
    with IoPool("io", workers=1) as pool, pytest.raises(BulkheadFull):
        pool.run(pool.run, print)


def test_a_call_that_is_too_late_in_a_thread_is_abandoned_and_counted(blocked):
    """TimedOut for the caller; the thread is taken, and counted, until it really ends."""
    events: list[ThreadAbandoned] = []
    unsubscribe = subscribe(events.append, ThreadAbandoned)

    async def late(ready):
        async def call():
            with deadline(5.0):
                await pool.arun(blocked)

        task = asyncio.create_task(call())
        await _until_async(ready)
        asyncio.get_running_loop().clock.advance(5.0)
        await asyncio.wait([task])
        return task.exception()

    with virtual_time() as clock:
        pool = IoPool("io", workers=1, max_queue=1)
    error = run_virtual(late(lambda: blocked.started.acquire(blocking=False)), clock=clock)
    assert isinstance(error, TimedOut)
    assert (error.guard, error.seconds) == ("io", 5.0)
    assert (pool.snapshot()["abandoned"], pool.snapshot()["in_flight"]) == (1, 1)
    error = run_virtual(late(lambda: pool.snapshot()["waiting"]), clock=clock)
    assert isinstance(error, DeadlineExceeded)
    assert "waiting for a worker" in str(error)
    unsubscribe()
    assert [event.guard for event in events] == ["io"]
    snapshot = pool.snapshot()
    assert (snapshot["timed_out"], snapshot["failed"], snapshot["rejected"]) == (1, 1, 1)
    blocked.go_on.set()
    until(lambda: pool.pool.idle)
    assert pool.close()
    until(lambda: not pool.snapshot()["abandoned"])
    assert pool.snapshot()["succeeded"] == 0


def test_a_guards_bulkhead_is_held_until_an_abandoned_thread_ends(blocked):
    """What is outside of the executor knows that the work runs on."""
    pool = IoPool("io", workers=1)
    bulkhead = Bulkhead(1)
    guard = Guard("vendor", bulkhead)

    async def main():
        task = asyncio.create_task(guard.acall(pool.arun, blocked))
        await asyncio.get_running_loop().run_in_executor(None, blocked.started.acquire)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(main())
    assert bulkhead.in_flight == 1
    blocked.go_on.set()
    assert pool.close()
    until(lambda: bulkhead.in_flight == 0)


# --- Expired work never starts ---


def _check_late_start(case: tuple[float, float]) -> None:
    """Call under a deadline after some of it has passed; it runs only if some is left."""
    seconds, passed = case
    ran: list[int] = []
    with virtual_time() as clock:
        pool = IoPool("io", workers=1)
        with deadline(seconds):
            clock.advance(passed)
            try:
                pool.run(ran.append, 1)
            except DeadlineExceeded:
                assert passed >= seconds
                assert not ran
            except TimedOut:  # a busy machine: virtual time does not wait long for threads
                assert passed < seconds
            else:
                assert passed < seconds
        pool.close()


LATE = st.tuples(quarters(8), quarters(8))


@given(LATE)
@settings(max_examples=30)
def test_expired_work_never_starts(case):
    """Whatever is left of the deadline: with nothing left, the function is not called."""
    _check_late_start(case)


def test_without_the_look_at_the_deadline_expired_work_would_start(
    monkeypatch: pytest.MonkeyPatch,
):
    """Do not look at the deadline, and the property is falsified."""
    monkeypatch.setattr(ExecutorCall, "_check_deadline", lambda _: None)
    assert falsified(_check_late_start, LATE)


def test_work_that_expired_in_the_queue_does_not_start(blocked):
    """A thread that becomes free too late looks at the deadline too, before its caller does."""
    ran: list[int] = []
    with virtual_time() as clock:
        pool = IoPool("io", workers=1)
        first, _ = in_thread(pool.run, blocked)
        assert blocked.started.acquire(timeout=WAIT)

        async def main():
            with deadline(5.0):
                task = asyncio.create_task(pool.arun(ran.append, 1))
                await _until_async(lambda: pool.snapshot()["waiting"])
                clock.advance(6.0)  # and the loop has not come round yet
                blocked.go_on.set()
                await asyncio.wait([task])
            return task.exception()

        error = run_virtual(main(), clock=clock)
    assert isinstance(error, DeadlineExceeded)
    assert not ran
    first.join(WAIT)
    assert pool.close()
    assert pool.snapshot()["rejected"] == 1


# --- Nothing is lost when callers give up ---


def _check_cancelled(case: tuple[int, int, list[bool]], drain: float = WAIT) -> None:
    """Cancel some of many calls; all others get their own values, and nothing stays taken."""
    workers, queue, cancelled = case
    blocked = _Blocked()
    pool = IoPool("io", workers=workers, max_queue=queue)

    async def main():
        tasks = [asyncio.create_task(pool.arun(blocked, n)) for n in range(len(cancelled))]
        for _ in range(min(workers, len(tasks))):
            await asyncio.get_running_loop().run_in_executor(None, blocked.started.acquire)
        for task, cancel in zip(tasks, cancelled, strict=True):
            if cancel:
                task.cancel()
        for _ in range(3):
            await asyncio.get_running_loop().run_in_executor(None, lambda: None)
        blocked.go_on.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(main())
    for number, (result, cancel) in enumerate(zip(results, cancelled, strict=True)):
        if number >= workers + queue:
            assert isinstance(result, BulkheadFull)
        elif not cancel:
            assert result == number
        else:
            assert isinstance(result, asyncio.CancelledError)
    assert pool.close(drain), "something is still taken"
    snapshot = pool.snapshot()
    assert snapshot["abandoned"] == 0
    taken = list(zip(results, cancelled, strict=True))[: workers + queue]
    assert snapshot["cancelled"] == sum(cancel for _, cancel in taken)
    counts = ("succeeded", "failed", "rejected", "cancelled")
    assert sum(snapshot[name] for name in counts) == len(cancelled)


CANCELLED = st.tuples(
    st.integers(1, 3), st.integers(0, 3), st.lists(st.booleans(), min_size=1, max_size=7)
)


@given(CANCELLED)
@settings(max_examples=25)
def test_cancelled_calls_take_nothing_with_them(case):
    """Whoever is cancelled, running or queued: his place is free again, others are served."""
    _check_cancelled(case)


def test_without_withdrawing_places_would_be_lost(monkeypatch: pytest.MonkeyPatch):
    """Leave queued work that nobody waits for in its place, and the property is falsified."""
    monkeypatch.setattr(ClosableThreads, "give_up", lambda _, job: job.give_up())
    assert falsified(lambda case: _check_cancelled(case, drain=0.05), CANCELLED)


def test_a_call_that_ended_before_it_was_cancelled_is_counted_as_ended():
    """Each call counts once, though its caller is cancelled at that very moment."""

    async def main():
        task = asyncio.create_task(pool.arun(abs, -1))
        await let_pass(0.0)
        until(lambda: pool.pool.idle)  # done, and this loop has not heard of it
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    with IoPool("io", workers=1) as pool:
        assert asyncio.run(main())
        assert (pool.snapshot()["succeeded"], pool.snapshot()["cancelled"]) == (1, 0)


# --- Closing ---


@pytest.mark.parametrize("how", ["sync", "async"])
def test_closing_waits_for_what_there_is(blocked, how):
    """Running and queued calls are finished, new ones refused, and `close` says that all ended."""
    pool = IoPool("io", workers=1, max_queue=1)
    calls = [in_thread(pool.run, blocked, number) for number in range(2)]
    assert blocked.started.acquire(timeout=WAIT)
    until(lambda: pool.snapshot()["waiting"] == 1)
    close = pool.close if how == "sync" else lambda: asyncio.run(pool.aclose())
    closer, closed = in_thread(close)
    until(lambda: pool.pool.state == "closing")
    with pytest.raises(Rejected, match="'io' is closed") as refused:
        pool.run(print)
    assert (refused.value.guard, refused.value.policy) == ("io", "io_pool")
    blocked.go_on.set()
    closer.join(WAIT)
    assert closed == [True]
    for thread, _ in calls:
        thread.join(WAIT)
    assert sorted(result for _, (result,) in calls) == [0, 1]
    assert pool.close()
    with pytest.raises(Rejected), pool:
        pass


@pytest.mark.parametrize("drain", [0.0, 5.0])
@pytest.mark.parametrize("how", ["sync", "async"])
def test_closing_does_not_wait_for_ever(blocked, how, drain):
    """When the time is over, queued calls are refused though all threads hang; those run on."""

    async def aclose():
        task = asyncio.create_task(pool.aclose(drain))
        await _until_async(lambda: pool.pool.state != "open")
        asyncio.get_running_loop().clock.advance(drain)
        return await task

    with virtual_time() as clock:
        pool = IoPool("io", workers=1, max_queue=1)
    running, result = in_thread(pool.run, blocked, 1)
    assert blocked.started.acquire(timeout=WAIT)
    queued, refused = in_thread(pool.run, blocked, 2)
    until(lambda: pool.snapshot()["waiting"] == 1)
    if how == "sync":
        assert not pool.close(drain)
    else:
        assert not run_virtual(aclose(), clock=clock)
    queued.join(WAIT)
    assert isinstance(refused[0], Rejected)
    assert "was closed before it began" in str(refused[0])
    blocked.go_on.set()
    running.join(WAIT)
    assert result == [1]
    assert pool.close()


def test_a_cancelled_close_closes_all_the_same(blocked):
    """Who is cancelled while he waits for the end still leaves a closed executor behind."""
    pool = IoPool("io", workers=1)
    running, _ = in_thread(pool.run, blocked)
    assert blocked.started.acquire(timeout=WAIT)

    async def main():
        task = asyncio.create_task(pool.aclose())
        await _until_async(lambda: pool.pool.state == "closing")
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(main())
    assert pool.pool.state == "closed"
    assert not pool.pool._shared.idle_wakes
    blocked.go_on.set()
    running.join(WAIT)


def test_closing_does_not_depend_on_a_loop_that_is_gone(blocked):
    """A call whose loop was closed ends unseen; who waits for the end of all work is told."""
    pool = IoPool("io", workers=1)
    loop = asyncio.new_event_loop()
    task = loop.create_task(pool.arun(blocked))
    while not blocked.started.acquire(blocking=False):
        loop.run_until_complete(let_pass(0.0))
    loop.close()
    closer, closed = in_thread(pool.close, float("inf"))
    until(lambda: pool.pool._shared.idle_wakes)
    blocked.go_on.set()
    closer.join(WAIT)
    assert closed == [True]
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_closing_does_not_wait_for_a_call_that_got_no_thread(monkeypatch):
    """If its thread cannot be made, its place is freed, and whoever waits for the end is woken."""
    pool, woken = IoPool("io", workers=1), []

    def exhausted(_thread):
        pool.pool.until_idle(float("inf")).publish(lambda: woken.append(True))
        assert not woken
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", exhausted)
    with pytest.raises(RuntimeError, match="new thread"):
        pool.run(len, "x")
    assert woken == [True]


def test_leaving_by_an_error_does_not_wait(blocked):
    """`with` and `async with` wait for calls at their end, but not if an error ends them."""

    async def main():
        async with IoPool("b", workers=1) as pool:
            task = asyncio.create_task(pool.arun(blocked))
            await asyncio.get_running_loop().run_in_executor(None, blocked.started.acquire)
            try:
                raise LookupError
            finally:
                task.cancel()

    def leave(pool):
        with pool:
            in_thread(pool.run, blocked)
            assert blocked.started.acquire(timeout=WAIT)
            raise LookupError

    pool = IoPool("a", workers=1)
    with pytest.raises(LookupError):
        leave(pool)
    with pytest.raises(LookupError):
        asyncio.run(main())
    assert pool.pool.state == "closed"


def test_threads_end_with_the_executor():
    """A closed executor, or one that is gone, leaves no thread behind."""
    pool = IoPool("short-lived", workers=2)
    pool.run(print, end="")
    del pool
    with IoPool("short-lived", workers=2) as closed:
        closed.run(print, end="")
    until(lambda: not [t for t in threading.enumerate() if "short-lived" in t.name])
