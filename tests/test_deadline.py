"""What a call carries with it: deadline, criticality, attempt number, idempotency key."""

from __future__ import annotations

import asyncio
import pickle
import threading
from contextvars import copy_context
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    Breaker,
    Bulkhead,
    Criticality,
    DeadlineExceeded,
    Rejected,
    Retry,
    TimedOut,
    Timeout,
    check_deadline,
    criticality,
    current_deadline,
    deadline,
)
from seawall.clock import SYSTEM, VirtualClock, current_clock
from seawall.context import (
    Deadline,
    _DeadlineScope,
    current_attempt,
    current_criticality,
    current_idempotency_key,
    deadline_scope,
    deadline_var,
    idempotency_key,
)
from seawall.policies.timeout.policy import CooperativeTimeout
from seawall.resources import Pool
from seawall.runtime import fastpath, interpreter
from seawall.testing import ScriptedService, answer, run_virtual, virtual_time
from tests.support import SEEDS, falsified, let_pass, new_guard, quarters

QUARTERS = quarters(16)


# The instant


def test_a_deadline_counts_down_and_never_below_zero() -> None:
    """What is left shrinks with its clock; at the instant itself it is expired."""
    clock = VirtualClock()
    held = Deadline(2.0, clock)
    assert (held.remaining(), held.expired) == (2.0, False)
    assert repr(held) == "<Deadline 2.000 s left>"
    clock.advance(1.5)
    assert (held.remaining(), held.expired) == (0.5, False)
    clock.advance(0.5)
    assert (held.remaining(), held.expired) == (0.0, True)
    clock.advance(9.0)
    assert held.remaining() == 0.0


def test_shrink_leaves_a_reserve() -> None:
    """It ends earlier by so much, on the same clock; a negative reserve is refused."""
    held = Deadline(5.0, VirtualClock())
    assert held.shrink(2.0).at == 3.0
    assert held.shrink(0).at == 5.0
    assert held.shrink(9.0).expired
    assert held.shrink(2.0).clock is held.clock
    with pytest.raises(ValueError, match="reserve"):
        held.shrink(-1.0)


def test_split_divides_what_is_left_evenly() -> None:
    """Each step has its share of the time that is left now, one after another."""
    clock = VirtualClock(10.0)
    held = Deadline(14.0, clock)
    assert [part.at for part in held.split(4)] == [11.0, 12.0, 13.0, 14.0]
    clock.advance(2.0)
    assert [part.at for part in held.split(2)] == [13.0, 14.0]
    clock.advance(5.0)
    assert all(part.expired for part in held.split(2))


def test_split_divides_by_weights() -> None:
    """A step of weight 3 has three times the time of one of weight 1; 0 has none."""
    held = Deadline(8.0, VirtualClock())
    assert [part.at for part in held.split([1, 3, 0, 4])] == [1.0, 4.0, 4.0, 8.0]
    assert [part.at for part in held.split((0.5, 0.5))] == [4.0, 8.0]


@pytest.mark.parametrize("steps", [0, -1, [], [0, 0], [1, -1], [float("nan")], [float("inf")]])
def test_split_refuses_what_it_cannot_divide_by(steps: Any) -> None:
    """No steps, no weight, or a weight below 0."""
    with pytest.raises(ValueError, match=r"steps|weight"):
        Deadline(8.0, VirtualClock()).split(steps)


@given(
    st.floats(0, 1e9),
    st.floats(-10, 1e6),
    st.integers(1, 20) | st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20),
)
def test_parts_are_in_order_and_the_last_ends_with_the_whole(
    now: float, left: float, steps: int | list[float]
) -> None:
    """Rounding never gives a part more time than the whole has."""
    held = Deadline(now + left, VirtualClock(now))
    ends = [part.at for part in held.split(steps)]
    assert ends == sorted(ends)
    assert all(end <= max(now, held.at) for end in ends)
    assert ends[-1] == pytest.approx(held.at if left >= 0 else ends[-1])
    assert len(ends) == (steps if isinstance(steps, int) else len(steps))


# The scope


