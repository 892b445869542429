"""The generated success path and the interpreter alone: the same rules, told twice."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import linecache
import traceback
import weakref
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    AdaptiveLimit,
    Breaker,
    Bulkhead,
    Cache,
    Chaos,
    CircuitOpen,
    Criticality,
    Fallback,
    Guard,
    RateLimit,
    RateLimited,
    Rejected,
    Retry,
    RetryBudget,
    Shed,
    ThreadBulkhead,
    Throttle,
    Timeout,
    criticality,
    deadline,
    policies,
)
from seawall.backoff import constant
from seawall.clock import VirtualClock
from seawall.limits import Limit, aimd, vegas
from seawall.policies.breaker import n_of_m, ramp
from seawall.policies.fallback import _FallbackFlow
from seawall.policies.retry import InFlightRatio, RequestRatio
from seawall.policies.timeout import adaptive_timeout
from seawall.runtime import fastpath
from seawall.runtime.call import Call
from seawall.runtime.interpreter import run_async, run_sync
from seawall.shedding import (
    adaptive_lifo,
    by_chance,
    by_cost,
    by_criticality,
    by_deadline,
    by_fraction,
    by_latency,
    codel,
)
from seawall.testing import run_virtual, virtual_time
from tests.support import examples, falsified


class Poor(Exception):
    """An error that fallbacks answer."""


def poor(*_args: object) -> str:
    return "poor"


def no_level(*_args: object) -> str:
    raise LookupError


MAKERS: dict[str, Callable[[], Any]] = {
    "fallback": lambda: Fallback(poor, on=Poor),
    "any fallback": lambda: Fallback(poor),
    "two levels": lambda: Fallback(no_level, poor, on=(Poor, KeyError)),
    "retry": lambda: Retry(on=ConnectionError, attempts=3, backoff=0.1),
    "retry of values": lambda: Retry(on=[KeyError, lambda _e, v: v == "again"], attempts=2),
    "deposit": lambda: Retry(on=ConnectionError, attempts=4, budget=RetryBudget()),
    "ratio": lambda: Retry(on=OSError, budget=RetryBudget(RequestRatio(0.1, floor=0.2))),
    "in flight": lambda: Retry(on=OSError, budget=RetryBudget(InFlightRatio(0.2, floor=1))),
    "breaker": lambda: Breaker(consecutive=3, break_for=2.0),
    "ratio breaker": lambda: Breaker(failure_ratio=0.5, min_calls=4, probes=n_of_m(1, 2)),
    "slow breaker": lambda: Breaker(
        slow_after=1.0, slow_ratio=0.5, min_calls=4, break_for=1.0, probes=ramp(step=1.0)
    ),
    "classifier": lambda: Breaker(consecutive=2, is_failure=lambda e, v: bool(e) or v == "again"),
    "keyed": lambda: Breaker(consecutive=2, break_for=3.0, key=len),
    "bulkhead": lambda: Bulkhead(1),
    "queue": lambda: Bulkhead(1, max_wait=1.0),
    "shadow": lambda: Bulkhead(1, mode="shadow"),
    "total": lambda: Timeout(6.0, sync="cooperative"),
    "timeout": lambda: Timeout(1.5, sync="cooperative"),
    "adaptive": lambda: Timeout(adaptive_timeout(floor=1.0, cap=3.0), sync="cooperative"),
    # Gates against scarcity.
    "rate": lambda: RateLimit("2/s"),
    "keyed rate": lambda: RateLimit("2/s", key=len),
    "cost": lambda: RateLimit("12/s", cost=len),
    "constant cost": lambda: RateLimit("6/s", cost=3),
    "two rates": lambda: RateLimit("3/s", "4/2s"),
    "all kinds of rates": lambda: RateLimit(
        Limit("5/s"), Limit("20/2s", key=len, cost=len), Limit("9/s", algorithm="sliding_log")
    ),
    "settled": lambda: RateLimit("12/s", cost=8, settle=len),
    "settled cost": lambda: RateLimit("15/s", cost=len, settle=lambda value: 2 * len(value)),
    "leaky": lambda: RateLimit("2/s", algorithm="leaky_bucket"),
    "shaped": lambda: RateLimit("2/s", algorithm="leaky_bucket", max_wait=1.0),
    "shaped keys": lambda: RateLimit("2/s", algorithm="leaky_bucket", key=len, max_wait=1.0),
    "patient rate": lambda: RateLimit("2/s", burst=1, max_wait=1.0),
    "window": lambda: RateLimit("2/s", algorithm="fixed_window"),
    "shadow rate": lambda: RateLimit("1/s", mode="shadow"),
    "shed": lambda: Shed(by_criticality(), load=waves()),
    "shed costs": lambda: Shed(by_cost(len, most=8), by_chance(), load=waves()),
    "shed late": lambda: Shed(by_deadline(reserve=0.5)),
    "shed slow": lambda: Shed(by_latency(0.5), by_fraction(0.2, key=str)),
    "throttle": lambda: Throttle(k=1.0, window=10.0),
    "throttle of values": lambda: Throttle(k=1.0, on=[OSError, lambda _e, v: v == "again"]),
    "limit": lambda: AdaptiveLimit(aimd(slow_after=1.0, initial=2, maximum=3)),
    "patient limit": lambda: AdaptiveLimit(aimd(slow_after=1.0, initial=1), max_wait=1.0),
    "drops": lambda: AdaptiveLimit(vegas(initial=2), is_drop=lambda _e, value: value == "again"),
    "partitions": lambda: AdaptiveLimit(
        vegas(initial=2, maximum=4), partitions={"long": 0.5}, partition=long_or_short
    ),
    "codel": lambda: Bulkhead(1, max_wait=2.0, shed=codel()),
    "adaptive lifo": lambda: Bulkhead(1, max_wait=2.0, shed=adaptive_lifo(scale=0)),
    # Flows that have a say in refusals.
    "retry of refusals": lambda: Retry(on=[OSError, Rejected], attempts=3, backoff=0.2),
    "retry of some refusals": lambda: Retry(
        on=(CircuitOpen, RateLimited), attempts=2, budget=RetryBudget(InFlightRatio(0.2, floor=1))
    ),
    "fallback of refusals": lambda: Fallback(poor, on=Rejected),
    "no fallback": lambda: Fallback(no_level),
}


def waves() -> Callable[[], float]:
    """Return a load that comes and goes with each reading."""
    levels = cycle((0.1, 0.82, 0.3, 0.99, 1.2))
    return lambda: next(levels)


def long_or_short(what: str) -> str:
    return "long" if len(what) > 5 else "short"


ERRORS = {"rejected": ConnectionError, "missing": KeyError, "poor": Poor, "bug": ZeroDivisionError}
WHATS = ["answer", "again", "slow", "very slow", *ERRORS]
SECONDS = {"slow": 1.2, "very slow": 5.0}

stacks = st.lists(st.sampled_from(sorted(MAKERS)), min_size=1, max_size=5, unique=True)
scripts = st.lists(
    st.tuples(
        st.sampled_from(["plain", "taken", "drained", "soon late", "unimportant", "twice"]),
        st.lists(st.sampled_from(WHATS), min_size=1, max_size=4),
        st.sampled_from([0.0, 0.1, 2.5]),
    ),
    min_size=1,
    max_size=8,
)


class Script:
    """A function that does what a list of words says; the last word repeats."""

    def __init__(self, words: list[str], clock: VirtualClock) -> None:
        self._words = list(words)
        self._clock = clock
        self.calls = 0

    def _next(self) -> str:
        self.calls += 1
        return self._words.pop(0) if len(self._words) > 1 else self._words[0]

    def __call__(self, _what: str) -> str:
        word = self._next()
        self._clock.advance(SECONDS.get(word, 0.01))
        return self._end(word)

    async def later(self, _what: str) -> str:
        word = self._next()
        loop = asyncio.get_running_loop()
        bell = loop.create_future()
        timer = loop.call_later(SECONDS.get(word, 0.01), lambda: bell.done() or bell.set_result(0))
        try:
            await bell
        finally:
            timer.cancel()
        return self._end(word)

    @staticmethod
    def _end(word: str) -> str:
        if word in ERRORS:
            raise ERRORS[word](word)
        return word


def build(names: list[str], clock: VirtualClock) -> Guard:
    guard = Guard("twin", *(MAKERS[name]() for name in names), clock=clock, rng=Random(7))
    guard.close()
    return guard


def tell(error: BaseException) -> tuple[Any, ...]:
    notes = getattr(error, "__notes__", [])
    return type(error).__name__, str(error), notes, type(error.__cause__).__name__


class SyncTwin:
    """Runs the calls of a script through the fast path, or through the interpreter only."""

    def __init__(self, names: list[str], *, fast: bool) -> None:
        self.clock = VirtualClock()
        self.guard = build(names, self.clock)
        self.fast = fast
        self.layers = None if fast else self.guard._plan.layers("sync", "be compared")

    def call(self, script: Script, what: str) -> Any:
        try:
            if self.layers is None:
                return self.guard.call(script, what)
            call = Call(self.guard, self.layers, script, (what,), {}, self.clock.now())
            return run_sync(call)
        except Exception as error:  # noqa: BLE001 - compared
            return tell(error)

    def surroundings(self, how: str, what: str) -> contextlib.ExitStack:
        """Return a block in which slots or tokens are gone, or little time is left."""
        stack = contextlib.ExitStack()
        for policy in self.guard.policies:
            if how == "taken" and isinstance(policy, (Bulkhead, AdaptiveLimit)):
                while (slot := policy.slots.take()) is not None:
                    stack.callback(policy.slots.give_back, slot)
            elif how == "drained" and isinstance(policy, RateLimit) and policy.mode == "enforce":
                with contextlib.suppress(RateLimited):
                    while True:
                        policy.reserve(what)
        if how == "soon late":
            stack.enter_context(deadline(1.0, clock=self.clock))
        elif how == "late":
            stack.enter_context(deadline(0.0, clock=self.clock))
        elif how == "unimportant":
            stack.enter_context(criticality(Criticality.SHEDDABLE))
        return stack

    def at_rest(self) -> None:
        """Check that no call is counted as under way, once none is."""
        for policy in self.guard.policies:
            if isinstance(policy, Retry) and policy.budget is not None:
                assert policy.budget.snapshot().get("active", 0) == 0
            elif isinstance(policy, (Bulkhead, AdaptiveLimit)):
                assert (policy.in_flight, policy.waiting) == (0, 0)
            elif isinstance(policy, RateLimit):
                assert policy.waiting == 0

    def play(self, script: list[tuple[str, list[str], float]]) -> list[Any]:
        seen: list[Any] = []
        for how, words, pause in script:
            function = Script(words, self.clock)
            with self.surroundings(how, words[0]):
                seen.append((self.call(function, words[0]), function.calls, self.clock.now()))
                if how == "twice":
                    seen.append((self.call(function, words[0]), function.calls, self.clock.now()))
            self.clock.advance(pause)
        self.at_rest()
        seen.append(self.guard.snapshot())
        return seen


class AsyncTwin(SyncTwin):
    """The same for coroutines; "twice" is at the same time."""

    def __init__(self, names: list[str], *, fast: bool) -> None:
        super().__init__(names, fast=True)
        self.fast = fast
        self.layers = None if fast else self.guard._plan.layers("async", "be compared")

    async def acall(self, script: Script, what: str) -> Any:
        try:
            if self.layers is None:
                return await self.guard.acall(script.later, what)
            call = Call(self.guard, self.layers, script.later, (what,), {}, self.clock.now())
            return await run_async(call)
        except Exception as error:  # noqa: BLE001 - compared
            return tell(error)

    async def aplay(self, script: list[tuple[str, list[str], float]]) -> list[Any]:
        seen: list[Any] = []
        for how, words, pause in script:
            function = Script(words, self.clock)
            with self.surroundings(how, words[0]):
                calls = [self.acall(function, words[0]) for _ in range(1 + (how == "twice"))]
                seen.append((await asyncio.gather(*calls), function.calls, self.clock.now()))
            self.clock.advance(pause)
        self.at_rest()
        seen.append(self.guard.snapshot())
        return seen


def sensible(names: list[str]) -> bool:
    """Leave out what a guard refuses to be built of."""
    with contextlib.suppress(ValueError):
        build(names, VirtualClock())
        return True
    return False


def test_every_policy_with_generated_text_takes_part():
    """Text that is not driven with the same histories as its rule may come to differ from it."""
    folder = Path(policies.__file__).parent
    written = {
        path.relative_to(folder).parts[0].removesuffix(".py")
        for path in folder.rglob("*.py")
        if " Inline(" in path.read_text("utf-8")
    }
    assert written >= {"breaker", "bulkhead", "rate_limit", "timeout"}
    driven = {type(make()).__module__.split(".")[2] for make in MAKERS.values()}
    assert written - driven == set()


@given(names=stacks.filter(sensible), script=scripts)
@examples(150)
def test_sync_calls_go_the_same_way_with_and_without_the_fast_path(names, script):
    """Values, errors, notes, instants, counts and states are the same, whatever happens."""
    fast, slow = SyncTwin(names, fast=True), SyncTwin(names, fast=False)
    assert fast.play(script) == slow.play(script)


@given(names=stacks.filter(sensible), script=scripts)
@examples(120)
def test_async_calls_go_the_same_way_with_and_without_the_fast_path(names, script):
    """The same for coroutines, also when two of them meet."""
    results = []
    for quick in (True, False):
        twin = AsyncTwin(names, fast=quick)
        results.append(run_virtual(twin.aplay(script), clock=twin.clock))
    assert results[0] == results[1]


@given(names=stacks.filter(sensible))
@examples(40)
def test_an_expired_deadline_is_refused_the_same_way(names):
    """A call whose deadline has passed meets the same fate with and without the fast path."""
    results = []
    for quick in (True, False):
        twin = SyncTwin(names, fast=quick)
        with deadline(0.0, clock=twin.clock):
            twin.clock.advance(1.0)
            function = Script(["answer"], twin.clock)
            results.append((twin.call(function, "answer"), function.calls, twin.guard.snapshot()))
    assert results[0] == results[1]


FLOWS = [
    "fallback of refusals",
    "any fallback",
    "no fallback",
    "fallback",
    "total",
    "retry",
    "retry of refusals",
    "retry of some refusals",
    "retry of values",
    "deposit",
    "in flight",
    "timeout",
]
REFUSING = ["bulkhead", "limit", "partitions", "rate", "keyed rate", "two rates", "leaky", "queue"]

refused = st.tuples(
    st.lists(st.sampled_from(FLOWS), min_size=1, max_size=3, unique=True),
    st.lists(st.sampled_from(REFUSING), min_size=1, max_size=2, unique=True),
    st.randoms(use_true_random=False),
    st.lists(
        st.tuples(
            st.sampled_from(["taken", "drained", "late", "plain"]),
            st.just(["answer"]),
            st.sampled_from([0.0, 0.5]),
        ),
        min_size=1,
        max_size=4,
    ),
)
"""Flows around gates in any order, and calls that find all slots taken or all tokens gone."""


def refusals_agree(case: tuple[list[str], list[str], Random, Any]) -> None:
    flows, gates, chance, script = case
    names = flows + gates
    chance.shuffle(names)
    if not sensible(names):
        return
    fast, slow = SyncTwin(names, fast=True), SyncTwin(names, fast=False)
    assert fast.play(script) == slow.play(script)
    results = []
    for quick in (True, False):
        twin = AsyncTwin(names, fast=quick)
        results.append(run_virtual(twin.aplay(script), clock=twin.clock))
    assert results[0] == results[1]


@given(case=refused)
@examples(150)
def test_refusals_go_the_same_way_with_and_without_the_short_cut(case):
    """A refusal has the same effects around it on its short way out, in any order of layers."""
    refusals_agree(case)


def every_retry_ignores_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Retry, "_retries_refusals", property(lambda _self: False))


def fallbacks_are_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_FallbackFlow, "passes_refusals", True)


def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_path: Any, _tickets: Any, error: BaseException) -> bool:
        return isinstance(error, Rejected)

    monkeypatch.setattr(fastpath.FastPath, "_refused", refused)


@pytest.mark.parametrize(
    "take_away", [every_retry_ignores_refusals, fallbacks_are_passed, nothing_is_left]
)
def test_the_short_cut_needs_each_of_its_conditions(take_away, monkeypatch):
    """Where it passes a flow that has a say, or leaves nothing, the same property fails."""
    take_away(monkeypatch)
    assert falsified(refusals_agree, refused)


DRIVEN = {
    "cache": lambda: [Cache(5.0)],
    "thread": lambda: [Timeout(5.0, sync="thread")],
    "threads": lambda: [ThreadBulkhead(2)],
    "cache and retry": lambda: [Cache(5.0), Retry(on=KeyError, attempts=3, backoff=constant(0.1))],
    "all": lambda: [
        Retry(on=KeyError, attempts=3, backoff=constant(0.1)),
        Cache(5.0),
        Bulkhead(3),
        Timeout(5.0, sync="thread"),
        Breaker(consecutive=50),
    ],
}


@pytest.mark.parametrize("stack", DRIVEN)
def test_a_call_through_several_segments_is_counted_once(stack: str):
    """Each start of the function is one attempt, however many parts its stack is compiled to."""
    with virtual_time() as clock:
        guard = Guard(f"segments {stack}", *DRIVEN[stack]())
        assert guard.call(Script(["answer"], clock), "answer") == "answer"
        assert guard.snapshot()["succeeded"] == 1
        assert guard.snapshot()["failed"] == 0


@pytest.mark.parametrize("stack", DRIVEN)
def test_the_attempts_of_several_segments_are_told(stack: str):
    """A Result tells how often the function was started, whichever part of the stack did it."""
    with virtual_time() as clock:
        guard = Guard(f"told {stack}", *DRIVEN[stack]())
        script = Script(["missing"], clock)
        result = guard.attempt(script, "missing")
        assert isinstance(result.error, KeyError)
        assert result.attempts == script.calls
        assert guard.snapshot()["failed"] == script.calls


HOSTILE = "x'\"\\\n'''; raise SystemExit #{}%s"


def texts() -> list[str]:
    return [name for name in list(linecache.cache) if name.startswith("seawall fast path")]


def test_no_data_of_the_user_becomes_program_text(monkeypatch):
    """Names, keys, messages and defaults of the user appear nowhere in the generated text."""
    made = []
    source = fastpath.source
    monkeypatch.setattr(
        fastpath, "source", lambda *args, **kwargs: made.append(source(*args, **kwargs)) or made[-1]
    )
    with virtual_time():
        key = Breaker(key=lambda *_args, **_kwargs: HOSTILE)
        guard = Guard(HOSTILE, Fallback(lambda: HOSTILE), key)

        def function(parameter=HOSTILE, *, other=HOSTILE):
            return parameter + other

        function.__name__ = function.__qualname__ = HOSTILE
        assert guard(function)() == HOSTILE * 2
        assert guard(function)("a", other="b") == "ab"
        assert guard.call(function) == HOSTILE * 2
    assert made
    assert not any("SystemExit" in text or "'''" in text for text in made)


def odd_names(now, clock, value, error, failure, host, enter0, function, args, kwargs):  # noqa: PLR0917
    return now, clock, value, error, failure, host, enter0, function, args, kwargs


def underscored(now_, value_, t0_, function_, defaults_, OK_):  # noqa: N803
    return now_, value_, t0_, function_, defaults_, OK_


def every_kind(a, b=2, /, c=3, *rest, d, e=5, **more):
    return a, b, c, rest, d, e, more


def shadowing(BaseException, list=list):  # noqa: N803, A002 - on purpose
    return BaseException, list


class _Private:
    def method(self, __hidden, /, visible=1):
        return __hidden, visible


SIGNATURES: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (odd_names, tuple(range(10)), {}),
    (odd_names, (), {name: name for name in inspect.signature(odd_names).parameters}),
    (underscored, tuple(range(6)), {}),
    (every_kind, (1,), {"d": 4}),
    (every_kind, (1, 2, 3, 4, 5), {"d": 4, "e": 6, "f": 7, "a": 8}),
    (shadowing, (1,), {}),
    (_Private().method, (1,), {"visible": 2}),
    (_Private.method, (_Private(), 1), {}),
    (lambda *args, **kwargs: (args, kwargs), (1, 2), {"self": 3, "function": 4}),
    (lambda **kwargs: kwargs, (), {"args": 1, "kwargs": 2, "now": 3}),
]


@pytest.mark.parametrize("number", range(len(SIGNATURES)))
@pytest.mark.parametrize("failing", [False, True])
def test_every_signature_passes_through(number: int, failing: bool):  # noqa: FBT001
    """The guarded function takes what the function takes, and gets it, also in a second attempt."""
    function, args, kwargs = SIGNATURES[number]
    with virtual_time():
        guard = Guard(
            f"signature {number} {failing}",
            Retry(on=[OSError, lambda error, _value: bool(failing and error is None and tries)]),
            Breaker(key=lambda *_args, **_kwargs: 1),
        )
        tries = [1, 1]
        expected = function(*args, **kwargs)
        seen = guard(function)(*args, **kwargs)
        assert seen == expected
        assert guard.call(function, *args, **kwargs) == expected
        assert inspect.signature(guard(function)) == inspect.signature(function)


def test_a_parameter_that_hides_a_builtin_hides_it_from_nobody_else():
    """A parameter called BaseException does not change what the generated text catches."""
    with virtual_time():

        @Guard("hidden", Breaker(consecutive=1), Bulkhead(1))
        def fails(BaseException, None_=None):  # noqa: N803, A002 - on purpose
            raise KeyError(BaseException, None_)

        with pytest.raises(KeyError):
            fails(1)

        @Guard("hidden2", Breaker(consecutive=1), Bulkhead(1))
        def fails_too(BaseException):  # noqa: N803, A002 - on purpose
            raise KeyError(BaseException)

        with pytest.raises(KeyError):
            fails_too(1)


def test_wrong_arguments_are_refused_as_by_the_function_itself():
    """A call that the function could not take says so under the function's own name."""
    with virtual_time():
        guard = Guard("wrong arguments", Breaker(consecutive=1))

        @guard
        def named(first, *, second):
            return first, second

        for args, kwargs in [((), {}), ((1,), {}), ((1, 2), {"second": 3}), ((1,), {"third": 3})]:
            with pytest.raises(TypeError, match=r"named\(\)"):
                named(*args, **kwargs)


