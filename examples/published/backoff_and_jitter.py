"""Exponential backoff and jitter: the study of the AWS architecture blog, with Seawall's `Retry`.

N contenders update one row with optimistic locking, each once: read its version, write if it has
not changed, else back off and begin again. A message takes N(10, 2) ms. Base 5 ms, cap 2 s. The
published columns are means of 30 runs (1000 with 10 contenders) of the authors' program,
aws-samples/aws-arch-backoff-simulator.

    python examples/published/backoff_and_jitter.py

takes a few minutes on all processors. One run gave, each column within 10 % of the published one:

                   contenders       ms  published   writes  published
    none                   10      382        381       51         51
    none                   50     1137       1143      690        690
    none                  100     2030       2018     2429       2424
    none                  150     2886       2878     5135       5153
    none                  190     3546       3543     8006       8020
    exponential            10     3419       3509       51         51
    exponential            50    36413      36449      624        616
    exponential           100    63414      63514     1858       1858
    exponential           150    85344      84798     3537       3549
    exponential           190   102207     100369     5177       5135
    equal jitter           10      729        728       42         43
    equal jitter           50     4157       4166      347        348
    equal jitter          100     6717       6594      814        811
    equal jitter          150     8245       8205     1325       1324
    equal jitter          190     9379       9436     1758       1762
    full jitter            10      451        466       39         39
    full jitter            50     3019       2895      333        333
    full jitter           100     5028       4962      797        797
    full jitter           150     6519       6621     1319       1319
    full jitter           190     7203       7685     1773       1775
    decorrelated           10      433        438       38         38
    decorrelated           50     2166       2217      374        370
    decorrelated          100     4371       4810     1004       1006
    decorrelated          150     6737       6694     1764       1769
    decorrelated          190     7808       7783     2427       2423
"""

# ruff: noqa: T201 - it prints its table

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from seawall import Guard, Retry
from seawall.backoff import Backoff, constant, decorrelated_jitter, exponential
from seawall.sim import Latency, World

RUNS = {10: 400, 50: 60, 100: 40, 150: 30, 190: 30}
"""Number of runs by number of contenders. The time of a few contenders varies most."""

STRATEGIES: dict[str, Backoff] = {
    "none": constant(0.0),
    # The program doubles the base before the first pause: 10 ms.
    "exponential": exponential(0.010, cap=2.0, jitter="none"),
    "equal jitter": exponential(0.010, cap=2.0, jitter="equal"),
    "full jitter": exponential(0.010, cap=2.0),
    "decorrelated": decorrelated_jitter(0.005, cap=2.0),
}

PUBLISHED: dict[str, tuple[tuple[float, float], ...]] = {
    "none": ((381, 51), (1143, 690), (2018, 2424), (2878, 5153), (3543, 8020)),
    "exponential": ((3509, 51), (36449, 616), (63514, 1858), (84798, 3549), (100369, 5135)),
    "equal jitter": ((728, 43), (4166, 348), (6594, 811), (8205, 1324), (9436, 1762)),
    "full jitter": ((466, 39), (2895, 333), (4962, 797), (6621, 1319), (7685, 1775)),
    "decorrelated": ((438, 38), (2217, 370), (4810, 1006), (6694, 1769), (7783, 2423)),
}
"""For each number of contenders: milliseconds until all are done, and writes."""


class Conflict(Exception):
    """Somebody else has changed the row since it was read."""


class Row(NamedTuple):
    """What a run gave: milliseconds until the last contender was done, and writes."""

    milliseconds: float
    writes: float


def run(name: str, contenders: int, seed: int) -> Row:
    """Let all contenders begin at the same time, with the strategy of that name."""
    backoff = STRATEGIES[name]
    version = writes = 0
    done = 0.0
    with World(seed) as world:
        network = world.network(delay=Latency.normal(0.010, 0.002))

        async def update() -> None:
            nonlocal version, writes
            await network.across()
            read = version
            await network.across()
            await network.across()
            writes += 1
            is_current = read == version
            version += is_current
            await network.across()
            if not is_current:
                raise Conflict

        guarded = Guard("row", Retry(on=Conflict, attempts=10_000, backoff=backoff))(update)

        async def contend() -> None:
            nonlocal done
            await guarded()
            done = max(done, world.clock.now())

        world.at(0, world.clients("contenders", contend, rate=0).burst(contenders))
        result = world.run(seconds=300)
    assert result.ended("ok") == contenders  # noqa: S101 - otherwise the numbers mean nothing
    return Row(done * 1000, writes)


def mean(name: str, contenders: int, runs: int, over: Callable[..., Any] = map) -> Row:
    """Return the mean over the seeds from 1 to `runs`, which `over` maps to runs."""
    rows = list(over(partial(run, name, contenders), range(1, runs + 1)))
    return Row(*(sum(column) / runs for column in zip(*rows, strict=True)))


def main() -> None:
    """Print both columns for each strategy and number of contenders."""
    print(f"{'':14}{'contenders':>11}{'ms':>9}{'published':>11}{'writes':>9}{'published':>11}")
    with ProcessPoolExecutor() as processes:
        for name in STRATEGIES:
            for (contenders, runs), (time, writes) in zip(
                RUNS.items(), PUBLISHED[name], strict=True
            ):
                row = mean(name, contenders, runs, partial(processes.map, chunksize=5))
                print(
                    f"{name:14}{contenders:11}{row.milliseconds:9.0f}{time:11.0f}"
                    f"{row.writes:9.0f}{writes:11.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