def test_with_sets_the_deadline_and_restores_it() -> None:
    """It holds inside the block, nested blocks too, and is gone after it."""
    with virtual_time() as clock:
        assert current_deadline() is None
        with deadline(5.0) as outer:
            assert (outer.at, outer.clock) == (5.0, clock)
            assert current_deadline().at == 5.0
            with deadline(2.0) as inner:
                assert inner.at == current_deadline().at == 2.0
            assert current_deadline().at == 5.0
        assert current_deadline() is None
        with pytest.raises(ValueError, match="mine"), deadline(1.0):
            raise ValueError("mine")
        assert current_deadline() is None


def test_an_earlier_deadline_outside_is_kept() -> None:
    """A block cannot give itself more time than it was given."""
    with virtual_time(), deadline(2.0):
        with deadline(5.0) as kept:
            assert kept.at == 2.0
            assert current_deadline().at == 2.0
        with deadline(Deadline(7.0, current_deadline().clock)) as kept:
            assert kept.at == 2.0


def test_a_deadline_object_can_be_handed_on() -> None:
    """Parts of a split are used one after another."""
    with virtual_time() as clock, deadline(4.0) as whole:
        for part, expected in zip(whole.split(2), (2.0, 4.0), strict=True):
            with deadline(part):
                assert current_deadline().at == expected
                clock.sleep(1.0)


def test_deadlines_of_two_clocks_are_compared_by_what_is_left() -> None:
    """Instants of two clocks have nothing in common, seconds have."""
    one, two = VirtualClock(1000.0), VirtualClock()
    with deadline(5.0, clock=one):
        with deadline(2.0, clock=two) as kept:
            assert (kept.at, kept.clock) == (2.0, two)
        with deadline(9.0, clock=two) as kept:
            assert (kept.at, kept.clock) == (1005.0, one)
    with deadline(5.0, clock=one), deadline(3.0) as kept:
        assert kept.clock is one  # unless told otherwise, that of the deadline outside
    with deadline(5.0) as kept:
        assert kept.clock is SYSTEM


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_wrong_seconds_are_refused_where_they_are_written(seconds: float) -> None:
    """0 is allowed: there is no time left."""
    with pytest.raises(ValueError, match="deadline"):
        deadline(seconds)
    with pytest.raises(TypeError, match="deadline"):
        deadline("2")
    assert deadline(0) is not None


def test_check_deadline_raises_when_time_is_over() -> None:
    """Long loops ask, and end by themselves; without a deadline nothing happens."""
    check_deadline()
    with virtual_time() as clock, deadline(1.0):
        check_deadline()
        clock.advance(0.5)
        check_deadline()
        clock.advance(0.5)
        with pytest.raises(TimedOut, match="deadline passed"):
            check_deadline()


def test_check_deadline_lets_cleanup_after_a_cancellation_run() -> None:
    """It asks about the deadline that `current_deadline` returns; one further out still applies."""
    seen: list[str] = []

    async def work(cleanup: float) -> None:
        try:
            await let_pass(9.0)
        finally:
            assert (current_deadline() is None) is (cleanup == 0.0)
            check_deadline()
            seen.append("cleaned up")
            with deadline(0.0), pytest.raises(TimedOut, match="deadline passed"):
                check_deadline()
            if cleanup:
                await let_pass(cleanup)
                check_deadline()

    async def main() -> None:
        with pytest.raises(TimedOut):
            async with deadline(1.0):
                await work(0.0)
        with deadline(2.0), pytest.raises(TimedOut):
            async with deadline(1.0):
                await work(0.5)
        assert seen == ["cleaned up"] * 2

    run_virtual(main())


def test_async_with_also_enforces_it() -> None:
    """The block is cancelled at the instant and raises TimedOut; the task is as before."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(TimedOut) as caught:  # noqa: PT012 - the block is the subject
            async with deadline(2.0) as held:
                assert held.at == 2.0
                await let_pass(9.0)
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)
        assert loop.time() == 2.0
        assert asyncio.current_task().cancelling() == 0
        assert current_deadline() is None
        async with deadline(2.0):
            await let_pass(1.0)
        await let_pass(5.0)  # nothing fires later
        with pytest.raises(KeyError):
            async with deadline(2.0):
                raise KeyError
        assert current_deadline() is None

    run_virtual(main())


def test_async_with_keeps_an_earlier_deadline_and_enforces_that() -> None:
    """The inner block ends when the outer one's time is over."""

    async def main() -> None:
        with deadline(1.0), pytest.raises(TimedOut):
            async with deadline(5.0):
                await let_pass(9.0)
        assert asyncio.get_running_loop().time() == 1.0

    run_virtual(main())


