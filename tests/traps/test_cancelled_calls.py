"""Traps around cancellation, half-open probes and results that come too late."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from seawall import Breaker, Bulkhead, BulkheadFull, CircuitOpen, Guard, Timeout
from seawall.clock import VirtualClock
from seawall.policies.breaker import n_of_m, single_probe
from seawall.testing import ScriptedService, answer, fail, hang, run_virtual, slow


async def turn() -> None:
    """Let everything that is ready run once."""
    bell = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(bell.set_result, None)
    await bell


async def cancel(task: asyncio.Task) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def begin(guard: Guard, service: ScriptedService) -> asyncio.Task:
    """Start a call and let it come as far as it can."""
    task = asyncio.create_task(guard.acall(service.acall))
    await turn()
    await turn()
    return task


async def trip(guard: Guard) -> None:
    with pytest.raises(ConnectionError):
        await guard.acall(ScriptedService(fail(ConnectionError)).acall)


def test_cancelled_call_is_no_failure():
    """Trap: cancelled calls are counted as failures, and impatient callers open the circuit."""

    async def main() -> None:
        breaker = Breaker(consecutive=2)
        guard = Guard("cancelled-failure", breaker)
        for _ in range(5):
            await cancel(await begin(guard, ScriptedService(hang())))
        assert breaker.state == "closed"
        assert guard.snapshot()["cancelled"] == 5
        assert guard.snapshot()["failed"] == 0

    run_virtual(main())


def test_cancelled_probe_is_no_success():
    """Trap: a cancelled probe is counted as a success and closes a circuit that should be open."""

    async def main() -> None:
        breaker = Breaker(consecutive=1, break_for=5.0, probes=single_probe())
        guard = Guard("cancelled-probe", breaker)
        await trip(guard)
        clock.advance(5.0)
        probe = await begin(guard, ScriptedService(hang()))
        assert breaker.state == "half_open"
        await cancel(probe)
        assert breaker.state == "half_open"
        assert await guard.acall(ScriptedService(answer("back")).acall) == "back"
        assert breaker.state == "closed"

    clock = VirtualClock()
    run_virtual(main(), clock=clock)


def test_own_timeout_of_a_probe_is_a_failure():
    """Trap: a probe that our timeout stops looks cancelled, and a dead server is never noticed."""

    async def main() -> None:
        breaker = Breaker(consecutive=1, break_for=5.0, probes=single_probe())
        guard = Guard("timed-out-probe", Timeout(1.0), breaker)
        await trip(guard)
        clock.advance(5.0)
        with pytest.raises(TimeoutError):
            await guard.acall(ScriptedService(hang()).acall)
        assert breaker.state == "open"

    clock = VirtualClock()
    run_virtual(main(), clock=clock)


@pytest.mark.parametrize("allowed", [1, 3])
def test_fifty_callers_are_not_fifty_probes(allowed: int):
    """Trap: when the break is over, every caller that comes at that moment is let through."""

    async def main() -> None:
        breaker = Breaker(consecutive=1, break_for=5.0, probes=n_of_m(allowed, allowed))
        guard = Guard(f"fifty-callers-{allowed}", breaker)
        await trip(guard)
        clock.advance(5.0)
        service = ScriptedService(slow(1.0, "fine"))
        calls = [guard.acall(service.acall) for _ in range(50)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert service.peak == service.calls == allowed
        assert [type(r) for r in results].count(CircuitOpen) == 50 - allowed
        assert breaker.state == "closed"

    clock = VirtualClock()
    run_virtual(main(), clock=clock)


@pytest.mark.parametrize("half_open", [False, True])
def test_late_success_from_before_the_trip_closes_nothing(half_open: bool):  # noqa: FBT001
    """Trap: a call admitted before the trip succeeds afterwards and closes the circuit."""

    async def main() -> None:
        breaker = Breaker(consecutive=1, break_for=5.0, probes=single_probe())
        guard = Guard(f"late-success-{half_open}", breaker)
        late = await begin(guard, ScriptedService(slow(10.0)))
        await trip(guard)
        if half_open:
            clock.advance(5.0)
            probe = await begin(guard, ScriptedService(hang()))
        before = breaker.state
        await late
        assert breaker.state == before == ("half_open" if half_open else "open")
        if half_open:
            await cancel(probe)

    clock = VirtualClock()
    run_virtual(main(), clock=clock)


def test_late_failure_from_before_the_trip_fails_no_probe():
    """Trap: a call admitted before the trip fails later and is taken for the probe's verdict."""

    async def main() -> None:
        breaker = Breaker(consecutive=1, break_for=5.0, probes=single_probe())
        guard = Guard("late-failure", breaker)
        release = asyncio.Event()

        async def fails_late() -> None:
            await release.wait()
            raise ConnectionError

        late = asyncio.create_task(guard.acall(fails_late))
        await turn()
        await trip(guard)
        clock.advance(5.0)
        probe = await begin(guard, ScriptedService(slow(1.0)))
        release.set()
        with pytest.raises(ConnectionError):
            await late
        assert breaker.state == "half_open"
        await probe
        assert breaker.state == "closed"

    clock = VirtualClock()
    run_virtual(main(), clock=clock)


@pytest.mark.parametrize("order", ["fifo", "lifo", "criticality"])
def test_cancelled_waiter_takes_no_slot_with_it(order):
    """Trap: a waiter that is cancelled, before or after it was granted a slot, keeps the slot."""

    async def main() -> None:
        bulkhead = Bulkhead(1, max_wait=60.0, max_waiting=10, order=order)
        guard = Guard(f"waiter-{order}", bulkhead)
        holder = guard.hold()
        await holder.__aenter__()
        waiting = [await begin(guard, ScriptedService(answer())) for _ in range(4)]
        assert bulkhead.waiting == 4
        await cancel(waiting[1])
        await holder.__aexit__(None, None, None)
        # The slot is granted to one of them, which has not run yet: all are cancelled now.
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert (bulkhead.in_flight, bulkhead.waiting) == (0, 0)
        assert await guard.acall(ScriptedService(answer("in")).acall) == "in"

    run_virtual(main())


def test_waiter_that_times_out_as_it_is_granted_keeps_the_slot_or_gives_it_back():
    """Trap: a slot granted at the very moment at which the waiter gives up is lost."""

    async def main() -> None:
        bulkhead = Bulkhead(1, max_wait=1.0, max_waiting=10)
        guard = Guard("granted-late", bulkhead, replace=True)
        holders = asyncio.create_task(guard.acall(ScriptedService(slow(1.0)).acall))
        await turn()
        calls = [guard.acall(ScriptedService(answer("in")).acall) for _ in range(3)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        await holders
        assert all(r == "in" or isinstance(r, BulkheadFull) for r in results)
        assert (bulkhead.in_flight, bulkhead.waiting) == (0, 0)

    for seed in range(20):
        run_virtual(main(), seed=seed)
