"""Guard(max_wait=...): one bound for what a call waits at all of its gates."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    AdaptiveLimit,
    Breaker,
    Bulkhead,
    BulkheadFull,
    Cache,
    Fallback,
    Guard,
    RateLimit,
    RateLimited,
    Rejected,
    Retry,
    static,
)
from seawall.clock import VirtualClock
from seawall.errors import StoreUnavailable
from seawall.limits import aimd
from seawall.policies import slots
from seawall.policies.rate_limit import gate as rate_gate
from seawall.testing import retries, run_virtual, virtual_time
from tests.support import falsified, new_guard, quarters


async def _done(*_: object) -> str:
    return "done"


def _slots(kind: str, max_wait: float) -> Any:
    if kind == "bulkhead":
        return Bulkhead(1, max_wait=max_wait)
    return AdaptiveLimit(aimd(initial=1, minimum=1, maximum=1, slow_after=60.0), max_wait=max_wait)


@pytest.mark.parametrize("kind", ["bulkhead", "adaptive limit"])
@pytest.mark.parametrize("way", ["sync", "async"])
def test_waits_at_several_gates_are_bounded_together(kind: str, way: str) -> None:
    """The second gate has what the first left; its refusal says whose bound it was."""
    clock = VirtualClock()
    slots = _slots(kind, 2.0)
    guard = new_guard(RateLimit("1/s", burst=1, max_wait=1.0), slots, max_wait=1.25, clock=clock)
    other = new_guard(slots, clock=clock)

    async def main() -> None:
        await guard.acall(_done)
        async with other.hold():
            await guard.acall(_done)

    def plainly() -> None:
        guard.call(int)
        with other.hold():
            guard.call(int)

    with pytest.raises(Rejected, match=r"the guard's max_wait of 1\.25 s is spent"):
        plainly() if way == "sync" else run_virtual(main(), clock=clock)
    assert clock.now() == 1.25
    assert guard.call(int) == 0


def test_a_turn_that_comes_after_the_bound_is_refused_at_once() -> None:
    """As one that comes after the policy's own."""
    with virtual_time() as clock:
        guard = new_guard(RateLimit("1/s", burst=1, max_wait=5.0), max_wait=0.5)
        guard.call(int)
        with pytest.raises(RateLimited, match=r"the guard's max_wait is 0\.5 s in all"):
            guard.call(int)
        assert clock.now() == 0.0
        clock.advance(0.5)
        assert guard.call(int) == 0


def test_a_gate_waits_no_longer_than_its_own_max_wait() -> None:
    """So a large bound of the guard's changes nothing, and one that does not wait waits not."""
    with virtual_time() as clock:
        for own, spent in ((0.25, "waited 0.25 s"), (0.0, "no free slot of 1")):
            slots = Bulkhead(1, max_wait=own)
            guard = new_guard(slots, max_wait=60.0)
            began = clock.now()
            with new_guard(slots).hold(), pytest.raises(BulkheadFull, match=spent):
                guard.call(int)
            assert clock.now() - began == own


def test_the_waits_of_all_attempts_count() -> None:
    """A call that is tried again has waited before."""
    with virtual_time() as clock:
        slots = Bulkhead(1, max_wait=0.5)
        retry = Retry(on=BulkheadFull, attempts=5, backoff=[0.0])
        guard = new_guard(Fallback(static("less")), retry, slots, max_wait=1.25)
        with new_guard(slots).hold():
            assert guard.call(int) == "less"
        assert clock.now() == 1.25


def test_a_call_of_the_same_guard_inside_the_function_is_another_call() -> None:
    """It may wait as long as any."""
    with virtual_time() as clock:
        guard = new_guard(RateLimit("1/s", burst=1, max_wait=1.0), max_wait=1.0)
        guard.call(int)
        assert guard.call(lambda: guard.call(int)) == 0
        assert clock.now() == 2.0


def test_a_substitute_that_calls_the_same_guard_is_another_call() -> None:
    """What the refused call waited is not held against it."""
    with virtual_time() as clock:
        slots = Bulkhead(1, max_wait=1.0)
        guard: Guard
        holds = ExitStack()

        def again() -> str:
            holds.close()
            clock.advance(1.0)
            return str(guard.call(int))

        limit = RateLimit("1/s", burst=1, max_wait=1.0)
        guard = new_guard(Fallback(again, on=BulkheadFull), limit, slots, max_wait=1.0)
        holds.enter_context(new_guard(slots).hold())
        assert guard.call(int) == "0"


