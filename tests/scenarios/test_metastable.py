"""A failure that outlives its cause: an outage, and then retries of work that nobody waits for.

The server serves 100 calls a second, one after another, and is asked for 93. It stands still for
ten seconds. Clients wait for one second and try up to three times more. Afterwards the server is as
strong as before, and still nobody is served: it is busy with calls whose clients have given up, and
these have been replaced by retries. What ends this is to retry only what successes pay for, and not
to begin what is too late; neither is enough by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextvars import copy_context
from random import Random
from typing import Any

import pytest

from seawall import Bulkhead, Guard, Retry, RetryBudget, Timeout, deadline
from seawall.testing import run_virtual
from tests.support import let_pass

CAPACITY = 100.0
LOAD = 0.93
OUTAGE = (10.0, 20.0)
TIMEOUT = 1.0
RETRIES = 3
SEEDS = (1, 2, 3)


class Server:
    """One worker, first come first served; each call takes an exponential time."""

    def __init__(self, rng: Random, *, drops_expired: bool) -> None:
        self._rng = rng
        self._drops_expired = drops_expired
        self._guard = Guard("server", Bulkhead(1, max_wait=float("inf"), max_waiting=10**6))
        self._running: set[asyncio.Task[None]] = set()
        self._context = copy_context()
        self.served = 0

    async def handle(self) -> None:
        """Be asked over a network: what has been sent is worked on, also if the client is gone."""
        # A server knows nothing of its client's context, such as the deadline of its timeout.
        task = asyncio.get_running_loop().create_task(self._serve(), context=self._context.copy())
        self._running.add(task)
        task.add_done_callback(self._over)
        await asyncio.shield(task)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        _ = task.cancelled() or task.exception()  # seen

    async def _serve(self) -> None:
        if self._drops_expired:
            with deadline(TIMEOUT):  # it came along with the call
                await self._guard.acall(self._work)
        else:
            await self._guard.acall(self._work)

    async def _work(self) -> None:
        now = asyncio.get_running_loop().time()
        if OUTAGE[0] <= now < OUTAGE[1]:
            await let_pass(OUTAGE[1] - now)
        await let_pass(self._rng.expovariate(CAPACITY))
        self.served += 1


async def _run(seed: int, until: float, *, budget: bool, drops_expired: bool) -> list[Any]:
    """Return for each call when it came, and whether it was answered in time."""
    rng = Random(seed)
    server = Server(rng, drops_expired=drops_expired)
    retry = Retry(
        on=TimeoutError,
        attempts=1 + RETRIES,
        backoff=0.1,
        budget=RetryBudget() if budget else None,
    )
    client = Guard("client", retry, Timeout(TIMEOUT), rng=rng)
    calls: list[tuple[float, bool]] = []

    async def call() -> None:
        came = asyncio.get_running_loop().time()
        result = await client.aattempt(server.handle)
        calls.append((came, result.error is None))

    async with asyncio.TaskGroup() as group:
        for at in _arrivals(rng, until):
            await let_pass(max(0.0, at - asyncio.get_running_loop().time()))
            group.create_task(call())
    return calls


def _arrivals(rng: Random, until: float) -> Iterator[float]:
    at = 0.0
    while at < until:
        at += rng.expovariate(CAPACITY * LOAD)
        yield at


def goodput(seed: int, until: float, **protection: bool) -> dict[int, float]:
    """Return the share of calls answered in time, for each second in which they came."""
    calls = run_virtual(_run(seed, until, **protection))
    shares = {}
    for second in range(int(until)):
        answered = [ok for came, ok in calls if second <= came < second + 1]
        shares[second] = sum(answered) / len(answered)
    return shares


def mean(shares: dict[int, float], begin: float, end: float) -> float:
    """Return the mean share of the seconds from `begin` to `end`."""
    return sum(shares[second] for second in range(int(begin), int(end))) / (end - begin)


def recovers_within(shares: dict[int, float], seconds: int) -> bool:
    """Tell whether from then on, five seconds at a time, more than 95 % are answered."""
    begins = range(int(OUTAGE[1]) + seconds, max(shares) - 3)
    return all(mean(shares, begin, begin + 5) > 0.95 for begin in begins)


def answered_at_all(shares: dict[int, float]) -> float:
    """Return the best share over five seconds in the minute after the outage."""
    end = int(OUTAGE[1])
    return max(mean(shares, begin, begin + 5) for begin in range(end, end + 60))


@pytest.mark.parametrize("seed", SEEDS)
def test_with_success_deposits_and_expired_work_dropped_it_recovers(seed: int) -> None:
    """Ten seconds after the outage more than 95 % of the calls are answered again, and stay so."""
    shares = goodput(seed, OUTAGE[1] + 25, budget=True, drops_expired=True)
    assert mean(shares, 1, OUTAGE[0] - 1) > 0.95  # so it was before
    assert mean(shares, OUTAGE[0] + 1, OUTAGE[1] - 1) == 0.0
    assert recovers_within(shares, 10)


def test_without_them_it_does_not() -> None:
    """A minute after the outage the server is as strong as before, and nobody is served."""
    shares = goodput(SEEDS[0], OUTAGE[1] + 65, budget=False, drops_expired=False)
    assert mean(shares, 1, OUTAGE[0] - 1) > 0.95
    assert answered_at_all(shares) < 0.05


def test_a_budget_alone_is_not_enough() -> None:
    """With so little to spare, the old calls in the queue keep every new one waiting too long."""
    shares = goodput(SEEDS[0], OUTAGE[1] + 65, budget=True, drops_expired=False)
    assert answered_at_all(shares) < 0.05


def test_to_drop_what_is_too_late_alone_is_not_enough() -> None:
    """What is served is served in time, but retries ask for more than twice what there is."""
    shares = goodput(SEEDS[0], OUTAGE[1] + 30, budget=False, drops_expired=True)
    assert mean(shares, 1, OUTAGE[0] - 1) > 0.95
    late = mean(shares, OUTAGE[1] + 15, OUTAGE[1] + 30)
    assert 0.2 < late < 0.6
