"""Blocks that are attempted again: `for attempt in guard.attempts(): with attempt: ...`."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    Breaker,
    Bulkhead,
    BulkheadFull,
    Cache,
    Chaos,
    CircuitOpen,
    Fallback,
    Guard,
    Hedge,
    RateLimit,
    Retry,
    RetryBudget,
    Shed,
    ThreadBulkhead,
    TimedOut,
    Timeout,
    check_deadline,
    current_deadline,
    deadline,
    static,
)
from seawall.clock import VirtualClock
from seawall.context import current_attempt
from seawall.errors import ReportedFailure
from seawall.runtime.layers import Outcome
from seawall.runtime.policy import GateBound, GatePolicy
from seawall.shedding import by_criticality
from seawall.testing import ScriptedService, answer, fail, run_virtual, virtual_time
from tests.support import let_pass, new_guard


class Broken(Exception):
    """What is retried here."""


class Bug(Exception):
    """What is not."""


class Turnstile(GatePolicy):
    """A gate that knows who is inside, and raises if somebody leaves who is not."""

    kind = "turnstile"

    def __init__(self) -> None:
        super().__init__("enforce")
        self.inside: set[int] = set()
        self.entered = 0
        self.outcomes: list[Outcome] = []

    def _bind(self, host: Any) -> _TurnstileGate:
        return _TurnstileGate(self, host)


class _TurnstileGate(GateBound):
    policy: Turnstile

    def enter(self, _now: float) -> int:
        self.policy.entered += 1
        self.policy.inside.add(self.policy.entered)
        return self.policy.entered

    def leave(self, ticket: int, outcome: Outcome, _detail: object, _now: float) -> None:
        self.policy.inside.remove(ticket)
        self.policy.outcomes.append(outcome)


def _retry(**settings: Any) -> Retry:
    return Retry(on=Broken, **{"attempts": 3, "backoff": [1.0], **settings})


def _run(guard: Guard, kind: str, block: Callable[[Any], Any]) -> Any:
    """Run a plain block in a loop of either kind; return what the last attempt did."""
    seen: list[Any] = []
    if kind == "sync":
        for attempt in guard.attempts():
            with attempt:
                seen.append(block(attempt))
        return seen[-1]

    async def main() -> None:
        async for attempt in guard.attempts():
            async with attempt:
                seen.append(block(attempt))

    run_virtual(main())
    return seen[-1]


both = pytest.mark.parametrize("kind", ["sync", "async"])


# How a loop goes


@both
def test_an_error_is_swallowed_while_another_attempt_follows(kind: str) -> None:
    """The block runs until it succeeds, and each attempt knows its number."""
    turnstile = Turnstile()
    with virtual_time() as clock:
        guard = new_guard(_retry(backoff=[0.0]), turnstile, clock=clock)
        numbers: list[tuple[int, int]] = []

        def block(attempt: Any) -> str:
            numbers.append((attempt.number, current_attempt()))
            if attempt.number < 3:
                raise Broken
            return "done"

        assert _run(guard, kind, block) == "done"
    assert numbers == [(1, 1), (2, 2), (3, 3)]
    assert [outcome.value for outcome in turnstile.outcomes] == ["failed", "failed", "ok"]
    assert guard.snapshot()["policies"][0]["outcomes"]["succeeded_after_retry"] == 1
    assert current_attempt() == 1


@both
@pytest.mark.parametrize(("error", "attempts"), [(Broken("no"), 3), (Bug("no"), 1)])
def test_the_last_error_is_raised_from_the_with(kind: str, error: Exception, attempts: int) -> None:
    """The error itself, with the notes that a call's would have."""
    with virtual_time() as clock:
        guard = new_guard(_retry(backoff=[0.0]), clock=clock)
        made: list[int] = []

        def block(attempt: Any) -> None:
            made.append(attempt.number)
            raise error

        with pytest.raises(type(error)) as caught:
            _run(guard, kind, block)
    assert caught.value is error
    assert made == list(range(1, attempts + 1))
    assert len(getattr(error, "__notes__", [])) == (3 if attempts == 3 else 0)


