"""Timeout around async calls: the semantics of `asyncio.timeout`, and a queue with one timer."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from contextvars import copy_context
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    Bulkhead,
    DeadlineExceeded,
    Guard,
    Retry,
    TimedOut,
    Timeout,
    _expiry,
    context,
    current_deadline,
    deadline,
    subscribe,
)
from seawall.clock import VirtualClock
from seawall.context import deadline_var
from seawall.events import CallTimedOut
from seawall.policies.timeout import adaptive_timeout
from seawall.policies.timeout import async_flow as _async_timeout
from seawall.resources import IoPool
from seawall.testing import ScriptedService, answer, fail, hang, run_virtual, slow
from tests.support import SEEDS, examples, falsified, let_pass, new_guard, quarters

QUARTERS = quarters(8, least=1)

Run = Callable[[], Awaitable[Any]]


# The same programs under asyncio.timeout and under Timeout


class Scope(NamedTuple):
    """A time limit around some steps, and what is done with a cancellation or a timeout there."""

    seconds: float
    steps: list[Any]
    inside: str
    outside: str


class Program(NamedTuple):
    """Steps with nested limits, and the instants at which somebody else cancels the task."""

    steps: list[Any]
    cancels: list[float]
    seed: int | None


LEAVES = st.one_of(
    QUARTERS,
    st.sampled_from(["raise TimeoutError", "raise ValueError", "raise CancelledError"]),
)
STEPS = st.recursive(
    st.lists(LEAVES, min_size=1, max_size=3),
    lambda steps: st.lists(
        st.one_of(
            QUARTERS,
            st.builds(
                Scope,
                seconds=QUARTERS,
                steps=steps,
                inside=st.sampled_from(["", "", "", "swallow", "clean up", "translate"]),
                outside=st.sampled_from(["", "", "catch"]),
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    max_leaves=6,
)
PROGRAMS = st.builds(Program, steps=STEPS, cancels=st.lists(QUARTERS, max_size=2), seed=st.none())


class Machine:
    """Runs a program and writes down what it sees."""

    def __init__(self, limit: Callable[[float, Run], Awaitable[Any]]) -> None:
        self.limit = limit
        self.seen: list[Any] = []

    def note(self, *what: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.seen.append((asyncio.get_running_loop().time(), task.cancelling(), *what))

    async def steps(self, steps: list[Any]) -> None:
        for step in steps:
            if isinstance(step, Scope):
                await self.scope(step)
            elif isinstance(step, float):
                await let_pass(step)
                self.note("passed", step)
            elif step == "raise CancelledError":
                raise asyncio.CancelledError
            else:
                raise TimeoutError("own") if "Timeout" in step else ValueError("own")

    async def scope(self, scope: Scope) -> None:
        try:
            await self.limit(scope.seconds, lambda: self.inside(scope))
        except TimeoutError as error:
            self.note("timeout", "own" in error.args)
            if not scope.outside:
                raise
        except BaseException as error:
            self.note("out of", type(error).__name__)
            raise
        else:
            self.note("through")

    async def inside(self, scope: Scope) -> None:
        try:
            await self.steps(scope.steps)
        except asyncio.CancelledError:
            self.note("cancelled")
            if scope.inside == "clean up":
                await let_pass(0.25)
            elif scope.inside == "translate":
                raise ValueError("translated") from None
            if scope.inside != "swallow":
                raise


async def _asyncio_limit(seconds: float, run: Run) -> Any:
    async with asyncio.timeout(seconds):
        return await run()


async def _our_limit(seconds: float, run: Run) -> Any:
    return await new_guard(Timeout(seconds)).acall(run)


async def _own_timer_limit(seconds: float, run: Run) -> Any:
    return await new_guard(Timeout(adaptive_timeout(floor=seconds, cap=seconds))).acall(run)


async def _deadline_limit(seconds: float, run: Run) -> Any:
    async with deadline(seconds):
        return await run()


def _run(program: Program, limit: Callable[[float, Run], Awaitable[Any]]) -> Machine:
    machine = Machine(limit)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(machine.steps(program.steps))
        for at in program.cancels:
            loop.call_later(at, lambda: machine.seen.append(("accepted", task.cancel())))
        await asyncio.wait([task])
        error = None if task.cancelled() else task.exception()
        kind = "TimeoutError" if isinstance(error, TimeoutError) else type(error).__name__
        machine.seen.append((loop.time(), task.cancelled(), kind, task.cancelling()))

    run_virtual(main(), seed=program.seed)
    return machine


def _check_like_asyncio(program: Program) -> None:
    expected = _run(program, _asyncio_limit).seen
    assert _run(program, _our_limit).seen == expected
    assert _run(program, _own_timer_limit).seen == expected


@given(PROGRAMS)
@examples(400)
def test_random_programs_run_as_under_asyncio_timeout(program: Program) -> None:
    """Nesting, cancellation at the same instant, swallowing, own errors: all as in asyncio."""
    if sys.version_info < (3, 11, 3):  # asyncio's own count of cancellations was wrong before
        program = program._replace(cancels=[])
    _check_like_asyncio(program)


def _forget_the_count(task: Any, _: int, error: BaseException | None) -> bool:
    task.uncancel()
    return isinstance(error, asyncio.CancelledError)


def _leave_the_count(task: Any, cancelling: int, error: BaseException | None) -> bool:
    return task.cancelling() - 1 <= cancelling and isinstance(error, asyncio.CancelledError)


def _relabel_errors(task: Any, cancelling: int, error: BaseException | None) -> bool:
    return task.uncancel() <= cancelling and error is not None


def _insist(task: Any, cancelling: int, _: BaseException | None) -> bool:
    return task.uncancel() <= cancelling


@pytest.mark.parametrize("broken", [_forget_the_count, _leave_the_count, _relabel_errors, _insist])
def test_without_its_bookkeeping_a_timeout_differs(
    broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every part of `take_back` matters: drop one, and some program runs otherwise."""
    monkeypatch.setattr(_expiry, "take_back", broken)
    monkeypatch.setattr(_async_timeout, "take_back", broken)
    assert falsified(_check_like_asyncio, PROGRAMS)


