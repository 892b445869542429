"""The fake store behaves as a real one does for a service of one pod, without a server."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    Breaker,
    Bulkhead,
    CircuitOpen,
    RateLimit,
    RateLimited,
    snapshot,
    subscribe,
)
from seawall.clock import SystemClock, VirtualClock
from seawall.errors import StoreUnavailable
from seawall.events import StoreModeChanged
from seawall.limits import Limit
from seawall.testing import (
    FakeStore,
    ScriptedService,
    answer,
    empty_registry,
    fail,
    run_virtual,
    virtual_time,
)
from seawall.web import RequestLimit, RequestLimits
from seawall.web.fastapi import protect
from tests.support import new_guard

ALGORITHMS = ["token_bucket", "leaky_bucket", "fixed_window", "sliding_counter", "sliding_log"]
FAILING = ["local", "open", "closed"]


@pytest.fixture
def modes() -> Iterator[list[tuple[str, str]]]:
    """Return a list that grows with each change of what decides, for policies of a fake store."""
    seen: list[tuple[str, str]] = []

    def note(event: StoreModeChanged) -> None:
        if event.store == "fake":
            seen.append((event.before, event.after))

    stop = subscribe(note, StoreModeChanged)
    yield seen
    stop()


# Agreement with limits in memory, which a service of one pod has


def key_of(user: str, _cost: int) -> str:
    return user


def cost_of(_user: str, cost: int) -> int:
    return cost


USERS = st.sampled_from(["ann", "bob"])
STEPS = st.one_of(
    st.tuples(st.just("call"), USERS, st.integers(0, 4)),
    st.tuples(st.just("reserve"), USERS, st.integers(0, 4)),
    st.tuples(st.just("settle"), st.integers(0, 8)),
    st.tuples(st.just("cancel")),
    st.tuples(st.just("take_up_to"), USERS, st.integers(0, 6)),
    st.tuples(st.just("lower"), USERS, st.integers(0, 3), st.integers(1, 20)),
    st.tuples(st.just("reset"), USERS),
    st.tuples(st.just("update"), st.sampled_from(["3/10s", "6/10s", "6/5s"])),
    st.tuples(st.just("advance"), st.integers(1, 12)),
)


class Subject:
    """A policy that follows a history, and says what became of each step."""

    def __init__(self, clock: VirtualClock, algorithm: Any, **shared: Any) -> None:
        self.clock = clock
        self.limits = self._limits(algorithm, "6/10s")
        self.algorithm = algorithm
        self.policy = RateLimit(*self.limits, **shared)
        self.guard = new_guard(self.policy, clock=clock)
        self.held: list[Any] = []

    def _limits(self, algorithm: Any, rate: str) -> list[Limit]:
        return [
            Limit(rate, algorithm=algorithm, key=key_of, cost=cost_of, name="own"),
            Limit("9/10s", algorithm=algorithm, name="all"),
        ]

    def step(self, kind: str, *given: Any) -> Any:
        if self.policy._sharing is not None:
            self.policy._sharing.exhausted.clear()  # let the store decide each time
        try:
            return getattr(self, kind)(*given)
        except RateLimited as error:
            return error.limit, error.retry_after

    def call(self, user: str, cost: int) -> Any:
        return self.guard.call(lambda user, cost: (user, cost), user, cost)

    def reserve(self, user: str, cost: int) -> None:
        self.held.append(self.policy.reserve(user, cost))

    def settle(self, used: int) -> None:
        if self.held:
            self.held.pop(0).settle(used)

    def cancel(self) -> None:
        if self.held:
            self.held.pop(0).cancel()

    def take_up_to(self, user: str, most: int) -> int:
        return self.policy.take_up_to(most, user, 1)

    def lower(self, user: str, remaining: int, seconds: int) -> None:
        self.policy.lower(remaining, float(seconds), user, 1, limit="own")

    def reset(self, user: str) -> None:
        self.policy.reset(user, 1)

    def update(self, rate: str) -> None:
        self.policy.update(limits=self._limits(self.algorithm, rate))

    def left(self) -> list[Any]:
        return [self.policy.peek(user, 1) for user in ("ann", "bob")]


HISTORIES: dict[str, list[Any]] = {
    "an estimate that is partly paid": [("reserve", "ann", 4), ("advance", 2), ("settle", 1)],
    "given back after a reset": [
        *(("reserve", "ann", 4), ("reset", "ann"), ("call", "ann", 3), ("settle", 0)),
    ],
    "given back by other numbers": [("reserve", "ann", 4), ("update", "6/5s"), ("settle", 0)],
    "given back under a vendor's word": [
        *(("lower", "ann", 3, 20), ("advance", 1), ("reserve", "ann", 2), ("settle", 0)),
    ],
}
"""What chance finds too seldom."""


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("history", HISTORIES)
def test_what_is_given_back_is_the_same(algorithm: Any, history: str) -> None:
    """As in memory: after time, a reset, other numbers, and under a vendor's word."""
    _agree(algorithm, HISTORIES[history])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(steps=st.lists(STEPS, max_size=30))
