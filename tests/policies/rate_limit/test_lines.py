"""RateLimit: lines of those who wait, and what may happen to a line meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from seawall import Bulkhead, RateLimit, RateLimited, deadline
from seawall.limits import Limit
from seawall.policies.rate_limit.gate import RateWaiter
from seawall.policies.rate_limit.meters import Meters
from seawall.testing import run_virtual, virtual_time
from tests.support import let_pass, new_guard

ALGORITHMS = ["token_bucket", "leaky_bucket", "fixed_window", "sliding_counter", "sliding_log"]


@pytest.mark.parametrize(
    ("algorithm", "max_wait"),
    [
        (algorithm, max_wait)
        for algorithm in ALGORITHMS
        for max_wait in (0.5, 1.0, 2.0, 3.25)
        # How a long line fits into several windows to come is not worked out there.
        if algorithm != "sliding_counter" or max_wait <= 2
    ],
)
def test_nobody_waits_in_vain(algorithm: str, max_wait: float) -> None:
    """Of thirty who come at once, those who are refused learn it at once."""

    async def main() -> None:
        guard = new_guard(RateLimit("2/s", algorithm=algorithm, max_wait=max_wait))
        results = await asyncio.gather(*(guard.aattempt(let_pass, 0.0) for _ in range(30)))
        assert all(result.ok or result.elapsed == 0 for result in results)
        assert all(result.elapsed <= max_wait for result in results)
        if algorithm in ("fixed_window", "sliding_log"):
            assert sum(result.ok for result in results) == 2 + 2 * int(max_wait)

    run_virtual(main())


def test_who_joins_a_line_looks_once_more_whether_it_is_in_time() -> None:
    """Others may have come between the first look and the line."""
    with virtual_time() as clock:
        limit = RateLimit("1/s", max_wait=1.5)
        guard = new_guard(limit)
        guard.call(lambda: None)
        gate: Any = guard.bounds[0]
        early, late = (RateWaiter(gate, limit._charges((), {}), clock.now()) for _ in range(2))
        woken = []
        for waiter in (early, late):
            waiter.publish(lambda: woken.append(1) or True)
        assert (limit.waiting, len(woken)) == (1, 1)
        with pytest.raises(RateLimited, match="it would have to wait too long"):
            late.claim()
        early.abandon()


def test_several_turns_at_the_very_end_of_max_wait_all_come() -> None:
    """The window opens at the instant at which all would give up: two go."""

    async def main() -> None:
        guard = new_guard(RateLimit("2/s", algorithm="fixed_window", max_wait=2.0))
        results = await asyncio.gather(*(guard.aattempt(let_pass, 0.0) for _ in range(6)))
        assert [result.elapsed for result in results] == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
        assert all(result.ok for result in results)

    run_virtual(main())


def test_who_finds_no_room_to_wait_is_over_the_limit_whatever_its_deadline() -> None:
    """There was time enough: it is not the deadline that is exceeded."""

    async def main() -> None:
        guard = new_guard(RateLimit("1/s", max_wait=99.0, max_waiting=1))

        async def one() -> Any:
            with deadline(50.0):
                return await guard.aattempt(let_pass, 0.0)

        results = await asyncio.gather(*(one() for _ in range(4)))
        assert [result.ok for result in results] == [True, True, False, False]
        assert all(isinstance(result.error, RateLimited) for result in results[2:])

    run_virtual(main())


def _blocked_behind_a_loop_that_stands_still() -> list[bool]:
    """Return who is admitted long after the time of the first in line was over."""
    with virtual_time() as clock:
        limit = RateLimit("10/s", burst=1, max_wait=0.3)
        guard = new_guard(limit)
        guard.call(lambda: None)
        gate: Any = guard.bounds[0]
        for _ in range(2):
            stuck = RateWaiter(gate, limit._charges((), {}), clock.now())
            stuck.publish(lambda: True)  # as of a loop that is neither closed nor running
        clock.advance(2.0)
        went = [guard.attempt(lambda: None).ok for _ in range(4)]
        stuck.abandon()
        return [*went, limit.waiting == 0]


def test_a_loop_that_stands_still_holds_nobody_up_beyond_its_own_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose time is over is passed over, whether its loop says so or not."""
    assert _blocked_behind_a_loop_that_stands_still() == [True] * 5
    monkeypatch.setattr(Meters, "remove_late", lambda *_: None)
    assert _blocked_behind_a_loop_that_stands_still()[:4] == [False] * 4