def _plain(steps: list[Any]) -> list[Any]:
    """Return the steps without those that cancel by themselves or keep a cancellation in."""
    return [
        step._replace(inside="", steps=_plain(step.steps)) if isinstance(step, Scope) else step
        for step in steps
        if step != "raise CancelledError"
    ]


SEEDED = st.builds(
    Program,
    steps=STEPS.map(_plain).filter(bool),
    cancels=st.lists(QUARTERS, min_size=1, max_size=2),
    seed=SEEDS,
)


def _check_cancellation_wins(program: Program) -> None:
    for limit in (_our_limit, _own_timer_limit, _deadline_limit):
        *seen, (_, cancelled, kind, cancelling) = _run(program, limit).seen
        accepted = seen.count(("accepted", True))
        assert cancelled == bool(accepted)
        assert kind in ("NoneType", "TimeoutError", "ValueError")
        assert cancelling == accepted


@given(SEEDED)
def test_a_cancellation_from_elsewhere_always_wins(program: Program) -> None:
    """In whatever order things of one instant happen, it is neither swallowed nor relabelled."""
    _check_cancellation_wins(program)


def test_without_the_count_cancellations_get_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Believe that every cancellation is one's own, and the property is falsified."""
    monkeypatch.setattr(_expiry, "take_back", _forget_the_count)
    monkeypatch.setattr(_async_timeout, "take_back", _forget_the_count)
    assert falsified(_check_cancellation_wins, SEEDED)


# What comes out


def test_a_call_that_takes_too_long_is_cancelled_in_time() -> None:
    """TimedOut comes at the very instant, knows guard and seconds, and is a TimeoutError."""

    async def main() -> None:
        guard = new_guard(Timeout(1.5))
        service = ScriptedService(hang())
        with pytest.raises(TimedOut, match=r"timed out after 1\.500 s") as caught:
            await guard.acall(service.acall)
        assert isinstance(caught.value, TimeoutError)
        assert (caught.value.guard, caught.value.seconds) == (guard.name, 1.5)
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)
        assert asyncio.get_running_loop().time() == 1.5
        assert service.running == 0
        assert guard.snapshot()["timed_out"] == 1
        assert guard.snapshot()["policies"][0] == {
            "policy": "timeout",
            "seconds": 1.5,
            "timed_out": 1,
        }

    run_virtual(main())


def test_a_call_in_time_is_left_alone() -> None:
    """It returns its value, no timer fires later, and nothing is counted."""

    async def main() -> None:
        guard = new_guard(Timeout(1.0))
        assert await guard.acall(ScriptedService(slow(0.75, "here")).acall) == "here"
        await let_pass(5.0)
        assert asyncio.current_task().cancelling() == 0
        assert guard.snapshot()["timed_out"] == 0

    run_virtual(main())


@pytest.mark.parametrize("error", [TimeoutError("mine"), TimedOut("of another guard")])
def test_the_functions_own_timeout_error_passes_through(error: TimeoutError) -> None:
    """It is not relabelled, and not counted as a timeout of this guard."""

    async def main() -> None:
        guard = new_guard(Timeout(1.0))

        async def function() -> None:
            raise error

        with pytest.raises(TimeoutError) as caught:
            await guard.acall(function)
        assert caught.value is error
        assert guard.snapshot()["policies"][0]["timed_out"] == 0

    run_virtual(main())


