"""Hedge around plain functions: every copy in a thread, and what becomes of those that lose."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest

from seawall import (
    Breaker,
    Bulkhead,
    DeadlineExceeded,
    Guard,
    Hedge,
    Retry,
    RetryBudget,
    TimedOut,
    deadline,
    subscribe,
)
from seawall.clock import VirtualClock
from seawall.events import CallHedged, ThreadAbandoned
from seawall.policies.hedge import threads as _hedge_threads
from seawall.policies.hedge.policy import HedgeBound
from seawall.policies.retry import InFlightRatio
from seawall.runtime.call import Abandoned, was_withdrawn
from seawall.runtime.workers import WorkerPool
from tests.support import new_guard


class Stopwatch(VirtualClock):
    """Virtual time for threads: a wait really waits, unless the test has let it expire.

    `expire_when(event)`: one more wait of the main thread ends without success, as soon as the
    event is set.
    """

    __slots__ = ("_expiring", "before_waiting")

    def __init__(self) -> None:
        super().__init__()
        self._expiring: list[threading.Event] = []
        self.before_waiting: Callable[[], Any] = bool

    def expire_when(self, *events: threading.Event) -> None:
        self._expiring.extend(events)

    def wait(self, lock: Any, seconds: float | None) -> bool:
        if not self._expiring or threading.current_thread() is not threading.main_thread():
            self.before_waiting()
            assert lock.acquire(timeout=30)
            return True
        assert self._expiring.pop(0).wait(30)
        self.advance(seconds or 0.0)
        return False


class Replica:
    """The first calls hang until they are let go, later ones do what `then` does."""

    def __init__(self, then: Callable[[], Any] = lambda: "quick", hanging: int = 1) -> None:
        self.begun = [threading.Event() for _ in range(9)]
        self.ended = [threading.Event() for _ in range(9)]
        self.go = threading.Event()
        self.then = then
        self.late: Callable[[], Any] = lambda: "slow"
        self.hanging = hanging
        self.calls = 0
        self.threads: list[str] = []
        self._lock = threading.Lock()

    def __call__(self) -> Any:
        with self._lock:
            number = self.calls
            self.calls += 1
            self.threads.append(threading.current_thread().name)
        self.begun[number].set()
        try:
            if number < self.hanging:
                assert self.go.wait(30)
                return self.late()
            return self.then()
        finally:
            self.ended[number].set()


@pytest.fixture
def clock() -> Stopwatch:
    """Return a clock on which waits end when the test says so."""
    return Stopwatch()


@pytest.fixture
def replica() -> Iterator[Replica]:
    """Return a function whose first call hangs until the test is over."""
    function = Replica()
    yield function
    function.go.set()


def fail() -> None:
    """Raise."""
    raise ConnectionError("reset")


def eventually(holds: Callable[[], bool]) -> bool:
    """Wait until it holds; what threads do after they told their caller is theirs."""
    for _ in range(3000):
        if holds():
            return True
        threading.Event().wait(0.01)
    return False


def came_back(guard: Guard) -> bool:
    """Wait until no thread of the guard is abandoned any more."""
    return eventually(lambda: not guard.snapshot()["abandoned"])


def test_a_slow_call_is_asked_again_in_another_thread(clock: Stopwatch, replica: Replica) -> None:
    """The second copy has the answer; the first runs on, holds its slot, and is counted."""
    told: list[Any] = []
    unsubscribe = subscribe(told.append, CallHedged, ThreadAbandoned)
    slots = Bulkhead(2)
    guard = new_guard(Hedge(1.0, sync="thread"), slots, clock=clock)
    clock.expire_when(replica.begun[0])
    assert guard.call(replica) == "quick"
    assert clock.now() == 1.0
    assert [type(event) for event in told] == [CallHedged, ThreadAbandoned]
    shown = guard.snapshot()
    assert (shown["abandoned"], shown["cancelled"], shown["succeeded"]) == (1, 1, 1)
    assert (shown["policies"][0]["wins"], shown["policies"][0]["abandoned"]) == (1, 1)
    assert shown["p99"] == pytest.approx(1.0, rel=0.05)  # the loser took at least that long
    assert slots.in_flight == 1
    replica.go.set()
    assert came_back(guard)
    assert replica.ended[0].wait(30)
    shown = guard.snapshot()
    assert (shown["cancelled"], shown["succeeded"]) == (1, 1)  # its end is not counted again
    assert eventually(lambda: not slots.in_flight)
    assert eventually(lambda: not guard.snapshot()["policies"][0]["in_flight"])
    unsubscribe()


def test_a_quick_call_is_not_copied(clock: Stopwatch) -> None:
    """One thread, one answer."""
    guard = new_guard(Hedge(1.0, sync="thread"), clock=clock)
    replica = Replica(hanging=0)
    assert guard.call(replica) == "quick"
    assert replica.calls == 1
    assert replica.threads[0].startswith("seawall-hedge")
    assert guard.snapshot()["policies"][0]["hedges"] == 0


def test_what_a_losing_thread_returns_is_disposed_of(clock: Stopwatch, replica: Replica) -> None:
    """In that thread, when it ends at last."""
    disposed: list[Any] = []
    guard = new_guard(Hedge(1.0, sync="thread", dispose=disposed.append), clock=clock)
    clock.expire_when(replica.begun[0])
    assert guard.call(replica) == "quick"
    assert disposed == []
    replica.go.set()
    assert came_back(guard)
    assert disposed == ["slow"]


def test_a_dispose_that_fails_or_is_async_after_all_is_logged(
    clock: Stopwatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It does no harm to the call, nor to the thread."""

    async def close(value: Any) -> None: ...

    def broken(_value: Any) -> None:
        raise OSError

    for dispose in (broken, lambda value: close([value])):
        replica = Replica()
        guard = new_guard(Hedge(1.0, sync="thread", dispose=dispose), clock=clock)
        clock.expire_when(replica.begun[0])
        assert guard.call(replica) == "quick"
        replica.go.set()
        assert came_back(guard)
    assert [record.exc_info and record.exc_info[0] for record in caplog.records] == [
        OSError,
        TypeError,
    ]


