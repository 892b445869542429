"""Retry: what it retries, how long it waits, what it says about it."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from itertools import count, pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    Breaker,
    Bulkhead,
    BulkheadFull,
    CircuitOpen,
    DeadlineExceeded,
    Guard,
    Rejected,
    Retry,
    RetryBudget,
    SeawallError,
    TimedOut,
    Timeout,
    deadline,
    full_jitter,
    subscribe,
)
from seawall.backoff import (
    constant,
    decorrelated_jitter,
    exponential,
    linear,
    plus_minus,
)
from seawall.clock import VirtualClock
from seawall.context import current_attempt
from seawall.events import CallRetried, RetryStopped
from seawall.load.signals import Signal
from seawall.models.backoff import above_floor
from seawall.policies.retry import (
    RequestRatio,
    RetryThresholds,
    SuccessDeposit,
    adaptive_attempts,
)
from seawall.policies.timeout import adaptive_timeout
from seawall.testing import (
    ScriptedService,
    answer,
    fail,
    hang,
    retries,
    run_virtual,
    slow,
    virtual_time,
)
from tests.support import let_pass

_serial = count()


class Broken(Exception):
    """What is retried here."""


class Bug(Exception):
    """What is not."""


class Asking(Broken):
    """An error with which the server asks to wait."""

    def __init__(self, retry_after: Any) -> None:
        super().__init__()
        self.retry_after = retry_after


def _guard(*policies: Any, **options: Any) -> Guard:
    return Guard(f"retry-{next(_serial)}", *policies, **options)


def _stopped(guard: Guard) -> dict[str, int]:
    """Return why the guard's (first) Retry stopped, and how often."""
    return next(p for p in guard.snapshot()["policies"] if p["policy"] == "retry")["stopped"]


def _outcome(policy: Retry, *steps: Any) -> tuple[int, float, BaseException | None]:
    """Return the attempts, the seconds and the error of one plain call."""
    with virtual_time() as clock:
        guard = _guard(policy)
        service = ScriptedService(*steps, clock=clock)
        result = guard.attempt(service.call)
        return service.calls, clock.now(), result.error


# What is retried


def test_on_is_mandatory_and_the_message_of_a_wrong_one_says_what_to_write() -> None:
    """There is no default for what is worth another attempt, and nonsense is refused."""
    with pytest.raises(TypeError, match="on"):
        Retry()
    with pytest.raises(TypeError, match="write exception types"):
        Retry(on="ConnectionError")
    with pytest.raises(TypeError, match="write exception types"):
        Retry(on=[ConnectionError, 7])
    with pytest.raises(ValueError, match="write exception types"):
        Retry(on=[])


@pytest.mark.parametrize(
    "kind", [BaseException, KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit]
)
def test_on_refuses_what_must_never_be_retried(kind: type[BaseException]) -> None:
    """Naming an exit or a cancellation raises where the policy is made."""
    with pytest.raises(TypeError, match="never retried"):
        Retry(on=kind)


def test_only_the_named_errors_are_retried() -> None:
    """An error that is not named passes through after one attempt, a subclass of one is retried."""
    policy = Retry(on=(Broken, KeyError), attempts=3, backoff=0)
    assert _outcome(policy, fail(Bug))[0] == 1
    assert _outcome(policy, fail(lambda: Asking(None)))[0] == 3
    assert _outcome(policy, fail(KeyError), answer(1))[0] == 2


def test_a_predicate_sees_results_and_errors() -> None:
    """`on(error, value)` is asked about what was returned and about what was raised."""
    seen: list[tuple[Any, Any]] = []

    def wrong(error: Exception | None, value: Any) -> bool:
        seen.append((error, value))
        return isinstance(error, Broken) or value == "wait"

    broken = Broken()
    policy = Retry(on=wrong, attempts=4, backoff=0)
    assert _outcome(policy, answer("wait"), fail(broken), answer("done")) == (3, 0.0, None)
    # The success path asks once more than the interpreter, about the first value.
    assert [entry for n, entry in enumerate(seen) if entry not in seen[:n]] == [
        (None, "wait"),
        (broken, None),
        (None, "done"),
    ]


def test_a_result_that_stays_bad_is_returned_at_the_end() -> None:
    """When the attempts are used up the last value is the answer: there is no error to raise."""
    with virtual_time():
        guard = _guard(Retry(on=lambda _, value: value is None, attempts=3, backoff=1))
        service = ScriptedService(answer(None))
        assert guard.call(service.call) is None
    assert service.calls == 3
    assert _stopped(guard) == {"attempts": 1}


def test_a_predicate_works_for_async_calls_too() -> None:
    """A bad value of an async function is retried like that of a plain one."""

    async def main() -> None:
        guard = _guard(Retry(on=lambda _, value: value == "wait", backoff=0.1))
        service = ScriptedService(answer("wait", times=2), answer("done"))
        assert await guard.acall(service.acall) == "done"
        assert service.calls == 3

    run_virtual(main())


@pytest.mark.parametrize(
    ("group", "attempts"),
    [
        (lambda: ExceptionGroup("", [Broken(), Asking(None)]), 3),
        (lambda: ExceptionGroup("", [Broken(), ExceptionGroup("", [Broken()])]), 3),
        (lambda: ExceptionGroup("", [Broken(), Bug()]), 1),
        (lambda: ExceptionGroup("", [Broken(), ExceptionGroup("", [Broken(), Bug()])]), 1),
        (lambda: ExceptionGroup("", [Broken(), BulkheadFull()]), 1),
    ],
)
def test_a_group_is_retried_if_all_its_leaves_are(
    group: Callable[[], ExceptionGroup[Any]], attempts: int
) -> None:
    """One leaf that is not worth another attempt, however deep, decides for the group."""
    assert _outcome(Retry(on=Broken, backoff=0), fail(group))[0] == attempts