def test_a_function_that_returns_in_spite_of_it_has_returned() -> None:
    """As with asyncio.timeout a swallowed cancellation leaves the value, and no trace behind."""

    async def main() -> None:
        guard = new_guard(Timeout(1.0))

        async def function() -> str:
            try:
                await let_pass(9.0)
            except asyncio.CancelledError:
                return "nevertheless"
            return "never"

        assert await guard.acall(function) == "nevertheless"
        assert asyncio.current_task().cancelling() == 0
        await let_pass(1.0)

    run_virtual(main())


def test_time_that_passes_before_the_function_begins_is_a_refusal() -> None:
    """A timeout in the queue of a bulkhead is DeadlineExceeded: the work never started."""

    async def main() -> None:
        bulkhead = Bulkhead(1, max_wait=10.0)
        guard = new_guard(Timeout(1.0), bulkhead)
        other = new_guard(bulkhead)
        async with other.hold():
            service = ScriptedService(answer())
            with pytest.raises(DeadlineExceeded, match="before the call began"):
                await guard.acall(service.acall)
            assert service.calls == 0
            assert asyncio.get_running_loop().time() == 1.0
        assert bulkhead.in_flight == bulkhead.waiting == 0

    run_virtual(main())


def test_two_timeouts_of_one_guard_that_expire_together_are_one() -> None:
    """The outer one reports; the task is left without a trace of either."""

    async def main(seconds: float) -> None:
        guard = new_guard(Timeout(1.0), Timeout(seconds))
        with pytest.raises(TimedOut):
            await guard.acall(ScriptedService(hang()).acall)
        assert asyncio.get_running_loop().time() == min(1.0, seconds)
        assert asyncio.current_task().cancelling() == 0

    for seconds in (0.5, 1.0, 2.0):
        for seed in range(5):
            run_virtual(main(seconds), seed=seed)


def test_an_inner_timeout_is_a_failure_for_the_outer_layers() -> None:
    """Only the innermost expiry that is due is reported, and the outer one goes on."""

    async def main() -> None:
        guard = new_guard(Timeout(5.0), Retry(on=TimedOut, attempts=9, backoff=0), Timeout(2.0))
        with pytest.raises(TimedOut) as caught:
            await guard.acall(ScriptedService(hang()).acall)
        assert asyncio.get_running_loop().time() == 5.0
        assert caught.value.seconds == 5.0
        assert [p.get("timed_out") for p in guard.snapshot()["policies"]] == [1, None, 2]

    run_virtual(main())


def test_every_timeout_is_an_event() -> None:
    """CallTimedOut tells the guard and the seconds."""

    async def main() -> None:
        seen: list[CallTimedOut] = []
        unsubscribe = subscribe(seen.append, CallTimedOut)
        guard = new_guard(Timeout(2.0))
        await guard.aattempt(ScriptedService(hang()).acall)
        unsubscribe()
        assert [(event.guard, event.seconds) for event in seen] == [(guard.name, 2.0)]

    run_virtual(main())


def test_settings_are_checked_where_they_are_written() -> None:
    """Each message says what to write."""
    for wrong in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="seconds"):
            Timeout(wrong)
    with pytest.raises(TypeError, match="seconds"):
        Timeout("2")
    with pytest.raises(ValueError, match="'cooperative', 'thread'"):
        Timeout(1.0, sync="signal")
    with pytest.raises(ValueError, match="cap"):
        adaptive_timeout(floor=2.0, cap=1.0)
    with pytest.raises(ValueError, match="factor"):
        adaptive_timeout(factor=0.5, floor=1.0, cap=2.0)
    assert repr(Timeout(2.0, sync="thread")) == "Timeout(2.0, sync='thread')"


def test_outside_of_a_task_it_says_what_is_missing() -> None:
    """There must be a task to cancel."""
    with pytest.raises(RuntimeError, match=r"needs a task to cancel|no running event loop"):
        new_guard(Timeout(1.0)).acall(ScriptedService(answer()).acall).send(None)


# Recursion, loops and threads


def test_a_guarded_function_may_call_itself() -> None:
    """Each level has its own time, from its own beginning."""

    async def main() -> None:
        loop = asyncio.get_running_loop()

        @new_guard(Timeout(1.0))
        async def function(depth: int) -> list[float]:
            if not depth:
                await let_pass(9.0)
            await let_pass(0.25)
            try:
                return await function(depth - 1)
            except TimedOut:
                return [loop.time()]

        # The outermost of all expires first, whichever is innermost.
        with pytest.raises(TimedOut):
            await function(3)
        assert loop.time() == 1.0
        assert asyncio.current_task().cancelling() == 0

        @new_guard(Timeout(1.0))
        async def quick(depth: int) -> int:
            await let_pass(0.25)
            return depth and await quick(depth - 1)

        assert await quick(2) == 0
        await let_pass(5.0)

    run_virtual(main())


