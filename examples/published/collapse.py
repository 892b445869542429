"""Collapse of an open system: Marc Brooker's simulation, with Seawall's `Retry` and `Timeout`.

A server takes 1 s and 10 ms more for each call inside. Clients come at 40 calls a second, at 80 for
five seconds, and then at 40 again. They wait for 3 s and try three times. Without backoff most runs
never recover. The published columns are those of the author's program (mbrooker/simulator_example,
simple_collapse_sim), as means of ten runs. Budgets are Seawall's own answer.

    python examples/published/collapse.py
"""

# ruff: noqa: T201 - it prints its table

from __future__ import annotations

from collections.abc import Callable

from seawall import Guard, Retry, RetryBudget, Timeout
from seawall.backoff import constant, exponential
from seawall.sim import Latency, SimulationResult, World, simulate

RUNS = 10
SPIKE = (20.0, 25.0)
AT = (10, 15, 25, 35, 45, 55, 65, 75)
"""Seconds for which the number of successes is shown."""

RETRIES: dict[str, Callable[[], Retry]] = {
    "no backoff": lambda: Retry(on=TimeoutError, attempts=3, backoff=constant(0.0), budget=None),
    "backoff and jitter": lambda: Retry(
        on=TimeoutError, attempts=3, backoff=exponential(20.0, cap=40.0), budget=None
    ),
    "success-deposit budget": lambda: Retry(
        on=TimeoutError, attempts=3, backoff=constant(0.0), budget=RetryBudget()
    ),
}

PUBLISHED = {
    "no backoff": (40.4, 40.7, 57.2, 10.1, 8.3, 7.9, 8.1, 6.8),
    "backoff and jitter": (38.9, 40.1, 57.3, 47.6, 45.7, 41.5, 38.7, 40.3),
}
"""Successes in each of these seconds; 8 of 10 runs without backoff stayed down."""


def rate(now: float) -> float:
    """Return how many clients come a second."""
    return 80.0 if SPIKE[0] <= now <= SPIKE[1] else 40.0


def run(make: Callable[[], Retry], *, seed: int) -> SimulationResult:
    """Let clients come for 80 seconds."""

    def build(world: World) -> None:
        network = world.network(delay=Latency.exponential(0.1))
        server = world.service(
            "server",
            latency=Latency.by_concurrency(lambda calls: 1 + 0.01 * calls),
            network=network,
        )
        world.clients("clients", Guard("client", make(), Timeout(3.0))(server.acall), rate=rate)

    return simulate(build, seed=seed, seconds=80)


def successes(result: SimulationResult, second: int) -> int:
    """Return how many calls were answered about then, whenever they came."""
    took = result.clients["clients"]
    return sum(
        int(came + 0.5 + seconds) == second
        for came in range(max(0, second - 70), second + 1)
        for seconds in took.latencies[came]
    )


def stays_down(result: SimulationResult) -> bool:
    """Return whether hardly anybody who comes in the last 20 seconds is served at once."""
    return result.share(50, 70) < 1 / 2


def main() -> None:
    """Print the successes over time, and how many runs stayed down."""
    print(f"{'':34}" + "".join(f"{f'{second} s':>7}" for second in AT) + "   stay down")
    for name, make in RETRIES.items():
        results = [run(make, seed=seed) for seed in range(1, RUNS + 1)]
        means = [sum(successes(one, second) for one in results) / RUNS for second in AT]
        down = sum(map(stays_down, results))
        print(f"{name:34}{''.join(f'{one:7.1f}' for one in means)}{down:6} of {RUNS}")
        if name in PUBLISHED:
            print(f"{'  published':34}{''.join(f'{one:7.1f}' for one in PUBLISHED[name])}")


if __name__ == "__main__":
    main()