def test_a_fake_store_decides_as_limits_in_memory_do(algorithm: Any, steps: list[Any]) -> None:
    """The same history has the same verdicts, waits and rests, whatever happens in it."""
    _agree(algorithm, steps)


def _agree(algorithm: Any, steps: list[Any]) -> None:
    clock = VirtualClock(1000.0)
    with empty_registry(), virtual_time(clock):
        alone = Subject(clock, algorithm)
        shared = Subject(clock, algorithm, shared=FakeStore(), name="vendor")
        for kind, *rest in steps:
            clock.advance(0.001)  # what is done at one instant has no order in memory
            if kind == "advance":
                clock.advance(float(rest[0]))
            else:
                assert shared.step(kind, *rest) == alone.step(kind, *rest)
            assert shared.left() == alone.left()


# Rate limits


def test_limits_of_one_name_count_together() -> None:
    """Whichever policy has them; those of another name, or in another store, count apart."""
    with virtual_time():
        store, other = FakeStore(), FakeStore()
        first, second = (RateLimit("1/min", shared=store, name="vendor") for _ in range(2))
        first.reserve()
        with pytest.raises(RateLimited):
            second.reserve()
        RateLimit("1/min", shared=store, name="bank").reserve()
        RateLimit("1/min", shared=other, name="vendor").reserve()


@pytest.mark.parametrize("sharing", ["exact", "leased", "split"])
@pytest.mark.parametrize(
    ("failing", "admitted"),
    [("local", [True, False]), ("open", [True, True]), ("closed", [False] * 2)],
)
def test_a_limit_does_what_on_store_failure_says(
    failing: Any, admitted: list[bool], sharing: Any, modes: list[Any]
) -> None:
    """While the store is away; then it counts on from what it knew."""
    with virtual_time() as clock:
        store = FakeStore()
        policy = RateLimit(
            "1/min", shared=store, name="vendor", sharing=sharing, on_store_failure=failing
        )
        guard = new_guard(policy)
        assert [guard.attempt(int).ok for _ in range(2)] == [True, False]
        store.fail()
        store.fail()
        assert [guard.attempt(int).ok for _ in range(2)] == admitted
        assert guard.snapshot()["policies"][0]["shared"]["mode"] == failing
        store.recover()
        assert not guard.attempt(int).ok
        clock.advance(60.0)
        assert guard.attempt(int).ok
        assert modes == [("shared", failing), (failing, "shared")]


def test_a_refusal_without_the_store_says_so() -> None:
    """As with a real store: the reason is the store, not the limit."""
    store = FakeStore(name="orders")
    guard = new_guard(RateLimit("1/s", shared=store, name="vendor", on_store_failure="closed"))
    store.fail()
    with pytest.raises(RateLimited, match="the store 'orders' is away") as raised:
        guard.call(int)
    assert raised.value.reason == StoreUnavailable.reason


def test_async_calls_wait_for_their_turn() -> None:
    """In virtual time, by the clock of the event loop."""

    async def main() -> float:
        policy = RateLimit("1/min", burst=1, max_wait=90.0, shared=FakeStore(), name="vendor")
        guard = new_guard(policy)
        service = ScriptedService(answer(None))
        await guard.acall(service.acall)
        return (await guard.aattempt(service.acall)).elapsed

    assert run_virtual(main()) == 60.0