def test_errors_of_threads(clock: Stopwatch) -> None:
    """One alone is raised; of two, the first; beside a value, none."""
    guard = new_guard(Hedge(1.0, sync="thread"), clock=clock)

    def fail_late() -> None:
        raise KeyError("late")

    with pytest.raises(ConnectionError):
        guard.call(fail)
    assert guard.snapshot()["failed"] == 1

    # The copy fails, the first goes on and returns; then it fails too, later.
    for late in (lambda: "slow", fail_late):
        replica = Replica(then=fail)
        replica.late = late
        clock.expire_when(replica.begun[0])
        clock.before_waiting = lambda replica=replica: (
            replica.ended[1].wait(30),
            eventually(lambda: guard.snapshot()["policies"][0]["in_flight"] == 1),
            replica.go.set(),
        )
        if late is fail_late:
            with pytest.raises(ConnectionError, match="reset"):
                guard.call(replica)
        else:
            assert guard.call(replica) == "slow"
    assert guard.snapshot()["failed"] == 4


def test_without_a_free_thread_a_call_runs_where_it_is(clock: Stopwatch, replica: Replica) -> None:
    """Hedging is a favour, not a condition: it never refuses a call."""
    guard = new_guard(Hedge(1.0, sync="thread", workers=2), clock=clock)
    clock.expire_when(replica.begun[0])
    assert guard.call(replica) == "quick"  # one thread is left hanging, and one is free
    hanging = Replica()
    clock.expire_when(hanging.begun[0])
    clock.before_waiting = hanging.go.set
    assert guard.call(hanging) == "slow"
    assert hanging.calls == 1
    assert guard.snapshot()["policies"][0]["stopped"] == {"threads": 1}

    def nested() -> str:
        return guard.call(lambda: threading.current_thread().name)

    outer, inner = guard.call(lambda: (threading.current_thread().name, nested()))
    assert outer == inner
    replica.go.set()
    assert came_back(guard)