@pytest.mark.parametrize("on", [Exception, SeawallError, lambda *_: True, (Exception, TimedOut)])
def test_a_refusal_is_not_retried_unless_named(on: Any) -> None:
    """Neither a general type nor a predicate makes Retry repeat what was refused."""
    for refusal in (Rejected, BulkheadFull, CircuitOpen, DeadlineExceeded):
        assert _outcome(Retry(on=on, backoff=0), fail(refusal))[0] == 1


def test_a_refusal_is_retried_if_its_type_is_named() -> None:
    """`on=BulkheadFull` means full bulkheads, `on=Rejected` every refusal."""
    assert _outcome(Retry(on=BulkheadFull, backoff=0), fail(BulkheadFull))[0] == 3
    assert _outcome(Retry(on=BulkheadFull, backoff=0), fail(CircuitOpen))[0] == 1
    assert _outcome(Retry(on=(Broken, Rejected), backoff=0), fail(CircuitOpen))[0] == 3


def test_a_refusal_by_the_guards_own_bulkhead_is_retried_when_named() -> None:
    """Waiting outside of the slots: the retry finds the slot free that the first try did not."""

    async def main() -> None:
        guard = _guard(Retry(on=BulkheadFull, attempts=3, backoff=[1.0]), Bulkhead(1))
        service = ScriptedService(slow(1.5, "first"), answer("second"))
        calls = [guard.acall(service.acall), guard.acall(service.acall)]
        assert await asyncio.gather(*calls) == ["first", "second"]
        assert guard.snapshot()["retries"] == 2

    run_virtual(main())


def test_a_refusal_by_the_guards_own_breaker_is_given_up_after_the_attempts() -> None:
    """An open breaker does not make a Retry that names its refusal go on for ever."""
    with virtual_time() as clock:
        guard = _guard(Retry(on=CircuitOpen, attempts=3, backoff=[1.0]), breaker := Breaker())
        breaker.isolate()
        with deadline(30.0), pytest.raises(CircuitOpen):
            guard.call(lambda: None)
    assert clock.now() == 2.0


# Pauses


