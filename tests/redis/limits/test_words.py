"""What vendors say is left, in one process: `RateLimit.lower` without a store."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Breaker, CircuitOpen, RateLimit, RateLimited
from seawall.clock import VirtualClock
from seawall.limits import Limit
from seawall.policies.rate_limit import meters as meter_module
from tests.support import new_guard


def admitted(guard: Any, times: int, *args: Any) -> int:
    """Return how many of so many calls are admitted."""
    return sum(guard.attempt(lambda *_: "ok", *args).ok for _ in range(times))


@pytest.mark.parametrize("options", [{}, {"key": lambda *_: "k"}, {"algorithm": "sliding_log"}])
def test_a_word_lowers_the_budget_until_its_time(options: dict[str, Any]) -> None:
    """On the quick path, the keyed and the locked one: no more than that, and then as before."""
    clock = VirtualClock(100.0)
    limit = RateLimit("100/s", **options)
    guard = new_guard(limit, clock=clock)
    assert admitted(guard, 10) == 10
    limit.lower(3, 2.5)
    assert limit.peek().left == 3
    clock.advance(1.0)
    assert admitted(guard, 10) == 3
    with pytest.raises(RateLimited) as refusal:
        guard.call(lambda: "ok")
    assert refusal.value.retry_after == 1.5
    assert limit.peek().reset_after == 1.5
    clock.advance(1.5)
    assert admitted(guard, 100) == 100


def test_a_word_never_raises_the_budget() -> None:
    """More than the limit has is no news, and a longer word does not lift a shorter one."""
    clock = VirtualClock(100.0)
    limit = RateLimit("5/s")
    guard = new_guard(limit, clock=clock)
    limit.lower(2, 1.0)
    limit.lower(50, 10.0)
    assert admitted(guard, 10) == 2
    clock.advance(1.0)
    assert admitted(guard, 10) == 5


def test_a_word_is_for_one_key_of_one_limit() -> None:
    """Others go on as before."""
    limit = RateLimit(Limit("10/s", key=lambda user: user, name="user"), Limit("100/s", name="all"))
    guard = new_guard(limit, clock=VirtualClock(1.0))
    limit.lower(1, 1.0, "ann", limit="user")
    assert admitted(guard, 5, "ann") == 1
    assert admitted(guard, 5, "bob") == 5


def test_what_is_refused_further_in_is_left_again() -> None:
    """A call that was not sent has not been counted by the vendor."""
    clock = VirtualClock(1.0)
    limit, shut = RateLimit("10/s"), Breaker(consecutive=1)
    guard = new_guard(limit, shut, clock=clock)
    shut.isolate()
    limit.lower(2, 5.0)
    clock.advance(0.1)
    for _ in range(5):
        with pytest.raises(CircuitOpen):
            guard.call(lambda: "ok")
    assert limit.peek().left == 2


def test_who_waits_waits_for_the_end_of_a_word() -> None:
    """With max_wait, a call goes when the vendor's window is over."""
    clock = VirtualClock(1.0)
    limit = RateLimit("10/s", max_wait=3.0)
    guard = new_guard(limit, clock=clock)
    limit.lower(0, 2.0)
    assert guard.call(lambda: "ok") == "ok"
    assert clock.now() == 3.0


@pytest.mark.parametrize(
    ("rate", "max_debt", "most"),
    [("10/s", None, 60.0), ("10/h", None, 3600.0), ("10/h", 5.0, 5.0), ("10/s", 900.0, 900.0)],
)
def test_a_word_holds_for_a_period_or_a_minute_at_most(
    rate: str, max_debt: float | None, most: float
) -> None:
    """A vendor that says nonsense does not stop us for ever."""
    clock = VirtualClock(1.0)
    limit = RateLimit(rate, max_debt=max_debt)
    guard = new_guard(limit, clock=clock)
    limit.lower(0, 1e300)
    assert limit.peek().retry_after == most
    clock.advance(most)
    assert admitted(guard, 1) == 1


def test_the_async_twin_needs_no_store() -> None:
    """In one process `alower`, `areserve` and `apeek` do what their twins do."""

    async def main() -> None:
        limit = RateLimit("10/s", burst=3)
        await limit.alower(1, 30.0)
        assert (await limit.apeek()).left == 1
        taken = await limit.areserve()
        with pytest.raises(RateLimited):
            await limit.areserve()
        taken.cancel()

    asyncio.run(main())


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(1, 8)),
        min_size=1,
        max_size=60,
    )
)
def test_words_hold_for_keys_that_find_no_room(steps: list[tuple[int, int, int]]) -> None:
    """With more keys than have a state of their own, no word about a key is broken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meter_module, "SHARED", 2)
        clock = VirtualClock(100.0)
        limit = RateLimit("5/s", key=lambda key: key, max_keys=3)
        guard = new_guard(limit, clock=clock)
        said: dict[str, list[list[float]]] = {}
        for number, remaining, lasts in steps:
            key = f"user-{number % 10}"
            clock.advance(0.125)
            if number < 10:
                limit.lower(remaining, lasts / 4, key)
                said.setdefault(key, []).append([remaining, clock.now() + lasts / 4])
            elif guard.attempt(lambda _: "ok", key).ok:
                for word in said.get(key, ()):
                    word[0] -= 1
                    assert word[0] >= 0 or word[1] <= clock.now()
        guard.close()