def test_what_stands_inside_a_cache_belongs_to_the_same_call() -> None:
    """A driver carries out its inside as a call of its own; the waits are counted together."""
    clock = VirtualClock()
    slots = Bulkhead(1, max_wait=2.0)
    limit = RateLimit("1/s", burst=1, max_wait=1.0)
    guard = new_guard(limit, Cache(ttl=60.0), slots, max_wait=1.25, clock=clock)

    async def main() -> None:
        await guard.acall(_done, 1)
        async with new_guard(slots, clock=clock).hold():
            with pytest.raises(BulkheadFull, match="the guard's max_wait"):
                await guard.acall(_done, 2)

    run_virtual(main(), clock=clock)
    assert clock.now() == 1.25


class _Silent:
    """A waiter for the answer of a store that never comes."""

    def __init__(self, until: float) -> None:
        self.until: float | None = until

    def publish(self, wake: Callable[[], bool]) -> None:
        pass

    def claim(self) -> Any:
        raise StoreUnavailable("no answer")

    def abandon(self) -> None:
        pass


@pytest.mark.parametrize("way", ["sync", "async"])
def test_questions_to_a_store_are_bounded_too(way: str) -> None:
    """One that is not answered by then is not answered: `on_store_failure` decides."""
    clock = VirtualClock()
    asked = []

    class Share:
        spend_path = None
        sharing, mode, away, times = "exact", "shared", False, 1
        excess: tuple[int, ...] = ()

        def ask(self, _kind: str, _charges: object, clock: VirtualClock) -> _Silent:
            asked.append(clock.now())
            return _Silent(clock.now() + 30.0)

        def __getattr__(self, _name: str) -> Any:
            return lambda *_, **__: None

    class Store:
        name = "store"

        def _limits(self, *_: object, **__: object) -> Share:
            return Share()

    limit = RateLimit("1/s", shared=Store(), name="x", on_store_failure="open")  # type: ignore[arg-type]
    guard = new_guard(limit, max_wait=0.75, clock=clock)
    if way == "sync":
        assert guard.call(int) == 0
    else:
        assert run_virtual(guard.acall(_done), clock=clock) == "done"
    assert asked == [0.0]
    assert clock.now() == 0.75


def test_the_standard_stack_waits_for_slots_so_long_in_all() -> None:
    """`max_wait` is the guard's: all attempts together, and part of the total timeout once."""
    with virtual_time() as clock:
        guard = Guard.standard(
            "waits", on=BulkheadFull, timeout=2.0, limit=1, max_wait=0.5, sync="cooperative",
            breaker=Breaker(min_calls=100), backoff=[0.0],
        )  # fmt: skip
        assert guard.max_wait == 0.5
        assert repr(guard.policies[0]) == "Timeout(6.5, sync='cooperative')"
        slots = next(policy for policy in guard.policies if policy.kind == "bulkhead")
        with new_guard(slots).hold(), pytest.raises(BulkheadFull):
            guard.call(int)
        assert clock.now() == 0.5
        guard.close()


# The rule, for any stack


Stack = tuple[list[tuple[str, float]], float, int]
STACKS: st.SearchStrategy[Stack] = st.tuples(
    st.lists(
        st.tuples(st.sampled_from(["bulkhead", "adaptive limit", "rate"]), quarters(8)),
        min_size=1,
        max_size=4,
    ),
    quarters(8),
    st.integers(1, 3),
)


def _check_sum(case: Stack) -> None:
    """Find all slots taken and all tokens spent; a call waits no longer than the guard says."""
    gates, most, attempts = case
    with virtual_time() as clock, retries("instant"), ExitStack() as held:
        policies = [
            RateLimit("1/s", burst=1, max_wait=wait) if kind == "rate" else _slots(kind, wait)
            for kind, wait in gates
        ]
        retry = Retry(on=Rejected, attempts=attempts, backoff=[0.0])
        guard = new_guard(retry, *policies, max_wait=most)
        for policy in policies:
            if policy.kind == "rate_limit":
                new_guard(policy).call(int)
            else:
                held.enter_context(new_guard(policy).hold())
        try:
            guard.call(int)
        except Rejected:
            pass
        assert clock.now() <= most


@given(STACKS)
def test_no_call_waits_longer_than_its_guard_says(case: Stack) -> None:
    """Whatever its gates and attempts are."""
    _check_sum(case)


@pytest.mark.parametrize("module", [slots, rate_gate])
def test_without_a_look_at_what_is_left_waits_add_up(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let one kind of gate look at its own bound only, and the property is falsified."""
    monkeypatch.setattr(module, "patience", lambda _host: float("inf"))
    assert falsified(_check_sum, STACKS)
