"""Hedge around async calls: when a copy starts, which answer is taken, what becomes of losers."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import subprocess
import sys
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from random import Random
from typing import Any
from weakref import ref

import pytest

from seawall import (
    Breaker,
    Bulkhead,
    BulkheadFull,
    CircuitOpen,
    Guard,
    Hedge,
    Retry,
    RetryBudget,
    ThreadBulkhead,
    TimedOut,
    Timeout,
    current_deadline,
    deadline,
    subscribe,
)
from seawall.context import idempotency_key
from seawall.events import CallHedged
from seawall.policies.hedge import quantile
from seawall.policies.retry import InFlightRatio, RequestRatio
from seawall.testing import ScriptedService, answer, fail, hang, run_virtual, slow
from tests.support import let_pass, new_guard

ROOT = Path(__file__).resolve().parents[3]


class Replica:
    """Takes as long as its script says; notes who was cancelled, and holds a connection meanwhile.

    A step is seconds, or seconds and an error or a value.
    """

    def __init__(self, *steps: Any) -> None:
        self.steps = [step if isinstance(step, tuple) else (step, None) for step in steps]
        self.calls = 0
        self.connections = 0
        self.cancelled = 0
        self.ignores_cancellation = False

    async def __call__(self) -> Any:
        number = self.calls
        self.calls += 1
        self.connections += 1
        seconds, outcome = self.steps[min(number, len(self.steps) - 1)]
        try:
            await let_pass(seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            if not self.ignores_cancellation:
                raise
        finally:
            self.connections -= 1
        if isinstance(outcome, BaseException):
            raise outcome
        return number if outcome is None else outcome


def now() -> float:
    return asyncio.get_running_loop().time()


def shown(guard: Guard) -> dict[str, Any]:
    return guard.snapshot()["policies"][0]


# When a copy is started


def test_a_slow_call_is_asked_again_and_the_first_answer_is_taken() -> None:
    """After the delay a copy starts; it wins, and the loser has ended when the call returns."""

    async def main() -> None:
        replica = Replica(10.0, 0.5)
        guard = new_guard(Hedge(1.0), Bulkhead(2))
        assert await guard.acall(replica) == 1
        assert now() == 1.5
        assert (replica.calls, replica.cancelled, replica.connections) == (2, 1, 0)
        assert guard.snapshot()["policies"][1]["in_flight"] == 0
        assert shown(guard)["hedges"] == shown(guard)["wins"] == 1
        stats = guard.snapshot()
        assert (stats["succeeded"], stats["cancelled"], stats["failed"]) == (1, 1, 0)

    run_virtual(main())


def test_a_call_that_is_answered_in_time_is_not_copied() -> None:
    """Nothing is started before the delay is over, and no timer is left."""

    async def main() -> None:
        replica = Replica(1.0)
        guard = new_guard(Hedge(1.5))
        assert await guard.acall(replica) == 0
        await let_pass(5.0)
        assert replica.calls == 1
        assert (shown(guard)["calls"], shown(guard)["hedges"]) == (1, 0)

    run_virtual(main())


def test_the_first_copy_may_still_win() -> None:
    """Then the copy beside it is cancelled."""

    async def main() -> None:
        replica = Replica(2.0, 10.0)
        guard = new_guard(Hedge(1.0))
        assert await guard.acall(replica) == 0
        assert now() == 2.0
        assert (replica.calls, replica.cancelled, replica.connections) == (2, 1, 0)
        assert (shown(guard)["hedges"], shown(guard)["wins"]) == (1, 0)

    run_virtual(main())


def test_more_copies_start_one_delay_after_another() -> None:
    """Up to `most` in all, the first included."""
    told: list[CallHedged] = []

    async def main() -> None:
        unsubscribe = subscribe(told.append, CallHedged)
        replica = Replica(100.0)
        guard = new_guard(Hedge(1.0, most=3, cap=1.0), Timeout(50.0))
        task = asyncio.create_task(guard.acall(replica))
        await let_pass(0.5)
        seen = []
        for _ in range(4):
            seen.append(replica.calls)
            await let_pass(1.0)
        assert seen == [1, 2, 3, 3]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (replica.cancelled, replica.connections) == (3, 0)
        unsubscribe()

    run_virtual(main())
    assert [(event.number, event.delay) for event in told] == [(2, 1.0), (3, 2.0)]


def test_failure_is_not_hedged() -> None:
    """An error before the delay is raised at once: another attempt is for Retry to make."""

    async def main() -> None:
        replica = Replica((0.5, ConnectionError("reset")))
        guard = new_guard(Hedge(1.0))
        with pytest.raises(ConnectionError, match="reset"):
            await guard.acall(replica)
        await let_pass(5.0)
        assert (now(), replica.calls) == (5.5, 1)

    run_virtual(main())


def test_a_failed_copy_leaves_the_answer_to_the_others() -> None:
    """Whichever fails first, the value of the other is the answer; no third copy is started."""

    async def main() -> None:
        for steps in [((1.5, ConnectionError()), 5.0), (6.0, (0.5, ConnectionError()))]:
            replica = Replica(*steps)
            guard = new_guard(Hedge(1.0, most=5, cap=1.0))
            assert isinstance(await guard.acall(replica), int)
            assert (replica.calls, replica.connections, replica.cancelled) == (2, 0, 0)
            stats = guard.snapshot()
            assert (stats["succeeded"], stats["failed"], stats["cancelled"]) == (1, 1, 0)

    run_virtual(main())


def test_if_all_copies_fail_the_first_error_is_raised() -> None:
    """Each attempt is counted as failed, and the earliest error tells why."""

    async def main() -> None:
        replica = Replica((5.0, ConnectionError("late")), (1.0, ConnectionError("early")))
        guard = new_guard(Hedge(1.0))
        with pytest.raises(ConnectionError, match="early"):
            await guard.acall(replica)
        assert now() == 5.0
        assert guard.snapshot()["failed"] == 2
        result = await guard.aattempt(Replica((5.0, ConnectionError()), (1.0, KeyError())))
        assert (type(result.error), result.attempts) == (KeyError, 2)

    run_virtual(main())


def test_an_error_of_an_attempt_says_more_than_a_refusal() -> None:
    """If one copy was refused and the other failed, something was sent: its error is raised."""

    async def main() -> None:
        slots = Bulkhead(1)
        breaker = Breaker(consecutive=1)
        guard = new_guard(breaker, Hedge(1.0), slots)
        with pytest.raises(ConnectionError):
            await guard.acall(Replica((2.0, ConnectionError())))
        assert guard.snapshot()["policies"][2]["rejected"] == 1
        assert breaker.state == "open"
        with pytest.raises(CircuitOpen):
            await guard.acall(Replica(1.0))

    run_virtual(main())


def test_copies_that_were_all_refused_are_a_refusal() -> None:
    """Nothing was sent: gates around the hedge get back what they gave."""

    async def main() -> None:
        slots = Bulkhead(1, max_wait=3.0, max_waiting=5)
        breaker = Breaker(consecutive=1)
        guard, other = new_guard(breaker, Hedge(1.0), slots), new_guard(slots)
        async with other.hold():
            with pytest.raises(BulkheadFull):
                await guard.acall(Replica(1.0))
            assert now() == 4.0  # the second copy came a second later, and waited too
        assert breaker.state == "closed"
        assert guard.snapshot()["policies"][1]["hedges"] == 1

    run_virtual(main())


# Which calls are hedged


@pytest.mark.parametrize("keyed", [False, True])
def test_only_calls_that_are_safe_to_repeat_are_hedged(keyed: bool) -> None:  # noqa: FBT001
    """A call that is not idempotent runs plainly, unless an idempotency key names its effect."""

    async def main() -> None:
        replica = Replica(10.0, 0.5)
        guard = new_guard(Hedge(1.0), idempotent=False)
        if keyed:
            with idempotency_key("order 7"):
                await guard.acall(replica)
        else:
            await guard.acall(replica)
        assert replica.calls == (2 if keyed else 1)
        assert shown(guard)["calls"] == int(keyed)

    run_virtual(main())


def test_a_function_marked_as_not_idempotent_is_not_hedged() -> None:
    """`@guard(idempotent=False)` holds for that function alone."""

    async def main() -> None:
        charge, read = Replica(10.0, 0.5), Replica(10.0, 0.5)
        guard = new_guard(Hedge(1.0))

        @guard(idempotent=False)
        async def post() -> Any:
            return await charge()

        @guard
        async def get() -> Any:
            return await read()

        await post()
        await get()
        assert (charge.calls, read.calls) == (1, 2)

    run_virtual(main())


def test_one_copy_at_most_is_no_hedge() -> None:
    """`update(most=1)` switches hedging off, and another number on again."""

    async def main() -> None:
        hedge = Hedge(1.0)
        guard = new_guard(hedge)
        replica = Replica(3.0)
        hedge.update(most=1)
        await guard.acall(replica)
        assert replica.calls == 1
        hedge.update(most=2, delay=0.5, cap=0.5, burst=3)
        await guard.acall(replica)
        assert replica.calls == 3
        assert (hedge.delay, hedge.cap, hedge.burst, hedge.most) == (0.5, 0.5, 3, 2)
        with pytest.raises(TypeError, match="delay, most, cap, burst"):
            hedge.update(workers=3)
        with pytest.raises(ValueError, match="cap"):
            hedge.update(delay=9.0, cap=2.0)
        assert hedge.delay == 0.5

    run_virtual(main())


def test_a_quantile_waits_until_enough_is_known() -> None:
    """Nothing is hedged for a hundred calls; then the delay follows the guard's own latency."""

    async def main() -> None:
        guard = new_guard(Hedge(quantile(0.95)))
        chance = Random(7)
        for _ in range(99):
            await guard.acall(let_pass, 0.1 + 0.1 * chance.random())
        assert shown(guard)["delay"] is None
        replica = Replica(10.0)
        await guard.acall(replica)
        assert replica.calls == 1
        for _ in range(50):
            await guard.acall(let_pass, 0.1 + 0.1 * chance.random())
        assert shown(guard)["delay"] == pytest.approx(0.195, rel=0.05)
        replica = Replica(10.0, 0.1)
        await guard.acall(replica)
        assert replica.calls == 2

    run_virtual(main())