def test_async_with_leaves_a_cancellation_from_elsewhere_alone() -> None:
    """Also at the same instant: the task is cancelled, not timed out."""

    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def work() -> None:
            async with deadline(1.0):
                await let_pass(9.0)

        task = loop.create_task(work())
        loop.call_later(1.0, task.cancel)
        await asyncio.wait([task])
        assert task.cancelled() or isinstance(task.exception(), TimedOut)
        return task.cancelled()

    # Who comes first decides, unless both come before the task runs: then the other one wins.
    assert run_virtual(main()) is True
    assert {run_virtual(main(), seed=seed) for seed in range(20)} <= {True, False}


def test_async_with_needs_a_task() -> None:
    """Outside of one it says so, and sets nothing."""
    with pytest.raises(RuntimeError, match="needs a task to cancel"):
        deadline(1.0).__aenter__().send(None)
    assert current_deadline() is None


def test_a_guarded_call_with_a_timeout_needs_a_task() -> None:
    """It says so on every Python, also after calls that had one."""

    async def call() -> str:
        return "done"

    guard = new_guard(Timeout(1.0))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="needs a task to cancel"):
            guard.acall(call).send(None)
        assert asyncio.run(guard.acall(call)) == "done"


# The error


def test_deadline_exceeded_is_a_refusal_and_a_timeout_error() -> None:
    """Code that knows nothing of Seawall takes it for a timeout."""
    guard = new_guard(Bulkhead(1))
    with deadline(0.0), pytest.raises(TimeoutError) as caught:
        guard.call(int)
    error = caught.value
    assert isinstance(error, DeadlineExceeded)
    assert isinstance(error, Rejected)
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    for one in (error, copy):
        assert (one.guard, one.policy, one.reason) == (guard.name, "deadline", "deadline_exceeded")
        assert str(one).startswith(f"guard '{guard.name}': the deadline passed")


@pytest.mark.parametrize(
    ("on", "attempts"),
    [(TimeoutError, 1), (OSError, 1), (Exception, 1), (DeadlineExceeded, 3), (Rejected, 3)],
)
def test_it_is_retried_only_where_a_refusal_is_named(on: type[Exception], attempts: int) -> None:
    """A TimeoutError is an OSError too; it began nowhere, whatever it is called."""
    calls = []

    def refused() -> None:
        calls.append(1)
        raise DeadlineExceeded("too late")

    with virtual_time():
        guard = new_guard(Retry(on=on, attempts=3))
        with pytest.raises(DeadlineExceeded):
            guard.call(refused)
    assert len(calls) == attempts


def test_a_breaker_does_not_count_what_the_deadline_refused() -> None:
    """Also one that counts timeouts only: nothing was asked of the dependency."""
    guard = new_guard(Breaker(consecutive=1, is_failure=TimeoutError), Bulkhead(1))
    with deadline(0.0), pytest.raises(DeadlineExceeded):
        guard.call(int)
    assert guard.call(int) == 0


def test_a_resource_of_a_pool_is_good_for_the_next_after_a_refusal_inside_its_block() -> None:
    """A timeout may have left it in the middle of something; what never began has not."""
    pool = Pool(object, name="deadline", max_size=1, reusable=TimeoutError)
    borrowed = []

    def use(error: Exception) -> None:
        with pool.borrow() as resource:
            borrowed.append(resource)
            raise error

    for error in (DeadlineExceeded("never began"), TimeoutError("began")):
        with pytest.raises(TimeoutError):
            use(error)
    with pool.borrow() as resource:
        assert borrowed == [borrowed[0]] * 2
        assert resource is not borrowed[0]