def broken(*_args: object) -> None:
    raise ValueError("broken")


def test_tracebacks_show_the_lines_of_the_fast_path():
    """Who reads a traceback sees program text where the generated function stands."""
    with virtual_time():
        guard = Guard("shown", Bulkhead(1), Breaker())
        try:
            guard.call(broken)
        except ValueError:
            shown = traceback.format_exc()
    assert "seawall fast path" in shown
    assert "function_(*args, **kwargs)" in shown


def test_dropped_guards_leave_no_text_behind():
    """The text kept for tracebacks goes with its guard, or is shared: the map is bounded."""
    with virtual_time():

        def use() -> None:
            guard = Guard("dropped", Bulkhead(1), Breaker())
            guard.close()
            guard.call(lambda: None)

        before = texts()
        for _ in range(50):
            use()
        assert texts() == before


class Witness:
    """Something in the frame of a function that raises."""


FAILING: dict[str, Callable[[], list[Any]]] = {
    "breaker": lambda: [Breaker()],
    "keyed breaker": lambda: [Breaker(key=lambda *_: 1)],
    "bulkhead": lambda: [Bulkhead(1)],
    "retry": lambda: [Retry(on=ValueError, attempts=3, backoff=constant(0.1))],
    "budget": lambda: [Retry(on=ValueError, budget=RetryBudget(InFlightRatio()))],
    "fallback": lambda: [Fallback(no_level)],
    "fallback answered": lambda: [Fallback(no_level, poor)],
    "cooperative": lambda: [Timeout(5.0, sync="cooperative")],
    "thread": lambda: [Timeout(5.0, sync="thread")],
    "threads": lambda: [ThreadBulkhead(2)],
    "cache": lambda: [Cache(5.0)],
    "rates": lambda: [RateLimit("9/s"), RateLimit("9/s", key=lambda *_: "key", cost=2)],
    "settled": lambda: [RateLimit("9/s", cost=3, settle=len)],
    "shed": lambda: [Shed(by_latency(1.0), by_criticality(), load=lambda: 0.1)],
    "throttle": lambda: [Throttle(on=[ValueError, lambda _error, _value: False])],
    "limit": lambda: [AdaptiveLimit(), AdaptiveLimit(is_drop=lambda *_: True)],
    "partitions": lambda: [AdaptiveLimit(partitions={"live": 0.5})],
    "chaos": lambda: [Chaos(1.0, latency=0.1, enabled=True)],
    "all": lambda: [
        Fallback(no_level),
        Cache(5.0),
        Timeout(50.0, sync="cooperative"),
        Retry(on=ValueError, attempts=3, backoff=constant(0.1)),
        Breaker(),
        Bulkhead(2),
        Timeout(5.0, sync="cooperative"),
    ],
}


