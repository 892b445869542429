"""Bulkhead: who gets in, who waits, who is refused, and what changes at run time."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from seawall import (
    Bulkhead,
    BulkheadFull,
    Criticality,
    DeadlineExceeded,
    Guard,
    Timeout,
    criticality,
    deadline,
    subscribe,
)
from seawall.clock import VirtualClock
from seawall.events import CallRejected
from seawall.runtime.slots import Slots
from seawall.testing import (
    ScriptedService,
    answer,
    fail,
    hang,
    held_permits,
    no_leaked_permits,
    run_virtual,
    slow,
    virtual_time,
)
from tests.support import let_pass, new_guard


async def _all(*calls: Any) -> list[Any]:
    """Run the calls at once, begun in this order; errors are results."""
    return await asyncio.gather(*calls, return_exceptions=True)


# Without waiting


def test_calls_beyond_the_limit_are_refused_at_once() -> None:
    """With `max_wait=0`, the default, nobody waits."""

    async def main() -> None:
        bulkhead = Bulkhead(2)
        guard = new_guard(bulkhead)
        service = ScriptedService(slow(1.0, "served"))
        results = await _all(*[guard.acall(service.acall) for _ in range(4)])
        assert results[:2] == ["served", "served"]
        assert [type(result) for result in results[2:]] == [BulkheadFull] * 2
        assert service.calls == service.peak == 2
        refusal = results[2]
        assert (refusal.guard, refusal.policy) == (guard.name, "bulkhead")
        assert results[2] is not results[3]
        assert guard.snapshot()["rejected"] == 2
        assert guard.snapshot()["policies"][0]["rejected"] == 2

    run_virtual(main())


def test_a_refusal_tells_when_to_come_again() -> None:
    """`retry_after` is what a typical call takes, once that is known."""

    async def main() -> None:
        bulkhead = Bulkhead(1)
        guard, other = new_guard(bulkhead), new_guard(bulkhead)
        service = ScriptedService(slow(2.0))
        async with other.hold():
            with pytest.raises(BulkheadFull) as caught:
                await guard.acall(service.acall)
            assert caught.value.retry_after is None
        await guard.acall(service.acall)
        async with other.hold():
            with pytest.raises(BulkheadFull) as caught:
                await guard.acall(service.acall)
            assert caught.value.retry_after == pytest.approx(2.0, rel=0.1)

    run_virtual(main())


@pytest.mark.parametrize("step", [answer(1), fail(ValueError), fail(BulkheadFull)])
def test_a_slot_comes_back_however_the_call_ends(step: Any) -> None:
    """Success, error, and a refusal of the function itself: the slot is free again."""
    with virtual_time():
        bulkhead = Bulkhead(1)
        guard = new_guard(bulkhead)
        for _ in range(3):
            guard.attempt(ScriptedService(step).call)
        assert bulkhead.in_flight == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_slot_comes_back_when_the_process_is_about_to_end(error: type[BaseException]) -> None:
    """Exits pass through and leave the slot free."""
    bulkhead = Bulkhead(1)
    guard = new_guard(bulkhead)

    def function() -> None:
        raise error

    with pytest.raises(error):
        guard.call(function)
    assert bulkhead.in_flight == 0


def test_a_slot_comes_back_when_an_inner_policy_refuses() -> None:
    """Two bulkheads in one guard: the outer one's slot is not lost to the inner one's refusal."""
    with virtual_time():
        outer, inner = Bulkhead(2), Bulkhead(1)
        guard, other = new_guard(outer, inner), new_guard(inner)
        with other.hold(), pytest.raises(BulkheadFull):
            guard.call(lambda: None)
        assert (outer.in_flight, inner.in_flight) == (0, 0)


def test_held_slots_can_be_seen_and_leaks_fail_a_test() -> None:
    """The helpers for tests know what is taken, by guard."""
    bulkhead = Bulkhead(2)
    guard = new_guard(bulkhead)
    with guard.hold():
        assert held_permits()[guard.name] == 1
        assert bulkhead.in_flight == 1
    assert guard.name not in held_permits()
    held = guard.hold()
    with pytest.raises(AssertionError, match=guard.name), no_leaked_permits():
        held.__enter__()
    held.__exit__(None, None, None)


# Waiting


def test_a_waiter_gets_the_slot_the_moment_it_is_free() -> None:
    """Waiting costs exactly the time until somebody leaves."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        bulkhead = Bulkhead(1, max_wait=5.0)
        guard = new_guard(bulkhead)
        service = ScriptedService(slow(1.0))
        calls = [loop.create_task(guard.acall(service.acall)) for _ in range(2)]
        await let_pass(0.5)
        assert (bulkhead.in_flight, bulkhead.waiting) == (1, 1)
        assert bulkhead.queue_wait(loop.time()) == 0.5
        shown = guard.snapshot()["policies"][0]
        assert (shown["in_flight"], shown["waiting"], shown["queue_wait"]) == (1, 1, 0.5)
        await _all(*calls)
        assert loop.time() == 2.0
        assert service.peak == 1

    run_virtual(main())