def test_mistakes_are_found_as_with_a_real_store() -> None:
    """A sync method in an event loop, and a key that processes cannot agree on."""

    async def main() -> None:
        policy = RateLimit("1/s", shared=FakeStore(), name="vendor")
        with pytest.raises(RuntimeError, match="areserve"):
            policy.reserve()
        await policy.areserve()

    run_virtual(main())
    keyed = RateLimit("1/s", key=lambda key: key, shared=FakeStore(), name="vendor")
    with pytest.raises(TypeError, match="cannot be shared between processes"):
        keyed.reserve(object())
    breaker = Breaker(key=lambda key: key, shared=FakeStore(), name="vendor")
    with pytest.raises(TypeError, match="cannot be shared between processes"):
        new_guard(breaker).call(lambda _key: None, object())


def test_what_needs_the_store_raises_while_it_is_away() -> None:
    """reset() and alower() are for all pods, so they cannot be done."""

    async def main() -> None:
        store = FakeStore()
        policy = RateLimit("5/s", shared=store, name="vendor")
        store.fail()
        with pytest.raises(StoreUnavailable):
            await policy.alower(1, 10.0)
        with pytest.raises(StoreUnavailable):
            await policy.areset()
        store.recover()
        await policy.alower(1, 10.0)
        assert (await policy.apeek()).left == 1
        await policy.areset()
        assert (await policy.apeek()).left == 5

    run_virtual(main())


def test_a_call_refused_further_in_gives_back_what_it_took() -> None:
    """It was never sent, so the limit does not count it."""
    with virtual_time():
        slots = Bulkhead(1)
        policy = RateLimit("1/min", shared=FakeStore(), name="vendor")
        guard = new_guard(policy, slots)
        with new_guard(slots).hold():
            assert guard.attempt(int).reason == "bulkhead_full"
        assert guard.attempt(int).ok


def test_a_caller_that_gives_up_gives_back_what_it_was_granted() -> None:
    """Its question was answered, and nobody claims the answer."""
    policy = RateLimit("1/day", shared=FakeStore(), name="vendor")
    assert policy._sharing is not None
    question = policy._sharing.share.ask("sync", policy._charges((), {}), SystemClock())
    question.publish(lambda: True)
    assert policy.peek().left == 0
    question.abandon()
    assert policy.peek().left == 1


def test_what_cannot_be_divided_is_refused() -> None:
    """As by a real store."""
    for sharing in ("leased", "split"):
        with pytest.raises(ValueError, match="a leaky bucket"):
            RateLimit(
                "1/s",
                algorithm="leaky_bucket",
                shared=FakeStore(),
                name="vendor",
                sharing=sharing,  # type: ignore[arg-type]
            )


def test_request_limits_count_in_a_fake_store() -> None:
    """And tell callers what is left."""

    async def main() -> list[Any]:
        app = FastAPI()
        limits = RequestLimits(
            RequestLimit("2/min", by="address", name="all"), shared=FakeStore(), name="orders"
        )
        protect(app, limits=limits, health=None)

        @app.get("/")
        async def hello() -> str:
            return "hello"

        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://orders") as client:
            answers = [await client.get("/") for _ in range(3)]
        return [(one.status_code, one.headers["RateLimit"]) for one in answers]

    told = [(200, '"all";r=1;t=30'), (200, '"all";r=0;t=30'), (429, '"all";r=0;t=30')]
    assert run_virtual(main()) == told


# Breakers


def test_a_breaker_opens_and_closes_by_its_own_calls() -> None:
    """As in a service of one pod, by streak and by ratio."""
    for rules in ({"consecutive": 2}, {"failure_ratio": 0.5, "min_calls": 2}):
        with virtual_time() as clock:
            breaker = Breaker(**rules, break_for=5.0, shared=FakeStore(), name="vendor")
            guard = new_guard(breaker)
            service = ScriptedService(fail(ConnectionError, times=2), answer("hello"))
            reasons = [guard.attempt(service.call).reason for _ in range(3)]
            assert reasons == ["ConnectionError", "ConnectionError", "circuit_open"]
            clock.advance(5.0)
            assert guard.call(service.call) == "hello"
            assert breaker.state == "closed"


