"""Exponential backoff and jitter: the study of the AWS architecture blog, with Seawall's `Retry`.

N contenders update one row with optimistic locking, each once: read its version, write if it has
not changed, else back off and begin again. A message takes N(10, 2) ms. Base 5 ms, cap 2 s. The
published columns are means of 30 runs (1000 with 10 contenders) of the authors' program,
aws-samples/aws-arch-backoff-simulator.

    python examples/published/backoff_and_jitter.py
"""

# ruff: noqa: T201 - it prints its table

from __future__ import annotations

from typing import NamedTuple

from seawall import Guard, Retry
from seawall.backoff import Backoff, constant, decorrelated_jitter, exponential
from seawall.sim import Latency, World

CONTENDERS = (10, 50, 100, 150, 190)
RUNS = 10

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


def run(backoff: Backoff, contenders: int, *, seed: int) -> Row:
    """Let all contenders begin at the same time."""
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


def mean(backoff: Backoff, contenders: int, runs: int) -> Row:
    """Return the mean over the seeds from 1 to `runs`."""
    rows = [run(backoff, contenders, seed=seed) for seed in range(1, runs + 1)]
    return Row(*(sum(column) / runs for column in zip(*rows, strict=True)))


def main() -> None:
    """Print both columns for each strategy and number of contenders."""
    print(f"{'':14}{'contenders':>11}{'ms':>9}{'published':>11}{'writes':>9}{'published':>11}")
    for name, backoff in STRATEGIES.items():
        for contenders, published in zip(CONTENDERS, PUBLISHED[name], strict=True):
            row = mean(backoff, contenders, RUNS)
            print(
                f"{name:14}{contenders:11}{row.milliseconds:9.0f}{published[0]:11.0f}"
                f"{row.writes:9.0f}{published[1]:11.0f}"
            )


if __name__ == "__main__":
    main()
