"""What Retry always keeps to, under random programs and orders; and that each safeguard matters."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    Bulkhead,
    BulkheadFull,
    Guard,
    Rejected,
    Retry,
    RetryBudget,
    Timeout,
    deadline,
    subscribe,
)
from seawall.backoff import Backoff
from seawall.context import current_attempt, idempotency_key
from seawall.events import CallRetried
from seawall.models.budget import BUCKETS
from seawall.policies.retry import InFlightRatio, RequestRatio, SuccessDeposit
from seawall.policies.retry import policy as retry
from seawall.policies.retry.policy import RetryFlow
from seawall.policies.timeout import adaptive_timeout
from seawall.runtime.call import Call
from seawall.testing import run_virtual, virtual_time
from tests.support import SEEDS, falsified, let_pass, new_guard, quarters

QUARTERS = quarters(16)


class Broken(Exception):
    """What is retried here."""


class Bug(Exception):
    """What is not."""


# Attempts are bounded


class Script(NamedTuple):
    """What each attempt does; the last step repeats."""

    attempts: int
    steps: list[str]
    pauses: list[float]
    kind: str
    seed: int


SCRIPTS = st.builds(
    Script,
    attempts=st.integers(1, 5),
    steps=st.lists(st.sampled_from(["ok", "broken", "bad", "bug", "refused"]), min_size=1),
    pauses=st.lists(QUARTERS, min_size=1, max_size=4),
    kind=st.sampled_from(["sync", "async"]),
    seed=SEEDS,
)
WORTH_ANOTHER = ("broken", "bad", "refused")


def _do(step: str) -> str:
    if step == "broken":
        raise Broken
    if step == "bug":
        raise Bug
    if step == "refused":
        raise Rejected("by the server")
    return step


def _check_attempts(case: Script) -> None:
    begun: list[str] = []

    def function() -> str:
        begun.append(case.steps[min(len(begun), len(case.steps) - 1)])
        return _do(begun[-1])

    async def afunction() -> str:
        return function()

    policy = Retry(
        on=(Broken, Rejected, lambda _, value: value == "bad"),
        attempts=case.attempts,
        backoff=case.pauses,
    )
    with virtual_time() as clock:
        guard = new_guard(policy)
        if case.kind == "sync":
            result = guard.attempt(function)
        else:
            result = run_virtual(guard.aattempt(afunction), clock=clock, seed=case.seed)
    assert len(begun) <= case.attempts
    assert result.attempts == len(begun)
    assert all(step in WORTH_ANOTHER for step in begun[:-1])
    assert begun[-1] not in WORTH_ANOTHER or len(begun) == case.attempts
    assert clock.now() == sum((case.pauses + case.pauses[-1:] * 5)[: len(begun) - 1])


@given(SCRIPTS)
def test_a_call_gets_the_attempts_it_needs_and_never_more_than_allowed(case: Script) -> None:
    """Each attempt but the last failed in a retryable way, and there are at most `attempts`."""
    _check_attempts(case)


def test_without_the_limit_of_attempts_there_are_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the limit away, and the property is falsified."""

    def decide(_: Any, call: Call, memory: Any, __: float) -> tuple[str | None, float]:
        return ("attempts", 0.0) if call.attempts >= 20 else (None, next(memory.delays))

    monkeypatch.setattr(RetryFlow, "_decide", decide)
    assert falsified(_check_attempts, SCRIPTS)


@given(st.integers(1, 4), SEEDS)
def test_refusals_of_the_guard_itself_count_as_attempts(attempts: int, seed: int) -> None:
    """A call that is refused further in again and again gives up after `attempts` tries."""

    async def main() -> int:
        guard = new_guard(Retry(on=BulkheadFull, attempts=attempts, backoff=[1.0]), Bulkhead(1))
        async with guard.hold():
            with deadline(50.0), pytest.raises(BulkheadFull):
                await guard.acall(_nothing)
        return guard.snapshot()["retries"]

    assert run_virtual(main(), seed=seed) == attempts - 1


async def _nothing() -> None:
    pass