@pytest.mark.parametrize("slow_after", [None, 1.0])
@pytest.mark.parametrize("failing", FAILING)
def test_a_breaker_does_what_on_store_failure_says(
    failing: Any, slow_after: float | None, modes: list[Any]
) -> None:
    """Open or not: by its own state, let all through, or refuse all; and back."""
    with virtual_time():
        store = FakeStore()
        slow = {} if slow_after is None else {"slow_after": slow_after, "slow_ratio": 0.5}
        breaker = Breaker(
            consecutive=1, **slow, shared=store, name="vendor", on_store_failure=failing
        )
        guard = new_guard(breaker)
        guard.call(int)
        store.fail()
        if failing == "closed":
            with pytest.raises(CircuitOpen, match="the store 'fake' does not answer"):
                guard.call(int)
        else:
            guard.call(int)
        guard.attempt(ScriptedService(fail(ConnectionError)).call)
        assert breaker.state == ("open" if failing == "local" else "closed")
        store.recover()
        breaker.trip()
        store.fail()
        assert guard.attempt(int).ok == (failing == "open")
        store.recover()
        assert guard.attempt(int).reason == "circuit_open"
        assert modes == [("shared", failing), (failing, "shared")] * 2


def test_one_vote_is_no_quorum_of_two() -> None:
    """A pod alone does not open such a breaker, unless the store is away."""
    store = FakeStore()
    breaker = Breaker(consecutive=1, quorum=2, shared=store, name="vendor")
    guard = new_guard(breaker)
    service = ScriptedService(fail(ConnectionError))
    guard.attempt(service.call)
    assert breaker.state == "closed"
    store.fail()
    guard.attempt(service.call)
    assert breaker.state == "open"


def test_an_isolated_breaker_stays_so_without_the_store() -> None:
    """Whatever on_store_failure says: somebody decided it by hand."""
    store = FakeStore()
    breaker = Breaker(shared=store, name="vendor", on_store_failure="open")
    breaker.isolate()
    store.fail()
    assert new_guard(breaker).attempt(int).reason == "circuit_open"


def test_each_key_of_a_breaker_is_switched() -> None:
    """Also those that were made before the store failed."""
    store = FakeStore()
    breaker = Breaker(key=str, shared=store, name="vendor", on_store_failure="closed")
    guard = new_guard(breaker)
    guard.call(str, "before")
    store.fail()
    assert [guard.attempt(str, key).ok for key in ("before", "after")] == [False, False]
    store.recover()
    assert [guard.attempt(str, key).ok for key in ("before", "after")] == [True, True]


def test_a_breaker_can_be_updated() -> None:
    """Other settings hold for the keys that are there, and for new ones."""
    breaker = Breaker(consecutive=5, key=lambda key: key, shared=FakeStore(), name="vendor")
    guard = new_guard(breaker)
    guard.call(lambda _key: None, "before")
    breaker.update(consecutive=1)
    for key in ("before", "after"):
        guard.attempt(ScriptedService(fail(ConnectionError)).call, key)
    assert {model.state.value for model in breaker.models().values()} == {"open"}


# The store itself


def test_a_closed_store_does_not_come_back() -> None:
    """Its policies go on as if it were down."""

    async def main() -> None:
        async with FakeStore() as store:
            policy = RateLimit("1/s", shared=store, name="vendor", on_store_failure="closed")
        with pytest.raises(RateLimited):
            await policy.areserve()
        with pytest.raises(RuntimeError, match="make another FakeStore"):
            store.recover()
        assert repr(store) == "<FakeStore 'fake': closed>"

    run_virtual(main())
    with FakeStore() as store:
        assert store.up
    assert not store.up


def test_the_store_is_seen() -> None:
    """Among the stores of the process, up or down; it is not for pickling."""
    store = FakeStore(name="the one that is seen")
    store.fail()
    (shown,) = (one for one in snapshot()["store"] if one["name"] == store.name)
    assert shown["up"] is False
    with pytest.raises(TypeError, match="not for pickling"):
        pickle.dumps(store)


def test_nothing_runs_in_the_background() -> None:
    """No thread is started, whatever is shared."""
    before = set(threading.enumerate())
    store = FakeStore()
    guard = new_guard(
        Breaker(shared=store, name="vendor"), RateLimit("9/s", shared=store, name="vendor")
    )
    guard.call(int)
    store.fail()
    guard.call(int)
    assert set(threading.enumerate()) <= before


def test_threads_take_no_more_than_the_limit() -> None:
    """The decisions of a fake store are one after another."""
    policy = RateLimit("1000/day", shared=FakeStore(clock=VirtualClock()), name="vendor")
    taken: list[int] = []
    together = threading.Barrier(4)

    def work() -> None:
        together.wait()
        taken.extend(policy.take_up_to(1) for _ in range(500))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert sum(taken) == 1000
