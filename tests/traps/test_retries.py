"""Traps around retries: shared state, total time, what counts as an attempt."""

from __future__ import annotations

import asyncio
import threading

import pytest

from seawall import (
    Bulkhead,
    BulkheadFull,
    Fallback,
    Guard,
    Retry,
    RetryBudget,
    ThreadBulkhead,
    TimedOut,
    Timeout,
    static,
    subscribe,
)
from seawall.backoff import constant
from seawall.clock import VirtualClock, current_clock
from seawall.context import current_attempt
from seawall.events import CallRetried
from seawall.policies.retry import InFlightRatio
from seawall.testing import ScriptedService, answer, fail, hang, run_virtual, virtual_time


def pause(seconds: float) -> asyncio.Future[None]:
    loop = asyncio.get_running_loop()
    bell = loop.create_future()
    loop.call_later(seconds, bell.set_result, None)
    return bell


@pytest.mark.parametrize("seed", range(5))
def test_concurrent_tasks_do_not_corrupt_a_shared_retry(seed: int):
    """Trap: the retry object keeps the state of the call in itself, so tasks share their count."""

    async def main() -> None:
        retry = Retry(on=ConnectionError, attempts=4, backoff=[0.1, 0.2, 0.4])
        guard = Guard("shared-retry", retry)
        guard.close()

        async def caller(number: int) -> None:
            seen: list[tuple[int, float]] = []
            began = current_clock().now()

            async def attempt() -> int:
                seen.append((current_attempt(), round(current_clock().now() - began, 6)))
                await pause(0.001 * number)
                raise ConnectionError(number)

            with pytest.raises(ConnectionError) as caught:
                await guard.acall(attempt)
            assert caught.value.args == (number,)
            took = 0.001 * number
            whens = [0.0, took + 0.1, 2 * took + 0.3, 3 * took + 0.7]
            assert seen == [(i + 1, pytest.approx(when)) for i, when in enumerate(whens)]

        await asyncio.gather(*(caller(number) for number in range(20)))

    run_virtual(main(), seed=seed)