def test_pauses_are_made_between_attempts() -> None:
    """By the schedule, and on the guard's clock."""
    with virtual_time() as clock:
        guard = new_guard(_retry(backoff=[1.0, 2.0]), clock=clock)
        times = []

        def loop() -> None:
            for attempt in guard.attempts():
                with attempt:
                    times.append(clock.now())
                    raise Broken

        with pytest.raises(Broken):
            loop()
    assert times == [0.0, 1.0, 3.0]


def test_break_and_return_inside_the_block_are_successes() -> None:
    """They leave the block without an error, and the loop with all that it held."""
    turnstile, outside = Turnstile(), Turnstile()
    guard = new_guard(outside, _retry(), turnstile)
    for attempt in guard.attempts():
        with attempt:
            break

    def returns() -> str:
        for attempt in guard.attempts():
            with attempt:
                return "value"
        raise AssertionError

    assert returns() == "value"
    assert [outcome.value for outcome in turnstile.outcomes + outside.outcomes] == ["ok"] * 4
    assert not turnstile.inside | outside.inside


@both
def test_a_loop_that_is_left_between_attempts_leaves_all_gates(kind: str) -> None:
    """Also while the attempt's own variable lives on."""
    turnstile, outside = Turnstile(), Turnstile()
    guard = new_guard(outside, Timeout(50.0, sync="cooperative"), _retry(), turnstile)

    async def main() -> None:
        async for attempt in guard.attempts():
            async with attempt:
                raise Broken
            break
        assert attempt.number == 1

    if kind == "async":
        run_virtual(main())
    else:
        for attempt in guard.attempts():
            with attempt:
                raise Broken
            break
        assert attempt.number == 1
        assert current_deadline() is None
    assert not turnstile.inside | outside.inside
    assert [outcome.value for outcome in outside.outcomes] == ["cancelled"]


def test_a_loop_without_retry_makes_one_attempt() -> None:
    """The rest of the stack stands around it all the same."""
    guard = new_guard(Bulkhead(1))
    made = []
    for attempt in guard.attempts():
        with attempt:
            made.append(guard.snapshot()["policies"][0]["in_flight"])
    assert made == [1]

    def loop() -> None:
        for attempt in guard.attempts():
            with attempt:
                raise Bug

    with pytest.raises(Bug):
        loop()


def test_a_refusal_is_raised_from_the_with_and_the_block_does_not_run() -> None:
    """There is no attempt to swallow it for."""
    breaker = Breaker()
    breaker.isolate()
    guard = new_guard(_retry(), breaker)

    def loop() -> None:
        for attempt in guard.attempts():
            with attempt:
                raise AssertionError

    with pytest.raises(CircuitOpen):
        loop()


def test_a_retry_that_is_refused_raises_the_error_of_the_block() -> None:
    """As for calls: something was sent."""
    with virtual_time() as clock:
        guard = new_guard(_retry(), Breaker(consecutive=1, counts="attempts"), clock=clock)
        made = []

        def loop() -> None:
            for attempt in guard.attempts():
                with attempt:
                    made.append(attempt.number)
                    raise Broken("sent")

        with pytest.raises(Broken, match="sent") as caught:
            loop()
    assert made == [1]
    assert "the next was refused" in caught.value.__notes__[0]


def test_what_a_block_says_of_itself_counts() -> None:
    """`failed` is retried if `on` names it, and is not raised in the end; `ignore` is neither."""
    turnstile = Turnstile()
    guard = new_guard(Retry(on=ReportedFailure, attempts=2, backoff=0), turnstile)
    statuses = []
    for attempt in guard.attempts():
        with attempt:
            statuses.append(503)
            attempt.failed("status 503")
    assert statuses == [503, 503]
    assert [outcome.value for outcome in turnstile.outcomes] == ["failed", "failed"]
    for attempt in guard.attempts():
        with attempt:
            attempt.ignore()
    assert turnstile.outcomes[-1].value == "cancelled"
    lenient = new_guard(Retry(on=Exception, attempts=2, backoff=0))

    def loop() -> None:
        for attempt in lenient.attempts():
            with attempt:
                attempt.ignore()
                raise Bug

    with pytest.raises(Bug):
        loop()