@contextlib.contextmanager
def no_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("stack", FAILING)
def test_a_failed_sync_call_leaves_no_cycle(stack: str):
    """What the error held is gone with the error, without the garbage collector."""
    seen: list[weakref.ref[Witness]] = []

    def fails() -> None:
        witness = Witness()
        seen.append(weakref.ref(witness))
        raise ValueError(len(seen))

    with virtual_time():
        guard = Guard(f"cycle {stack}", *FAILING[stack]())
        with no_collector():
            with contextlib.suppress(ValueError):
                guard.call(fails)
            # A worker thread lets go of its job only a moment after its caller has the result.
            if stack in ("thread", "threads"):
                guard.call(lambda: None)
            alive = [ref() is not None for ref in seen]
    assert alive == [False] * len(seen)


@pytest.mark.parametrize("stack", [name for name in FAILING if not name.startswith("thread")])
def test_a_failed_async_call_leaves_no_cycle(stack: str):
    """The same for coroutines."""
    seen: list[weakref.ref[Witness]] = []

    async def fails() -> None:
        witness = Witness()
        seen.append(weakref.ref(witness))
        raise ValueError(len(seen))

    async def main() -> list[bool]:
        guard = Guard(f"async cycle {stack}", *FAILING[stack]())
        with no_collector():
            with contextlib.suppress(ValueError):
                await guard.acall(fails)
            return [ref() is not None for ref in seen]

    alive = run_virtual(main())
    assert alive == [False] * len(seen)