def test_who_waits_too_long_is_refused_in_time() -> None:
    """`max_wait` is exact, and the message tells it."""

    async def main() -> None:
        bulkhead = Bulkhead(1, max_wait=1.5)
        guard = new_guard(bulkhead)
        async with guard.hold():
            with pytest.raises(BulkheadFull, match=r"waited 1\.5 s"):
                await guard.acall(ScriptedService(answer()).acall)
            assert asyncio.get_running_loop().time() == 1.5
            assert bulkhead.waiting == 0

    run_virtual(main())


def test_a_plain_call_waits_too() -> None:
    """The sync runner blocks its thread for as long, on its clock."""
    with virtual_time() as clock:
        bulkhead = Bulkhead(1, max_wait=1.5)
        guard = new_guard(bulkhead)
        with guard.hold():
            with pytest.raises(BulkheadFull):
                guard.call(lambda: None)
            assert clock.now() == 1.5
        assert (bulkhead.in_flight, bulkhead.waiting) == (0, 0)


def test_the_deadline_ends_the_waiting_with_its_own_error() -> None:
    """DeadlineExceeded, not BulkheadFull: there is no point in trying again."""

    async def main() -> None:
        bulkhead = Bulkhead(1, max_wait=5.0)
        guard = new_guard(bulkhead)
        service = ScriptedService(answer())
        async with guard.hold():
            with deadline(2.0), pytest.raises(DeadlineExceeded, match="waiting for a slot"):
                await guard.acall(service.acall)
            assert asyncio.get_running_loop().time() == 2.0
            assert service.calls == 0
            # A deadline that is later than max_wait does not matter.
            with deadline(20.0), pytest.raises(BulkheadFull):
                await guard.acall(service.acall)
            assert asyncio.get_running_loop().time() == 7.0
        assert (bulkhead.in_flight, bulkhead.waiting) == (0, 0)

    run_virtual(main())


def test_a_deadline_on_another_clock_ends_the_waiting_too() -> None:
    """What is left of it is what counts."""
    other = VirtualClock(1000.0)
    with virtual_time() as clock:
        guard = new_guard(Bulkhead(1, max_wait=5.0))
        with guard.hold(), deadline(2.0, clock=other), pytest.raises(DeadlineExceeded):
            guard.call(lambda: None)
        assert clock.now() == 2.0


def test_waiting_without_end() -> None:
    """`max_wait=inf` waits as long as it takes."""

    async def main() -> None:
        guard = new_guard(Bulkhead(1, max_wait=float("inf")))
        results = await _all(*[guard.acall(let_pass, 1e6) for _ in range(2)])
        assert results == [None, None]
        assert asyncio.get_running_loop().time() == 2e6

    run_virtual(main())


def test_a_newcomer_does_not_overtake_who_waits() -> None:
    """A slot that is free for a moment belongs to the one who waits for it."""

    async def main() -> None:
        guard = new_guard(Bulkhead(1, max_wait=5.0))
        loop = asyncio.get_running_loop()
        order: list[str] = []

        async def function(name: str) -> None:
            order.append(name)
            await let_pass(1.0)

        async with guard.hold():
            waiter = loop.create_task(guard.acall(function, "waiter"))
            await let_pass(1.0)
        # The slot was handed over already, though the waiter's task has not run yet.
        newcomer = loop.create_task(guard.acall(function, "newcomer"))
        await _all(waiter, newcomer)
        assert order == ["waiter", "newcomer"]

    run_virtual(main())