def test_a_plain_call_that_outlasted_its_time_is_timed_out_though_more_was_refused() -> None:
    """It began; and its attempt can be retried, where a refusal is not."""
    with virtual_time() as clock:
        inner = new_guard(Bulkhead(1))

        def slow() -> None:
            clock.sleep(1.0)
            inner.call(int)

        guard = new_guard(Retry(on=TimedOut, attempts=2), Timeout(0.5, sync="cooperative"))
        with pytest.raises(TimedOut, match=r"after 0\.500 s") as caught:
            guard.call(slow)
    assert isinstance(caught.value.__cause__, DeadlineExceeded)
    seen = guard.snapshot()
    assert (seen["timed_out"], seen["retries"]) == (2, 1)


# Tasks and threads


def test_every_task_sees_its_own() -> None:
    """A task begins with what its maker had; what it sets is seen by nobody else."""

    async def main() -> None:
        seen: dict[str, Any] = {}

        async def one(name: str, seconds: float, level: Criticality) -> None:
            with deadline(seconds), criticality(level), idempotency_key(name):
                await let_pass(0.5)
                seen[name] = (
                    current_deadline().at,
                    current_criticality(),
                    current_idempotency_key(),
                )

        with deadline(3.0):
            await asyncio.gather(
                one("a", 1.0, Criticality.SHEDDABLE),
                one("b", 2.0, Criticality.CRITICAL_PLUS),
                one("c", 9.0, Criticality.CRITICAL),
            )
            assert current_deadline().at == 3.0
        assert seen == {
            "a": (1.0, Criticality.SHEDDABLE, "a"),
            "b": (2.0, Criticality.CRITICAL_PLUS, "b"),
            "c": (3.0, Criticality.CRITICAL, "c"),
        }
        assert current_criticality() is Criticality.CRITICAL
        assert current_idempotency_key() is None

    run_virtual(main())


def test_every_thread_sees_its_own() -> None:
    """A plain thread begins with nothing; one that runs in a copy of a context sees that."""
    seen: list[Any] = []

    def look() -> None:
        held = current_deadline()
        seen.append((held and held.at, current_criticality(), current_attempt()))

    with virtual_time(), deadline(3.0), criticality(Criticality.SHEDDABLE):
        context = copy_context()
        for target in (look, lambda: context.run(look)):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join(30)
    assert seen[1] == (3.0, Criticality.SHEDDABLE, 1)
    assert seen[0] in [(None, Criticality.CRITICAL, 1), seen[1]]  # a free-threaded build inherits


# Criticality, attempt, idempotency key


def test_criticality_is_set_for_a_block() -> None:
    """CRITICAL unless said otherwise; levels are ordered."""
    assert current_criticality() is Criticality.CRITICAL
    with criticality(Criticality.SHEDDABLE) as level:
        assert current_criticality() is level is Criticality.SHEDDABLE
        with criticality(Criticality.CRITICAL_PLUS):
            assert current_criticality() is Criticality.CRITICAL_PLUS
        assert current_criticality() is Criticality.SHEDDABLE
    assert current_criticality() is Criticality.CRITICAL
    assert max(Criticality) is Criticality.CRITICAL_PLUS
    for wrong in (2, "CRITICAL", None):
        with pytest.raises(TypeError, match=r"Criticality\.CRITICAL"):
            criticality(wrong)


def test_an_idempotency_key_is_set_for_a_block() -> None:
    """None unless set; an empty one is refused."""
    assert current_idempotency_key() is None
    with idempotency_key("order 7") as key:
        assert current_idempotency_key() == key == "order 7"
    assert current_idempotency_key() is None
    for wrong in ("", None, 7):
        with pytest.raises(ValueError, match="non-empty string"):
            idempotency_key(wrong)


def test_outside_of_any_guard_it_is_the_first_attempt() -> None:
    """Nobody has to ask whether there is a guard."""
    assert current_attempt() == 1


# Invariant: remaining time never grows downstream


class Descent(NamedTuple):
    """A way down through scopes and guards, each with its own idea of the time it wants."""

    levels: list[tuple[str, float, float]]
    kind: str
    seed: int


