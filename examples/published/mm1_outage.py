"""An M/M/1 server at 93 % of its capacity stands still for ten seconds: who recovers, and when.

Clients wait for one second. Retries without a limit keep the server busy with calls that nobody
waits for, long after it is well again. Retries that successes pay for, and dropping what is too
late, end that.

    python examples/published/mm1_outage.py
"""

# ruff: noqa: T201 - it prints its table

from __future__ import annotations

from functools import partial
from math import inf
from typing import Any

from seawall import Bulkhead, Guard, Retry, RetryBudget, Timeout
from seawall.backoff import exponential
from seawall.policies.retry import RequestRatio, SuccessDeposit
from seawall.sim import Latency, World, run_seeds

SEEDS = 3
CAPACITY = 100.0
LOAD = 0.93
AT, LASTS = 20.0, 10.0

VARIANTS: dict[str, dict[str, Any]] = {
    "no retries": {"attempts": 1},
    "3 retries": {"jitter": "none"},
    "3 retries, jitter": {},
    "request-ratio budget": {"budget": RequestRatio(0.1)},
    "success-deposit budget": {"budget": SuccessDeposit()},
    "expired work dropped": {"drops_expired": True},
    "deposits and dropping": {"budget": SuccessDeposit(), "drops_expired": True},
}


def outage(
    world: World,
    *,
    attempts: int = 4,
    jitter: Any = "full",
    budget: Any = None,
    drops_expired: bool = False,
) -> None:
    """Fill a world with one server and its clients."""
    world.seconds = 240
    # The server's own queue: the deadline comes along, and what is too late leaves it.
    queue = Guard("server", Bulkhead(1, max_wait=inf, max_waiting=10**6))
    server = world.service(
        "server",
        workers=1,
        latency=Latency.exponential(1 / CAPACITY),
        guard=queue if drops_expired else None,
        deadlines=drops_expired,
    )
    retry = Retry(
        on=(TimeoutError, ConnectionError),
        attempts=attempts,
        backoff=exponential(0.1, jitter=jitter),
        budget=None if budget is None else RetryBudget(budget.fresh()),
    )
    client = Guard("client", *([retry] if attempts > 1 else []), Timeout(1.0))
    world.clients("clients", client(server.acall), rate=CAPACITY * LOAD)
    world.at(AT, server.stall(), lasts=LASTS)


def main() -> None:
    """Print verdict and recovery of each variant."""
    print(f"{'':24}{'verdicts of ' + str(SEEDS) + ' seeds':32}{'recovery':>16}{'load after':>12}")
    for name, settings in VARIANTS.items():
        runs = run_seeds(partial(outage, **settings), seeds=SEEDS, name=name)
        verdicts = ", ".join(f"{count} {kind}" for kind, count in runs.verdicts.items())
        recovery = str(runs.estimate(lambda result: result.recovery()))
        after = runs.estimate(lambda result: result.load("server", AT + LASTS + 10) / CAPACITY)
        if recovery != "never":
            recovery += " s"
        print(f"{name:24}{verdicts:32}{recovery:>16}{after.mean:10.2f} x")


if __name__ == "__main__":
    main()