def test_the_room_is_as_large_as_the_limit_unless_given() -> None:
    """A longer queue only adds latency."""

    async def main() -> None:
        guard = new_guard(Bulkhead(2, max_wait=9.0))
        service = ScriptedService(slow(1.0, "served"))
        results = await _all(*[guard.acall(service.acall) for _ in range(6)])
        assert results[:4] == ["served"] * 4
        assert all("no room to wait" in str(result) for result in results[4:])

    run_virtual(main())


def test_lifo_displaces_the_oldest() -> None:
    """In a full room the newest takes the place of the oldest, who learns it at once."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        guard = new_guard(Bulkhead(1, max_wait=9.0, max_waiting=1, order="lifo"))
        async with guard.hold():
            first = loop.create_task(guard.aattempt(let_pass, 0.0))
            await let_pass(1.0)
            second = loop.create_task(guard.aattempt(let_pass, 0.0))
            assert isinstance((await first).error, BulkheadFull)
            assert loop.time() == 1.0
        assert (await second).ok

    run_virtual(main())


def test_criticality_displaces_only_the_less_critical() -> None:
    """A newcomer of the same rank is turned away, one of a higher rank takes the place."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        guard = new_guard(Bulkhead(1, max_wait=9.0, max_waiting=1, order="criticality"))

        async def call(rank: Criticality) -> Any:
            with criticality(rank):
                return await guard.aattempt(let_pass, 0.0)

        async with guard.hold():
            low = loop.create_task(call(Criticality.SHEDDABLE))
            await let_pass(1.0)
            assert isinstance((await call(Criticality.SHEDDABLE)).error, BulkheadFull)
            high = loop.create_task(call(Criticality.CRITICAL))
            assert isinstance((await low).error, BulkheadFull)
            assert loop.time() == 1.0
        assert (await high).ok

    run_virtual(main())