# The total time is bounded


class Race(NamedTuple):
    """A call against the clock: who sets its limit, and how long its attempts and pauses are."""

    limit: float
    by: str
    attempts: int
    durations: list[float]
    pauses: list[float]
    seed: int


RACES = st.builds(
    Race,
    limit=st.integers(1, 16).map(lambda n: n / 4),
    by=st.sampled_from(["deadline", "enforced deadline", "timeout", "adaptive", "sync"]),
    attempts=st.integers(1, 5),
    durations=st.lists(QUARTERS, min_size=1, max_size=5),
    pauses=st.lists(QUARTERS, min_size=1, max_size=4),
    seed=SEEDS,
)


def _check_total_time(case: Race) -> None:
    spans: list[tuple[float, float]] = []

    def duration() -> float:
        return case.durations[min(len(spans), len(case.durations) - 1)]

    async def function() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        # A client that knows the deadline keeps to it; the others are cancelled.
        span = duration()
        if case.by == "deadline":
            span = min(span, case.limit - began)
        try:
            await asyncio.wait_for(loop.create_future(), span)
        except TimeoutError:
            raise Broken from None
        finally:
            spans.append((began, loop.time()))

    policy = Retry(on=Broken, attempts=case.attempts, backoff=case.pauses)
    with virtual_time() as clock:
        if case.by == "sync":
            guard = new_guard(Timeout(case.limit, sync="cooperative"), policy)

            def plain() -> None:
                began = clock.now()
                clock.sleep(min(duration(), case.limit - began))
                spans.append((began, clock.now()))
                raise Broken

            error = guard.attempt(plain).error
        else:
            outer = {
                "timeout": [Timeout(case.limit)],
                "adaptive": [Timeout(adaptive_timeout(floor=case.limit, cap=case.limit))],
            }
            guard = new_guard(*outer.get(case.by, []), policy)

            async def main() -> Exception | None:
                if case.by == "enforced deadline":
                    try:
                        async with deadline(case.limit):
                            await guard.acall(function)
                    except (Broken, TimeoutError) as error:
                        return error
                with deadline(case.limit) if case.by == "deadline" else nullcontext():
                    return (await guard.aattempt(function)).error

            error = run_virtual(main(), clock=clock, seed=case.seed)
    assert clock.now() <= case.limit
    assert all(began < case.limit for began, _ in spans)
    # It never begins a pause that it cannot finish, and does not wait for nothing.
    assert spans
    assert clock.now() == spans[-1][1]
    assert isinstance(error, (Broken, TimeoutError))


@given(RACES)
def test_all_attempts_and_pauses_fit_into_the_time_there_is(case: Race) -> None:
    """A deadline, or a Timeout further out, bounds the total; no pause is begun in vain."""
    _check_total_time(case)