@pytest.mark.parametrize("mode", ["off", "shadow"])
def test_who_waits_goes_when_the_limit_is_no_longer_enforced(mode: Any) -> None:
    """All of them at once, and nothing is taken for them; in shadow they are counted."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        limit = RateLimit("1/h", max_wait=float("inf"))
        guard = new_guard(limit)
        calls = [asyncio.ensure_future(guard.acall(let_pass, 0.0)) for _ in range(5)]
        await let_pass(1.0)
        assert limit.waiting == 4
        limit.update(mode=mode)
        await asyncio.gather(*calls)
        assert loop.time() == 1.0
        assert limit.waiting == 0
        assert guard.snapshot()["policies"][0]["would_reject"] == (4 if mode == "shadow" else 0)
        limit.update(mode="enforce", max_wait=0)
        assert limit.peek().retry_after == 3599.0

    run_virtual(main())


def test_a_mode_that_changes_on_the_way_into_the_line_is_seen() -> None:
    """Who was told to wait and finds the limit off does not join."""
    with virtual_time() as clock:
        limit = RateLimit("1/h", max_wait=float("inf"))
        guard = new_guard(limit)
        guard.call(lambda: None)
        gate: Any = guard.bounds[0]
        waiter = RateWaiter(gate, limit._charges((), {}), clock.now())
        limit.update(mode="off")
        woken = []
        waiter.publish(lambda: woken.append(1) or True)
        assert woken
        assert waiter.claim() is None
        assert limit.waiting == 0


def _looks_at_others(count: int) -> int:
    """Return how often somebody in a line of so many is looked at, on its way in and out."""
    looked = [0]

    class Counted(RateWaiter):
        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            if name == "number":
                looked[0] += 1
            return super().__getattribute__(name)

    with virtual_time() as clock:
        limit = RateLimit("1/s", max_wait=float("inf"), max_waiting=count)
        guard = new_guard(limit)
        guard.call(lambda: None)
        gate: Any = guard.bounds[0]
        line = [Counted(gate, limit._charges((), {}), clock.now()) for _ in range(count)]
        for waiter in line:
            waiter.publish(lambda: True)
        assert limit.waiting == count
        for waiter in reversed(line):
            waiter.abandon()
        assert limit.waiting == 0
    return looked[0]


def test_a_long_line_costs_each_no_more_than_a_short_one() -> None:
    """Joining at the end and leaving from anywhere take as long, however many wait."""
    assert _looks_at_others(1000) <= 10 * _looks_at_others(100) + 100


def test_who_moves_to_another_line_keeps_its_place_there() -> None:
    """Before all who began to wait after it."""

    async def main() -> None:
        limit = RateLimit(
            Limit("1/s", key=lambda user: user, name="user"),
            Limit("1/2s", burst=1, name="all"),
            max_wait=float("inf"),
        )
        guard = new_guard(limit)
        went = []

        async def note(user: str) -> None:
            went.append(user)

        users = ["ann", "ann", "bob", "cy", "dora", "ann"]
        await asyncio.gather(*[guard.acall(note, user) for user in users])
        assert went == users

    run_virtual(main())


def test_a_call_that_waited_further_in_gives_back_all_of_its_estimate() -> None:
    """With accounts it is exact; a bucket that is one number gives back what is surely there."""

    async def main() -> None:
        for options, left in (({"cost": 1, "settle": lambda _: 1}, 10), ({}, 5)):
            limit = RateLimit("10/s", **options)
            guard = new_guard(limit, Bulkhead(1, max_wait=0.5, max_waiting=100))
            hog = asyncio.ensure_future(guard.acall(let_pass, 99.0))
            await let_pass(0.0)
            await asyncio.gather(*(guard.aattempt(let_pass, 0.0) for _ in range(9)))
            assert limit.peek().left == left
            hog.cancel()
            await asyncio.wait([hog])

    run_virtual(main())