def test_values_are_not_looked_at() -> None:
    """A block has none: a function in `on=` is asked about errors only."""
    guard = new_guard(Retry(on=lambda _error, value: value["retry"], backoff=0))
    made = []
    for attempt in guard.attempts():
        with attempt:
            made.append(1)
    assert made == [1]


@pytest.mark.parametrize(
    "kind", [StopIteration, StopAsyncIteration, GeneratorExit, KeyboardInterrupt]
)
def test_any_error_can_end_a_block(kind: type[BaseException]) -> None:
    """StopIteration and GeneratorExit mean something to generators, and nothing here."""
    turnstile = Turnstile()
    guard = new_guard(Retry(on=Broken, backoff=0), turnstile)

    def loop() -> None:
        for attempt in guard.attempts():
            with attempt:
                raise kind

    with pytest.raises(kind):
        loop()
    assert not turnstile.inside


# Time


def test_each_attempt_has_its_own_timeout_and_all_have_the_total() -> None:
    """Expiry in the block is `TimedOut`; it is retried, until the total is over."""

    async def main() -> None:
        turnstile = Turnstile()
        guard = new_guard(
            Timeout(5.5), Retry(on=TimeoutError, attempts=9, backoff=[0.5]), turnstile, Timeout(2.0)
        )
        now = asyncio.get_running_loop().time
        times = []

        async def loop() -> None:
            async for attempt in guard.attempts():
                async with attempt:
                    times.append(now())
                    await let_pass(60.0)

        with pytest.raises(TimedOut, match=r"5\.500 s|2\.000 s"):
            await loop()
        assert times == [0.0, 2.5, 5.0][: len(times)]
        assert len(times) >= 2
        assert now() <= 5.5
        assert not turnstile.inside
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    run_virtual(main())


def test_a_cooperative_timeout_is_the_deadline_of_the_block() -> None:
    """Of each attempt, and it is gone after the loop."""
    with virtual_time() as clock:
        guard = new_guard(
            Timeout(10.0, sync="cooperative"),
            Retry(on=TimeoutError, attempts=3, backoff=[1.0]),
            Timeout(2.0, sync="cooperative"),
            clock=clock,
        )
        left = []

        def loop() -> None:
            for attempt in guard.attempts():
                with attempt:
                    held = current_deadline()
                    assert held is not None
                    left.append((clock.now(), held.remaining()))
                    clock.advance(2.5)
                    check_deadline()

        with pytest.raises(TimedOut):
            loop()
        assert left == [(0.0, 2.0), (3.5, 2.0), (7.0, 2.0)]
        assert current_deadline() is None


def test_no_attempt_is_made_that_the_deadline_cannot_hold() -> None:
    """The pause would end after it."""
    with virtual_time() as clock:
        guard = new_guard(_retry(backoff=[2.0]), clock=clock)
        made = []

        def loop() -> None:
            for attempt in guard.attempts():
                with attempt:
                    made.append(clock.now())
                    raise Broken

        with deadline(3.0, clock=clock), pytest.raises(Broken):
            loop()
    assert made == [0.0, 2.0]