@pytest.mark.parametrize("how", ["taken", "none to give"])
@pytest.mark.parametrize("ends", ["value", "error"])
def test_a_copy_that_finds_no_thread_was_never_made(
    clock: Stopwatch, how: str, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call goes on without it, and cap, budget and counts are as if nobody had asked."""
    budget = RetryBudget(InFlightRatio())
    guard = new_guard(Hedge(1.0, sync="thread", budget=budget), clock=clock)
    replica = Replica()
    if ends == "error":
        replica.late = fail
    really = WorkerPool.submit

    def submit(pool: WorkerPool, job: Any) -> bool:
        if replica.calls and how == "taken":
            return False  # by somebody else, a moment ago
        if replica.calls:
            raise RuntimeError("can't start new thread")
        return really(pool, job)

    monkeypatch.setattr(WorkerPool, "submit", submit)
    told: list[Any] = []
    unsubscribe = subscribe(told.append, CallHedged)
    clock.expire_when(replica.begun[0])
    clock.before_waiting = replica.go.set
    result = guard.attempt(replica)
    unsubscribe()
    assert result.value == ("slow" if ends == "value" else None)
    assert isinstance(result.error, ConnectionError) == (ends == "error")
    shown = guard.snapshot()["policies"][0]
    assert (shown["hedges"], shown["available"], shown["stopped"]) == (0, 5, {"threads": 1})
    assert (shown["budget"]["active"], shown["budget"]["retries"]) == (0, 0)
    assert (replica.calls, told) == (1, [])


def test_without_threads_to_give_a_call_runs_where_it_is(
    clock: Stopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if not even the first thread can be started."""

    def none_left(*_: Any) -> bool:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(WorkerPool, "submit", none_left)
    guard = new_guard(Hedge(1.0, sync="thread"), clock=clock)
    assert guard.call(threading.get_ident) == threading.get_ident()
    assert guard.snapshot()["policies"][0]["stopped"] == {"threads": 1}


def test_a_call_that_fails_while_a_copy_is_asked_for_gets_none(
    clock: Stopwatch, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody would wait for that copy, nor count it, nor dispose of what it returns."""
    budget = RetryBudget(InFlightRatio())
    guard = new_guard(Hedge(1.0, sync="thread", budget=budget), clock=clock)
    replica.late = fail
    really = HedgeBound.permits

    def slowly(bound: HedgeBound, left: float | None) -> bool:
        permitted = really(bound, left)
        replica.go.set()
        assert eventually(lambda: not guard.snapshot()["policies"][0]["in_flight"])
        return permitted

    monkeypatch.setattr(HedgeBound, "permits", slowly)
    clock.expire_when(replica.begun[0])
    with pytest.raises(ConnectionError):
        guard.call(replica)
    assert replica.calls == 1
    shown = guard.snapshot()["policies"][0]
    assert (shown["hedges"], shown["available"]) == (0, 5)
    assert budget.snapshot()["retries"] == 0


class Exit(BaseException):
    """Neither a failure nor a cancellation."""


def leave() -> None:
    """Raise it."""
    raise Exit


@pytest.mark.parametrize("who", ["first", "copy"])
def test_an_exit_in_a_thread_ends_the_call(clock: Stopwatch, replica: Replica, who: str) -> None:
    """What is no `Exception` is raised at once, whoever raised it; others run on, counted."""
    guard = new_guard(Hedge(1.0, sync="thread"), clock=clock)
    go = threading.Event()
    if who == "copy":
        replica.then = leave
    else:
        replica.late = leave
        replica.then = lambda: go.wait(30)
        clock.before_waiting = lambda: (replica.begun[1].wait(30), replica.go.set())
    clock.expire_when(replica.begun[0])
    with pytest.raises(Exit):
        guard.call(replica)
    shown = guard.snapshot()
    assert (shown["abandoned"], shown["cancelled"], shown["succeeded"]) == (1, 2, 0)
    go.set()
    replica.go.set()
    assert came_back(guard)


def test_a_losing_thread_that_has_not_begun_never_does(clock: Stopwatch, replica: Replica) -> None:
    """One that waits for a slot when the call ends does not take it, and was no attempt."""
    slots = Bulkhead(1, max_wait=60.0, max_waiting=5)
    guard = new_guard(Hedge(1.0, sync="thread"), slots, clock=clock)
    queued = threading.Event()
    clock.before_waiting = queued.set
    clock.expire_when(replica.begun[0], queued)
    with deadline(5.0, clock=clock):
        result = guard.attempt(replica)
    assert isinstance(result.error, TimedOut)
    assert (result.attempts, guard.snapshot()["abandoned"]) == (1, 2)
    replica.go.set()
    assert came_back(guard)
    assert eventually(lambda: not slots.in_flight)
    assert replica.calls == 1
    shown = guard.snapshot()
    counts = ("failed", "cancelled", "succeeded", "rejected")
    assert [shown[name] for name in counts] == [1, 0, 0, 0]


def test_copies_that_all_waited_in_vain_were_no_attempt(clock: Stopwatch) -> None:
    """The deadline ends the call before any thread has its slot: the function never ran."""
    slots = Bulkhead(1, max_wait=60.0, max_waiting=5)
    guard = new_guard(Hedge(1.0, sync="thread"), slots, clock=clock)
    queued = [threading.Event(), threading.Event()]
    next_one = iter(queued)
    clock.before_waiting = lambda: next(next_one).set()
    clock.expire_when(*queued)
    with new_guard(slots, clock=clock).hold():
        with deadline(5.0, clock=clock):
            result = guard.attempt(lambda: "called")
        assert isinstance(result.error, TimedOut)
        assert (result.attempts, guard.snapshot()["abandoned"]) == (0, 2)
    assert came_back(guard)
    assert eventually(lambda: not slots.in_flight)
    shown = guard.snapshot()
    counts = ("failed", "cancelled", "succeeded", "rejected")
    assert [shown[name] for name in counts] == [0, 0, 0, 0]


def test_a_losing_thread_makes_no_further_attempt(clock: Stopwatch, replica: Replica) -> None:
    """A retry inside the hedge stops when the call has its answer."""
    retry = Retry(on=ConnectionError, attempts=5, backoff=0.1)
    guard = new_guard(Hedge(1.0, sync="thread"), retry, clock=clock)
    replica.late = fail
    clock.expire_when(replica.begun[0])
    assert guard.call(replica) == "quick"
    replica.go.set()
    assert came_back(guard)
    assert replica.calls == 2


def test_a_copy_does_not_begin_when_the_answer_is_known(clock: Stopwatch) -> None:
    """Even before the caller has seen it: then all other threads are told at once."""
    guard = new_guard(Hedge(1.0, sync="thread"), clock=clock)
    bound: Any = guard.bounds[0]
    called: list[str] = []
    copies = _hedge_threads.ThreadCopies(bound.layer("sync"), lambda: called.append("called"))
    assert copies._race.returned(2, "value")
    assert copies.start(1)
    assert eventually(lambda: copies._race.running == 0)
    assert called == []
    assert not copies._jobs[1].goes_on()


def test_a_caller_that_is_interrupted_before_a_thread_began_has_asked_for_nothing(
    clock: Stopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work is withdrawn: nothing was sent, so nothing is counted."""

    def only_take(pool: WorkerPool, _job: Any) -> bool:
        pool._shared.taken += 1
        return True

    def interrupted(*_: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(WorkerPool, "submit", only_take)
    monkeypatch.setattr(_hedge_threads, "wait_sync", interrupted)
    guard = new_guard(Bulkhead(1), Hedge(1.0, sync="thread"), clock=clock)
    with pytest.raises(KeyboardInterrupt) as raised:
        guard.call(print)
    assert was_withdrawn(raised.value)
    shown = guard.snapshot()
    assert (shown["cancelled"], shown["policies"][1]["in_flight"]) == (0, 0)


def test_a_plain_function_must_ask_for_threads() -> None:
    """At decoration, with what to write instead."""
    guard = new_guard(Hedge(1.0))

    def function() -> None: ...

    with pytest.raises(TypeError, match="sync='thread'"):
        guard(function)

    async def close(value: Any) -> None: ...

    guard = new_guard(Hedge(1.0, sync="thread", dispose=close))
    with pytest.raises(TypeError, match="async"):
        guard(function)
    with pytest.raises(TypeError, match="is async, the guarded"):
        guard.call(function)


def test_calls_that_are_not_hedged_need_no_thread(clock: Stopwatch) -> None:
    """One that is not idempotent runs in the caller's own thread."""
    guard = new_guard(Hedge(1.0, sync="thread"), clock=clock, idempotent=False)
    name = guard.call(lambda: threading.current_thread().name)
    assert name == threading.current_thread().name


def test_context_goes_along(clock: Stopwatch, replica: Replica) -> None:
    """Copies see the caller's context variables."""
    var: ContextVar[str] = ContextVar("var", default="nothing")
    var.set("mine")
    replica.then = var.get
    guard = new_guard(Hedge(1.0, sync="thread"), clock=clock)
    clock.expire_when(replica.begun[0])
    assert guard.call(replica) == "mine"
    replica.go.set()
    assert came_back(guard)


def test_the_deadline_ends_the_waiting_and_leaves_all_threads_counted(clock: Stopwatch) -> None:
    """All copies are abandoned; slots around the hedge are held until the last of them ends."""
    replica = Replica(hanging=2)
    around = Bulkhead(1)
    guard = new_guard(around, Hedge(1.0, sync="thread"), clock=clock)
    clock.expire_when(replica.begun[0], replica.begun[1])
    with deadline(5.0, clock=clock), pytest.raises(TimedOut, match="the deadline passed"):
        guard.call(replica)
    assert clock.now() == 5.0
    shown = guard.snapshot()
    assert (shown["abandoned"], around.in_flight) == (2, 1)
    assert (shown["failed"], shown["cancelled"], shown["succeeded"]) == (1, 1, 0)
    replica.go.set()
    assert came_back(guard)
    assert eventually(lambda: not around.in_flight)
    shown = guard.snapshot()
    assert (shown["failed"], shown["cancelled"], shown["succeeded"]) == (1, 1, 0)


def test_a_deadline_that_leaves_no_time_starts_nothing(clock: Stopwatch) -> None:
    """Expired work never starts, in no thread."""
    guard = new_guard(Hedge(1.0, sync="thread"), clock=clock)
    replica = Replica(hanging=0)
    with deadline(0.0, clock=clock), pytest.raises(DeadlineExceeded):
        guard.call(replica)
    assert replica.calls == 0


def test_a_caller_that_is_interrupted_leaves_its_threads_counted(
    clock: Stopwatch, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KeyboardInterrupt in the waiting thread: the copies run on, as they must, and are known."""
    guard = new_guard(Breaker(consecutive=1), Hedge(1.0, sync="thread"), clock=clock)

    def interrupted(*_: Any) -> bool:
        assert replica.begun[0].wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr(_hedge_threads, "wait_sync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        guard.call(replica)
    shown = guard.snapshot()
    assert (shown["abandoned"], shown["cancelled"]) == (1, 1)
    replica.go.set()
    assert came_back(guard)


def test_a_copy_counts_for_the_budget_until_its_thread_ends(
    clock: Stopwatch, replica: Replica
) -> None:
    """An abandoned hedge is a retry in flight for as long as it runs."""
    budget = RetryBudget(InFlightRatio())
    replica.hanging = 2

    def third() -> str:
        return "quick"

    replica.then = third
    hedge = Hedge(1.0, most=3, cap=1.0, sync="thread", budget=budget)
    guard = new_guard(hedge, clock=clock)
    clock.expire_when(replica.begun[0], replica.begun[1])
    assert guard.call(replica) == "quick"
    state = budget.snapshot()
    assert (state["active"], state["retries"]) == (0, 1)
    result = guard.attempt(lambda: "quick")
    assert result.attempts == 1
    replica.go.set()
    assert came_back(guard)
    assert eventually(lambda: not budget.snapshot()["retries"])


def test_a_result_tells_of_all_attempts(clock: Stopwatch, replica: Replica) -> None:
    """`attempt` counts the thread that lost as well."""
    guard = new_guard(Hedge(1.0, sync="thread"), clock=clock)
    clock.expire_when(replica.begun[0])
    assert guard.attempt(replica).attempts == 2
    replica.go.set()
    assert came_back(guard)


def test_works_together_stop_when_the_last_of_them_does() -> None:
    """In whatever order they stop, and also if they have stopped already."""
    for order in [(0, 1, 2), (2, 1, 0), (1, 0, 2)]:
        works = [Abandoned() for _ in range(3)]
        works[order[0]].stopped()
        stopped: list[str] = []
        everything = _hedge_threads.together(works)
        everything.when_stopped(lambda stopped=stopped: stopped.append("all"))
        works[order[1]].stopped()
        assert stopped == []
        works[order[2]].stopped()
        assert stopped == ["all"]