DESCENTS = st.builds(
    Descent,
    levels=st.lists(
        st.tuples(
            st.sampled_from(["with", "async with", "object", "timeout", "retry", "task"]),
            st.integers(1, 16).map(lambda n: n / 4),
            st.integers(0, 2).map(lambda n: n / 8),
        ),
        min_size=1,
        max_size=5,
    ),
    kind=st.sampled_from(["sync", "async"]),
    seed=SEEDS,
)


class Downstream:
    """Goes down level by level and looks at what is left, before and after each."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.grown: list[tuple[float, float]] = []

    def left(self) -> float:
        held = current_deadline()
        return float("inf") if held is None else held.at - self.clock.now()

    def look(self, before: float, wanted: float | None) -> float:
        left = self.left()
        if left > before or (wanted is not None and left > wanted):
            self.grown.append((before, left))
        return left

    def down(self, levels: list[tuple[str, float, float]], before: float = float("inf")) -> None:
        if not levels:
            return
        (how, seconds, pause), *rest = levels

        def inside(wanted: float | None) -> None:
            left = self.look(before, wanted)
            self.clock.sleep(pause)
            self.down(rest, left - pause)

        if how == "timeout":
            new_guard(Timeout(seconds, sync="cooperative")).attempt(inside, seconds)
        elif how in ("retry", "task"):
            new_guard(Retry(on=KeyError)).attempt(inside, None)
        elif how == "object":
            with deadline(Deadline(self.clock.now() + seconds, self.clock)):
                inside(seconds)
        else:
            with deadline(seconds):
                inside(seconds)
        self.look(before, None)

    async def adown(
        self, levels: list[tuple[str, float, float]], before: float = float("inf")
    ) -> None:
        if not levels:
            return
        (how, seconds, pause), *rest = levels

        async def inside(wanted: float | None) -> None:
            left = self.look(before, wanted)
            await let_pass(pause)
            await self.adown(rest, left - pause)

        if how in ("timeout", "retry"):
            await new_guard(Timeout(seconds)).aattempt(inside, None)
        elif how == "task":
            await asyncio.get_running_loop().create_task(inside(None))
        elif how == "async with":
            async with deadline(seconds):
                await inside(seconds)
        else:
            with deadline(seconds):
                await inside(seconds)
        self.look(before, None)


def _check_descent(case: Descent) -> None:
    with virtual_time() as clock:
        way = Downstream(clock)
        try:
            if case.kind == "sync":
                way.down(case.levels)
            else:
                run_virtual(way.adown(case.levels), clock=clock, seed=case.seed)
        except (TimedOut, DeadlineExceeded):
            pass
        assert not way.grown
        assert current_deadline() is None


@given(DESCENTS)
def test_the_time_left_never_grows_on_the_way_down(case: Descent) -> None:
    """Scopes, guards, tasks: each has at most what it was given, and what it asked for."""
    _check_descent(case)


def _naive_scope(scope: _DeadlineScope) -> Deadline:
    wanted = scope._seconds
    if not isinstance(wanted, Deadline):
        outer = deadline_scope()
        clock = outer[1] if outer else current_clock()
        wanted = Deadline(clock.now() + wanted, clock)
    scope._scope = [wanted.at, wanted.clock, None, True]
    scope._token = deadline_var.set(scope._scope)
    return wanted


def _naive_timeout(timeout: CooperativeTimeout, now: float) -> Any:
    scope = [now + timeout._bound.seconds(now), timeout._clock, None, True]
    deadline_var.set(scope)
    return scope


@pytest.mark.parametrize(
    ("owner", "name", "naive"),
    [(_DeadlineScope, "__enter__", _naive_scope), (CooperativeTimeout, "enter", _naive_timeout)],
)
def test_without_keeping_the_earlier_one_time_grows(
    owner: type, name: str, naive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let a scope or a guard set what it wants, and the property is falsified."""
    monkeypatch.setattr(owner, name, naive)
    assert falsified(_check_descent, DESCENTS)


# Invariant: expired work never starts


class Late(NamedTuple):
    """A call that comes before, at or after the deadline, through some stack."""

    limit: float
    arrival: float
    stack: str
    kind: str
    seed: int