def test_budget_breaker_bulkhead_and_rate_limit_act_on_each_attempt() -> None:
    """The whole stack stands around the block, as around a function."""
    with virtual_time() as clock:
        bulkhead, limit = Bulkhead(1), RateLimit("100/s")
        breaker = Breaker(failure_ratio=0.9, min_calls=100, counts="attempts")
        guard = new_guard(
            Shed(by_criticality(), load=lambda: 0.0),
            _retry(attempts=4, backoff=[0.0], budget=RetryBudget()),
            breaker,
            limit,
            bulkhead,
            clock=clock,
        )
        made: list[int] = []

        def loop() -> None:
            for attempt in guard.attempts():
                with attempt:
                    made.append(attempt.number)
                    assert bulkhead.in_flight == 1
                    raise Broken

        for _ in range(20):
            with pytest.raises(Broken):
                loop()
        shown = {one["policy"]: one for one in guard.snapshot()["policies"]}
    assert len(made) == 20 + shown["retry"]["retries"] == 23
    assert shown["breaker"]["failures"] == 23
    assert shown["retry"]["stopped"]["budget"] == 19
    assert bulkhead.in_flight == 0


# Cancellation


@pytest.mark.parametrize("moment", [0.5, 1.5, 2.5])
def test_cancellation_leaves_everything_once(moment: float) -> None:
    """In the block, in the pause before the next, and while it waits for a slot."""

    async def main() -> None:
        outside, inside = Turnstile(), Turnstile()
        slots = Bulkhead(1, max_wait=60.0)
        guard = new_guard(outside, _retry(backoff=[1.0]), inside, slots)
        other = new_guard(slots)
        reached = []

        async def loop() -> None:
            async for attempt in guard.attempts():
                async with attempt:
                    reached.append(attempt.number)
                    await let_pass(1.0)
                    raise Broken

        async def occupy() -> None:
            await let_pass(1.2)
            async with other.hold():
                await let_pass(60.0)

        task, occupant = asyncio.ensure_future(loop()), asyncio.ensure_future(occupy())
        await let_pass(moment)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        occupant.cancel()
        await asyncio.wait([occupant])
        assert reached == [1]
        assert not outside.inside | inside.inside
        assert slots.in_flight == slots.waiting == 0

    run_virtual(main())