def test_a_quantile_is_not_deceived_by_the_calls_it_cut_short() -> None:
    """A loser counts with the time it had: else ever more calls would seem slow."""

    async def main() -> float:
        chance = Random(7)
        guard = new_guard(Hedge(quantile(0.9), cap=1.0))

        async def call() -> None:
            await let_pass(chance.expovariate(10.0))

        for _ in range(3000):
            await guard.acall(call)
        return shown(guard)["hedges"] / shown(guard)["calls"]

    assert run_virtual(main()) == pytest.approx(0.11, abs=0.03)


def test_without_the_losers_a_quantile_drifts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ablation: unseen losers make the delay shrink and the copies grow."""
    from seawall.runtime.stats import Stats

    monkeypatch.setattr(Stats, "cut_off", lambda *_: None)
    with pytest.raises(AssertionError):
        test_a_quantile_is_not_deceived_by_the_calls_it_cut_short()


def test_another_quantile_is_followed_at_once() -> None:
    """A change of settings does not wait for the delay to be computed anew."""

    async def main() -> None:
        hedge = Hedge(quantile(0.95))
        guard = new_guard(hedge)
        for number in range(200):
            await guard.acall(let_pass, 0.1 if number % 10 else 0.5)
        assert shown(guard)["delay"] == pytest.approx(0.5, rel=0.05)
        hedge.update(delay=quantile(0.5))
        assert shown(guard)["delay"] == pytest.approx(0.1, rel=0.05)

    run_virtual(main())


def test_loops_that_are_closed_are_forgotten() -> None:
    """A hedge that serves one loop after another keeps none of them alive."""
    guard = new_guard(Hedge(1.0))
    for _ in range(3):
        run_virtual(guard.acall(let_pass, 0.1))
    bound: Any = guard.bounds[0]
    assert len(bound.layer("async")._queues) == 1


FORKED = """
import asyncio, os, threading, warnings
warnings.simplefilter("ignore")  # newer versions warn of any fork beside threads
from seawall import Chaos, Guard, Hedge
from seawall.testing import run_virtual

