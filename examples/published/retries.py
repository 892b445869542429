"""Retries, token buckets and circuit breakers: Marc Brooker's simulation, with Seawall's policies.

100 clients call 10 times a second each; attempts fail at random. Load is attempts for each call.
The published columns are those of the author's program (mbrooker/simulator_example, retry_sim), of
which the token bucket earns a tenth of a token with each call, and the breaker stops only retries.

    python examples/published/retries.py
"""

# ruff: noqa: T201 - it prints its table

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from seawall import Breaker, Guard, Retry, RetryBudget, Timeout
from seawall.backoff import constant
from seawall.policies.retry import RequestRatio, SuccessDeposit
from seawall.sim import Latency, ServiceFailed, World

CLIENTS = 100
RATE = 10.0
SECONDS = 20.0
FAILING = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0)

NOW = constant(0.0)
MakeGuard = Callable[[str], Guard]


def once(name: str) -> Guard:
    """Never retry."""
    return Guard(name, Timeout(60.0))


def three_retries(name: str) -> Guard:
    """Retry up to three times, whatever happens."""
    return Guard(name, Retry(on=ServiceFailed, attempts=4, backoff=NOW, budget=None))


def token_bucket(name: str) -> Guard:
    """Let retries be a tenth of the calls."""
    budget = RetryBudget(RequestRatio(0.1, window=SECONDS, floor=0.0))
    return Guard(name, Retry(on=ServiceFailed, attempts=4, backoff=NOW, budget=budget))


def success_deposit(name: str) -> Guard:
    """Let successes pay for retries: Seawall's default, which has no published column."""
    budget = RetryBudget(SuccessDeposit())
    return Guard(name, Retry(on=ServiceFailed, attempts=4, backoff=NOW, budget=budget))


def breaker(name: str) -> Guard:
    """Retry up to three times while at most a tenth of the attempts fail; always try once."""
    # In shadow mode it counts and changes its state, and admits every call.
    state = Breaker(
        failure_ratio=0.1,
        window=SECONDS,
        min_calls=10,
        break_for=SECONDS,
        counts="attempts",
        mode="shadow",
    )

    def is_closed(error: Exception | None, _value: object) -> bool:
        return isinstance(error, ServiceFailed) and state.state == "closed"

    return Guard(name, Retry(on=is_closed, attempts=4, backoff=NOW, budget=None), state)


STRATEGIES: dict[str, MakeGuard] = {
    "no retries": once,
    "three retries": three_retries,
    "token bucket": token_bucket,
    "breaker": breaker,
    "success deposit": success_deposit,
}

PUBLISHED: dict[str, tuple[tuple[float, float], ...]] = {
    "no retries": ((1, 0.902), (1, 0.796), (1, 0.696), (1, 0.505), (1, 0.252), (1, 0.0)),
    "three retries": (
        (1.113, 1.0),
        (1.245, 0.998),
        (1.401, 0.993),
        (1.871, 0.940),
        (2.731, 0.686),
        (4.0, 0.0),
    ),
    "token bucket": (
        (1.097, 0.989),
        (1.117, 0.896),
        (1.120, 0.782),
        (1.121, 0.564),
        (1.122, 0.280),
        (1.121, 0.0),
    ),
    "breaker": ((1.033, 0.932), (1.001, 0.798), (1, 0.696), (1, 0.499), (1, 0.249), (1, 0.0)),
}
"""For each share of failing attempts: load and success."""


class Row(NamedTuple):
    """What a run gave: attempts for each call, and the share of calls that succeeded."""

    load: float
    success: float


def run(make: MakeGuard, failing: float, *, seed: int = 1, clients: int = CLIENTS) -> Row:
    """Let each client call through a guard of its own."""
    with World(seed) as world:
        server = world.service("server", latency=Latency.exponential(0.02), failing=failing)
        for number in range(clients):
            guard = make(f"client {number}")
            world.clients(f"client {number}", guard(server.acall), rate=RATE)
        result = world.run(seconds=SECONDS)
    return Row(result.load("server") * SECONDS / result.came(), result.share())


def main() -> None:
    """Print both columns for each strategy and share of failures."""
    print(f"{'':17}{'failing':>8}{'load':>8}{'published':>11}{'success':>9}{'published':>11}")
    for name, make in STRATEGIES.items():
        for index, failing in enumerate(FAILING):
            row = run(make, failing)
            published = PUBLISHED[name][index] if name in PUBLISHED else ("", "")
            print(
                f"{name:17}{failing:8.2f}{row.load:8.3f}{published[0]:>11}"
                f"{row.success:9.3f}{published[1]:>11}"
            )


if __name__ == "__main__":
    main()
