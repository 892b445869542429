"""Traps around timeouts, threads and what they carry with them."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest

from seawall import (
    Breaker,
    Bulkhead,
    BulkheadFull,
    Cache,
    Fallback,
    Guard,
    Retry,
    ThreadBulkhead,
    TimedOut,
    Timeout,
    current_deadline,
    deadline,
)
from seawall.clock import current_clock
from seawall.context import Criticality, criticality, current_criticality
from seawall.testing import ScriptedService, answer, hang, run_virtual, virtual_time

color: contextvars.ContextVar[str] = contextvars.ContextVar("color", default="none")


class Own(TimeoutError):
    pass


@pytest.mark.parametrize("error", [TimeoutError("mine"), Own("mine")])
@pytest.mark.parametrize("how", ["async", "cooperative", "thread"])
def test_a_users_timeout_error_stays_the_users(error: TimeoutError, how: str):
    """Trap: a TimeoutError of the function's own is relabelled as the library's, or counted so."""

    def plain() -> None:
        raise error

    async def coroutine() -> None:
        raise error

    async def main() -> None:
        sync = None if how == "async" else how
        guard = Guard("own", Timeout(5.0, sync=sync))
        guard.close()
        call = guard.aattempt(coroutine) if how == "async" else None
        result = guard.attempt(plain) if call is None else await call
        with pytest.raises(TimeoutError) as caught:
            result.unwrap()
        assert caught.value is error
        assert not isinstance(caught.value, TimedOut)
        assert guard.snapshot()["timed_out"] == 0

    run_virtual(main())


def test_a_users_cancellation_is_no_timeout():
    """Trap: a CancelledError that the function raises by itself becomes a timeout."""

    async def main() -> None:
        guard = Guard("own-cancel", Timeout(5.0))

        async def gives_up() -> None:
            raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            await guard.acall(gives_up)
        assert guard.snapshot()["timed_out"] == 0

    run_virtual(main())


def test_a_timeout_inside_asyncio_timeout_is_told_apart():
    """Trap: two timeouts around one call take each other's cancellation for their own."""

    async def main() -> None:
        guard = Guard("apart", Timeout(5.0))
        with pytest.raises(TimeoutError) as outer:
            async with asyncio.timeout(1.0):
                await guard.acall(ScriptedService(hang()).acall)
        assert not isinstance(outer.value, TimedOut)
        with pytest.raises(TimedOut):
            async with asyncio.timeout(5.0):
                await Guard("apart2", Timeout(1.0)).acall(ScriptedService(hang()).acall)
        # Both at the same instant: something must be raised, and nothing be left behind.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await guard.acall(ScriptedService(hang()).acall)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        assert await guard.acall(ScriptedService(answer("next")).acall) == "next"

    run_virtual(main())


STACKS = {
    "thread timeout": lambda: [Timeout(5.0, sync="thread")],
    "thread bulkhead": lambda: [ThreadBulkhead(2)],
    "deep": lambda: [
        Fallback(lambda: None, on=LookupError),
        Cache(5.0, key=object),
        Retry(on=OSError),
        Breaker(),
        Bulkhead(2),
        Timeout(5.0, sync="thread"),
    ],
}


@pytest.mark.parametrize("stack", STACKS)
def test_context_variables_go_along_into_threads(stack: str):
    """Trap: context variables (and so trace ids, tenants, deadlines) are lost in a thread pool."""
    here = threading.get_ident()

    def look() -> tuple[object, ...]:
        left = current_deadline()
        assert left is not None
        assert threading.get_ident() != here
        return color.get(), current_criticality(), left.remaining() <= 3.0

    with virtual_time():
        guard = Guard(f"context {stack}", *STACKS[stack]())
        token = color.set("blue")
        with deadline(3.0), criticality(Criticality.SHEDDABLE):
            seen = guard.call(look)
        color.reset(token)
        assert seen == ("blue", Criticality.SHEDDABLE, True)
        # And nothing that one job set is there for the next.
        guard.call(lambda: color.set("red"))
        assert guard.call(color.get) == "none"


def test_context_variables_go_along_from_tasks_into_threads():
    """Trap: a task's context variables are not those of the thread that works for it."""

    async def main() -> None:
        guard = Guard("context-tasks", ThreadBulkhead(2))

        async def caller(name: str) -> str:
            color.set(name)
            return await guard.acall(color.get)

        loop = asyncio.get_running_loop()
        with loop.hold_time():
            assert await asyncio.gather(caller("blue"), caller("red")) == ["blue", "red"]

    run_virtual(main())


def test_hung_calls_do_not_make_an_instant_call_time_out():
    """Trap: hung calls fill the pool, and a call that takes no time waits for its own timeout."""
    release = threading.Event()
    with virtual_time() as clock:
        guard = Guard("hung", Timeout(1.0, sync="thread", max_threads=2))
        for _ in range(2):
            with pytest.raises(TimedOut):
                guard.call(release.wait)
        before = clock.now()
        with pytest.raises(BulkheadFull, match="2 of them with calls that nobody waits for"):
            guard.call(lambda: "instant")
        assert clock.now() == before
        assert guard.snapshot()["abandoned"] == 2
        release.set()
        for _ in range(500):
            if not guard.snapshot()["abandoned"]:
                break
            threading.Event().wait(0.01)
        assert guard.call(lambda: "instant") == "instant"


def test_no_lock_is_held_during_the_call():
    """Trap: a lock is held while the function runs, so that threads go one after the other."""
    with virtual_time():
        guard = Guard(
            "parallel",
            Cache(5.0, key=lambda number: number),
            Retry(on=OSError),
            Breaker(slow_after=100.0, slow_ratio=0.5, min_calls=5),
            Bulkhead(4),
            Timeout(50.0, sync="cooperative"),
        )
        together = threading.Barrier(4)

        @guard
        def meet(number: int) -> int:
            together.wait(timeout=5.0)  # all four are inside at once, or this raises
            return number

        results: list[int] = []
        threads = [
            threading.Thread(target=lambda n=number: results.append(meet(n))) for number in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(results) == [0, 1, 2, 3]


def test_no_lock_is_held_while_events_are_told():
    """Trap: a subscriber that asks the guard for its state waits for a lock that its caller has."""
    from seawall import subscribe
    from seawall.events import BreakerChanged

    seen: list[dict] = []
    with virtual_time():
        guard = Guard("listening", Breaker(consecutive=1), Bulkhead(1))

        def listener(_event: object) -> None:
            worker = threading.Thread(target=lambda: seen.append(guard.snapshot()))
            worker.start()
            worker.join(timeout=5.0)

        unsubscribe = subscribe(listener, BreakerChanged)
        try:
            with pytest.raises(ZeroDivisionError):
                guard.call(lambda: 1 / 0)
        finally:
            unsubscribe()
    assert seen[0]["policies"][0]["state"] == "open"


def test_the_time_in_the_queue_counts_for_the_total():
    """Trap: the clock of a call starts when it gets its slot, so waiting comes on top."""

    async def main() -> float:
        guard = Guard("queue", Timeout(1.0), Bulkhead(1, max_wait=60.0))
        began = current_clock().now()
        async with guard.hold():
            with pytest.raises(Exception, match="before the call began"):
                await guard.acall(ScriptedService(answer()).acall)
        return current_clock().now() - began

    assert run_virtual(main()) == pytest.approx(1.0)