STACKS = ["retry", "bulkhead", "timeout", "waiting", "retrying"]
LATE = st.builds(
    Late,
    limit=QUARTERS,
    arrival=QUARTERS,
    stack=st.sampled_from(STACKS),
    kind=st.sampled_from(["sync", "async"]),
    seed=SEEDS,
)


def _check_late(case: Late) -> None:
    begun: list[float] = []
    with virtual_time() as clock:
        bulkhead = Bulkhead(1, max_wait=8.0)
        guard = new_guard(
            *{
                "retry": [Retry(on=KeyError)],
                "bulkhead": [bulkhead],
                "timeout": [Timeout(9.0, sync="cooperative")],
                "waiting": [bulkhead],
                "retrying": [Retry(on=KeyError, attempts=5, backoff=[0.75])],
            }[case.stack]
        )

        def function() -> None:
            begun.append(clock.now())
            if case.stack == "retrying":
                raise KeyError

        async def afunction() -> None:
            function()

        def plain() -> Any:
            with deadline(case.limit):
                clock.sleep(case.arrival)
                if case.stack == "waiting":
                    with guard.hold():
                        return guard.attempt(function).error
                return guard.attempt(function).error

        async def main() -> Any:
            with deadline(case.limit):
                await let_pass(case.arrival)
                if case.stack == "waiting":
                    hold = guard.hold()
                    await hold.__aenter__()
                    # The slot comes back at the very deadline.
                    loop = asyncio.get_running_loop()
                    left = case.limit - case.arrival
                    loop.call_later(left, hold.__exit__, None, None, None)
                result = await guard.aattempt(afunction)
                await let_pass(3.0)
                return result.error

        try:
            error = (
                plain() if case.kind == "sync" else run_virtual(main(), clock=clock, seed=case.seed)
            )
        except DeadlineExceeded as raised:  # hold() itself is refused
            error = raised
        assert all(at < case.limit for at in begun)
        if case.arrival >= case.limit:
            assert isinstance(error, DeadlineExceeded)
        assert bulkhead.waiting == 0


@pytest.mark.parametrize("stack", STACKS)
@given(LATE)
def test_expired_work_never_starts(stack: str, case: Late) -> None:
    """Whatever it waited for, no function begins when its time is over."""
    _check_late(case._replace(stack=stack))


def test_without_the_look_at_the_beginning_expired_work_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Do not refuse what is expired, and the property is falsified."""
    monkeypatch.setattr(fastpath, "refuse_expired", lambda _: None)
    monkeypatch.setattr(interpreter, "refuse_expired", lambda _: None)
    assert falsified(_check_late, LATE)


def test_a_slot_granted_at_the_very_deadline_is_given_back() -> None:
    """Granted and late in the same instant, in whatever order: the work does not begin."""

    async def main() -> None:
        bulkhead = Bulkhead(1, max_wait=8.0)
        guard = new_guard(bulkhead)
        service = ScriptedService(answer())
        hold = guard.hold()
        await hold.__aenter__()
        asyncio.get_running_loop().call_later(1.0, hold.__exit__, None, None, None)
        with deadline(1.0):
            result = await guard.aattempt(service.acall)
        await let_pass(1.0)
        assert isinstance(result.error, DeadlineExceeded)
        assert service.calls == 0
        assert (bulkhead.in_flight, bulkhead.waiting) == (0, 0)

    for seed in range(20):
        run_virtual(main(), seed=seed)


def test_a_slot_granted_in_time_but_noticed_too_late_is_given_back() -> None:
    """A loop that was busy for so long wakes the waiter after its deadline."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        bulkhead = Bulkhead(1, max_wait=8.0)
        guard = new_guard(bulkhead)
        service = ScriptedService(answer())
        hold = guard.hold()
        await hold.__aenter__()

        def release() -> None:
            hold.__exit__(None, None, None)
            loop.clock.advance(3.0)  # this callback kept the loop busy

        loop.call_later(1.0, release)
        with deadline(2.0):
            result = await guard.aattempt(service.acall)
        assert isinstance(result.error, DeadlineExceeded)
        assert service.calls == 0
        assert (bulkhead.in_flight, bulkhead.waiting) == (0, 0)

    run_virtual(main())