def test_without_a_look_at_the_clock_pauses_run_into_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hide the limits from Retry, and the property is falsified."""
    monkeypatch.setattr(Call, "until", lambda _: None)
    assert falsified(_check_total_time, RACES)


# The budget holds at every prefix


class Traffic(NamedTuple):
    """Calls of two guards with one budget: when each begins, how attempts go, when it is cut."""

    rule: str
    calls: list[tuple[float, int, list[tuple[float, bool]], float | None]]
    seed: int


ATTEMPTS = st.lists(st.tuples(QUARTERS, st.booleans()), min_size=1, max_size=4)
TRAFFIC = st.builds(
    Traffic,
    rule=st.sampled_from(["deposit", "requests", "in flight"]),
    calls=st.lists(
        st.tuples(QUARTERS, st.integers(0, 1), ATTEMPTS, st.none() | QUARTERS),
        min_size=1,
        max_size=12,
    ),
    seed=SEEDS,
)


class Ledger:
    """Counts by itself, from outside, what the budget must have counted."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        self.log: list[tuple[float, str]] = []
        self.active: set[Any] = set()
        self.retrying: set[Any] = set()
        self.broken: list[str] = []

    async def call(self, guard: Guard, script: list[tuple[float, bool]]) -> None:
        """Make one call whose attempts go by `script`, and write it down."""
        steps = iter(script)
        task = asyncio.current_task()
        self.active.add(task)
        self.note("start")

        async def function() -> None:
            pause, good = next(steps, (0.25, True))
            try:
                await let_pass(pause)
                if not good:
                    raise Broken
            finally:
                self.retrying.discard(task)

        try:
            await guard.acall(function)
            self.note("success")
        except Broken:
            pass
        finally:
            self.retrying.discard(task)
            self.active.discard(task)

    def compare(self, retries: int, allowed: float, *, strictly: bool = False) -> None:
        if retries > allowed or (strictly and retries == allowed):
            self.broken.append(f"{retries} retries, {allowed} allowed")

    def note(self, what: str) -> None:
        self.log.append((asyncio.get_running_loop().time(), what))

    def on_retry(self) -> None:
        """Check the inequality: a retry was permitted just now, in this task."""
        self.note("retry")
        self.retrying.add(asyncio.current_task())
        rule = self.rule
        if isinstance(rule, SuccessDeposit):
            for begin in range(len(self.log)):
                since = [what for _, what in self.log[begin:]]
                earned = rule.maximum / 2 + rule.ratio * since.count("success")
                self.compare(since.count("retry"), earned, strictly=True)
        elif isinstance(rule, RequestRatio):
            width = rule.window / BUCKETS
            first = self.log[-1][0] // width - (BUCKETS - 1)
            recent = [what for at, what in self.log if at // width >= first]
            allowed = max(rule.ratio * recent.count("start"), rule.floor * rule.window)
            self.compare(recent.count("retry"), allowed)
        else:
            allowed = max(rule.floor, rule.ratio * len(self.active))
            self.compare(len(self.retrying), allowed)


def _rule(name: str) -> Any:
    if name == "deposit":
        return SuccessDeposit(maximum=4, ratio=0.5)
    return RequestRatio(0.5, window=2.5, floor=0.4) if name == "requests" else InFlightRatio(0.5, 1)


def _check_budget(case: Traffic) -> None:
    budget = RetryBudget(_rule(case.rule))
    ledger = Ledger(budget.rule)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        retry = Retry(on=Broken, attempts=4, backoff=[0.25, 0.5], budget=budget)
        other = Retry(on=Broken, attempts=3, backoff=[0.5], budget=budget)
        guards = [new_guard(retry), new_guard(other)]
        tasks: list[asyncio.Task[None]] = []

        def begin(guard: Guard, script: list[tuple[float, bool]], cut: float | None) -> None:
            task = loop.create_task(ledger.call(guard, script))
            tasks.append(task)
            if cut is not None:
                loop.call_later(cut, task.cancel)

        for at, which, script, cut in case.calls:
            loop.call_later(at, begin, guards[which], script, cut)
        await let_pass(60.0)
        assert all(task.done() for task in tasks)
        assert all(task.cancelled() or task.exception() is None for task in tasks)

    unsubscribe = subscribe(lambda _: ledger.on_retry(), CallRetried)
    try:
        run_virtual(main(), seed=case.seed)
    finally:
        unsubscribe()
    assert not ledger.broken
    if isinstance(budget.rule, InFlightRatio):
        assert (budget.rule.active, budget.rule.retries) == (0, 0)


@given(TRAFFIC)
def test_the_budget_holds_at_every_moment_for_all_guards_that_share_it(case: Traffic) -> None:
    """Whenever a retry is made, the budget's own inequality is true, counted from outside."""
    _check_budget(case)


@pytest.mark.parametrize("rule", ["deposit", "requests", "in flight"])
def test_without_asking_the_budget_it_is_overspent(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permit every retry, and the property is falsified, whatever the rule."""
    monkeypatch.setattr(RetryBudget, "try_retry", lambda *_: True)
    assert falsified(_check_budget, TRAFFIC.map(lambda case: case._replace(rule=rule)))


@pytest.mark.parametrize(
    ("rule", "note"),
    [("deposit", "failed"), ("in flight", "retry_ended"), ("in flight", "ended")],
)
def test_without_being_told_the_budget_is_wrong(
    rule: str, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep one thing from the budget, and the property is falsified."""
    tell = RetryFlow._note

    def forgetful(self: Any, what: str, now: float) -> None:
        if what != note:
            tell(self, what, now)

    monkeypatch.setattr(RetryFlow, "_note", forgetful)
    assert falsified(_check_budget, TRAFFIC.map(lambda case: case._replace(rule=rule)))


# Cancellation and exits


class Exit(NamedTuple):
    """An attempt ends by something that is no Exception."""

    kind: str
    how: str
    failures: int
    on: str


EXITS = st.builds(
    Exit,
    kind=st.sampled_from(["sync", "async"]),
    how=st.sampled_from(["CancelledError", "KeyboardInterrupt", "SystemExit", "group"]),
    failures=st.integers(0, 3),
    on=st.sampled_from(["type", "predicate", "both"]),
)


def _leave(how: str) -> BaseException:
    if how == "group":
        return BaseExceptionGroup("", [Broken(), KeyboardInterrupt()])
    return {
        "CancelledError": asyncio.CancelledError,
        "KeyboardInterrupt": KeyboardInterrupt,
        "SystemExit": SystemExit,
    }[how]()


def _check_exits(case: Exit) -> None:
    begun = 0
    end = _leave(case.how)

    def function() -> None:
        nonlocal begun
        begun += 1
        raise Broken if begun <= case.failures else end

    async def afunction() -> None:
        function()

    on: Any = {
        "type": Exception,
        "predicate": lambda *_: True,
        "both": [Exception, lambda *_: True],
    }[case.on]
    guard = new_guard(Retry(on=on, attempts=6, backoff=[0.0]))
    raised: BaseException | None = None
    try:
        if case.kind == "sync":
            guard.call(function)
        else:
            # With no pause and no await inside, the coroutine ends in its first step.
            guard.acall(afunction).send(None)
    except BaseException as error:  # noqa: BLE001 - this is the subject
        raised = error
    assert raised is end
    assert begun == case.failures + 1


@given(EXITS)
def test_cancellation_and_exits_are_never_swallowed_nor_retried(case: Exit) -> None:
    """Whatever `on` says, they end the call at once and come out as they are."""
    _check_exits(case)


def test_if_retry_wanted_every_error_it_would_retry_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Retry want whatever was raised, and the property is falsified."""
    monkeypatch.setattr(Retry, "is_retryable", lambda _, error, __: error is not None)
    assert falsified(_check_exits, EXITS)


class Cut(NamedTuple):
    """A call that somebody cancels, in an attempt or in a pause."""

    at: float
    durations: list[float]
    pauses: list[float]
    seed: int


CUTS = st.builds(
    Cut,
    at=QUARTERS,
    durations=st.lists(QUARTERS, min_size=1, max_size=5),
    pauses=st.lists(QUARTERS, min_size=1, max_size=5),
    seed=SEEDS,
)


def _check_cut(case: Cut) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        guard = new_guard(Retry(on=lambda *_: True, attempts=50, backoff=case.pauses))
        begun = 0
        accepted: list[tuple[bool, int]] = []

        async def function() -> None:
            nonlocal begun
            begun += 1
            await let_pass(case.durations[begun % len(case.durations)] + 0.25)
            raise Broken

        task = loop.create_task(guard.acall(function))
        loop.call_later(case.at, lambda: accepted.append((task.cancel(), begun)))
        await asyncio.wait([task])
        assert accepted[0][0]
        assert task.cancelled()
        # A task that was cancelled before its first step does not begin at all.
        assert begun == accepted[0][1]
        assert guard.snapshot()["cancelled"] <= 1

    run_virtual(main(), seed=case.seed)


@given(CUTS)
def test_no_attempt_begins_after_the_call_was_cancelled(case: Cut) -> None:
    """A cancellation from outside ends the call where it is: attempt or pause."""
    _check_cut(case)


def test_if_retry_wanted_cancellations_attempts_would_follow_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Let Retry want cancellations too, and the property is falsified."""
    monkeypatch.setattr(Retry, "is_retryable", lambda _, error, __: error is not None)
    assert falsified(_check_cut, CUTS)


# No retry of a call that is not idempotent without a key


class Effect(NamedTuple):
    """A call that may have an effect each time, and what is known about it."""

    guard: bool
    function: bool | None
    key: bool
    failures: int
    kind: str


EFFECTS = st.builds(
    Effect,
    guard=st.booleans(),
    function=st.none() | st.booleans(),
    key=st.booleans(),
    failures=st.integers(0, 4),
    kind=st.sampled_from(["sync", "async"]),
)


def _check_effects(case: Effect) -> None:
    effects = 0

    def function() -> None:
        nonlocal effects
        effects += 1
        if effects <= case.failures:
            raise Broken

    async def afunction() -> None:
        function()

    target: Any = function if case.kind == "sync" else afunction
    with virtual_time() as clock:
        guard = new_guard(Retry(on=Broken, attempts=3, backoff=[1.0]), idempotent=case.guard)
        marked = guard if case.function is None else guard(idempotent=case.function)
        guarded = marked(target)
        with idempotency_key("order 7") if case.key else nullcontext():
            try:
                if case.kind == "sync":
                    guarded()
                else:
                    run_virtual(guarded(), clock=clock)
            except Broken:
                pass
    safe = case.key or (case.guard if case.function is None else case.function)
    assert effects == (min(3, case.failures + 1) if safe else 1)


@given(EFFECTS)
def test_a_call_that_is_not_idempotent_is_repeated_only_with_a_key(case: Effect) -> None:
    """The mark of the function wins over the guard's; a key makes repeating safe."""
    _check_effects(case)


def test_without_looking_for_the_key_effects_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is always a key, and the property is falsified."""
    monkeypatch.setattr(retry, "current_idempotency_key", lambda: "always")
    assert falsified(_check_effects, EFFECTS)


# Schedules, and the number of the attempt


class Crowd(NamedTuple):
    """Calls under way at once, through one Retry in two guards."""

    starts: list[tuple[float, int]]
    pauses: list[float]
    seed: int


CROWDS = st.builds(
    Crowd,
    starts=st.lists(st.tuples(QUARTERS, st.integers(0, 3)), min_size=2, max_size=6),
    pauses=st.lists(QUARTERS, min_size=2, max_size=4, unique=True),
    seed=SEEDS,
)


def _check_crowd(case: Crowd) -> None:
    policy = Retry(on=Broken, attempts=4, backoff=case.pauses)

    async def one(guard: Guard, start: float, failures: int) -> None:
        await let_pass(start)
        loop = asyncio.get_running_loop()
        begun: list[float] = []

        async def function() -> None:
            begun.append(loop.time())
            assert current_attempt() == len(begun)
            if len(begun) <= failures:
                raise Broken

        await guard.acall(function)
        assert current_attempt() == 1
        pauses = [later - earlier for earlier, later in pairwise(begun)]
        assert pauses == (case.pauses + case.pauses[-1:] * 2)[:failures]

    async def main() -> None:
        guards = [new_guard(policy), new_guard(policy)]
        calls = [one(guards[n % 2], *start) for n, start in enumerate(case.starts)]
        await asyncio.gather(*calls)

    run_virtual(main(), seed=case.seed)


@given(CROWDS)
def test_calls_at_once_have_schedules_and_attempt_numbers_of_their_own(case: Crowd) -> None:
    """Every call runs through the pauses from the first, and sees its own attempt's number."""
    _check_crowd(case)


def test_a_schedule_shared_by_calls_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all calls one iterator of delays, and the property is falsified."""
    delays = Backoff.delays
    kept: dict[Backoff, Any] = {}

    def shared(self: Backoff, rng: Any) -> Any:
        return kept.setdefault(self, delays(self, rng))

    monkeypatch.setattr(Backoff, "delays", shared)
    assert falsified(_check_crowd, CROWDS)