def test_concurrent_threads_do_not_corrupt_a_shared_retry():
    """Trap: threads that share a retry object take each other's attempts."""
    with virtual_time():
        guard = Guard("thread-retry", Retry(on=KeyError, attempts=5, backoff=constant(0.001)))
        counts: list[list[int]] = []

        def caller() -> None:
            mine: list[int] = []

            def attempt() -> None:
                mine.append(current_attempt())
                raise KeyError

            for _ in range(20):
                with pytest.raises(KeyError):
                    guard.call(attempt)
            counts.append(mine)

        threads = [threading.Thread(target=caller) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counts == [[1, 2, 3, 4, 5] * 20] * 6


def test_a_total_timeout_ends_in_the_middle_of_an_attempt():
    """Trap: the total is looked at between attempts only, so that a limit of 0.2 s takes 1 s."""

    async def main() -> float:
        began = current_clock().now()
        guard = Guard("total", Timeout(0.2), Retry(on=Exception, attempts=3), Timeout(1.0))
        with pytest.raises(TimedOut):
            await guard.acall(ScriptedService(hang()).acall)
        return current_clock().now() - began

    assert run_virtual(main()) == pytest.approx(0.2)


def test_a_total_timeout_ends_in_the_middle_of_a_pause():
    """Trap: a pause that the total cannot hold is slept to its end."""

    async def main() -> tuple[float, int]:
        began = current_clock().now()
        guard = Guard(
            "total-pause", Timeout(0.2), Retry(on=OSError, attempts=3, backoff=constant(1.0))
        )
        service = ScriptedService(fail(ConnectionError))
        with pytest.raises((TimedOut, ConnectionError)):
            await guard.acall(service.acall)
        return current_clock().now() - began, service.calls

    took, calls = run_virtual(main())
    assert took <= 0.2
    assert calls == 1


def test_a_total_timeout_of_plain_functions_in_threads_is_kept():
    """Trap: a blocked attempt in a thread is waited for though the total is over."""
    release = threading.Event()
    with virtual_time() as clock:
        guard = Guard(
            "total-thread",
            Timeout(0.2, sync="thread"),
            Retry(on=OSError, attempts=3),
            Timeout(1.0, sync="thread"),
        )
        with pytest.raises(TimedOut):
            guard.call(release.wait)
        # The worker inside waits in virtual time too, so at most its own second passes.
        assert clock.now() <= 1.2
        release.set()


@pytest.mark.parametrize("inner", ["bulkhead", "threads"])
def test_retried_refusals_count_as_attempts(inner: str):
    """Trap: a refusal starts no function, so it is not counted, and is retried for ever."""
    retried = []

    def stop(event: CallRetried) -> None:
        retried.append(event.attempt)
        if len(retried) > 10:
            raise KeyboardInterrupt

    with virtual_time():
        policy = Bulkhead(1) if inner == "bulkhead" else ThreadBulkhead(1, max_queue=0)
        guard = Guard(
            f"refused-{inner}",
            Retry(on=BulkheadFull, attempts=3, backoff=constant(0.1)),
            policy,
        )
        if inner == "bulkhead":
            taken = policy.slots.take()
            assert taken
        else:
            policy.pool._shared.taken = 1
        unsubscribe = subscribe(stop, CallRetried)
        try:
            with pytest.raises(BulkheadFull):
                guard.call(lambda: None)
        finally:
            unsubscribe()
    assert len(retried) == 2


def test_retry_inside_retry_adds_up_as_explained():
    """Trap: two retries in one stack multiply, or share one count and the outer never acts."""
    with virtual_time():
        guard = Guard(
            "nested",
            Retry(on=KeyError, attempts=2, backoff=constant(0.1)),
            Retry(on=KeyError, attempts=3, backoff=constant(0.1)),
        )
        service = ScriptedService(fail(KeyError))
        with pytest.raises(KeyError):
            guard.call(service.call)
    assert "up to 4 attempts" in guard.explain()
    assert service.calls == 4


def no_level() -> None:
    raise LookupError("no level")


def test_a_fallback_inside_a_retry_swallows_no_error():
    """Trap: what a fallback remembers of the first attempt turns the second's error into None."""
    with virtual_time():
        guard = Guard(
            "inside",
            Retry(on=ValueError, attempts=2, backoff=constant(0.1)),
            Fallback(no_level, on=ValueError),
        )
        service = ScriptedService(fail(ValueError))
        with pytest.raises(ValueError):  # noqa: PT011 - which one does not matter
            guard.call(service.call)
    assert service.calls == 2


def test_a_real_answer_after_a_failed_fallback_is_not_degraded():
    """Trap: a fallback that failed in the first attempt claims the second attempt's real answer."""
    with virtual_time():
        guard = Guard(
            "claimed",
            Retry(on=ValueError, attempts=2, backoff=constant(0.1)),
            Fallback(no_level, on=ValueError),
        )
        result = guard.attempt(ScriptedService(fail(ValueError), answer("real")).call)
    assert (result.value, result.degraded) == ("real", False)
    assert guard.snapshot()["degraded"] == 0


def test_every_attempt_gets_its_own_fallback():
    """Trap: a fallback is used up by the first attempt that needed it."""
    with virtual_time():
        guard = Guard(
            "own",
            Retry(on=lambda _error, value: value == "poor", attempts=3, backoff=constant(0.1)),
            Fallback(static("poor"), on=ValueError),
        )
        service = ScriptedService(fail(ValueError))
        assert guard.call(service.call) == "poor"
    assert service.calls == 3


def test_the_budget_is_given_back_by_a_cancelled_pause():
    """Trap: a retry whose pause is cancelled stays counted as in flight."""

    async def main() -> None:
        budget = RetryBudget(InFlightRatio(0.2, floor=1))
        retry = Retry(on=KeyError, attempts=3, backoff=constant(10.0), budget=budget)
        guard = Guard("given-back", retry)
        for _ in range(5):
            task = asyncio.create_task(guard.acall(ScriptedService(fail(KeyError)).acall))
            await pause(1.0)
            assert budget.snapshot()["retries"] == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (budget.snapshot()["active"], budget.snapshot()["retries"]) == (0, 0)

    run_virtual(main(), clock=VirtualClock())
