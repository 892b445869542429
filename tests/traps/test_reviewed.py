"""What reviews of this very library found, so that it stays found."""

from __future__ import annotations

import asyncio
import functools
import gc
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import closing
from pathlib import Path

import pytest

import seawall
from seawall import (
    Breaker,
    Bulkhead,
    BulkheadFull,
    Cache,
    CircuitOpen,
    DeadlineExceeded,
    Fallback,
    Guard,
    Rejected,
    Retry,
    ThreadBulkhead,
    TimedOut,
    Timeout,
    current_deadline,
    deadline,
    static,
    subscribe,
)
from seawall.events import BreakerChanged, CallDegraded
from seawall.policies.breaker import single_probe
from seawall.policies.retry import adaptive_attempts
from seawall.policies.timeout import adaptive_timeout
from seawall.runtime.mutex import Mutex
from seawall.testing import ScriptedService, answer, fail, hang, run_virtual, slow, virtual_time
from tests.redis.support import eventually

PATIENCE = 20.0


def run_script(script: str) -> str:
    """Run a program of its own; return what it printed."""
    source = str(Path(seawall.__file__).parent.parent)
    head = f"import sys; sys.path.insert(0, {source!r})\n"
    done = subprocess.run(  # noqa: S603 - this very interpreter and a script of this file
        [sys.executable, "-W", "ignore", "-c", head + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- Marks ---


@pytest.mark.parametrize("way", ["call", "attempt"])
def test_a_mark_holds_however_the_function_is_called(way: str):
    """A function marked idempotent=False is not retried by guard.call or guard.attempt either."""
    guard = Guard("marked", Retry(on=ConnectionError, backoff=0.0))
    service = ScriptedService(fail(ConnectionError))

    @guard(idempotent=False)
    def pay() -> None:
        service.call()

    try:
        getattr(guard, way)(pay)
    except ConnectionError:
        pass
    assert service.calls == 1


def test_a_wrapper_of_a_guarded_function_is_not_skipped():
    """functools.wraps copies attributes; the wrapper is called all the same."""
    guard = Guard("wrapped", Retry(on=ConnectionError))
    guarded = guard(lambda: "inner")

    @functools.wraps(guarded)
    def authorised() -> str:
        return f"checked {guarded()}"

    assert guard.call(authorised) == "checked inner"


def test_a_policy_alone_is_not_dropped_by_a_guard_of_the_same_name():
    """What another guard has decorated stays decorated."""
    service = ScriptedService(fail(ConnectionError), answer("second"))

    @Retry(on=ConnectionError, backoff=0.0)
    def fetch() -> str:
        return service.call()

    assert Guard(fetch.__qualname__, Bulkhead(1)).call(fetch) == "second"


def test_methods_decorated_by_a_guard_go_through_it_once():
    """guard.attempt(obj.method) makes as many attempts as configured, with its own self."""
    guard = Guard("methods", Retry(on=ConnectionError, attempts=3, backoff=0.0))

    class Client:
        calls = 0

        @guard
        def get(self, path: str) -> str:
            self.calls += 1
            raise ConnectionError(path)

    client = Client()
    assert guard.attempt(client.get, "/x").attempts == client.calls == 3


# --- On the way up ---


class Frozen(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("frozen")


def test_an_error_that_takes_no_notes_costs_no_slot():
    """An exception that cannot be changed passes through, and everything is given back."""
    bulkhead = Bulkhead(1)
    guard = Guard("frozen", bulkhead, Retry(on=Frozen, attempts=2, backoff=0.0))
    for _ in range(3):
        with pytest.raises(Frozen):
            guard.call(ScriptedService(fail(Frozen)).call)
    assert bulkhead.in_flight == 0


def test_a_predicate_that_exits_costs_no_slot():
    """KeyboardInterrupt in a user's predicate is raised, and everything is given back."""
    bulkhead = Bulkhead(1)

    def interrupted(_error: object, _value: object) -> bool:
        raise KeyboardInterrupt

    guard = Guard("interrupted", bulkhead, Retry(on=interrupted, backoff=0.0))
    for function in (lambda: 1, ScriptedService(fail(ConnectionError)).call):
        with pytest.raises(KeyboardInterrupt):
            guard.call(function)
    assert bulkhead.in_flight == 0


def test_a_timeout_around_a_failing_predicate_is_disarmed():
    """What fails on the way up does not leave a timer behind that cancels something else."""

    async def main() -> None:
        def broken(_error: object, _value: object) -> bool:
            raise SystemError

        guard = Guard("disarmed", Timeout(1.0), Retry(on=broken))
        with pytest.raises(SystemError):
            await guard.acall(ScriptedService(answer(1)).acall)
        await ScriptedService(slow(5.0)).acall()

    run_virtual(main())


def test_stop_iteration_is_the_same_on_all_ways():
    """A function that raises StopIteration raises it through guard.call and guard.attempt."""
    guard = Guard("stop", Retry(on=ConnectionError))
    with pytest.raises(StopIteration):
        guard.call(next, iter([]))
    assert isinstance(guard.attempt(next, iter([])).error, StopIteration)


# --- Refusals ---


def test_a_refusal_after_an_attempt_does_not_hide_the_attempt():
    """Something was sent: then Rejected, which means that nothing was, is not what is raised."""
    breaker = Breaker(consecutive=1, counts="attempts")
    guard = Guard("sent", Retry(on=ConnectionError, backoff=0.0), breaker)
    service = ScriptedService(fail(ConnectionError))
    with pytest.raises(ConnectionError) as raised:
        guard.call(service.call)
    assert "1 attempt in" in raised.value.__notes__[0]
    assert "the next was refused: guard 'sent': the circuit is open" in raised.value.__notes__[0]
    with pytest.raises(CircuitOpen):
        guard.call(service.call)
    assert service.calls == 1


def test_an_outer_breaker_sees_attempts_that_a_refusal_followed():
    """Around a cache, failures further in count, though an inner breaker refused the retry."""
    outer = Breaker(consecutive=3)
    guard = Guard(
        "outer",
        outer,
        Cache(60.0, key=object),
        Retry(on=ConnectionError, backoff=0.0),
        Breaker(consecutive=1, break_for=0.001),
    )
    with virtual_time() as clock:
        del clock
        for _ in range(3):
            guard.policies[3].close()
            with pytest.raises(ConnectionError):
                guard.call(ScriptedService(fail(ConnectionError)).call)
    assert outer.state == "open"


def test_a_nested_refusal_of_the_same_guard_is_a_failure_of_the_outer_call():
    """The outer function did run: it is counted, whatever it was refused inside."""
    guard = Guard("nested", Bulkhead(1))

    def outer() -> None:
        guard.call(int)

    result = guard.attempt(outer)
    assert isinstance(result.error, Rejected)
    assert result.attempts == 1
    assert guard.snapshot()["failed"] == 1


# --- Streams ---


def test_consumers_that_have_enough_are_successes():
    """A stream closed after some items tells the breaker that the dependency works."""
    with virtual_time() as clock:
        breaker = Breaker(consecutive=1, break_for=5.0, probes=single_probe())
        guard = Guard("streams", breaker)

        @guard
        def items(broken: bool):  # noqa: FBT001
            if broken:
                raise ConnectionError
            yield 1
            yield 2

        with pytest.raises(ConnectionError):
            next(items(broken=True))
        clock.advance(5.0)
        stream = items(broken=False)
        assert next(stream) == 1
        stream.close()
        assert breaker.state == "closed"


# --- Threads ---


def test_an_attempt_that_was_abandoned_in_a_thread_was_an_attempt():
    """A thread that outlived its timeout is one attempt in the result, and a failure."""
    begun, release = threading.Event(), threading.Event()
    guard = Guard("abandoned", Timeout(0.05, sync="thread"))

    def hangs() -> None:
        begun.set()
        release.wait(PATIENCE)

    result = guard.attempt(hangs)
    release.set()
    if begun.is_set():
        assert isinstance(result.error, TimedOut)
        assert result.attempts == 1
        assert pickle.loads(pickle.dumps(result.error)).seconds == 0.05  # noqa: S301


def test_a_thread_knows_how_long_its_caller_waits():
    """The limit of an async timeout is the deadline inside the thread."""

    async def main() -> None:
        guard = Guard("deadline in thread", Timeout(30.0), ThreadBulkhead(1))
        left = await guard.acall(lambda: current_deadline().remaining())
        assert 29.0 < left <= 30.0

    asyncio.run(main())


def test_withdrawn_work_leaves_nothing_in_the_queue():
    """Calls that gave up while all threads hang do not pile up."""
    policy = ThreadBulkhead(1, max_queue=1)
    guard = Guard("pile", policy)
    begun, release = threading.Event(), threading.Event()

    def hangs() -> None:
        begun.set()
        release.wait(PATIENCE)

    worker = threading.Thread(target=guard.call, args=(hangs,))
    worker.start()
    assert begun.wait(PATIENCE)
    for _ in range(20):
        with deadline(0.001), pytest.raises(DeadlineExceeded):
            guard.call(int)
    assert not policy.pool._shared.jobs
    release.set()
    worker.join()


def test_a_nested_call_of_a_full_pool_is_refused_instead_of_waiting_for_itself():
    """The thread that would have to serve it is the one that asks."""
    guard = Guard("itself", ThreadBulkhead(1))

    def outer() -> None:
        guard.call(int)

    with pytest.raises(BulkheadFull):
        guard.call(outer)
    assert guard.call(int) == 0


def test_an_adaptive_total_is_explained():
    """A total limit that follows attempts never has room for a second one."""
    guard = Guard(
        "adaptive", Timeout(adaptive_timeout(floor=1, cap=9)), Retry(on=OSError, backoff=0.0)
    )
    assert "an adaptive Timeout around Retry" in guard.explain()


def test_a_thread_that_cannot_be_started_costs_no_place(monkeypatch: pytest.MonkeyPatch):
    """When the system has no more threads, the error is raised and the next call may try."""
    guard = Guard("no threads", ThreadBulkhead(1))
    real = threading.Thread.start

    def cannot(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", cannot)
    with pytest.raises(RuntimeError, match="new thread"):
        guard.call(int)
    monkeypatch.setattr(threading.Thread, "start", real)
    assert guard.call(int) == 0


def test_what_a_thread_worked_on_is_let_go():
    """Arguments and results die with the call, without the collector."""
    guard = Guard("let go", ThreadBulkhead(1))

    class Payload:
        alive = 0

        def __init__(self) -> None:
            Payload.alive += 1

        def __del__(self) -> None:
            Payload.alive -= 1

    gc.disable()
    try:
        for _ in range(5):
            guard.call(lambda payload: [payload], Payload())
        guard.call(int)  # the worker has put the last one down
        assert Payload.alive == 0
    finally:
        gc.enable()


# --- Keys ---


def test_keys_of_the_dead_make_room():
    """A key whose break is long over does not keep a new key from having a breaker of its own."""
    with virtual_time() as clock:
        breaker = Breaker(consecutive=1, break_for=5.0, key=lambda host: host, max_keys=2)
        guard = Guard("hosts", breaker)
        for host in ("a", "b"):
            guard.attempt(ScriptedService(fail(ConnectionError)).call, host)
        guard.attempt(ScriptedService(answer(1)).call, "no room")
        assert set(guard.snapshot()["policies"][0]["keys"]) == {"a", "b", "(others)"}
        clock.advance(3600.0)
        guard.attempt(ScriptedService(answer(1)).call, "new")
        assert "new" in guard.snapshot()["policies"][0]["keys"]


def test_an_open_key_takes_no_retries_from_the_others():
    """Adaptive attempts ask the breaker of the call's own key, and only while it is open."""
    with virtual_time():
        guard = Guard(
            "keys",
            Retry(on=ConnectionError, attempts=adaptive_attempts(3), backoff=0.0),
            Breaker(consecutive=3, break_for=5.0, key=lambda host: host),
        )
        for _ in range(2):
            guard.attempt(ScriptedService(fail(ConnectionError)).call, "bad")
        service = ScriptedService(fail(ConnectionError), answer("second"))
        assert guard.attempt(service.call, "good").value == "second"


def test_the_queue_never_waited_less_than_nothing():
    """Somebody who joined after the clock was read does not make the wait negative."""
    bulkhead = Bulkhead(1, max_wait=10.0)

    async def main() -> None:
        guard = Guard("queue", bulkhead)
        async with guard.hold():
            waiting = asyncio.ensure_future(guard.acall(ScriptedService(answer(1)).acall))
            await asyncio.wait([waiting], timeout=1.0)
            assert bulkhead.queue_wait(-5.0) == 0.0
        assert await waiting == 1

    run_virtual(main())


# --- Single flight ---


def test_a_listener_may_ask_for_the_key_that_is_landing():
    """The event of a stale answer is told after the flight has landed."""
    with virtual_time() as clock:
        cache = Cache(1.0, stale_if_error=100.0)
        guard = Guard("landing", cache)
        service = ScriptedService(answer("old"), fail(ConnectionError))
        guarded = guard(service.call)
        assert guarded() == "old"
        clock.advance(2.0)
        seen: list[str] = []

        def ask_once(_event: object) -> None:
            if not seen:
                seen.append("asks")
                seen.append(guarded())

        stop = subscribe(ask_once, CallDegraded)
        assert guarded() == "old"
        stop()
        assert seen == ["asks", "old"]


def test_one_callers_short_deadline_is_not_everybodys():
    """A follower with more time than the leader had tries again itself."""

    async def main() -> None:
        guard = Guard("patient", Cache(60.0, key=lambda: "k"), Timeout(50.0))
        service = ScriptedService(slow(5.0, "answer"))

        async def ask(seconds: float) -> object:
            with deadline(seconds):
                return (await guard.aattempt(service.acall)).value

        assert await asyncio.gather(ask(1.0), ask(20.0)) == [None, "answer"]

    run_virtual(main())


# --- Locks, signals, forks ---


def test_a_snapshot_in_a_signal_handler_does_not_hang():
    """Statistics may be read at any moment, also in the middle of being read."""
    guard = Guard("signals", Retry(on=ConnectionError))
    guard.call(int)
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(guard.snapshot()))
    try:
        with guard.stats._lock:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen


def test_a_mutex_survives_what_fails_inside_it(caplog):
    """Put-off work waits for the outermost section; if it raises, the rest is done, and logged."""
    mutex = Mutex()
    done: list[str] = []

    def breaks() -> None:
        raise ValueError

    with mutex:
        with mutex:
            mutex.do(breaks)
            mutex.do(lambda: done.append("late"))
        assert not done
    thread = threading.Thread(target=lambda: mutex.do(lambda: done.append("free")))
    thread.start()
    thread.join(PATIENCE)
    eventually(lambda: len(done) == 2)
    assert sorted(done) == ["free", "late"]
    assert "work that had to wait for a lock failed" in caplog.text


def test_guards_made_while_a_breaker_reports_do_no_harm():
    """A breaker shared with guards that come and go tells its changes without stumbling."""
    breaker = Breaker(consecutive=1)
    guard = Guard("telling", breaker)
    kept = []
    stop = subscribe(
        lambda _event: kept.append(Guard(f"made {len(kept)}", breaker)), BreakerChanged
    )
    guard.attempt(ScriptedService(fail(ConnectionError)).call)
    stop()
    assert breaker.state == "open"
    assert len(kept) == 1


def test_a_timeout_acts_in_a_child_forked_from_a_running_loop():
    """The loop of the parent is not taken for that of the child."""
    printed = run_script("""
        import asyncio, os
        from seawall import Guard, Timeout, TimedOut
        guard = Guard("forked", Timeout(0.05))
        @guard
        async def quick(): return 1
        @guard
        async def slow(): await asyncio.get_running_loop().create_future()
        async def parent():
            await quick()
            child = os.fork()
            if child == 0:
                asyncio._set_running_loop(None)
                try: asyncio.run(slow())
                except TimedOut: os._exit(7)
                os._exit(1)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        asyncio.run(parent())
    """)
    assert printed == "7"


def test_children_draw_their_own_jitter():
    """Forked workers do not retry in step."""
    printed = run_script("""
        import os
        from seawall import Guard, Retry
        guard = Guard("jitter", Retry(on=ValueError))
        guard.rng.random()
        for _ in range(2):
            read, write = os.pipe()
            if os.fork() == 0:
                os.write(write, repr(guard.rng.random()).encode())
                os._exit(0)
            print(os.read(read, 100).decode())
            os.wait()
    """)
    first, second = printed.splitlines()
    assert first != second


def test_a_function_with_its_own_mark_draws_from_the_guards_generator():
    """A child process replaces that one, so calls of marked functions do not retry in step."""
    guard = Guard("marked", Retry(on=ValueError))
    with closing(guard):
        marked = guard(idempotent=False).__self__  # type: ignore[attr-defined]
        marked.rng.random()
        assert marked.rng is guard.rng
        guard._after_fork()
        assert marked.rng is guard.rng


def test_a_call_that_a_fork_took_along_gives_back_no_slot_too_many():
    """In the child the bulkhead has exactly its slots, also after that call has ended."""
    printed = run_script("""
        import os
        from seawall import Bulkhead, Guard
        bulkhead = Bulkhead(2)
        guard = Guard("along", bulkhead)
        def work():
            guard.call(int)
            return os.fork()
        child = guard.call(work)
        if child == 0:
            guard.call(int)
            print(len(bulkhead.slots.free), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
    """)
    assert printed == "2"


# --- Time ---


def test_another_clock_than_the_loops_does_not_spin():
    """A guard on a clock that stands still is timed by its loop."""

    async def main() -> None:
        from seawall.clock import VirtualClock

        guard = Guard("standing", Timeout(2.0), clock=VirtualClock())
        result = await guard.aattempt(ScriptedService(hang()).acall)
        assert isinstance(result.error, TimedOut)
        assert asyncio.get_running_loop().time() == 2.0

    run_virtual(main())


def test_a_deadline_block_is_entered_once_at_a_time():
    """One deadline(...) object in two places would mix up whose time it is."""
    block = deadline(5.0)
    with block, pytest.raises(RuntimeError, match="for each block"), block:
        pass
    with block:
        pass


def test_a_group_is_answered_if_all_its_leaves_are():
    """Fallback and Retry agree on exception groups."""
    group = ExceptionGroup("both", [ConnectionError(), ConnectionError()])
    mixed = ExceptionGroup("mixed", [ConnectionError(), KeyError()])
    guard = Guard("groups", Fallback(static("less"), on=ConnectionError))
    assert guard.call(ScriptedService(fail(group)).call) == "less"
    with pytest.raises(ExceptionGroup):
        guard.call(ScriptedService(fail(mixed)).call)
    assert Retry(on=ExceptionGroup).is_retryable(mixed, None)


def test_a_bigger_bulkhead_has_a_bigger_waiting_room():
    """Where the room was not chosen it follows the limit."""
    bulkhead = Bulkhead(1, max_wait=1.0)
    bulkhead.update(limit=10)
    assert bulkhead.slots.queue.limit == 10