def test_one_guard_serves_two_loops_in_two_threads() -> None:
    """Each loop has a lane of its own; both expire, and a third loop sweeps the closed ones."""
    guard = new_guard(Timeout(0.02))
    both = threading.Barrier(2)
    ended: list[str] = []

    async def main(name: str) -> None:
        async def function() -> None:
            await asyncio.get_running_loop().create_future()

        both.wait(30)
        results = await asyncio.gather(*[guard.aattempt(function) for _ in range(20)])
        assert all(isinstance(result.error, TimedOut) for result in results)
        ended.append(name)

    def run(name: str) -> None:
        asyncio.run(main(name))

    threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(ended) == ["a", "b"]
    assert guard.snapshot()["timed_out"] == 40

    asyncio.run(guard.acall(ScriptedService(answer()).acall))
    lanes = next(iter(guard._plan._segments.values()))[0]._layers[0]._lanes
    assert len(lanes) == 1


def test_loops_one_after_another_in_one_thread() -> None:
    """A closed loop's task is never taken for the current one."""
    guard = new_guard(Timeout(60.0))

    async def main() -> None:
        assert _expiry.current_task() is asyncio.current_task()
        assert await guard.acall(ScriptedService(answer(1)).acall) == 1

    for _ in range(3):
        asyncio.run(main())
        with pytest.raises(RuntimeError):
            _expiry.running_task()


# One timer


