"""What the order of a stack is worth: goodput and load while some keys always fail.

    python -m bench.orders

prints a table for 10 to 60 % of keys that fail at every attempt, for the recommended order and for
the one with the bulkhead and the breaker around the retry, with and without a retry budget. All of
it runs in virtual time, from seeds.
"""

from __future__ import annotations

import asyncio
from itertools import count
from random import Random
from typing import NamedTuple

from seawall import Breaker, Bulkhead, Guard, Retry, RetryBudget, Timeout
from seawall.runtime.policy import Policy
from seawall.testing import run_virtual

RATE = 50.0
"""Calls a second, at random instants."""

SECONDS = 120.0
LATENCY = 0.02
ATTEMPTS = 3
SLOTS = 10
BREAK_FOR = 1.0
"""Seconds: short, so that a run sees many breaks, and not the luck of a few probes."""
SEEDS = range(1, 6)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
ORDERS = {
    "Retry > Breaker > Bulkhead > Timeout": ("retry", "breaker", "bulkhead", "timeout"),
    "Bulkhead > Breaker > Retry > Timeout": ("bulkhead", "breaker", "retry", "timeout"),
}

_numbers = count()


class BadKeyError(Exception):
    """What a bad key leads to, whenever it is asked for."""


class Measured(NamedTuple):
    """Shares of the calls that came."""

    goodput: float
    """Answered."""
    load: float
    """Attempts that reached the dependency, for each call."""


def stack(order: str, *, budget: bool, counts: str = "calls") -> list[Policy]:
    """Return the policies in that order, with their defaults where nothing else is said."""
    made: dict[str, Policy] = {
        "retry": Retry(on=BadKeyError, attempts=ATTEMPTS, budget=RetryBudget() if budget else None),
        "breaker": Breaker(break_for=BREAK_FOR, counts=counts),  # type: ignore[arg-type]
        "bulkhead": Bulkhead(SLOTS),
        "timeout": Timeout(1.0),
    }
    return [made[kind] for kind in ORDERS[order]]


def measure(
    order: str,
    share: float,
    seed: int,
    *,
    budget: bool,
    counts: str = "calls",
    seconds: float = SECONDS,
) -> Measured:
    """Let calls come for so long, of which `share` have a bad key."""
    rng = Random(seed)
    policies = stack(order, budget=budget, counts=counts)
    attempts = answered = calls = 0

    async def ask(bad: bool) -> None:  # noqa: FBT001 - the key
        nonlocal attempts
        attempts += 1
        await asyncio.sleep(LATENCY)
        if bad:
            raise BadKeyError

    async def main() -> None:
        nonlocal calls
        loop = asyncio.get_running_loop()
        guard = Guard(f"orders-{next(_numbers)}", *policies, rng=Random(seed))

        async def call(bad: bool) -> None:  # noqa: FBT001 - the key
            nonlocal answered
            result = await guard.aattempt(ask, bad)
            answered += result.ok

        async with asyncio.TaskGroup() as group:
            at = 0.0
            while (at := at + rng.expovariate(RATE)) < seconds:
                await asyncio.sleep(max(0.0, at - loop.time()))
                calls += 1
                group.create_task(call(rng.random() < share))
        guard.close()

    run_virtual(main())
    return Measured(answered / calls, attempts / calls)


def mean(order: str, share: float, *, budget: bool, counts: str = "calls") -> Measured:
    """Return the means over all seeds."""
    runs = [measure(order, share, seed, budget=budget, counts=counts) for seed in SEEDS]
    return Measured(*(sum(values) / len(runs) for values in zip(*runs, strict=True)))


def main() -> None:
    """Print the table."""
    print(
        f"{RATE:g} calls a second for {SECONDS:g} s, {ATTEMPTS} attempts, {SLOTS} slots, means of"
        f" {len(SEEDS)} seeds: share of calls answered, and attempts for each call"
    )
    ours, other = ORDERS
    columns = [(order, budget) for budget in (False, True) for order in (ours, other)]
    titles = [f"{order}{', budget' if budget else ''}" for order, budget in columns]
    print(f"| bad keys | {' | '.join(titles)} | the first, by attempts |")
    print("| ---: |" + " ---: |" * (len(titles) + 1))
    for share in SHARES:
        found = [mean(order, share, budget=budget) for order, budget in columns]
        found.append(mean(ours, share, budget=False, counts="attempts"))
        cells = [f"{one.goodput:.1%}, {one.load:.2f}" for one in found]
        print(f"| {share:.0%} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
