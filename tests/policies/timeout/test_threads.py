"""Timeout around plain functions: cooperative, or in worker threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    Breaker,
    BulkheadFull,
    DeadlineExceeded,
    Guard,
    Retry,
    TimedOut,
    Timeout,
    check_deadline,
    current_deadline,
    deadline,
    subscribe,
)
from seawall.clock import VirtualClock
from seawall.events import ThreadAbandoned
from seawall.policies.timeout import adaptive_timeout
from seawall.resources import check_threads
from seawall.runtime.call import Abandoned
from seawall.runtime.threads import ThreadDriver
from seawall.runtime.workers import ThreadJob
from seawall.testing import virtual_time

_serial = count()
QUARTERS = st.integers(1, 16).map(lambda n: n / 4)


def _guard(*policies: Any, **options: Any) -> Guard:
    return Guard(f"timeout-threads-{next(_serial)}", *policies, **options)


class Stopwatch(VirtualClock):
    """Virtual time for threads: a wait really waits, unless the test has let it expire.

    `expire_when(event)`: the next wait ends without success, as soon as the event is set.
    """

    __slots__ = ("_expiring", "waits")

    def __init__(self) -> None:
        super().__init__()
        self._expiring: list[threading.Event] = []
        self.waits: list[float | None] = []

    def expire_when(self, event: threading.Event) -> None:
        self._expiring.append(event)

    def wait(self, lock: threading.Lock, seconds: float | None) -> bool:
        self.waits.append(seconds)
        if not self._expiring:
            assert lock.acquire(timeout=30)
            return True
        assert self._expiring.pop().wait(30)
        self.advance(seconds or 0.0)
        return False


class Hanging:
    """A function that hangs until it is let go, in any number of threads."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        self.begun.set()
        assert self.go.wait(30)
        return "late"


@pytest.fixture
def clock() -> Stopwatch:
    """Return a clock on which waits end when the test says so."""
    return Stopwatch()


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    """Return a function that hangs until the test is over."""
    function = Hanging()
    yield function
    function.go.set()


def _abandon(guard: Guard, clock: Stopwatch, hanging: Hanging) -> TimedOut:
    """Let a call of the guard run out of time while its thread hangs; return its error."""
    hanging.begun.clear()
    clock.expire_when(hanging.begun)
    with pytest.raises(TimedOut) as caught:
        guard.call(hanging)
    return caught.value


def _let_go(hanging: Hanging, error: BaseException) -> None:
    """Let the hanging function return, and wait until its thread is free again."""
    stopped = threading.Event()
    work = Abandoned.of(error)
    assert work is not None
    work.when_stopped(stopped.set)
    hanging.go.set()
    assert stopped.wait(30)


# Which way


def test_a_plain_function_must_say_how_it_is_timed() -> None:
    """Without `sync=` it raises where it is decorated, and tells what to write."""
    for wrap in (_guard(Timeout(1.0)), Timeout(1.0)):
        with pytest.raises(TypeError, match=r"sync='cooperative'.*sync='thread'.*Guard\.standard"):

            @wrap
            def function() -> None:
                pass

    with pytest.raises(TypeError, match="cannot be stopped from outside"):
        _guard(Timeout(1.0)).call(print)


def test_a_generator_cannot_run_in_a_thread() -> None:
    """Its items come bit by bit: the cooperative way is the only one."""
    with pytest.raises(TypeError, match="generator"):

        @_guard(Timeout(1.0, sync="thread"))
        def items() -> Iterator[int]:
            yield 1


# Cooperative


@given(st.lists(QUARTERS, min_size=1, max_size=4), st.none() | QUARTERS)
def test_cooperative_sets_and_restores_the_deadline(
    limits: list[float], outer: float | None
) -> None:
    """What is inside sees the nearest limit; what is outside sees what it saw before."""
    with virtual_time() as clock:
        seen: list[float] = []
        call: Callable[[], None] = lambda: seen.append(current_deadline().at)  # noqa: E731
        for limit in limits:
            inner, guard = call, _guard(Timeout(limit, sync="cooperative"))

            def call(inner: Any = inner, guard: Guard = guard) -> None:
                before = current_deadline()
                guard.call(inner)
                after = current_deadline()
                assert (before and before.at) == (after and after.at)

        if outer is None:
            call()
            assert current_deadline() is None
        else:
            with deadline(outer):
                call()
        assert seen == [min([*limits, *([] if outer is None else [outer])])]
        assert clock.now() == 0.0


