"""Metastable failures in the wild (OSDI'22): which trigger stays down, with Seawall's policies.

The paper's experiment with retries: clients come at even distances, wait for an answer and try up
to five times; the server loses 78 or 80 % of its processor for 9 or 10 seconds. Whether the failure
outlives its trigger depends on the size of the trigger, on how long it lasts and on the load
(lexiangh/Metastability, Retry_Metastability). The server's capacity is not published: here it is
twice the load, and the timeout of 4.3 s is chosen so that the paper's four cases lie on both sides.

    python examples/published/metastable_retries.py

takes half a minute, and gives:

                                        stays down   published  with a budget
    a) 10 s, -78 % CPU                     0 of 20    recovers        0 of 20
    b) 10 s, -80 % CPU                    20 of 20  stays down        0 of 20
    c)  9 s, -80 % CPU                     0 of 20    recovers        0 of 20
    d) 10 s, -80 % CPU, -30 % load         0 of 20    recovers        0 of 20
"""

# ruff: noqa: T201 - it prints its table

from __future__ import annotations

from typing import NamedTuple

from seawall import Guard, Retry, RetryBudget, Timeout
from seawall.backoff import constant
from seawall.sim import Latency, SimulationResult, World, simulate

SEEDS = 20
CAPACITY = 100.0
WORKERS = 2
TIMEOUT = 4.3
AT = 15.0


class Case(NamedTuple):
    """A trigger, the load, and whether the paper's system stayed down."""

    lost: float
    lasts: float
    load: float
    stays_down: bool


CASES = {
    "a) 10 s, -78 % CPU": Case(0.78, 10.0, 0.5, stays_down=False),
    "b) 10 s, -80 % CPU": Case(0.80, 10.0, 0.5, stays_down=True),
    "c)  9 s, -80 % CPU": Case(0.80, 9.0, 0.5, stays_down=False),
    "d) 10 s, -80 % CPU, -30 % load": Case(0.80, 10.0, 0.35, stays_down=False),
}


def run(case: Case, *, seed: int, budget: bool = False) -> SimulationResult:
    """Run one case for a minute."""

    def build(world: World) -> None:
        mean = WORKERS / CAPACITY
        server = world.service("server", workers=WORKERS, latency=Latency.normal(mean, mean / 5))
        retry = Retry(
            on=TimeoutError,
            attempts=5,
            backoff=constant(0.0),
            budget=RetryBudget() if budget else None,
        )
        client = Guard("client", retry, Timeout(TIMEOUT))
        world.clients("clients", client(server.acall), rate=CAPACITY * case.load, even=True)
        world.at(AT, server.slow(1 / (1 - case.lost)), lasts=case.lasts)

    return simulate(build, seed=seed, seconds=60)


def main() -> None:
    """Print how many seeds stayed down, beside the paper's verdict and with a budget."""
    print(f"{'':32}{'stays down':>14}{'published':>12}{'with a budget':>15}")
    for name, case in CASES.items():
        seeds = range(1, SEEDS + 1)
        down = sum(run(case, seed=seed).verdict.kind == "stays down" for seed in seeds)
        kept = sum(run(case, seed=seed, budget=True).verdict.kind == "stays down" for seed in seeds)
        published = "stays down" if case.stays_down else "recovers"
        print(f"{name:32}{f'{down} of {SEEDS}':>14}{published:>12}{f'{kept} of {SEEDS}':>15}")


if __name__ == "__main__":
    main()