def test_a_refused_call_leaves_no_cycle():
    """A refusal is gone with its traceback too: it is what an overloaded service makes most of."""
    with virtual_time():
        guard = Guard("refused", Retry(on=OSError), Bulkhead(1))

        def refused() -> weakref.ref[Any]:
            witness = Witness()
            with contextlib.suppress(Exception):
                guard.call(broken, witness)
            return weakref.ref(witness)

        taken = guard.policies[1].slots.take()
        with no_collector():
            assert refused()() is None
        assert taken


REFUSALS: dict[str, Callable[[], Any]] = {
    "rate": lambda: RateLimit("1/day"),
    "keyed rate": lambda: RateLimit("1/day", key=lambda *_: "key"),
    "leaky": lambda: RateLimit("1/day", algorithm="leaky_bucket", max_wait=1.0),
    "shed": lambda: Shed(by_criticality(), load=lambda: 2.0),
    "limit": lambda: AdaptiveLimit(aimd(slow_after=1.0, initial=1)),
    "partitions": lambda: AdaptiveLimit(aimd(slow_after=1.0, initial=1), partitions={"live": 0.5}),
    "queue": lambda: Bulkhead(1, max_wait=1.0, shed=codel()),
}


@pytest.mark.parametrize("gate", REFUSALS)
@pytest.mark.parametrize("outside", ["timeout", "retry", "retry of refusals", "fallback"])
def test_no_refusal_leaves_a_cycle(gate: str, outside: str):
    """The same for each gate against scarcity, whichever way the refusal takes."""

    def refused(guard: Guard) -> weakref.ref[Any]:
        witness = Witness()
        with pytest.raises(Rejected):
            guard.call(lambda _: None, witness)
        return weakref.ref(witness)

    with virtual_time():
        policy = REFUSALS[gate]()
        guard = Guard("refused", MAKERS[outside](), policy)
        if isinstance(policy, RateLimit):
            policy.reserve()
        elif not isinstance(policy, Shed):
            taken = policy.slots.take()
            assert taken
        refused(guard)
        with no_collector():
            assert refused(guard)() is None


def test_a_timed_out_call_leaves_no_cycle():
    """Nor does a call that our timeout stopped."""

    async def main() -> bool:
        guard = Guard("timed out", Timeout(1.0), Bulkhead(1))
        seen: list[weakref.ref[Witness]] = []

        async def hangs() -> None:
            witness = Witness()
            seen.append(weakref.ref(witness))
            await asyncio.get_running_loop().create_future()

        async def caller() -> None:
            with contextlib.suppress(TimeoutError):
                await guard.acall(hangs)

        with no_collector():
            # In a task of its own: asyncio itself holds the cancellation until its step ends.
            await asyncio.create_task(caller())
            return seen[0]() is None

    assert run_virtual(main())