def test_a_cancelled_waiter_passes_the_slot_on() -> None:
    """Also if the slot was granted in the same instant: the next one gets it."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        bulkhead = Bulkhead(1, max_wait=9.0, max_waiting=5)
        guard = new_guard(bulkhead)
        async with guard.hold():
            first = loop.create_task(guard.acall(let_pass, 0.0))
            second = loop.create_task(guard.acall(let_pass, 0.0))
            await let_pass(1.0)
        assert bulkhead.waiting == 1  # the first has been granted the slot
        first.cancel()
        await second
        assert first.cancelled()
        assert loop.time() == 1.0
        assert (bulkhead.in_flight, bulkhead.waiting) == (0, 0)

    run_virtual(main())


def test_an_interrupted_thread_leaves_the_queue() -> None:
    """KeyboardInterrupt while waiting takes nothing with it."""

    class Interrupting(VirtualClock):
        def wait(self, lock: threading.Lock, seconds: float | None) -> bool:
            raise KeyboardInterrupt

    bulkhead = Bulkhead(1, max_wait=9.0)
    guard = new_guard(bulkhead, clock=Interrupting())
    with guard.hold():
        with pytest.raises(KeyboardInterrupt):
            guard.call(lambda: None)
        assert (bulkhead.in_flight, bulkhead.waiting) == (1, 0)
    assert bulkhead.in_flight == 0


# Loops that go away


def _leave_a_waiter_behind(guard: Guard) -> tuple[asyncio.AbstractEventLoop, Any]:
    """Let a task of a loop wait for a slot, and close the loop without ending the task."""
    loop = asyncio.new_event_loop()
    # What asyncio says of tasks that die with their loop is not our subject.
    loop.set_exception_handler(lambda *_: None)
    task = loop.create_task(guard.acall(let_pass, 0.0))
    for _ in range(3):
        loop.call_soon(loop.stop)
        loop.run_forever()
    loop.close()
    return loop, task


@pytest.mark.parametrize("where", ["another thread", "the same thread"])
def test_a_waiter_of_a_closed_loop_does_not_swallow_a_slot(where: str) -> None:
    """What is granted to nobody goes to the next, or stays free; leaving never raises."""
    bulkhead = Bulkhead(1, max_wait=60.0, max_waiting=5)
    guard = new_guard(bulkhead)
    kept: list[Any] = []
    with guard.hold():
        if where == "the same thread":
            kept.append(_leave_a_waiter_behind(guard))
        else:
            thread = threading.Thread(target=lambda: kept.append(_leave_a_waiter_behind(guard)))
            thread.start()
            thread.join(30)
        assert bulkhead.waiting == 1
    assert (bulkhead.in_flight, bulkhead.waiting) == (0, 0)
    assert guard.call(lambda: "served") == "served"


def test_a_waiter_of_a_closed_loop_gives_nothing_back_when_it_is_closed() -> None:
    """The slot that it could not use is in other hands: closing the dead coroutine frees none."""
    bulkhead = Bulkhead(1, max_wait=60.0)
    guard = new_guard(bulkhead)
    with guard.hold():
        loop, task = _leave_a_waiter_behind(guard)
    with guard.hold():
        task.get_coro().close()
        assert (bulkhead.in_flight, len(bulkhead.slots.free)) == (1, 0)
    assert (bulkhead.in_flight, len(bulkhead.slots.free)) == (0, 1)
    assert loop.is_closed()


def test_a_waiter_behind_one_of_a_closed_loop_is_served() -> None:
    """The slot that nobody can use any more is handed on to who waits next."""
    bulkhead = Bulkhead(1, max_wait=60.0, max_waiting=5)
    guard = new_guard(bulkhead)
    kept: list[Any] = []
    joined = threading.Event()
    served: list[str] = []

    join = Slots.join

    def telling(slots: Slots, waiter: Any) -> None:
        join(slots, waiter)
        joined.set()

    thread = threading.Thread(target=lambda: kept.append(_leave_a_waiter_behind(guard)))
    with guard.hold():
        thread.start()
        thread.join(30)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Slots, "join", telling)
            behind = threading.Thread(target=lambda: served.append(guard.call(lambda: "served")))
            behind.start()
            assert joined.wait(30)
        assert bulkhead.waiting == 2
    behind.join(30)
    assert served == ["served"]
    assert bulkhead.in_flight == 0


def test_a_waiting_task_that_is_thrown_away_gives_its_place_back() -> None:
    """A coroutine that is closed instead of cancelled leaves the queue as well."""

    async def main() -> None:
        bulkhead = Bulkhead(1, max_wait=60.0)
        guard = new_guard(bulkhead)
        async with guard.hold():
            waiting = guard.acall(let_pass, 0.0)
            waiting.send(None)
            assert bulkhead.waiting == 1
            waiting.close()
            assert bulkhead.waiting == 0
        assert bulkhead.in_flight == 0

    run_virtual(main())


def test_a_thread_wakes_a_task_and_a_task_wakes_a_thread() -> None:
    """Slots go from one kind of caller to the other."""
    bulkhead = Bulkhead(1, max_wait=60.0)
    guard = new_guard(bulkhead)
    held, release = threading.Event(), threading.Event()

    def hold_in_thread() -> None:
        with guard.hold():
            held.set()
            assert release.wait(30)

    async def main() -> str:
        loop = asyncio.get_running_loop()
        waiting = loop.create_task(guard.acall(ScriptedService(answer("a task")).acall))
        loop.call_soon(loop.call_soon, release.set)
        return await waiting

    thread = threading.Thread(target=hold_in_thread)
    thread.start()
    assert held.wait(30)
    assert asyncio.run(main()) == "a task"
    thread.join(30)

    async def other_way() -> str:
        loop = asyncio.get_running_loop()
        joined = asyncio.Event()
        join = Slots.join

        def telling(slots: Slots, waiter: Any) -> None:
            join(slots, waiter)
            loop.call_soon_threadsafe(joined.set)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Slots, "join", telling)
            async with guard.hold():
                answered = loop.run_in_executor(None, guard.call, lambda: "a thread")
                await joined.wait()
            return await answered

    assert asyncio.run(other_way()) == "a thread"
    assert bulkhead.in_flight == 0


# Changes at run time


def test_a_raised_limit_lets_waiters_in_at_once() -> None:
    """New slots go to who waits, in order."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        bulkhead = Bulkhead(1, max_wait=9.0, max_waiting=9)
        guard = new_guard(bulkhead)
        service = ScriptedService(hang())
        tasks = [loop.create_task(guard.acall(service.acall)) for _ in range(4)]
        await let_pass(1.0)
        assert (service.running, bulkhead.in_flight, bulkhead.waiting) == (1, 1, 3)
        bulkhead.update(limit=3)
        await let_pass(1.0)
        assert (service.running, bulkhead.in_flight, bulkhead.waiting) == (3, 3, 1)
        for task in tasks:
            task.cancel()
        await _all(*tasks)
        assert (bulkhead.in_flight, bulkhead.waiting) == (0, 0)

    run_virtual(main())