def _count_timers(loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made: list[float] = []
    call_at = loop.call_at

    def counting(when: float, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        made.append(when)
        return call_at(when, *args, **kwargs)

    monkeypatch.setattr(loop, "call_at", counting)
    return made


def test_a_thousand_calls_at_once_need_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a constant limit the calls stand in a queue with one timer for its head."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        timers = _count_timers(loop, monkeypatch)
        guard = new_guard(Timeout(2.0))
        go = asyncio.Event()
        calls = [loop.create_task(guard.acall(go.wait)) for _ in range(1000)]
        await let_pass(1.0)
        go.set()
        await asyncio.gather(*calls)
        assert len(timers) == 2  # ours, and the one of let_pass
        await let_pass(5.0)
        assert len(timers) == 3  # nothing is armed when nobody is under way

    run_virtual(main())


def test_a_thousand_calls_that_expire_together_need_one_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of one instant are cancelled by one firing."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        timers = _count_timers(loop, monkeypatch)
        guard = new_guard(Timeout(2.0))
        never = asyncio.Event()
        results = await asyncio.gather(*[guard.aattempt(never.wait) for _ in range(1000)])
        assert all(isinstance(result.error, TimedOut) for result in results)
        assert loop.time() == 2.0
        assert timers == [2.0]

    run_virtual(main())


class Stream(NamedTuple):
    """Calls that begin one after another, each with its own duration; limits may change between."""

    gaps: list[float]
    durations: list[float]
    limits: list[float]
    seed: int


STREAMS = st.builds(
    Stream,
    gaps=st.lists(st.integers(0, 4).map(lambda n: n / 4), min_size=1, max_size=12),
    durations=st.lists(QUARTERS, min_size=1, max_size=5),
    limits=st.lists(QUARTERS, min_size=1, max_size=3),
    seed=SEEDS,
)


def _check_stream(case: Stream) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        policy = Timeout(case.limits[0])
        guard = new_guard(policy)

        async def one(number: int) -> None:
            limit, began = policy.seconds, loop.time()
            wanted = case.durations[number % len(case.durations)]
            result = await guard.aattempt(let_pass, wanted)
            if wanted < limit:
                assert result.ok
                assert loop.time() == began + wanted
            elif wanted > limit:
                assert isinstance(result.error, TimedOut)
                assert loop.time() == began + limit
            assert loop.time() <= began + limit

        tasks = []
        for number, gap in enumerate(case.gaps):
            if gap:
                await let_pass(gap)
            limit = case.limits[number % len(case.limits)]
            if limit != policy.seconds:
                policy.update(seconds=limit)
            # It begins before the next change of the limit.
            task = loop.create_task(one(number))
            tasks.append(task)
            started = loop.create_future()
            loop.call_soon(lambda f=started: loop.call_soon(lambda: f.set_result(None)))
            await started
        await asyncio.gather(*tasks)

    run_virtual(main(), seed=case.seed)


@given(STREAMS)
def test_every_call_has_exactly_the_time_that_was_the_limit_when_it_began(case: Stream) -> None:
    """One timer serves all in order, and `update` leaves the calls under way as they are."""
    _check_stream(case)


def test_without_arming_again_later_calls_never_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the lane's timer serve its first call only, and the property is falsified."""
    monkeypatch.setattr(
        _async_timeout.ExpiryQueue,
        "_fire",
        lambda lane: (
            [task.cancel(_expiry.EXPIRED) for task in list(lane.pending)[:1]]
            and [lane.pending.pop(task) for task in list(lane.pending)[:1]]
        ),
    )
    assert falsified(_check_stream, STREAMS)


def test_without_new_lanes_a_changed_limit_is_out_of_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Put calls of another limit into the same queue, and the property is falsified."""

    def refresh(self: Any) -> None:
        self._constant = self._bound.policy.seconds

    monkeypatch.setattr(_async_timeout.AsyncTimeout, "refresh", refresh)
    assert falsified(_check_stream, STREAMS)


def test_update_is_for_calls_that_begin_later() -> None:
    """A call under way keeps its limit; bad values change nothing."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        policy = Timeout(5.0)
        guard = new_guard(policy)
        first = loop.create_task(guard.aattempt(ScriptedService(hang()).acall))
        await let_pass(1.0)
        policy.update(seconds=1.0)
        with pytest.raises(ValueError, match="seconds"):
            policy.update(seconds=0)
        with pytest.raises(TypeError, match="it takes seconds"):
            policy.update(sync="thread")
        await guard.aattempt(ScriptedService(hang()).acall)
        assert loop.time() == 2.0
        error = (await first).error
        assert loop.time() == 5.0
        assert isinstance(error, TimedOut)
        assert error.seconds == 5.0  # the time it had, whatever the limit is by now

    run_virtual(main())


# The deadline and adaptive limits


@given(QUARTERS, QUARTERS, SEEDS)
def test_the_time_is_bounded_by_the_deadline(seconds: float, left: float, seed: int) -> None:
    """Whichever is nearer ends the call; what the function sees is never more than there was."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        guard = new_guard(Timeout(seconds))

        async def function() -> None:
            assert current_deadline().remaining() <= left
            await let_pass(60.0)

        with deadline(left), pytest.raises(TimedOut):
            await guard.acall(function)
        assert loop.time() == min(seconds, left)

    run_virtual(main(), seed=seed)


def test_a_deadline_that_has_passed_refuses_before_anything_begins() -> None:
    """The function never starts."""

    async def main() -> None:
        service = ScriptedService(answer())
        with deadline(0), pytest.raises(DeadlineExceeded):
            await new_guard(Timeout(1.0)).acall(service.acall)
        assert service.calls == 0

    run_virtual(main())


def test_an_adaptive_limit_follows_the_latency() -> None:
    """The cap while little is known, then a multiple of what is usual, never under the floor."""

    async def main() -> None:
        guard = new_guard(Timeout(adaptive_timeout(p=0.5, factor=2.0, floor=0.5, cap=8.0)))
        seconds = guard.bounds[0].seconds
        now = asyncio.get_running_loop().time

        async def calls(duration: float) -> None:
            for _ in range(100):
                await guard.aattempt(let_pass, duration)

        assert seconds(now()) == 8.0
        for _ in range(19):
            await guard.acall(let_pass, 1.0)
        assert seconds(now()) == 8.0
        await calls(1.0)
        assert seconds(now()) == pytest.approx(2.0, rel=0.1)
        began = now()
        assert isinstance((await guard.aattempt(let_pass, 60.0)).error, TimedOut)
        assert now() - began == pytest.approx(2.0, rel=0.1)
        # Calls that are cut off count with the time they had: so the limit can rise again.
        await calls(3.0)
        assert seconds(now()) > 2.5
        await calls(60.0)
        await calls(60.0)
        assert seconds(now()) == 8.0
        for _ in range(5):
            await calls(0.01)
            await let_pass(60.0)
        await calls(0.01)
        await let_pass(1.0)
        assert seconds(now()) == 0.5

    run_virtual(main())


def test_update_can_turn_a_constant_into_an_adaptive_limit_and_back() -> None:
    """The longest that a call may get is what `explain` and `standard` reckon with."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        policy = Timeout(1.0)
        guard = new_guard(policy)
        for limit, expected in [(adaptive_timeout(floor=1.0, cap=3.0), 3.0), (2.0, 2.0)]:
            policy.update(seconds=limit)
            assert policy.longest == expected
            began = loop.time()
            await guard.aattempt(ScriptedService(hang()).acall)
            assert loop.time() - began == expected

    run_virtual(main())


@pytest.mark.parametrize("enforced", [False, True])
def test_an_enforced_deadline_and_a_timeout_at_the_same_instant(enforced: bool) -> None:  # noqa: FBT001
    """One TimedOut comes out, and the task is as before."""

    async def main() -> None:
        guard = new_guard(Timeout(1.0))
        with pytest.raises(TimedOut):
            async with deadline(1.0) if enforced else nullcontext():
                await guard.acall(ScriptedService(hang()).acall)
        assert asyncio.get_running_loop().time() == 1.0
        assert asyncio.current_task().cancelling() == 0

    for seed in range(10):
        run_virtual(main(), seed=seed)


# The time of a call is the deadline of what runs inside it


def _left() -> float | None:
    held = current_deadline()
    return None if held is None else held.remaining()


def test_a_timeout_is_the_deadline_of_what_runs_inside() -> None:
    """The nearer of two counts; afterwards there is none."""

    async def main() -> None:
        outer, near, far = (new_guard(Timeout(seconds)) for seconds in (0.5, 0.25, 2.0))

        async def inside() -> list[float | None]:
            seen = [_left()]
            seen += [await near.acall(left), await far.acall(left)]
            with deadline(1.0) as kept:
                seen.append(kept.remaining())
            await let_pass(0.125)
            return [*seen, _left()]

        for _ in range(2):  # by the rule, and by the success path
            assert await outer.acall(inside) == [0.5, 0.25, 0.5, 0.5, 0.375]
            assert _left() is None

    async def left() -> float | None:
        return _left()

    run_virtual(main())


@pytest.mark.parametrize("start", ["gather", "task group"])
def test_child_tasks_have_the_deadline_of_the_call_that_they_are_part_of(start: str) -> None:
    """Whoever starts them: they copy the context."""

    async def child() -> float | None:
        await let_pass(0.125)
        return _left()

    async def main() -> None:
        guard = new_guard(Timeout(0.5))

        @guard
        async def parent() -> list[float | None]:
            if start == "gather":
                return await asyncio.gather(child(), child())
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(child()) for _ in range(2)]
            return [task.result() for task in tasks]

        assert [await parent(), await parent()] == [[0.375, 0.375]] * 2

    run_virtual(main())


def _background(outcome: str) -> list[Any]:
    """Start a task inside a call with a timeout; return what it sees during and after the call."""
    seen: list[Any] = []

    async def main() -> None:
        inner = new_guard(Retry(on=ConnectionError))
        tasks = []

        async def work() -> str:
            return "done"

        async def background() -> None:
            await let_pass(0.25)
            seen.append(_left())
            await let_pass(10.0)
            seen.append(_left())
            seen.append(await inner.acall(work))

        async def call(*, fails: bool) -> None:
            tasks.append(asyncio.create_task(background()))
            await let_pass(0.5 if outcome != "times out" else 5.0)
            if fails:
                raise ConnectionError

        guard = new_guard(Timeout(1.0))
        await guard.acall(answered)
        try:
            await guard.acall(call, fails=outcome == "fails")
        except (ConnectionError, TimedOut):
            pass
        # Neither does another call of the same task, which is under way then, concern it.
        other = new_guard(Timeout(20.0))
        await other.acall(let_pass, 15.0)
        await asyncio.gather(*tasks)

    async def answered() -> None:
        pass

    run_virtual(main())
    return seen


@pytest.mark.parametrize("outcome", ["returns", "fails", "times out"])
def test_a_background_task_is_not_refused_because_of_a_call_that_has_ended(outcome: str) -> None:
    """It has the deadline of the call while that is under way, and none after it."""
    assert _background(outcome) == [0.75, None, "done"]


def test_without_the_end_of_its_scope_a_timeout_outlives_its_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The background task has no time left, long after."""
    monkeypatch.setattr(context, "live_scope", lambda scope: scope)
    assert _background("returns")[1] == 0.0


def test_a_retry_inside_a_timeout_makes_no_pause_that_cannot_end_in_time() -> None:
    """So the real error is raised at once, and no `TimedOut` hides it."""

    async def main() -> None:
        service = ScriptedService(fail(ConnectionError("refused"), times=None))
        outer, inner = new_guard(Timeout(0.5)), new_guard(Retry(on=ConnectionError, backoff=[2.0]))

        @outer
        async def call() -> Any:
            return await inner.acall(service.acall)

        for _ in range(2):
            began = asyncio.get_running_loop().time()
            with pytest.raises(ConnectionError, match="refused"):
                await call()
            assert asyncio.get_running_loop().time() == began
        assert service.calls == 2

    run_virtual(main())


def test_a_call_that_outlasted_its_time_is_timed_out_though_a_guard_inside_refused_more() -> None:
    """A loop that is kept busy cancels nobody; still it began, so `TimedOut` it is."""

    async def main(clock: VirtualClock) -> None:
        inner = new_guard(Bulkhead(1))
        refused: list[DeadlineExceeded] = []

        async def work() -> None:
            raise AssertionError("expired work has started")

        async def busy() -> None:
            clock.advance(1.0)
            try:
                await inner.acall(work)
            except DeadlineExceeded as error:
                refused.append(error)
                raise

        for policies in ([Timeout(0.5)], [Timeout(0.5), Timeout(2.0)]):
            guard = new_guard(*policies)
            with pytest.raises(TimedOut, match=r"after 0\.500 s") as caught:
                await guard.acall(busy)
            assert caught.value.__cause__ is refused[-1]
            assert guard.snapshot()["timed_out"] == 1

    clock = VirtualClock()
    run_virtual(main(clock), clock=clock)


def test_a_total_and_an_attempt_timeout_need_no_timers_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The total is a deadline for the attempt, and costs it nothing but a comparison."""

    class Own:
        def __init__(self, *_: object) -> None:
            raise AssertionError("a timer for one call")

    monkeypatch.setattr(_async_timeout, "_OwnTimer", Own)

    async def main() -> None:
        retry = Retry(on=TimedOut, attempts=3, backoff=[0.5])
        guard = new_guard(Timeout(2.0), retry, Timeout(1.0))
        for _ in range(3):
            assert await guard.acall(ScriptedService(answer("ok")).acall) == "ok"
        # The second attempt begins at 1.5: the total ends it, and says so.
        with pytest.raises(TimedOut, match=r"after 2\.000 s"):
            await guard.acall(ScriptedService(hang(times=None)).acall)
        assert asyncio.get_running_loop().time() == 2.0

    run_virtual(main())


def test_the_deadline_of_a_stream_ends_with_its_first_item() -> None:
    """As the timeout does; its consumer never has it."""

    async def main() -> None:
        @new_guard(Timeout(0.5))
        async def items() -> AsyncIterator[float | None]:
            yield _left()
            await let_pass(1.0)
            yield _left()

        seen = []
        async for item in items():
            seen += [item, _left()]
        assert seen == [0.5, None, None, None]

    run_virtual(main())


def test_what_a_call_was_is_freed_when_it_has_ended() -> None:
    """The ended scope stays in the task's context, and must not lead to the task or the guard."""

    async def main() -> None:
        guard = new_guard(Timeout(1.0))
        for _ in range(2):
            task = asyncio.create_task(guard.acall(let_pass, 0.25))
            await task
            gone = weakref.ref(task)
            del task
            await let_pass(0.0)  # the loop itself has it until then
            assert gone() is None
            await guard.acall(let_pass, 0.25)  # in the context of this task
        guard.close()
        gone = weakref.ref(guard)
        del guard
        gc.collect()
        assert gone() is None

    gc.disable()
    try:
        run_virtual(main())
    finally:
        gc.enable()


def test_a_thread_has_the_deadline_of_the_timeout_around_it_also_when_it_is_given_up() -> None:
    """Work that nobody waits for any more begins nothing; what comes after has no deadline."""
    clock = VirtualClock()
    inner, outer = new_guard(Bulkhead(1), clock=clock), new_guard(Timeout(30.0), clock=clock)
    pool = IoPool("deadlines", workers=1, clock=clock)
    started, given_up = threading.Event(), threading.Event()
    seen: list[Any] = []

    def work() -> None:
        seen.append(_left())
        started.set()
        given_up.wait(60)
        seen.append(_left())
        try:
            inner.call(int)
        except DeadlineExceeded:
            seen.append("refused")

    async def main() -> None:
        task = asyncio.create_task(outer.acall(pool.arun, work))
        await asyncio.to_thread(started.wait, 60)
        task.cancel()
        await asyncio.wait([task])
        clock.advance(31.0)
        given_up.set()
        assert await pool.arun(_left) is None

    with pool:
        asyncio.run(main())
    assert seen == [30.0, 0.0, "refused"]


def test_a_task_left_running_is_not_bound_through_a_scope_of_its_own():
    """A call that began under a nearer deadline has its own time again when that one has ended."""

    async def main() -> list[str]:
        tick = Guard("tick", Timeout(1.0))
        ran: list[str] = []
        tasks: list[asyncio.Task[None]] = []

        async def work() -> None:
            ran.append("ran")
            if len(ran) < 40:
                tasks.append(asyncio.create_task(later()))
            await asyncio.sleep(0.1)  # noqa: TID251 - virtual

        async def later() -> None:
            await asyncio.sleep(0.05)  # noqa: TID251 - virtual
            await tick.acall(work)

        await tick.acall(work)
        while tasks:
            await tasks.pop(0)
        held = deadline_var.get()
        depth = 0
        while held is not None:
            held, depth = held[2], depth + 1
        assert depth <= 2
        return ran

    assert len(run_virtual(main())) == 40


def test_a_timeout_around_another_loop_is_kept_inside_it():
    """Where a cancellation cannot reach, the inner timeout ends the call at the nearer instant."""
    clock = VirtualClock(100.0)
    inner = Guard("inner", Timeout(3.0), clock=clock)
    ends: list[float] = []

    async def call() -> None:
        scope = deadline_var.get()
        assert scope is not None
        ends.append(scope[5].seconds)

    async def elsewhere() -> None:
        await inner.acall(call)

    async def main() -> None:
        outer = Guard("outer", Timeout(0.5), clock=clock)

        async def hop() -> None:
            context = copy_context()
            await asyncio.to_thread(lambda: context.run(asyncio.run, elsewhere()))

        await outer.acall(hop)

    asyncio.run(main())
    assert ends == [0.5]


async def _hang() -> None:
    await let_pass(9.0)


def _cleaned_up(around: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]) -> list[Any]:
    """Cancel a body by `around`; return what its cleanup under a guard with a retry does."""
    seen: list[Any] = []

    async def roll_back() -> None:
        seen.append(_left())
        if len(seen) == 1:
            raise ConnectionError

    async def body() -> None:
        cleanup = new_guard(Timeout(2.0), Retry(on=ConnectionError, backoff=[0.25]))
        try:
            await _hang()
        finally:
            await cleanup.acall(roll_back)
            seen.append("cleaned up")

    async def main() -> None:
        with pytest.raises(TimedOut):
            await around(body)

    run_virtual(main())
    return seen