@pytest.mark.parametrize(
    ("backoff", "expected"),
    [
        (constant(2.0), [2.0, 2.0, 2.0, 2.0]),
        (exponential(1.0, cap=5.0, jitter="none"), [1.0, 2.0, 4.0, 5.0]),
        (exponential(1.0, cap=30.0, factor=3.0, jitter="none"), [1.0, 3.0, 9.0, 27.0]),
        (linear(1.0, step=0.5, cap=2.0, jitter="none"), [1.0, 1.5, 2.0, 2.0]),
        ([0.5, 3.0], [0.5, 3.0, 3.0, 3.0]),
        (lambda attempt: attempt * 0.25, [0.25, 0.5, 0.75, 1.0]),
        (0, [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_pauses_without_chance(backoff: Any, expected: list[float]) -> None:
    """Each kind of backoff gives its pauses between the attempts, in order."""
    begun: list[float] = []
    with virtual_time() as clock:
        guard = _guard(Retry(on=Broken, attempts=5, backoff=backoff))

        def function() -> None:
            begun.append(clock.now())
            raise Broken

        with pytest.raises(Broken):
            guard.call(function)
    assert [b - a for a, b in pairwise(begun)] == pytest.approx(expected)


@given(st.integers(0, 2**32), st.data())
def test_pauses_with_chance_stay_in_their_range_and_follow_the_guards_rng(
    seed: int, data: st.DataObject
) -> None:
    """Jitter comes from the guard's own rng, and so the same seed gives the same pauses."""
    backoff, low, high = data.draw(
        st.sampled_from(
            [
                (0.1, [0.0] * 4, [0.1, 0.2, 0.4, 0.8]),
                (full_jitter(1.0, cap=2.0), [0.0] * 4, [1.0, 2.0, 2.0, 2.0]),
                (exponential(1.0, jitter="equal"), [0.5, 1, 2, 4], [1, 2, 4, 8]),
                (constant(1.0, jitter=plus_minus(0.1)), [0.9] * 4, [1.1] * 4),
                (decorrelated_jitter(1.0, cap=5.0), [1.0] * 4, [3.0, 5.0, 5.0, 5.0]),
            ]
        )
    )

    def pauses() -> list[float]:
        seen: list[CallRetried] = []
        unsubscribe = subscribe(seen.append, CallRetried)
        with virtual_time():
            guard = _guard(Retry(on=Broken, attempts=5, backoff=backoff), rng=Random(seed))
            guard.attempt(ScriptedService(fail(Broken)).call)
        unsubscribe()
        return [event.delay for event in seen]

    delays = pauses()
    assert all(a <= delay <= b for a, delay, b in zip(low, delays, high, strict=True))
    assert pauses() == delays


def test_the_servers_wish_is_honoured_where_it_is_longer_than_the_backoff() -> None:
    """`retry_after` of the error replaces a shorter pause, not a longer one."""
    policy = Retry(on=Broken, attempts=2, backoff=[2.0])
    calls, seconds, _ = _outcome(policy, fail(lambda: Asking(7)))
    assert calls == 2
    assert 7.0 <= seconds <= 8.75
    assert _outcome(policy, fail(lambda: Asking(0.5)))[:2] == (2, 2.0)
    assert _outcome(policy, fail(lambda: Asking(None)))[:2] == (2, 2.0)
    assert _outcome(policy, fail(lambda: Asking(0)))[:2] == (2, 2.0)


@pytest.mark.parametrize("asked", [500.0, math.inf])
def test_a_server_that_asks_for_more_than_max_retry_after_is_not_asked_again(asked: float) -> None:
    """Coming back before it wants to be asked would be one more request that it refuses."""
    with virtual_time() as clock:
        guard = _guard(Retry(on=Broken, attempts=3, backoff=[2.0], max_retry_after=20.0))
        service = ScriptedService(fail(lambda: Asking(asked)))
        error = guard.attempt(service.call).error
    assert (service.calls, clock.now()) == (1, 0.0)
    assert _stopped(guard) == {"retry_after too long": 1}
    assert error is not None
    assert error.__notes__ == [
        f"seawall: not retried: the server asks for {asked:g} s, max_retry_after is 20 s"
    ]


def test_a_server_that_asks_for_exactly_max_retry_after_is_asked_again() -> None:
    """The bound is for what the server asks for; the jitter on top of it does not count."""
    policy = Retry(on=Broken, attempts=2, backoff=0, max_retry_after=20.0)
    calls, seconds, _ = _outcome(policy, fail(lambda: Asking(20.0)))
    assert calls == 2
    assert 20.0 <= seconds <= 25.0


def test_clients_that_were_told_the_same_retry_after_return_spread_out_and_never_early() -> None:
    """Of 1 000 clients told `Retry-After: 5` none comes before 5 s, and not all at once."""
    returned = []
    for seed in range(1000):
        with virtual_time() as clock:
            guard = _guard(Retry(on=Broken, attempts=2, backoff=0.1), rng=Random(seed))
            guard.attempt(ScriptedService(fail(lambda: Asking(5.0)), answer("ok")).call)
            returned.append(clock.now())
        guard.close()
    assert min(returned) >= 5.0
    assert max(returned) - min(returned) >= 1.0
    busiest = max(sum(at <= one < at + 0.1 for one in returned) for at in returned)
    assert busiest <= 130, "an even spread has 80 of 1 000 in each 0.1 s"


@given(
    floor=st.floats(0, 1e6),
    chance=st.floats(0, 1, exclude_max=True),
)
def test_a_floor_is_never_undercut_and_exceeded_by_a_quarter_at_most(
    floor: float, chance: float
) -> None:
    """The rule for every `retry_after`, in numbers."""
    assert floor <= above_floor(floor, lambda: chance) <= 1.25 * floor


@pytest.mark.parametrize("asked", [-1, -0.001, -math.inf, math.nan, "soon"])
def test_a_server_that_wants_no_retry_gets_none(asked: Any) -> None:
    """A negative wish, or one that is no number, ends the call."""
    assert _outcome(Retry(on=Broken, backoff=[2.0]), fail(lambda: Asking(asked)))[:2] == (1, 0.0)


def test_the_servers_wish_can_be_read_in_another_way() -> None:
    """`retry_after=` is a function from the error to seconds."""
    policy = Retry(on=Broken, attempts=2, backoff=0, retry_after=lambda error: error.args[0])
    calls, seconds, _ = _outcome(policy, fail(lambda: Broken(4.0)))
    assert calls == 2
    assert 4.0 <= seconds <= 5.0


def test_a_wish_that_the_deadline_cannot_hold_ends_the_call_at_once() -> None:
    """The error comes now, not after a wait that ends too late."""
    with virtual_time() as clock:
        guard = _guard(Retry(on=Broken, backoff=0))
        with deadline(5.0), pytest.raises(Asking):
            guard.call(ScriptedService(fail(lambda: Asking(5.0))).call)
    assert clock.now() == 0.0
    assert _stopped(guard) == {"deadline": 1}


# The time there is


def test_an_outer_timeout_is_a_limit_for_the_pauses() -> None:
    """A pause that ends after the Timeout further out is not begun; the error itself is raised."""

    async def main() -> None:
        guard = _guard(Timeout(2.0), Retry(on=Broken, attempts=5, backoff=[1.5]))
        with pytest.raises(Broken):
            await guard.acall(ScriptedService(fail(Broken)).acall)
        assert asyncio.get_running_loop().time() == 1.5
        assert _stopped(guard) == {"deadline": 1}

    run_virtual(main())


def test_a_total_timeout_cuts_an_attempt_in_the_middle() -> None:
    """A total of 0.2 s takes 0.2 s, though each attempt alone would take a second."""

    async def main() -> None:
        guard = _guard(Timeout(0.2), Retry(on=TimeoutError, attempts=3, backoff=0))
        with pytest.raises(TimedOut):
            await guard.acall(ScriptedService(slow(1.0)).acall)
        assert asyncio.get_running_loop().time() == pytest.approx(0.2)

    run_virtual(main())


def test_nothing_is_retried_after_the_total_timeout_has_expired() -> None:
    """A function that turns its cancellation into an error of its own gets no second attempt."""

    async def main() -> None:
        guard = _guard(Timeout(1.0), Retry(on=Broken, attempts=3, backoff=0))
        begun = 0

        async def function() -> None:
            nonlocal begun
            begun += 1
            try:
                await ScriptedService(slow(5.0)).acall()
            except asyncio.CancelledError:
                raise Broken from None

        with pytest.raises(Broken):
            await guard.acall(function)
        assert begun == 1
        assert asyncio.get_running_loop().time() == 1.0

    run_virtual(main())


def test_attempts_that_time_out_are_retried() -> None:
    """The Timeout inside Retry is for each attempt."""

    async def main() -> None:
        guard = _guard(Retry(on=TimeoutError, backoff=[1.0]), Timeout(2.0))
        service = ScriptedService(hang(times=2), answer("at last"))
        assert await guard.acall(service.acall) == "at last"
        assert asyncio.get_running_loop().time() == 6.0

    run_virtual(main())


def test_the_typical_call_must_fit_in_after_the_pause() -> None:
    """Once enough calls are known, no attempt is begun that will most likely be cut off."""
    with virtual_time() as clock:
        guard = _guard(Retry(on=Broken, backoff=[1.0]))
        for _ in range(20):
            guard.call(lambda: clock.sleep(1.0))
        service = ScriptedService(fail(Broken))
        with deadline(1.5), pytest.raises(Broken):
            guard.call(service.call)
        assert service.calls == 1
        with deadline(2.5), pytest.raises(Broken):
            guard.call(service.call)
        assert service.calls == 3


def test_a_deadline_on_another_clock_counts_too() -> None:
    """What is left of it is compared, since two clocks have no instants in common."""
    other = VirtualClock(1000.0)
    with virtual_time() as clock:
        guard = _guard(Retry(on=Broken, attempts=9, backoff=[2.0]))
        with deadline(3.0, clock=other), pytest.raises(Broken):
            guard.call(ScriptedService(fail(Broken), clock=clock).call)
        assert clock.now() == 2.0 * 8  # that clock stands still: there is always time left
        other.advance(2.0)
        with deadline(1.0, clock=other), pytest.raises(Broken):
            guard.call(ScriptedService(fail(Broken), clock=clock).call)
        assert clock.now() == 2.0 * 8


# Adaptive attempts


def test_adaptive_attempts_follow_the_error_rate() -> None:
    """Many errors leave one retry, some leave two, few leave all there are."""
    with virtual_time():
        guard = _guard(Retry(on=Broken, attempts=adaptive_attempts(5), backoff=0))
        for successes, attempts in [(0, 2), (6, 3), (80, 5)]:
            for _ in range(successes):
                guard.call(lambda: None)
            service = ScriptedService(fail(Broken))
            guard.attempt(service.call)
            assert service.calls == attempts


def test_adaptive_attempts_make_no_retry_while_the_breaker_is_open() -> None:
    """The failure that opened the breaker is the last attempt."""
    with virtual_time():
        policy = Retry(on=Broken, attempts=adaptive_attempts(5), backoff=[1.0])
        breaker = Breaker(failure_ratio=0.5, min_calls=1, break_for=15, counts="attempts")
        guard = _guard(policy, breaker)
        service = ScriptedService(fail(Broken))
        with pytest.raises(Broken):
            guard.call(service.call)
    assert service.calls == 1
    assert _stopped(guard) == {"attempts": 1}


def test_adaptive_attempts_make_no_retry_while_the_bulkhead_is_full() -> None:
    """A dependency whose slots are all in use gets no more load from retries."""

    async def main() -> None:
        guard = _guard(
            Retry(on=Broken, attempts=adaptive_attempts(5), backoff=[1.0]),
            Bulkhead(2, max_wait=1.0),
        )
        service = ScriptedService(fail(Broken))
        async with guard.hold(), guard.hold():
            assert guard.pressure().saturation == 1.0
            guard.bounds[1].policy.update(mode="shadow")
            with pytest.raises(Broken):
                await guard.acall(service.acall)
        assert service.calls == 1

    run_virtual(main())


@pytest.mark.parametrize("limit", [2, 3, 5, 10, 11, 40])
@pytest.mark.parametrize("outside", [False, True])
def test_adaptive_attempts_see_a_full_bulkhead_of_any_size(limit: int, *, outside: bool) -> None:
    """Where all other slots are in use there is no retry, and where one in ten is free there is."""

    async def main() -> None:
        retry = Retry(on=Broken, attempts=adaptive_attempts(3), backoff=0)
        stack = (Bulkhead(limit), retry) if outside else (retry, Bulkhead(limit))
        guard = _guard(*stack)
        for taken in {limit - 1, int((limit - 1) * 0.9)}:
            async with AsyncExitStack() as others:
                for _ in range(taken):
                    await others.enter_async_context(guard.hold())
                service = ScriptedService(fail(Broken))
                with pytest.raises(Broken):
                    await guard.acall(service.acall)
            assert (service.calls > 1) == (taken < limit - 1)

    run_virtual(main())


def _retries_inside(outer: Guard, kind: str, before: Callable[[], None] | None = None) -> int:
    """Return how often a guard that adapts retries a failure, inside a call of `outer`."""
    inner = _guard(Retry(on=Broken, attempts=adaptive_attempts(3), backoff=0))
    for _ in range(50):
        inner.call(lambda: None)

    def function() -> None:
        if before is not None:
            before()
        raise Broken

    async def afunction() -> None:
        function()

    if kind == "call":
        with suppress(Broken):
            outer.call(inner(function))
    elif kind == "attempt":
        outer.attempt(inner.attempt, function)
    else:
        run_virtual(outer.aattempt(inner(afunction)))
    return int(inner.snapshot()["retries"])


@pytest.mark.parametrize("kind", ["call", "attempt", "async"])
def test_adaptive_attempts_see_the_pressure_on_guards_around_them(kind: str) -> None:
    """Where an outer guard is full, fails, is open or is loaded, an inner one adds no attempts."""
    assert _retries_inside(_guard(Bulkhead(3)), kind) == 2
    full = _guard(Bulkhead(2))
    with full.hold():
        assert _retries_inside(full, kind) == 0
    loaded = Retry(on=Bug, attempts=adaptive_attempts(2, signals=[lambda: 0.95]))
    assert _retries_inside(_guard(loaded), kind) == 0
    failing = _guard(Bulkhead(9))
    for _ in range(9):
        failing.attempt(ScriptedService(fail(Bug)).call)
    assert _retries_inside(failing, kind) == 1
    breaker = Breaker()
    assert _retries_inside(_guard(breaker), kind, breaker.isolate) == 0


@pytest.mark.parametrize("seconds", [60.0, adaptive_timeout(floor=1.0, cap=60.0)])
def test_adaptive_attempts_in_child_tasks_see_the_guards_around_their_parent(seconds: Any) -> None:
    """If these have a Timeout, for as long as their call goes on."""

    async def main() -> None:
        full = _guard(Bulkhead(2), Timeout(seconds))
        inner = _guard(Retry(on=Broken, attempts=adaptive_attempts(3), backoff=0))
        for _ in range(50):
            inner.call(lambda: None)
        later = asyncio.Event()
        children: list[asyncio.Task[Any]] = []

        async def child(*, late: bool) -> int:
            if late:
                await later.wait()
            return (await inner.aattempt(ScriptedService(fail(Broken)).acall)).attempts

        async def parent() -> int:
            children.append(asyncio.create_task(child(late=True)))
            return (await asyncio.gather(child(late=False)))[0]

        async with full.hold():
            assert await full.acall(parent) == 1
            later.set()
            assert await children[0] == 3

    run_virtual(main())


def test_an_open_key_of_an_outer_guard_is_no_pressure() -> None:
    """Its call was admitted with another key."""
    breaker = Breaker(consecutive=1, key=lambda *_args: "here")
    breaker.isolate("elsewhere")
    assert _retries_inside(_guard(breaker), "call") == 2


def test_adaptive_attempts_make_no_retry_while_calls_have_to_wait() -> None:
    """Also when the queue has just been served: recent waits count, and the average of them."""

    async def main() -> None:
        retry = Retry(on=Broken, attempts=adaptive_attempts(3), backoff=0)
        guard = _guard(retry, Bulkhead(1, max_wait=60.0))

        async def wait_for_slot() -> None:
            async with guard.hold():
                pass

        async with guard.hold():
            waiting = asyncio.ensure_future(wait_for_slot())
            await let_pass(3.0)
            assert guard.pressure().queue_wait == 3.0
        await waiting
        seen = []
        for pause in [0.5, 1.0, 10.0]:
            await let_pass(pause)
            service = ScriptedService(fail(Broken))
            await guard.aattempt(service.acall)
            pressure = guard.pressure()
            seen.append((service.calls, pressure.queue_wait, pressure.average_queue_wait > 1.0))
        assert seen == [(1, 3.0, True), (1, 0.0, True), (2, 0.0, False)]

    run_virtual(main())


def test_adaptive_attempts_follow_signals() -> None:
    """The highest of the signals that they are given is the load of the pressure."""
    with virtual_time():
        load = 0.5
        attempts = adaptive_attempts(4, signals=[lambda: 0.1, Signal("own", lambda: load, every=0)])
        guard = _guard(Retry(on=Broken, attempts=attempts, backoff=0))
        assert guard.pressure().load == 0.5
        assert guard.attempt(ScriptedService(fail(Broken)).call).attempts == 2
        load = 0.95
        assert guard.attempt(ScriptedService(fail(Broken)).call).attempts == 1


def test_adaptive_attempts_take_thresholds() -> None:
    """What is trouble for one dependency is a usual day for another."""
    with virtual_time():
        lenient = adaptive_attempts(4, RetryThresholds(error_rates={}))
        guard = _guard(Retry(on=Broken, attempts=lenient, backoff=0))
        assert guard.attempt(ScriptedService(fail(Broken)).call).attempts == 4
    text = "adaptive_attempts(4, RetryThresholds(queue_wait=2, average_queue_wait=1, "
    assert repr(lenient) == f"{text}saturation=0.9, load=0.9, error_rates={{}}))"


def test_adaptive_attempts_take_a_function_of_the_pressure() -> None:
    """It says how many attempts, and gets at least one and at most the maximum."""
    with virtual_time():
        for wanted, made in [(3, 3), (0, 1), (-5, 1), (100, 4)]:
            attempts = adaptive_attempts(4, lambda _pressure, wanted=wanted: wanted)
            guard = _guard(Retry(on=Broken, attempts=attempts, backoff=0))
            assert guard.attempt(ScriptedService(fail(Broken)).call).attempts == made


def test_a_function_of_the_pressure_that_fails_is_told_and_not_retried() -> None:
    """The call's own error is raised, as for every hook."""
    with virtual_time():
        broken = adaptive_attempts(4, lambda _pressure: 1 // 0)
        guard = _guard(Retry(on=Broken, attempts=broken, backoff=0))
        result = guard.attempt(ScriptedService(fail(Broken)).call)
    assert isinstance(result.error, Broken)
    assert result.attempts == 1
    assert "ZeroDivisionError" in result.error.__notes__[0]


def test_adaptive_attempts_check_their_maximum() -> None:
    """With fewer than two attempts there is nothing to adapt."""
    with pytest.raises(ValueError, match="2 or more"):
        adaptive_attempts(1)
    assert repr(adaptive_attempts(3)) == "adaptive_attempts(3)"
    assert Retry(on=Broken, attempts=adaptive_attempts(3)).most_attempts == 3


# What is seen of it


def test_the_attempt_number_is_in_the_context_and_restored_after() -> None:
    """The function sees 1, 2, 3; who called it sees what it saw before, also after a failure."""
    seen: list[int] = []

    def function() -> None:
        seen.append(current_attempt())
        raise Broken

    with virtual_time():
        guard = _guard(Retry(on=Broken, backoff=1.0))
        with pytest.raises(Broken):
            guard.call(function)
        assert seen == [1, 2, 3]
        assert current_attempt() == 1


def test_the_attempt_number_reaches_a_worker_thread() -> None:
    """A thread works with a copy of the context of its attempt."""
    seen: list[int] = []

    def function() -> None:
        seen.append(current_attempt())
        raise Broken

    guard = _guard(Retry(on=Broken, backoff=0), Timeout(60.0, sync="thread"))
    with pytest.raises(Broken):
        guard.call(function)
    assert seen == [1, 2, 3]


# How calls are counted


def _outcomes(guard: Guard) -> tuple[int, ...]:
    retry = next(one for one in guard.snapshot()["policies"] if one["policy"] == "retry")
    return tuple(retry["outcomes"].values())


@pytest.mark.parametrize("kind", ["decorated", "attempt", "async"])
@pytest.mark.parametrize("budget", [False, True])
def test_calls_are_counted_in_four(kind: str, *, budget: bool) -> None:
    """Succeeded or failed, without a retry or after one; cancelled and refused are neither."""

    async def main() -> None:
        rule = RetryBudget(SuccessDeposit(maximum=1_000)) if budget else None
        accepted = lambda _error, value: value == "pending"  # noqa: E731
        retry = Retry(on=[Broken, accepted], attempts=3, backoff=0, budget=rule)
        guard = _guard(retry, Bulkhead(1))
        scripts = [
            *[[answer("first")]] * 5,
            *[[fail(Broken), answer("second")]] * 4,
            *[[answer("pending"), answer("third")]] * 2,
            *[[fail(Bug)]] * 3,
            *[[fail(Broken)]] * 2,
            [answer("pending")],
        ]
        for steps in scripts:
            service = ScriptedService(*steps)
            if kind == "attempt":
                guard.attempt(service.call)
                continue
            try:
                await guard.acall(service.acall) if kind == "async" else guard(service.call)()
            except (Broken, Bug):
                pass
        async with guard.hold():
            assert isinstance(guard.attempt(lambda: None).error, BulkheadFull)
        # The last script returned its value in the end, after two retries.
        assert _outcomes(guard) == (5, 7, 3, 2)

    run_virtual(main())


def test_a_retry_that_is_refused_counts_as_failed_after_a_retry() -> None:
    """The first attempt was made, and there was to be another."""
    guard = _guard(Retry(on=Broken, backoff=0), Breaker(consecutive=1, break_for=60))
    for _ in range(3):
        guard.attempt(ScriptedService(fail(Broken)).call)
    assert _outcomes(guard) == (0, 0, 0, 1)


def test_calls_in_worker_threads_are_counted_in_four() -> None:
    """Where a driver runs the function, its successes are still those of calls."""
    guard = _guard(Retry(on=Broken, backoff=0), Timeout(60.0, sync="thread"))
    for steps in [[answer(1)], [answer(1)], [fail(Broken), answer(2)], [fail(Bug)]]:
        guard.attempt(ScriptedService(*steps).call)
        with suppress(Bug):
            guard.call(ScriptedService(*steps).call)
    assert _outcomes(guard) == (4, 2, 2, 0)


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from([Broken, Bug]), st.booleans()), max_size=30
    )
)
def test_the_four_add_up_to_all_calls(calls: list[tuple[int, type[Exception], bool]]) -> None:
    """Whatever happens, each call is exactly one of them."""
    guard = _guard(Retry(on=Broken, attempts=3, backoff=0))
    expected = [0, 0, 0, 0]
    for failures, error, fast in calls:
        service = ScriptedService(*[fail(error)] * failures, answer("ok"))
        if fast:
            with suppress(Broken, Bug):
                guard.call(service.call)
        else:
            guard.attempt(service.call)
        retried = error is Broken and failures > 0
        succeeded = failures == 0 or (retried and failures < 3)
        expected[2 * (not succeeded) + retried] += 1
    guard.close()
    assert list(_outcomes(guard)) == expected


def test_the_last_error_itself_is_raised_with_notes_that_name_the_earlier_ones() -> None:
    """Nothing is wrapped: how many attempts there were, how long they took, and how each ended."""
    errors = [Broken("first"), Broken("second"), Broken("third")]
    with virtual_time() as clock:
        guard = _guard(Retry(on=Broken, backoff=[1.0]))
        service = ScriptedService(*map(fail, errors), clock=clock)
        with pytest.raises(Broken, match="third") as caught:
            guard.call(service.call)
    assert caught.value is errors[2]
    assert caught.value.__notes__ == [
        "seawall: 3 attempts in 2.000 s",
        "seawall: attempt 1: Broken: first",
        "seawall: attempt 2: Broken: second",
    ]
    assert not hasattr(errors[0], "__notes__")


def test_notes_name_a_bounded_number_of_earlier_errors_in_bounded_length() -> None:
    """The first one and the latest: what began it, and how it went on."""
    errors = [Broken(f"{number} " + "x" * 1_000) for number in range(1, 41)]
    policy = Retry(on=Broken, attempts=40, backoff=0)
    _, _, raised = _outcome(policy, *map(fail, errors))
    assert raised is errors[-1]
    assert max(map(len, raised.__notes__)) < 250
    made, first, left_out, *latest = raised.__notes__
    assert made.startswith("seawall: 40 attempts in ")
    assert first.startswith("seawall: attempt 1: Broken: 1 x")
    assert left_out == "seawall: (attempts not named here: 33)"
    assert [note.split(": ")[1] for note in latest] == [f"attempt {n}" for n in range(35, 40)]


def test_notes_of_earlier_errors_hide_secrets() -> None:
    """They go where logs go, so they are treated as other text of errors is."""
    _, _, raised = _outcome(
        Retry(on=Broken, attempts=2, backoff=0), fail(Broken("no https://user:pw@host/x?key=1"))
    )
    assert raised.__notes__[1] == "seawall: attempt 1: Broken: no https://host/..."


def test_notes_tell_refusals_and_values_that_were_retried() -> None:
    """A refusal is no attempt; and of a value only that it was not accepted."""
    values = Retry(on=[Broken, lambda _error, value: value == "wait"], attempts=3, backoff=0)
    _, _, raised = _outcome(values, answer("wait"), fail(Broken("b")), fail(Broken("c")))
    assert raised.__notes__[1:] == [
        "seawall: attempt 1: the value was not accepted",
        "seawall: attempt 2: Broken: b",
    ]
    patient = _guard(Retry(on=[Broken, BulkheadFull], attempts=3, backoff=0), Bulkhead(1))
    with patient.hold(), pytest.raises(BulkheadFull) as refused:
        patient.call(lambda: None)
    assert not hasattr(refused.value, "__notes__")  # nothing was attempted


def test_the_error_that_is_raised_is_not_named_among_the_earlier_ones() -> None:
    """If the next attempt was refused, the attempt before it is the one that is raised."""
    guard = _guard(Retry(on=Broken, backoff=0), Breaker(consecutive=2, counts="attempts"))
    service = ScriptedService(fail(Broken("first")), fail(Broken("second")))
    with pytest.raises(Broken, match="second") as caught:
        guard.call(service.call)
    made, earlier = caught.value.__notes__
    assert "2 attempts in" in made
    assert "the next was refused" in made
    assert earlier == "seawall: attempt 1: Broken: first"


def test_an_error_that_passes_through_two_retries_is_noted_once() -> None:
    """The outer retry's notes take the place of the inner one's."""
    error = Broken("same")
    inner = _guard(Retry(on=Broken, attempts=2, backoff=0))
    outer = _guard(Retry(on=Broken, attempts=2, backoff=0))
    with pytest.raises(Broken) as caught:
        outer.call(inner.call, ScriptedService(fail(error)).call)
    why, made, earlier = caught.value.__notes__
    assert why.startswith("seawall: not retried: ")
    assert made.startswith("seawall: 2 attempts in ")
    assert earlier == "seawall: attempt 1: Broken: same"


def test_notes_keep_no_earlier_error_alive() -> None:
    """They are text: but for the first error and the latest, what was retried is freed at once."""
    alive: list[weakref.ref[Broken]] = []
    counted: list[int] = []

    def function() -> None:
        counted.append(sum(known() is not None for known in alive))
        error = Broken(f"number {len(alive)}")
        alive.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    with pytest.raises(Broken):
        _guard(Retry(on=Broken, attempts=5, backoff=0)).call(function)
    assert counted == [0, 1, 2, 2, 2]


def test_one_attempt_needs_no_note() -> None:
    """An error that was not retried passes through untouched."""
    error = Bug()
    _outcome(Retry(on=Broken, backoff=0), fail(error))
    assert not hasattr(error, "__notes__")


@pytest.mark.parametrize(
    ("policy", "options", "why"),
    [
        (Retry(on=Broken, budget=RetryBudget(RequestRatio(0.1, floor=0.0))), {}, "budget is spent"),
        (Retry(on=Broken, backoff=[60.0]), {"seconds": 1.0}, "the deadline leaves no time"),
        (Retry(on=Broken), {"idempotent": False}, "the call has no idempotency key"),
        (Retry(on=Broken, retry_after=lambda _: -1.0), {}, "the server asked not to"),
    ],
    ids=["budget", "deadline", "not idempotent", "server said no"],
)
def test_error_says_why_it_was_not_retried(
    policy: Retry, options: dict[str, Any], why: str
) -> None:
    """An attempt that `on=` would repeat and something else forbids leaves a note of it."""
    with virtual_time():
        seconds = options.pop("seconds", 3600.0)
        guard = Guard("noted", policy, replace=True, **options)
        with deadline(seconds):
            result = guard.attempt(ScriptedService(fail(Broken())).call)
    assert result.attempts == 1
    (note,) = result.error.__notes__
    assert note.startswith("seawall: not retried: ")
    assert why in note


def test_an_error_object_raised_again_and_again_collects_no_notes() -> None:
    """Our notes are those of the latest call, and the user's own stay."""
    error = Broken()
    error.add_note("from the user")
    policy = Retry(on=Broken, attempts=2, backoff=0)
    for _ in range(5):
        _outcome(policy, fail(error))
    assert error.__notes__ == [
        "from the user",
        "seawall: 2 attempts in 0.000 s",
        "seawall: attempt 1: Broken",
    ]


def test_an_error_object_raised_again_and_again_has_a_bounded_traceback() -> None:
    """A call adds its own frames to the traceback, not those of all calls before."""
    error = Broken()
    depths = []
    for _ in range(3):
        error.__traceback__ = None
        _outcome(Retry(on=Broken, attempts=4, backoff=0), fail(error))
        depth, entry = 0, error.__traceback__
        while entry is not None:
            depth, entry = depth + 1, entry.tb_next
        depths.append(depth)
    assert len(set(depths)) == 1


def test_events_tell_of_retries_and_of_why_they_stopped() -> None:
    """Each retry and each end without success is one event."""
    seen: list[Any] = []
    unsubscribe = subscribe(seen.append, CallRetried, RetryStopped)
    with virtual_time():
        guard = _guard(Retry(on=lambda _, value: value == 0, attempts=2, backoff=[1.0]))
        guard.call(lambda: 0)
        guard.attempt(ScriptedService(fail(Broken)).call)
    unsubscribe()
    assert [(type(event), event.guard, event.attempt) for event in seen] == [
        (CallRetried, guard.name, 1),
        (RetryStopped, guard.name, 2),
    ]
    assert (seen[0].delay, seen[0].reason) == (1.0, "value")
    assert seen[1].cause == "attempts"


def test_the_snapshot_counts_retries_and_reasons() -> None:
    """The reasons for stopping are counted by name, the budget is shown."""
    with virtual_time():
        budget = RetryBudget(SuccessDeposit(maximum=4))
        guard = _guard(Retry(on=Broken, attempts=9, backoff=0, budget=budget))
        guard.attempt(ScriptedService(fail(Broken)).call)
        shown = guard.snapshot()["policies"][0]
    assert shown == {
        "policy": "retry",
        "attempts": 9,
        "retries": 1,
        "outcomes": {
            "succeeded": 0,
            "succeeded_after_retry": 0,
            "failed": 0,
            "failed_after_retry": 1,
        },
        "stopped": {"budget": 1},
        "budget": {"tokens": 2.0, "maximum": 4.0},
    }


# Switches, settings, and hooks that fail


def test_instant_retries_take_no_time() -> None:
    """The switch for tests skips the pauses and keeps the attempts."""
    policy = Retry(on=Broken, attempts=4, backoff=[100.0])
    with retries("instant"):
        assert _outcome(policy, fail(Broken))[:2] == (4, 0.0)
    assert _outcome(policy, fail(Broken))[:2] == (4, 300.0)


def test_instant_retries_do_not_wait_for_the_server_either() -> None:
    """Instant means instant: a test does not sleep because a fake server said so."""
    with retries("instant"):
        outcome = _outcome(Retry(on=Broken, attempts=2, backoff=0), fail(lambda: Asking(30)))
    assert outcome[:2] == (2, 0.0)


def test_retries_can_be_switched_off_and_on_again() -> None:
    """Inside the block there is one attempt; the switch is restored, also when blocks nest."""
    policy = Retry(on=Broken, attempts=4, backoff=0)
    with retries("off"):
        assert _outcome(policy, fail(Broken))[0] == 1
        with retries("instant"):
            assert _outcome(policy, fail(Broken))[0] == 4
        assert _outcome(policy, fail(Broken))[0] == 1
    assert _outcome(policy, fail(Broken))[0] == 4
    with pytest.raises(ValueError, match="'instant', 'off'"), retries("never"):
        pass


def test_settings_change_at_run_time() -> None:
    """`update` takes effect for calls under way too, and changes nothing if a value is bad."""
    with virtual_time() as clock:
        policy = Retry(on=Broken, attempts=2, backoff=[1.0])
        guard = _guard(policy)
        guard.attempt(ScriptedService(fail(Broken)).call)
        assert clock.now() == 1.0
        policy.update(attempts=3, backoff=[2.0])
        guard.attempt(ScriptedService(fail(Broken)).call)
        assert clock.now() == 5.0
        with pytest.raises(ValueError, match="attempts=0"):
            policy.update(attempts=0, backoff=[9.0])
        with pytest.raises(TypeError, match="it takes attempts"):
            policy.update(on=Bug)
        guard.attempt(ScriptedService(fail(Broken)).call)
        assert clock.now() == 9.0


def test_bad_settings_are_refused_where_they_are_written() -> None:
    """Each message names the argument."""
    with pytest.raises(ValueError, match="attempts=0"):
        Retry(on=Broken, attempts=0)
    with pytest.raises(TypeError, match=r"budget=RetryBudget\(\)"):
        Retry(on=Broken, budget=SuccessDeposit())
    with pytest.raises(TypeError, match="retry_after"):
        Retry(on=Broken, retry_after=3.0)
    with pytest.raises(ValueError, match="max_retry_after"):
        Retry(on=Broken, max_retry_after=-1.0)
    with pytest.raises(TypeError, match="backoff"):
        Retry(on=Broken, backoff="0.1")


def _raise(*_: Any) -> Any:
    raise Bug("in a hook")


HOOKS: dict[str, Callable[[], Retry]] = {
    "predicate": lambda: Retry(on=_raise, backoff=0),
    "retry_after": lambda: Retry(on=Broken, backoff=0, retry_after=_raise),
    "backoff": lambda: Retry(on=Broken, backoff=_raise),
    "negative backoff": lambda: Retry(on=Broken, backoff=lambda _: -1.0),
}


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_fails_hides_no_error_and_takes_no_slot_with_it(
    hook: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What the call raised is raised, with a note; the hook's own error is in the log."""

    async def main() -> None:
        bulkhead = Bulkhead(1)
        guard = _guard(Timeout(5.0, sync="cooperative"), bulkhead, HOOKS[hook]())
        service = ScriptedService(fail(Broken))
        call = guard.aattempt(service.acall) if kind == "async" else None
        result = await call if call is not None else guard.attempt(service.call)
        assert isinstance(result.error, Broken)
        (note,) = result.error.__notes__
        assert note.startswith("seawall: not retried, as on=, attempts=, retry_after= or backoff=")
        assert service.calls == 1
        assert bulkhead.in_flight == 0

    run_virtual(main())
    (record,) = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], (Bug, ValueError))


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_predicate_that_fails_on_a_value_takes_no_slot_with_it(kind: str) -> None:
    """The same on the success path: everything entered is left."""

    async def main() -> None:
        bulkhead = Bulkhead(1)
        guard = _guard(Timeout(5.0, sync="cooperative"), bulkhead, Retry(on=_raise, backoff=0))
        service = ScriptedService(answer("fine"))
        call = guard.aattempt(service.acall) if kind == "async" else None
        result = await call if call is not None else guard.attempt(service.call)
        assert isinstance(result.error, Bug)
        assert bulkhead.in_flight == 0

    run_virtual(main())


def test_the_representation_shows_what_matters() -> None:
    """A Retry in `explain()` reads like its constructor."""

    def too_small(_: Any, value: int) -> bool:
        return value < 3

    policy = Retry(on=(Broken, too_small), attempts=2, backoff=constant(1.0))
    assert repr(policy) == (
        "Retry(on=(Broken, too_small), attempts=2, backoff=constant(1.0, jitter='none'))"
    )