def test_what_was_said_swallows_no_cancellation() -> None:
    """A block that said it failed and is cancelled is cancelled."""

    async def main() -> None:
        guard = new_guard(Retry(on=ReportedFailure, attempts=9, backoff=0))

        async def loop() -> None:
            async for attempt in guard.attempts():
                async with attempt:
                    attempt.failed("so far")
                    await let_pass(60.0)

        task = asyncio.ensure_future(loop())
        await let_pass(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(main())


@both
def test_a_generator_around_the_loop_can_be_left_early(kind: str) -> None:
    """Its consumer has enough: the block ends without a verdict, and leaves all gates."""
    turnstile = Turnstile()
    guard = new_guard(_retry(), turnstile)

    def items() -> Iterator[int]:
        for attempt in guard.attempts():
            with attempt:
                yield attempt.number

    async def aitems() -> AsyncIterator[int]:
        async for attempt in guard.attempts():
            async with attempt:
                yield attempt.number

    async def main() -> None:
        source: Any = aitems()
        assert await anext(source) == 1
        await source.aclose()

    if kind == "async":
        run_virtual(main())
    else:
        source = items()
        assert next(source) == 1
        del source
    assert not turnstile.inside
    assert [outcome.value for outcome in turnstile.outcomes] == ["cancelled"]


# Mistakes


@both
@pytest.mark.parametrize(
    ("policy", "named"),
    [
        (lambda: Fallback(static(1)), "Fallback"),
        (lambda: Cache(5.0), "Cache"),
        (lambda: Hedge(0.1), "Hedge"),
        (lambda: ThreadBulkhead(1), "ThreadBulkhead"),
        (lambda: Chaos(0.1, error=Bug), "Chaos"),
    ],
)
def test_what_cannot_stand_around_a_block_is_refused_at_once(
    kind: str, policy: Callable[[], Any], named: str
) -> None:
    """Before anything is entered, and with the policy's name."""
    guard = new_guard(policy())
    with pytest.raises(TypeError, match=named):
        _run(guard, kind, lambda _attempt: pytest.fail("the block ran"))


@pytest.mark.parametrize("sync", ["thread", None])
def test_a_timeout_of_a_plain_block_has_to_be_cooperative(sync: Any) -> None:
    """A block cannot be moved to a thread, nor be stopped from outside."""
    guard = new_guard(Timeout(1.0, sync=sync))
    with pytest.raises(TypeError, match=r"Timeout\(1\.0|cooperative"):
        _run(guard, "sync", lambda _attempt: pytest.fail("the block ran"))
    assert _run(guard, "async", lambda attempt: attempt.number) == 1


def test_an_attempt_is_made_once_and_before_the_next() -> None:
    """A loop that forgets its `with` would never end; it is told what to write."""
    guard = new_guard(_retry())
    with pytest.raises(RuntimeError, match="with attempt:"):
        for _attempt in guard.attempts():
            pass
    for attempt in guard.attempts():
        with attempt:
            pass
        with pytest.raises(RuntimeError, match="made already"), attempt:
            raise AssertionError
    with pytest.raises(RuntimeError, match="inside of it"):
        attempt.failed("too late")


def test_a_key_that_needs_arguments_is_given_them_by_attempts() -> None:
    """And the error says so where they are missing."""
    guard = new_guard(RateLimit("1/h", key=lambda user: user))
    for attempt in guard.attempts("ada"):
        with attempt:
            pass

    def loop() -> None:
        for attempt in guard.attempts():
            with attempt:
                raise AssertionError

    with pytest.raises(TypeError, match=r"attempts\(\.\.\.\)"):
        loop()


def test_one_attempts_object_serves_several_loops() -> None:
    """Each loop is a call of its own."""
    guard = new_guard(_retry(backoff=0))
    attempts = guard.attempts()
    made = []
    for _ in range(2):
        for attempt in attempts:
            with attempt:
                made.append(attempt.number)
                if attempt.number == 1:
                    raise Broken
    assert made == [1, 2, 1, 2]


def test_a_loop_keeps_no_error_alive() -> None:
    """Neither the one that was swallowed nor the one that was raised."""
    guard = new_guard(_retry(backoff=0, attempts=2))
    known: list[weakref.ref[Broken]] = []

    def loop() -> None:
        for attempt in guard.attempts():
            with attempt:
                error = Broken()
                known.append(weakref.ref(error))
                try:
                    raise error
                finally:
                    del error

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(Broken):
            loop()
        assert [ref() for ref in known] == [None, None]
    finally:
        gc.enable()


# Agreement with calls

STEPS = st.sampled_from(["ok", "broken", "bug"])
STACKS: dict[str, Callable[[], list[Any]]] = {
    "retry": lambda: [_retry()],
    "budget": lambda: [_retry(budget=RetryBudget())],
    "total": lambda: [Timeout(4.0, sync="cooperative"), _retry(attempts=5)],
    "breaker": lambda: [_retry(), Breaker(consecutive=3, break_for=5.0)],
    "all": lambda: [
        Bulkhead(2),
        Timeout(9.0, sync="cooperative"),
        _retry(attempts=4),
        Breaker(consecutive=4, break_for=5.0),
        RateLimit("2/s", burst=2),
        Bulkhead(1),
        Timeout(2.0, sync="cooperative"),
    ],
}


@given(st.sampled_from(sorted(STACKS)), st.lists(st.lists(STEPS, min_size=1, max_size=6)))
def test_a_loop_does_what_a_call_does(stack: str, scripts: list[list[str]]) -> None:
    """Same errors, same attempts, same times, same counts: it is the same interpreter."""

    def play(how: str) -> list[Any]:
        clock = VirtualClock()
        guard = Guard("twin", *STACKS[stack](), clock=clock, rng=Random(7))
        guard.close()
        told: list[Any] = []
        for script in scripts:
            steps = {"ok": answer(1), "broken": fail(Broken("b")), "bug": fail(Bug("c"))}
            service = ScriptedService(*(steps[step] for step in script), clock=clock)
            try:
                if how == "call":
                    guard.call(service.call)
                else:
                    for attempt in guard.attempts():
                        with attempt:
                            service.call()
            except Exception as error:  # noqa: BLE001 - whatever it is, both raise it
                told.append((repr(error), getattr(error, "__notes__", [])))
            told.append((service.calls, clock.now()))
            clock.advance(0.5)
        return [*told, guard.snapshot()]

    assert play("call") == play("loop")


# Whatever happens

MOVES = st.sampled_from(["ok", "broken", "bug", "break", "leave", "slow", "failed", "ignore"])


async def _act(move: str, attempt: Any) -> None:
    await let_pass(0.25)
    if move in ("broken", "bug"):
        raise Broken if move == "broken" else Bug
    if move == "slow":
        await let_pass(5.0)
    elif move == "failed":
        attempt.failed("said")
    elif move == "ignore":
        attempt.ignore()


@given(
    st.lists(st.lists(MOVES, min_size=1, max_size=4), min_size=1, max_size=5),
    st.floats(0.0, 12.0),
    st.integers(1, 2),
)
def test_every_gate_is_left_once_whatever_happens(
    scripts: list[list[str]], cancelled_at: float, slots: int
) -> None:
    """Loops side by side that fail, expire, are left early, wait, and are cancelled."""

    async def main() -> None:
        gates = [Turnstile() for _ in range(4)]
        bulkhead = Bulkhead(slots, max_wait=1.5)
        guard = new_guard(
            gates[0],
            Timeout(8.0),
            gates[1],
            Retry(on=(Broken, BulkheadFull, TimeoutError, ReportedFailure), backoff=[0.5]),
            gates[2],
            bulkhead,
            gates[3],
            Timeout(2.0),
        )

        async def loop(script: list[str]) -> None:
            moves = iter(script * 4)
            async for attempt in guard.attempts():
                move = next(moves)
                async with attempt:
                    if move == "break":
                        break
                    await _act(move, attempt)
                if move == "leave":
                    return

        tasks = [asyncio.ensure_future(loop(script)) for script in scripts]
        await let_pass(cancelled_at)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            _ = task.cancelled() or task.exception()
        assert [gate.inside for gate in gates] == [set()] * 4
        assert bulkhead.in_flight == bulkhead.waiting == 0
        for gate in gates:
            assert len(gate.outcomes) == gate.entered

    run_virtual(main())


@pytest.mark.parametrize("pause", [0.0, 0.5])
@pytest.mark.parametrize("inner", [[], [Timeout(20.0)]])
def test_a_total_that_expires_between_two_attempts_ends_as_timed_out(
    pause: float, inner: list[Any]
) -> None:
    """Code between two attempts is not cancelled: the next attempt says that the time is over."""

    async def main() -> tuple[int, float]:
        guard = new_guard(Timeout(1.0), Retry(on=Broken, attempts=9, backoff=[pause] * 9), *inner)
        made, task = 0, asyncio.current_task()
        assert task is not None

        async def loop() -> None:
            nonlocal made
            async for attempt in guard.attempts():
                async with attempt:
                    made += 1
                    raise Broken
                await let_pass(0.7 if made == 1 else 3.0)

        with pytest.raises(TimedOut) as caught:
            await loop()
        assert caught.value.seconds == 1.0
        assert task.cancelling() == 0
        assert guard.snapshot()["timed_out"] == 1
        return made, asyncio.get_running_loop().time()

    assert run_virtual(main()) == ((2, 3.7) if pause == 0.0 else (1, 1.0))


def test_a_total_is_not_paused_between_two_attempts() -> None:
    """The time between two attempts counts, and the block after it is cancelled at its end."""

    async def main() -> float:
        guard = new_guard(Timeout(1.0), Retry(on=Broken, backoff=[0.0] * 2))

        async def loop() -> None:
            async for attempt in guard.attempts():
                async with attempt:
                    if attempt.number == 1:
                        raise Broken
                    await let_pass(9.0)
                await let_pass(0.6)

        with pytest.raises(TimedOut):
            await loop()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 1.0