@pytest.mark.parametrize("error", [ValueError, TimeoutError, KeyboardInterrupt])
def test_cooperative_restores_the_deadline_after_an_error(error: type[BaseException]) -> None:
    """Whatever the function raises, the deadline is as before."""

    def function() -> None:
        raise error

    with virtual_time(), deadline(9.0) as outer:
        with pytest.raises(error):
            _guard(Timeout(1.0, sync="cooperative")).call(function)
        assert current_deadline().at == outer.at


def test_cooperative_work_that_checks_the_deadline_ends_in_time() -> None:
    """A long loop that calls `check_deadline` raises TimedOut, and it is counted."""
    with virtual_time() as clock:
        guard = _guard(Timeout(1.0, sync="cooperative"))

        def function() -> None:
            while True:
                check_deadline()
                clock.sleep(0.25)

        with pytest.raises(TimedOut):
            guard.call(function)
        assert clock.now() == 1.0
        assert guard.snapshot()["policies"][0]["timed_out"] == 1


def test_cooperative_does_not_count_a_timeout_of_the_functions_own() -> None:
    """A TimeoutError that comes before the limit is not the limit's."""
    with virtual_time():
        guard = _guard(Timeout(1.0, sync="cooperative"))

        def function() -> None:
            raise TimeoutError("mine")

        with pytest.raises(TimeoutError, match="mine"):
            guard.call(function)
        assert guard.snapshot()["policies"][0]["timed_out"] == 0


def test_cooperative_refuses_a_guard_inside_when_time_is_over() -> None:
    """Expired work never starts: the guard further in obeys the deadline set here."""
    with virtual_time() as clock:
        outer = _guard(Timeout(1.0, sync="cooperative"))
        inner = _guard(Retry(on=ValueError))
        began: list[int] = []

        def function() -> None:
            clock.sleep(1.0)
            inner.call(began.append, 1)

        with pytest.raises(TimedOut) as caught:  # the call outside has begun
            outer.call(function)
        assert isinstance(caught.value.__cause__, DeadlineExceeded)
        assert not began


def test_cooperative_limits_can_be_adaptive_and_updated() -> None:
    """The deadline is reckoned from the limit that holds when the call begins."""
    with virtual_time():
        policy = Timeout(adaptive_timeout(floor=1.0, cap=4.0), sync="cooperative")
        guard = _guard(policy)

        def left() -> float:
            return current_deadline().remaining()

        assert guard.call(left) == 4.0
        policy.update(seconds=2.0)
        assert guard.call(left) == 2.0


# In threads


def test_a_function_runs_in_a_worker_thread_and_returns(clock: Stopwatch) -> None:
    """Its value or its own error comes back, with the caller's arguments."""
    guard = _guard(Timeout(2.0, sync="thread"), clock=clock)
    assert guard.call(threading.get_ident) != threading.get_ident()
    assert guard.call(int, "12", base=3) == 5
    with pytest.raises(ZeroDivisionError):
        guard.call(divmod, 1, 0)
    with pytest.raises(TimeoutError, match="mine"):
        guard.call(_raise, TimeoutError("mine"))
    assert guard.snapshot()["policies"][0]["timed_out"] == 0
    assert clock.waits == [2.0] * 4


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), StopIteration(4)])
def test_what_the_function_raises_comes_out_as_it_is(
    error: BaseException, clock: Stopwatch
) -> None:
    """Also what a thread alone would swallow."""
    guard = _guard(Timeout(2.0, sync="thread"), clock=clock)
    with pytest.raises(type(error)) as caught:
        guard.call(_raise, error)
    assert caught.value is error


def test_context_variables_go_along_and_stay_there(clock: Stopwatch) -> None:
    """The thread works with a copy of the caller's context; what it sets stays in the copy."""
    variable: ContextVar[str] = ContextVar("variable", default="default")
    guard = _guard(Timeout(2.0, sync="thread"), clock=clock)

    def function() -> str:
        before = variable.get()
        variable.set("from the thread")
        return before

    def caller() -> None:
        variable.set("from the caller")
        assert guard.call(function) == "from the caller"
        assert variable.get() == "from the caller"

    copy_context().run(caller)
    assert guard.call(function) == "default"
    assert guard.call(function) == "default"  # the same thread, a fresh copy