chaos = Chaos(0.0, result=1, enabled=True)
hedge = Hedge(1.0, sync="thread", cap=1.0)
guard = Guard("vendor", hedge, chaos)
numbers = iter(range(100))

async def ask():
    number = next(numbers)
    await asyncio.sleep(0.5 if number % 2 else 9.0)
    return number % 2

def check():
    assert run_virtual(guard.acall(ask)) == 1
    assert guard.call(lambda: "plain") == "plain"

def check_in_thread():
    thread = threading.Thread(target=check)
    thread.start()
    thread.join()

async def fork():
    check_in_thread()
    held, release = threading.Event(), threading.Event()
    def hold():
        with hedge._mutex, chaos._mutex:
            held.set()
            release.wait(30)
    threading.Thread(target=hold).start()
    held.wait(30)
    child = os.fork()
    if child:
        release.set()
        return child
    # The parent's loop cannot go on in the child: what is left to do happens in another thread.
    assert not guard.bounds[0].layer("async")._queues
    check_in_thread()
    os._exit(3)

child = asyncio.run(fork())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_hedges_with_threads_of_its_own() -> None:
    """No lock that a thread held at the fork is waited for, no thread or loop of the parent's."""
    ran = subprocess.run(  # noqa: S603 - our own text
        [sys.executable, "-c", FORKED],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (ran.stdout, ran.stderr) == ("3\n", "")


def test_a_floor_keeps_a_quantile_from_hedging_noise() -> None:
    """However quick the calls are, none is hedged sooner than that."""

    async def main() -> None:
        guard = new_guard(Hedge(quantile(0.9, floor=0.5)))
        for _ in range(100):
            await guard.acall(let_pass, 0.02)
        assert shown(guard)["delay"] == 0.5

    run_virtual(main())


# What bounds the extra load


def test_the_cap_bounds_the_copies() -> None:
    """When every call is slow, only the burst and then the share of calls is copied."""

    async def main() -> None:
        guard = new_guard(Hedge(1.0, cap=0.1, burst=2))
        replica = Replica(2.0)
        for _ in range(50):
            await guard.acall(replica)
        assert replica.calls - 50 == shown(guard)["hedges"] == 2 + 4
        assert shown(guard)["stopped"] == {"cap": 44}

    run_virtual(main())


def test_guards_that_share_a_hedge_share_its_cap() -> None:
    """Sharing is explicit: one object, one purse; counts are each guard's own."""

    async def main() -> None:
        hedge = Hedge(1.0, cap=0.0, burst=1)
        one, two = new_guard(hedge), new_guard(hedge)
        await one.acall(Replica(2.0))
        await two.acall(Replica(2.0))
        assert (shown(one)["hedges"], shown(two)["hedges"]) == (1, 0)
        assert shown(two)["stopped"] == {"cap": 1}

    run_virtual(main())


def test_a_budget_that_is_spent_allows_no_copy() -> None:
    """What failures of other calls have used up is not there for hedges."""

    async def main() -> None:
        budget = RetryBudget()
        guard = new_guard(Hedge(1.0, budget=budget))
        for _ in range(5):
            with pytest.raises(ConnectionError):
                await guard.acall(Replica((0.1, ConnectionError())))
        replica = Replica(2.0)
        await guard.acall(replica)
        assert replica.calls == 1
        assert shown(guard)["stopped"] == {"budget": 1}
        assert shown(guard)["available"] == 5  # the cap did not pay for it
        for _ in range(10):
            await guard.acall(Replica(0.1))
        await guard.acall(replica)
        assert replica.calls == 3

    run_virtual(main())


def test_a_budget_shared_with_retry_counts_each_call_once() -> None:
    """The retry tells how calls go; the hedge only asks, and tells of copies that end."""

    async def main() -> None:
        budget = RetryBudget(RequestRatio(0.5, window=1000.0, floor=0.0))
        retry = Retry(on=ConnectionError, backoff=0.1, budget=budget)
        guard = new_guard(retry, Hedge(1.0, cap=1.0, budget=budget))
        for _ in range(4):
            await guard.acall(Replica(2.0))
        assert budget.snapshot() == {"requests": 4, "retries": 2, "allowed": 2.0}
        alone = RetryBudget(RequestRatio(0.5, window=1000.0, floor=0.0))
        guard = new_guard(Hedge(1.0, cap=1.0, budget=alone))
        for _ in range(4):
            await guard.acall(Replica(2.0))
        assert alone.snapshot() == {"requests": 4, "retries": 2, "allowed": 2.0}

    run_virtual(main())


def test_two_hedges_that_share_a_budget_tell_it_of_each_call_once() -> None:
    """The first of them does; with a retry that has it too, wherever that is, the retry."""

    async def main() -> None:
        for order in ("", "before", "after"):
            budget = RetryBudget(RequestRatio(0.5, window=1000.0, floor=0.0))
            stack: list[Any] = [Hedge(1.0, budget=budget), Hedge(1.0, budget=budget)]
            if order:
                retry = Retry(on=ConnectionError, budget=budget)
                stack.insert(0 if order == "before" else 2, retry)
            guard = new_guard(*stack)
            for _ in range(3):
                await guard.acall(let_pass, 0.1)
            assert budget.snapshot()["requests"] == 3

    run_virtual(main())


def test_a_copy_is_in_flight_for_the_budget_until_it_ends() -> None:
    """By the in-flight rule a hedge is a retry under way, from its start to its end."""

    async def main() -> None:
        budget = RetryBudget(InFlightRatio())
        guard = new_guard(Hedge(1.0, budget=budget))
        task = asyncio.create_task(guard.acall(Replica(3.0)))
        await let_pass(0.5)
        assert (budget.snapshot()["active"], budget.snapshot()["retries"]) == (1, 0)
        await let_pass(1.0)
        assert (budget.snapshot()["active"], budget.snapshot()["retries"]) == (1, 1)
        await task
        assert (budget.snapshot()["active"], budget.snapshot()["retries"]) == (0, 0)

    run_virtual(main())


def test_errors_that_the_caller_does_not_see_still_cost_the_budget() -> None:
    """A copy that failed is a failure of the dependency, though another one answered."""

    async def main() -> None:
        for shared in (False, True):
            budget = RetryBudget()
            retry = [Retry(on=ConnectionError, budget=budget)] if shared else []
            guard = new_guard(*retry, Hedge(1.0, budget=budget))
            await guard.acall(Replica((2.0, ConnectionError()), 3.0))
            tokens = budget.snapshot()["tokens"]
            assert tokens == pytest.approx(9.1)
            await guard.acall(Replica(9.0, (1.0, ConnectionError())))
            assert budget.snapshot()["tokens"] == pytest.approx(8.2)

    run_virtual(main())


def test_no_copy_is_started_that_has_no_time_left() -> None:
    """Neither when the deadline is nearer than a typical call takes, nor an outer timeout."""

    async def main() -> None:
        for limit in (False, True):
            around = [Timeout(3.0)] if limit else []
            guard = new_guard(*around, Hedge(2.0))
            for _ in range(20):
                await guard.acall(let_pass, 1.5)
            replica = Replica(100.0)
            if limit:
                with pytest.raises(TimedOut):
                    await guard.acall(replica)
            else:
                with pytest.raises(TimedOut):
                    async with deadline(3.0):
                        await guard.acall(replica)
            assert replica.calls == 1
            assert guard.snapshot()["policies"][-1]["stopped"] == {"deadline": 1}

    run_virtual(main())


# What becomes of the losers


def test_what_a_loser_returns_all_the_same_is_disposed_of() -> None:
    """A copy that would not be cancelled may hold something open: it is handed to `dispose`."""

    async def main() -> None:
        for steps, winner, loser in [((9.0, 0.5), 1, 0), ((1.5, 9.0), 0, 1)]:
            disposed: list[Any] = []
            replica = Replica(*steps)
            replica.ignores_cancellation = True
            guard = new_guard(Hedge(1.0, dispose=disposed.append))
            assert await guard.acall(replica) == winner
            assert disposed == [loser]
            assert replica.connections == 0

    run_virtual(main())


def test_disposing_may_take_its_time_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    """An async `dispose` is awaited; what it raises is logged, and the answer stands."""
    disposed: list[Any] = []

    async def close(value: Any) -> None:
        await let_pass(0.25)
        disposed.append(value)
        raise OSError("already closed")

    def fail_at_once(value: Any) -> None:
        disposed.append(value)
        raise OSError("already closed")

    async def main(dispose: Any, takes: float) -> None:
        for steps in [(9.0, 0.5), (1.5, 9.0)]:
            began = now()
            replica = Replica(*steps)
            replica.ignores_cancellation = True
            guard = new_guard(Hedge(1.0, dispose=dispose))
            await guard.acall(replica)
            assert now() - began == 1.5 + takes

    with caplog.at_level(logging.ERROR, logger="seawall"):
        run_virtual(main(close, 0.25))
        run_virtual(main(fail_at_once, 0.0))
    assert disposed == [0, 1, 0, 1]
    assert len(caplog.records) == 4


def test_the_answer_of_a_call_that_is_cancelled_meanwhile_is_disposed_of() -> None:
    """A winner that has nobody to go to is a loser too."""

    async def main() -> None:
        disposed: list[Any] = []
        began = asyncio.Event()

        async def stubborn() -> str:
            if began.is_set():
                return "answer"
            began.set()
            try:
                await let_pass(100.0)
            except asyncio.CancelledError:
                await let_pass(1.0)  # takes its time to clean up
                raise
            return "never"

        guard = new_guard(Hedge(1.0, dispose=disposed.append))
        task = asyncio.create_task(guard.acall(stubborn))
        await let_pass(1.5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert disposed == ["answer"]

    run_virtual(main())


def test_a_losing_thread_runs_on_and_is_counted() -> None:
    """Inside a hedge, a thread bulkhead's thread cannot be cancelled: it keeps its thread."""
    import threading

    release, number = threading.Event(), iter(range(9))

    def work() -> int:
        mine = next(number)
        if mine == 0:
            release.wait(30)
        return mine

    async def main() -> None:
        guard = new_guard(Hedge(1.0), ThreadBulkhead(2))
        assert await guard.acall(work) == 1
        assert guard.snapshot()["abandoned"] == 1
        assert guard.snapshot()["policies"][1]["abandoned"] == 1
        assert guard.snapshot()["cancelled"] == 1
        release.set()
        with asyncio.get_running_loop().hold_time():
            while guard.snapshot()["abandoned"]:
                threading.Event().wait(0.001)

    run_virtual(main(), patience=60.0)


def test_copies_see_the_context_of_the_call() -> None:
    """Context variables and the deadline go along; what a copy sets stays its own."""
    var: ContextVar[str] = ContextVar("var", default="nothing")

    async def main() -> None:
        seen: list[Any] = []

        async def function() -> None:
            limit = current_deadline()
            seen.append((var.get(), None if limit is None else limit.at))
            var.set("changed")
            if len(seen) == 1:
                await let_pass(9.0)

        guard = new_guard(Hedge(1.0))
        var.set("mine")
        with deadline(60.0):
            await guard.acall(function)
        assert seen == [("mine", 60.0), ("mine", 60.0)]

    run_virtual(main())


def test_a_copy_that_cannot_be_started_is_not_waited_for() -> None:
    """The loop is told why, the call has its own answer, other calls have their copies."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        told: list[Any] = []
        refused: list[Any] = []

        def factory(loop: Any, coro: Any, **options: Any) -> Any:
            if "_copy" in coro.__qualname__ and not refused:
                refused.append(coro)
                raise RuntimeError("no more tasks")
            return asyncio.Task(coro, loop=loop, **options)

        loop.set_task_factory(factory)
        loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
        budget = RetryBudget(InFlightRatio())
        guard = new_guard(Hedge(1.0, budget=budget))
        first, second = Replica(2.0), Replica(9.0, 0.5)
        tasks = [asyncio.ensure_future(guard.acall(replica)) for replica in (first, second)]
        assert await asyncio.gather(*tasks) == [0, 1]
        assert (first.calls, second.calls, now()) == (1, 2, 2.0)
        assert [str(error) for error in told] == ["no more tasks"]
        assert (shown(guard)["hedges"], shown(guard)["stopped"]) == (1, {"task": 1})
        assert (shown(guard)["available"], budget.snapshot()["retries"]) == (4.0, 0)

    run_virtual(main())


def test_copies_are_made_by_any_task_factory() -> None:
    """Also by one that takes a loop and a coroutine only: a copy has its name and the context."""
    var: ContextVar[str] = ContextVar("var", default="nothing")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(lambda loop, coro: asyncio.Task(coro, loop=loop))
        replica = Replica(9.0, 0.5)

        names: list[str] = []

        async def function() -> str:
            names.append(asyncio.current_task().get_name())  # type: ignore[union-attr]
            await replica()
            return var.get()

        var.set("mine")
        guard = new_guard(Hedge(1.0))
        assert await guard.acall(function) == "mine"
        assert replica.calls == 2
        assert names[1] == f"{guard.name}: copy 2"

    run_virtual(main())


class Exit(BaseException):
    """Neither a failure nor a cancellation."""


@pytest.mark.parametrize("error", [Exit, asyncio.CancelledError])
@pytest.mark.parametrize("first", ["runs", "has failed", "raises it"])
def test_an_exit_of_any_copy_ends_the_call(error: type[BaseException], first: str) -> None:
    """What is no `Exception` is raised, whatever other copies do; these are cancelled."""
    steps = {
        "runs": (9.0, (0.5, error())),
        "has failed": ((1.25, ConnectionError()), (0.5, error())),
        "raises it": ((1.5, error()), 9.0),
    }

    async def main() -> None:
        disposed: list[Any] = []
        guard = new_guard(Hedge(1.0, dispose=disposed.append), Bulkhead(5))
        replica = Replica(*steps[first])
        with pytest.raises(error):
            await guard.acall(replica)
        await let_pass(0.0)
        assert (now(), replica.calls, replica.connections) == (1.5, 2, 0)
        assert replica.cancelled == (first != "has failed")
        assert guard.snapshot()["policies"][1]["in_flight"] == 0
        assert disposed == []

    run_virtual(main())


def test_a_result_tells_of_all_attempts() -> None:
    """`aattempt` counts each copy that ran."""

    async def main() -> None:
        guard = new_guard(Hedge(1.0))
        result = await guard.aattempt(Replica(9.0, 0.5))
        assert (result.value, result.attempts, result.elapsed) == (1, 2, 1.5)

    run_virtual(main())


def test_errors_of_copies_are_not_kept_alive() -> None:
    """No cycle is left for the collector: neither by the error raised nor by those hidden."""
    errors: list[ref[Exception]] = []

    class Trouble(Exception):
        pass

    async def fail_after(seconds: float) -> None:
        await let_pass(seconds)
        error = Trouble()
        errors.append(ref(error))
        try:
            raise error
        finally:
            del error

    async def main() -> None:
        guard = new_guard(Hedge(1.0), Bulkhead(5))
        for seconds in (0.5, 3.0):
            with suppress(Trouble):
                await guard.acall(fail_after, seconds)
        await let_pass(10.0)
        assert [known() for known in errors] == [None] * 3

    gc.disable()
    try:
        run_virtual(main())
    finally:
        gc.enable()


# Cancellation by others


def test_whoever_cancels_the_call_cancels_all_copies() -> None:
    """Before, during and after the delay, and whichever copy has failed already."""

    async def main() -> None:
        for at in (0.5, 1.5, 2.5):
            for steps in [(9.0,), ((2.0, ConnectionError()), 9.0), (9.0, (1.0, ConnectionError()))]:
                replica = Replica(*steps)
                guard = new_guard(Hedge(1.0), Bulkhead(5))
                task = asyncio.create_task(guard.acall(replica))
                await let_pass(at)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                assert task.cancelled()
                assert replica.connections == 0
                assert guard.snapshot()["policies"][1]["in_flight"] == 0

    run_virtual(main())


def test_a_timeout_around_it_stops_all_copies() -> None:
    """And is a timeout: for the gates inside all copies have failed, none was just cancelled."""

    async def main() -> None:
        replica = Replica(100.0)
        guard = new_guard(Timeout(3.0), Hedge(1.0), Bulkhead(5))
        with pytest.raises(TimedOut):
            await guard.acall(replica)
        assert (now(), replica.calls, replica.connections) == (3.0, 2, 0)
        assert guard.snapshot()["policies"][2]["in_flight"] == 0
        # The copy beside it did not run out of its time: it is just not wanted any more.
        assert (guard.snapshot()["failed"], guard.snapshot()["cancelled"]) == (1, 1)

    run_virtual(main())


def test_each_copy_has_a_timeout_of_its_own() -> None:
    """Inside the hedge a timeout is for a copy: the second one gets its full time."""

    async def main() -> None:
        guard = new_guard(Hedge(1.0), Timeout(2.0))
        assert await guard.acall(Replica(100.0, 1.5)) == 1
        assert now() == 2.5
        with pytest.raises(TimedOut):
            await guard.acall(Replica(100.0))
        assert now() == 5.5

    run_virtual(main())


def test_a_cancellation_is_not_taken_for_the_hedges_own() -> None:
    """Cancelled at the instant at which a copy wins, it is cancelled, whatever comes first."""

    async def main(order: str) -> None:
        loop = asyncio.get_running_loop()
        guard = new_guard(Hedge(1.0))
        if order == "cancel first":
            loop.call_later(1.5, lambda: task.cancel())  # noqa: PLW0108 - made below
        replica = Replica(9.0, 0.5)
        task = asyncio.create_task(guard.acall(replica))
        await let_pass(1.0)
        if order == "win first":
            await let_pass(0.0)
            loop.call_later(0.5, lambda: loop.call_soon(task.cancel))
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert task.cancelling() == 1
        assert replica.connections == 0

    run_virtual(main("cancel first"))
    run_virtual(main("win first"))


def test_a_hedge_inside_a_hedge() -> None:
    """Two guards around each other cancel in one task, and each takes back only its own."""

    async def main() -> None:
        replica = Replica(100.0)
        inner = new_guard(Hedge(1.0))
        outer = new_guard(Hedge(1.5))

        async def work() -> Any:
            return await inner.acall(replica)

        task = asyncio.create_task(outer.acall(work))
        replica.steps = [(100.0, None), (100.0, None), (1.0, "c"), (100.0, None)]
        assert await task == "c"
        assert now() == 2.5
        assert (task.cancelling(), replica.connections) == (0, 0)

    run_virtual(main())


def test_the_task_is_left_uncancelled_after_a_copy_won() -> None:
    """What the hedge did to its own task is undone: the task can wait and be timed as before."""

    async def main() -> None:
        guard = new_guard(Hedge(1.0))
        async with asyncio.timeout(20.0):
            assert await guard.acall(Replica(9.0, 0.5)) == 1
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0
            await let_pass(1.0)
        async with asyncio.TaskGroup() as group:
            group.create_task(guard.acall(Replica(9.0, 0.5)))

    run_virtual(main())


# Settings


def test_a_hedge_shows_its_settings() -> None:
    """The repr is how one would write it."""
    assert repr(Hedge(0.05)) == "Hedge(0.05, most=2, cap=0.05, burst=5)"
    written = repr(Hedge(quantile(0.99), budget=RetryBudget(), sync="thread"))
    assert written.startswith("Hedge(quantile(0.99, floor=0.001), most=2, cap=0.05, burst=5, bud")
    assert written.endswith(", sync='thread')")


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((0,), {}),
        ((-1.0,), {}),
        (("fast",), {}),
        ((0.1,), {"most": 0}),
        ((0.1,), {"cap": 1.5}),
        ((0.1,), {"burst": 0}),
        ((0.1,), {"budget": 3}),
        ((0.1,), {"dispose": "close"}),
        ((0.1,), {"sync": "cooperative"}),
        ((0.1,), {"workers": 0}),
    ],
)
def test_bad_settings_are_refused(arguments: Any, options: Any) -> None:
    """At once, with what to write instead."""
    with pytest.raises((TypeError, ValueError), match=r"write|pass"):
        Hedge(*arguments, **options)


@pytest.mark.parametrize(("p", "floor"), [(0.0, 0.1), (1.0, 0.1), (0.9, -1.0)])
def test_bad_quantiles_are_refused(p: float, floor: float) -> None:
    """A share between none and all, and a floor that is a time."""
    with pytest.raises(ValueError, match="write"):
        quantile(p, floor=floor)


def test_a_generator_cannot_be_hedged() -> None:
    """It gives its items bit by bit: there is no one answer to race for, in threads neither."""

    async def items() -> Any:
        yield 1

    def plain() -> Any:
        yield 1

    for hedge in (Hedge(1.0), Hedge(1.0, sync="thread")):
        for function in (items, plain):
            guard = new_guard(hedge)
            with pytest.raises(TypeError, match="cannot guard a generator"):
                guard(function)


def test_scripted_services_can_be_hedged() -> None:
    """With the helpers for tests: a replica that hangs, one that fails, one that answers."""

    async def main() -> None:
        guard = new_guard(Hedge(1.0, most=3, cap=1.0))
        service = ScriptedService(hang(), slow(9.0), answer("hello"))
        assert await guard.acall(service.acall) == "hello"
        assert (now(), service.running) == (2.0, 0)
        assert await guard.acall(ScriptedService(slow(1.5), fail(KeyError)).acall) is None

    run_virtual(main())


def test_the_tail_is_cut_for_a_few_percent_more_calls() -> None:
    """One call in a hundred hangs for 1.8 s: a hedge brings p99.9 down to a tenth of that."""

    async def main(*policies: Any) -> tuple[float, float]:
        chance = Random(7)
        guard = new_guard(*policies, Timeout(60.0))
        calls = 0
        latencies = []

        async def shard() -> None:
            nonlocal calls
            calls += 1
            slow = chance.random() < 0.01
            await let_pass(1.8 if slow else 0.005 + 0.01 * chance.random())

        for _ in range(5000):
            began = now()
            await guard.acall(shard)
            latencies.append(now() - began)
        return sorted(latencies)[-5], calls / 5000 - 1

    tail, extra = run_virtual(main())
    assert (tail, extra) == (pytest.approx(1.8), 0.0)
    tail, extra = run_virtual(main(Hedge(0.02)))
    assert tail < 0.05
    assert extra < 0.02
    tail, extra = run_virtual(main(Hedge(quantile(0.98))))
    assert tail < 0.05
    assert extra < 0.03