async def _enforced(body: Callable[[], Awaitable[None]]) -> None:
    async with deadline(0.5):
        await body()


AROUND: dict[str, Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]] = {
    "constant": lambda body: new_guard(Timeout(0.5)).acall(body),
    "adaptive": lambda body: new_guard(Timeout(adaptive_timeout(floor=0.1, cap=0.5))).acall(body),
    "total and attempt": lambda body: new_guard(
        Timeout(0.5), Retry(on=ConnectionError), Timeout(5.0)
    ).acall(body),
    "another guard's": lambda body: new_guard(Timeout(0.5)).acall(
        new_guard(Timeout(5.0)).acall, body
    ),
    "a block": _enforced,
}


@pytest.mark.parametrize("around", AROUND)
def test_cleanup_under_a_guard_is_not_refused_after_a_timeout_has_cancelled(around: str) -> None:
    """What begins after the cancellation has time of its own, for its retries too."""
    seen = _cleaned_up(AROUND[around])
    # What was cut short may itself have had more time than that.
    assert seen[0] in (2.0, 4.5)
    assert seen[1:] == [seen[0] - 0.25, "cleaned up"]


def test_cleanup_is_bound_by_a_deadline_further_out() -> None:
    """Only the scope that has cancelled is left out: the caller's time is still the caller's."""

    async def around(body: Callable[[], Awaitable[None]]) -> None:
        with deadline(1.0):
            await new_guard(Timeout(0.5)).acall(body)

    assert _cleaned_up(around) == [0.5, 0.25, "cleaned up"]