def test_a_lowered_limit_lets_calls_in_flight_end_and_nobody_in_before() -> None:
    """Slots are withdrawn as they come back; who waits is served when there is room again."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        bulkhead = Bulkhead(3, max_wait=99.0, max_waiting=9)
        guard = new_guard(bulkhead)
        ends = [loop.create_future() for _ in range(4)]

        async def function(number: int) -> None:
            await ends[number]

        tasks = [loop.create_task(guard.acall(function, number)) for number in range(4)]
        await let_pass(1.0)
        bulkhead.update(limit=1)
        assert (bulkhead.in_flight, bulkhead.waiting) == (3, 1)
        for number, in_flight, waiting in [(0, 2, 1), (1, 1, 1), (2, 1, 0), (3, 0, 0)]:
            ends[number].set_result(None)
            await let_pass(1.0)
            assert (bulkhead.in_flight, bulkhead.waiting) == (in_flight, waiting)
        await _all(*tasks)
        assert len(bulkhead.slots.free) == 1
        bulkhead.update(limit=2)
        assert len(bulkhead.slots.free) == 2

    run_virtual(main())


def test_a_limit_lowered_and_raised_again_keeps_the_calls_in_flight() -> None:
    """Up and down with calls in flight: the slots come out right."""
    bulkhead = Bulkhead(3)
    guard = new_guard(bulkhead)
    with guard.hold(), guard.hold(), guard.hold():
        for limit in (1, 2, 1, 5, 4):
            bulkhead.update(limit=limit)
            assert bulkhead.in_flight == 3
    assert (bulkhead.in_flight, len(bulkhead.slots.free)) == (0, 4)


def test_other_settings_change_too_and_bad_ones_change_nothing() -> None:
    """`update` takes the constructor's names, except for the order."""
    with virtual_time() as clock:
        bulkhead = Bulkhead(1)
        guard = new_guard(bulkhead)
        bulkhead.update(max_wait=2.0, max_waiting=7)
        with guard.hold(), pytest.raises(BulkheadFull):
            guard.call(lambda: None)
        assert clock.now() == 2.0
        for changes in ({"limit": 0}, {"limit": 5, "max_wait": -1.0}, {"mode": "maybe"}):
            with pytest.raises(ValueError, match="write"):
                bulkhead.update(**changes)
        with pytest.raises(TypeError, match="it takes limit"):
            bulkhead.update(order="lifo")
        with pytest.raises(TypeError, match="name what to change"):
            bulkhead.update()
        assert (bulkhead.limit, bulkhead.max_wait, bulkhead.mode) == (1, 2.0, "enforce")


def test_shadow_mode_counts_and_admits() -> None:
    """What would have been refused is counted and told, and runs."""
    seen: list[CallRejected] = []
    unsubscribe = subscribe(seen.append, CallRejected)
    bulkhead = Bulkhead(1, mode="shadow")
    guard = new_guard(bulkhead)
    with guard.hold():
        assert guard.call(lambda: "beyond") == "beyond"
        assert bulkhead.in_flight == 1
    unsubscribe()
    shown = guard.snapshot()["policies"][0]
    assert (shown["mode"], shown["rejected"], shown["would_reject"]) == ("shadow", 0, 1)
    assert [(event.guard, event.enforced) for event in seen] == [(guard.name, False)]
    assert bulkhead.in_flight == 0