def test_without_the_copy_context_variables_are_lost(
    clock: Stopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run in the thread's own context, and the test above fails."""
    from contextvars import Context

    monkeypatch.setattr("seawall.runtime.workers.copy_context", Context)
    with pytest.raises(AssertionError):
        test_context_variables_go_along_and_stay_there(clock)


@given(QUARTERS, st.none() | QUARTERS)
def test_the_wait_and_the_deadline_inside_are_the_nearer_of_the_two(
    seconds: float, outer: float | None
) -> None:
    """A thread never gets more time than its caller has; the function can see how much."""
    clock = Stopwatch()
    guard = _guard(Timeout(seconds, sync="thread"), clock=clock)

    def left() -> float:
        return current_deadline().remaining()

    if outer is None:
        assert guard.call(left) == seconds
        assert current_deadline() is None
    else:
        with deadline(outer, clock=clock):
            assert guard.call(left) == min(seconds, outer)
            assert current_deadline().remaining() == outer
    assert clock.waits == [min(seconds, seconds if outer is None else outer)]


def test_a_call_that_takes_too_long_is_given_up_and_counted(
    clock: Stopwatch, hanging: Hanging
) -> None:
    """The caller gets TimedOut in time; the thread is counted until it comes back."""
    seen: list[ThreadAbandoned] = []
    unsubscribe = subscribe(seen.append, ThreadAbandoned)
    guard = _guard(Timeout(1.5, sync="thread", max_threads=2), clock=clock)
    error = _abandon(guard, clock, hanging)
    unsubscribe()
    assert (error.guard, error.seconds, clock.now()) == (guard.name, 1.5, 1.5)
    assert [(event.guard, event.running) for event in seen] == [(guard.name, 1)]
    shown = guard.snapshot()
    assert shown["abandoned"] == 1
    assert shown["policies"][0] == {
        "policy": "timeout",
        "seconds": 1.5,
        "timed_out": 1,
        "threads": 2,
        "in_flight": 1,
        "abandoned": 1,
    }
    _let_go(hanging, error)
    shown = guard.snapshot()
    assert shown["abandoned"] == 0
    assert shown["policies"][0]["in_flight"] == 0
    assert shown["policies"][0]["abandoned"] == 0


def test_a_full_pool_refuses_at_once(clock: Stopwatch, hanging: Hanging) -> None:
    """Hung calls do not make an instant one wait for them and time out: it is refused."""
    guard = _guard(Timeout(1.0, sync="thread", max_threads=2), clock=clock)
    errors = [_abandon(guard, clock, hanging) for _ in range(2)]
    now, waits = clock.now(), len(clock.waits)
    began: list[int] = []
    with pytest.raises(BulkheadFull, match="2 of them with calls that nobody waits for") as caught:
        guard.call(began.append, 1)
    assert (clock.now(), len(clock.waits)) == (now, waits)
    assert (caught.value.guard, caught.value.policy) == (guard.name, "timeout")
    assert not began
    assert guard.snapshot()["rejected"] == 1
    for error in errors:
        _let_go(hanging, error)
    assert guard.call(lambda: "instant") == "instant"


def test_a_refusal_by_a_full_pool_is_no_attempt(clock: Stopwatch, hanging: Hanging) -> None:
    """Neither retried nor counted as a failure of what was never called."""
    guard = _guard(
        Retry(on=Exception, attempts=3, backoff=0),
        Timeout(1.0, sync="thread", max_threads=1),
        clock=clock,
    )
    hanging.begun.clear()
    clock.expire_when(hanging.begun)
    result = guard.attempt(hanging)  # the retry finds the only thread hanging
    assert isinstance(result.error, TimedOut)  # something was sent: that is what counts
    assert "1 attempt in 1.000 s, the next was refused: guard" in result.error.__notes__[0]
    assert result.attempts == 1
    assert hanging.calls == 1
    shown = guard.snapshot()
    assert (shown["failed"], shown["rejected"], shown["retries"]) == (1, 1, 1)


def test_without_the_cap_a_full_pool_would_queue(
    clock: Stopwatch, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the pool queue, and an instant call waits behind a hung one until it times out."""
    policy = Timeout(1.0, sync="thread", max_threads=1)
    guard = _guard(policy, clock=clock)
    _abandon(guard, clock, hanging)
    monkeypatch.setattr(policy.pool, "queue", 10)
    clock.expire_when(hanging.begun)
    with pytest.raises(DeadlineExceeded):
        guard.call(lambda: "instant")


def test_a_result_at_the_very_moment_of_expiry_is_the_result(clock: Stopwatch) -> None:
    """If the work is done when the caller gives up, its value is not thrown away."""
    guard = _guard(Timeout(1.0, sync="thread"), clock=clock)
    done = threading.Event()
    finished = ThreadJob.finished

    def tell(job: ThreadJob) -> None:
        finished(job)
        if job.guard == guard.name:  # threads of other tests may still be ending
            done.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadJob, "finished", tell)
        clock.expire_when(done)
        assert guard.call(lambda: "just in time") == "just in time"
        done.clear()
        clock.expire_when(done)
        with pytest.raises(ZeroDivisionError):
            guard.call(divmod, 1, 0)
    shown = guard.snapshot()
    assert (shown["timed_out"], shown["abandoned"]) == (0, 0)
    assert shown["policies"][0]["abandoned"] == 0


def test_a_result_just_after_giving_up_is_thrown_away(clock: Stopwatch, hanging: Hanging) -> None:
    """Exactly one side sees the work to its end: the caller has TimedOut, and nothing is kept."""
    guard = _guard(Timeout(1.0, sync="thread"), clock=clock)
    jobs: list[ThreadJob] = []
    give_up = ThreadJob.give_up

    def tell(job: ThreadJob) -> Any:
        jobs.append(job)
        return give_up(job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadJob, "give_up", tell)
        error = _abandon(guard, clock, hanging)
    _let_go(hanging, error)
    assert (jobs[0]._state, jobs[0]._value, jobs[0]._error) == ("done", None, None)


def test_an_interrupt_while_waiting_leaves_a_thread_behind_that_is_counted(
    hanging: Hanging,
) -> None:
    """KeyboardInterrupt passes through; the abandoned thread is known until it ends."""

    class Interrupting(Stopwatch):
        def wait(self, lock: threading.Lock, seconds: float | None) -> bool:
            assert hanging.begun.wait(30)
            raise KeyboardInterrupt

    guard = _guard(Timeout(1.0, sync="thread"), clock=Interrupting())
    with pytest.raises(KeyboardInterrupt) as caught:
        guard.call(hanging)
    assert guard.snapshot()["abandoned"] == 1
    _let_go(hanging, caught.value)
    assert guard.snapshot()["abandoned"] == 0


def test_each_attempt_has_a_thread_of_its_own(clock: Stopwatch, hanging: Hanging) -> None:
    """A retry after a hung attempt runs beside it, and succeeds."""
    guard = _guard(
        Retry(on=TimedOut, attempts=2, backoff=0), Timeout(1.0, sync="thread"), clock=clock
    )
    attempts: list[str] = []

    def function() -> str:
        attempts.append(threading.current_thread().name)
        return hanging() if len(attempts) == 1 else "second"

    clock.expire_when(hanging.begun)
    assert guard.call(function) == "second"
    assert len(set(attempts)) == 2
    assert guard.snapshot()["abandoned"] == 1


def test_a_thread_is_used_again(clock: Stopwatch) -> None:
    """Calls one after another share one thread: a thread is made only when none is free."""
    guard = _guard(Timeout(1.0, sync="thread", max_threads=8), clock=clock)
    idents = {guard.call(threading.get_ident) for _ in range(20)}
    assert len(idents) == 1


def test_calls_of_many_threads_share_the_cap() -> None:
    """At most `max_threads` run at once; the others are refused, none is lost."""
    policy = Timeout(60.0, sync="thread", max_threads=3)
    guard = _guard(policy)
    start = threading.Barrier(8)
    counting = threading.Lock()
    inside = most = 0
    results: list[Any] = []

    def function() -> str:
        nonlocal inside, most
        with counting:
            inside += 1
            most = max(most, inside)
        with counting:
            inside -= 1
        return "served"

    def caller() -> None:
        start.wait(30)
        results.extend(guard.attempt(function) for _ in range(50))

    callers = [threading.Thread(target=caller) for _ in range(8)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(30)
    assert len(results) == 400
    assert most <= 3
    assert all(r.value == "served" or isinstance(r.error, BulkheadFull) for r in results)
    assert (policy.pool.in_use, policy.pool.abandoned) == (0, 0)


def test_one_policy_in_two_guards_has_one_pool(clock: Stopwatch, hanging: Hanging) -> None:
    """Sharing is explicit, and the threads of both are counted once."""
    policy = Timeout(1.0, sync="thread", max_threads=1)
    one, two = _guard(policy, clock=clock), _guard(policy, clock=clock)
    _abandon(one, clock, hanging)
    with pytest.raises(BulkheadFull):
        two.call(lambda: None)
    assert check_threads(10**6) >= 1
    assert two.snapshot()["abandoned"] == 0


def test_threads_end_with_their_policy(clock: Stopwatch) -> None:
    """No pool has to be closed: idle threads end when the guard is closed, and the policy gone."""
    guard = _guard(Timeout(1.0, sync="thread"), clock=clock)
    worker = guard.call(threading.current_thread)
    assert worker.daemon
    assert worker.is_alive()
    guard.close()
    del guard
    gc.collect()
    worker.join(5)
    assert not worker.is_alive()


def test_time_that_is_over_before_a_thread_begins_is_a_refusal(
    clock: Stopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work that is withdrawn from the queue never starts: DeadlineExceeded."""
    policy = Timeout(1.0, sync="thread", max_threads=1)
    guard = _guard(policy, clock=clock)
    now = threading.Event()
    now.set()
    jobs: list[ThreadJob] = []
    submit = policy.pool.submit

    def never_run(job: ThreadJob) -> bool:
        policy.pool._shared.taken += 1
        jobs.append(job)
        return True

    monkeypatch.setattr(policy.pool, "submit", never_run)
    clock.expire_when(now)
    began: list[int] = []
    with pytest.raises(DeadlineExceeded, match="before the call began"):
        guard.call(began.append, 1)
    assert jobs[0].run() is False  # a worker that comes too late does nothing
    assert not began
    monkeypatch.setattr(policy.pool, "submit", submit)
    assert policy.pool.in_use == 0
    assert guard.call(lambda: "next") == "next"


def test_without_the_last_look_a_finished_result_would_be_lost(
    clock: Stopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give up without asking whether the work is done, and a result of that moment is lost."""
    late = ThreadDriver._raise_late

    def hasty(driver: ThreadDriver, job: ThreadJob, seconds: float) -> None:
        late(driver, job, seconds)
        raise driver.late(seconds, began=True)

    monkeypatch.setattr(ThreadDriver, "_raise_late", hasty)
    with pytest.raises(TimedOut):
        test_a_result_at_the_very_moment_of_expiry_is_the_result(clock)


@pytest.mark.parametrize("counts", ["calls", "attempts"])
def test_attempts_that_were_abandoned_count_as_one_call_at_a_breaker(
    clock: Stopwatch, counts: Any
) -> None:
    """Their threads end after the call, and the first that ends is its verdict."""
    breaker = Breaker(failure_ratio=1.0, window=1000, min_calls=9, counts=counts)
    attempts = [Hanging() for _ in range(3)]
    errors: list[BaseException] = []
    retry = Retry(on=TimedOut, attempts=3, backoff=[0.0] * 3, retry_after=errors.append)
    guard = _guard(retry, Timeout(1.0, sync="thread"), breaker, clock=clock)
    begin = iter(attempts)

    def work() -> str:
        return next(begin)()

    def counted() -> int:
        calls: int = guard.snapshot()["policies"][2]["calls"]
        return calls

    for one in reversed(attempts):
        clock.expire_when(one.begun)
    with pytest.raises(TimedOut) as caught:
        guard.call(work)
    assert counted() == 0
    seen = []
    for one, error in zip(attempts, [*errors, caught.value], strict=True):
        _let_go(one, error)
        seen.append(counted())
    assert seen == ([1, 1, 1] if counts == "calls" else [1, 2, 3])