def test_cleanup_that_hangs_is_cancelled_by_its_own_timeout() -> None:
    """The second cancellation is the cleanup's, and the first stays that of the call."""

    async def main() -> float:
        work, cleanup = new_guard(Timeout(0.5)), new_guard(Timeout(1.0))
        caught: list[Any] = []

        async def body() -> None:
            try:
                await _hang()
            finally:
                with pytest.raises(TimedOut) as caught_inside:
                    await cleanup.acall(_hang)
                caught.append(caught_inside.value.guard)

        with pytest.raises(TimedOut) as raised:
            await work.acall(body)
        assert (caught, raised.value.guard) == ([cleanup.name], work.name)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 1.5


def test_a_call_that_began_before_the_expiry_does_not_go_on_after_it() -> None:
    """A guard inside whose function swallows the cancellation makes no second attempt."""
    begun = []

    async def swallows() -> None:
        begun.append(asyncio.get_running_loop().time())
        try:
            await _hang()
        except asyncio.CancelledError:
            raise ConnectionError from None

    async def main() -> None:
        inner = new_guard(Retry(on=ConnectionError, backoff=[0.0] * 3), Timeout(5.0))
        with pytest.raises(ConnectionError):
            await new_guard(Timeout(0.5)).acall(inner.acall, swallows)

    run_virtual(main())
    assert begun == [0.0]