def test_off_neither_counts_nor_refuses() -> None:
    """Everybody is let in, nothing is told."""
    bulkhead = Bulkhead(1, max_wait=5.0, mode="off")
    guard = new_guard(bulkhead)
    with guard.hold(), guard.hold(), guard.hold():
        pass
    shown = guard.snapshot()["policies"][0]
    assert (shown["rejected"], shown["would_reject"], shown["in_flight"]) == (0, 0, 0)


@pytest.mark.parametrize("mode", ["shadow", "off"])
def test_modes_switch_at_run_time_with_calls_in_flight_and_waiting(mode: str) -> None:
    """Who came in beyond the limit takes no slot away when the bulkhead is enforced again."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        bulkhead = Bulkhead(1, max_wait=5.0)
        guard = new_guard(bulkhead)
        service = ScriptedService(slow(10.0, "served"))
        first = loop.create_task(guard.acall(service.acall))
        waiter = loop.create_task(guard.acall(service.acall))
        await let_pass(1.0)
        assert (service.running, bulkhead.waiting) == (1, 1)
        bulkhead.update(mode=mode)
        beyond = loop.create_task(guard.acall(service.acall))
        await let_pass(1.0)
        assert service.running >= 2
        bulkhead.update(mode="enforce", max_wait=0.0)
        with pytest.raises(BulkheadFull):
            await guard.acall(service.acall)
        results = await _all(first, waiter, beyond)
        assert [results[0], results[2]] == ["served", "served"]
        assert (bulkhead.in_flight, bulkhead.waiting) == (0, 0)
        assert len(bulkhead.slots.free) == 1
        async with guard.hold():
            with pytest.raises(BulkheadFull):
                await guard.acall(service.acall)

    run_virtual(main())


# Together with others


def test_a_bulkhead_in_two_guards_is_one_bulkhead() -> None:
    """State is shared, counts are each guard's own."""
    bulkhead = Bulkhead(1)
    one, two = new_guard(bulkhead), new_guard(bulkhead)
    with one.hold(), pytest.raises(BulkheadFull) as caught:
        two.call(lambda: None)
    assert caught.value.guard == two.name
    assert one.snapshot()["policies"][0]["rejected"] == 0
    assert two.snapshot()["policies"][0]["rejected"] == 1


def test_the_slot_is_not_held_while_a_timed_out_call_is_gone() -> None:
    """A task that was cancelled has really stopped: its slot is free at once."""

    async def main() -> None:
        bulkhead = Bulkhead(1)
        guard = new_guard(bulkhead, Timeout(1.0))
        service = ScriptedService(hang(times=1), answer("next"))
        assert not (await guard.aattempt(service.acall)).ok
        assert bulkhead.in_flight == 0
        assert await guard.acall(service.acall) == "next"

    run_virtual(main())


def test_settings_are_checked_where_they_are_written() -> None:
    """Each message names the argument; the representation reads like the constructor."""
    with pytest.raises(ValueError, match="limit=0"):
        Bulkhead(0)
    with pytest.raises(TypeError, match="limit"):
        Bulkhead(2.5)
    with pytest.raises(ValueError, match="limit=1000000000: write 1000000 or less"):
        Bulkhead(10**9)
    with pytest.raises(ValueError, match="max_wait"):
        Bulkhead(1, max_wait=-1.0)
    with pytest.raises(ValueError, match="max_waiting"):
        Bulkhead(1, max_waiting=0)
    with pytest.raises(ValueError, match="order"):
        Bulkhead(1, order="random")
    with pytest.raises(ValueError, match="mode"):
        Bulkhead(1, mode="soft")
    assert repr(Bulkhead(3, max_wait=0.5)) == "Bulkhead(3, max_wait=0.5, order='fifo')"
