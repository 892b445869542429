"""The Tail at Scale: fan-out makes slow calls common, and hedging takes most of them away again.

The first table is the paper's arithmetic, measured: if one call in a hundred is slow, how many
requests that wait for a hundred calls are. The second is its example of BigTable: a read waits for
100 servers, and a call that has no answer after 10 ms is sent a second time, by Seawall's `Hedge`.
The paper gives no distribution of latencies. Here 2 % of the calls take more than 10 ms, as its 2 %
of additional calls say, one in 100 000 takes 1.8 s, as its 99.9 % quantile says, and 0.3 % take
more than 70 ms, which is our choice.

    python examples/published/tail_at_scale.py
"""

# ruff: noqa: T201 - it prints its tables

from __future__ import annotations

import asyncio
from bisect import bisect_left
from itertools import pairwise
from math import exp, log
from random import Random
from typing import NamedTuple

from seawall import Guard, Hedge
from seawall.sim import Latency, World

SERVERS = 100
READS = 5000

FAN_OUT = {(0.01, 1): 0.01, (0.01, 100): 0.63, (0.0001, 2000): 0.18}
"""For the share of slow calls and the calls of a request: the published share of slow requests."""

TAIL = ((1.0, 0.001), (0.02, 0.010), (0.003, 0.070), (0.00001, 1.8), (1e-9, 4.0))
"""Which share of the calls takes longer than how many seconds; between these, a power law."""

PUBLISHED = {"no hedging": (1.800, 1.0), "hedged after 10 ms": (0.074, 1.02)}
"""The 99.9 % quantile of a read in seconds, and calls for each server that is asked."""


class Read(NamedTuple):
    """The 99.9 % quantile of a read in seconds, and calls for each server that is asked."""

    p999: float
    load: float


def big_table(rng: Random, _calls: int) -> float:
    """Draw the latency of a call."""
    share = 1 - rng.random()
    for (above, low), (below, high) in pairwise(TAIL):
        if share >= below:
            part = log(above / share) / log(above / below)
            return exp(log(low) + part * (log(high) - log(low)))
    return TAIL[-1][1]


def slow_requests(share: float, calls: int, *, requests: int = 1000, seed: int = 1) -> float:
    """Return the share of requests of which at least one call is slow."""
    with World(seed) as world:
        latency = Latency("two values", None, lambda rng, _: 1.0 if rng.random() < share else 0.01)
        server = world.service("server", latency=latency)

        async def request() -> None:
            await asyncio.gather(*(server.acall() for _ in range(calls)))

        world.clients("requests", request, rate=requests / 100)
        result = world.run(seconds=100)
    took = [one for step in result.clients["requests"].latencies for one in step]
    return sum(one >= 1.0 for one in took) / len(took)


def reads(*, hedged: bool, count: int = READS, seed: int = 1) -> Read:
    """Read from all servers, `count` times."""
    with World(seed) as world:
        server = world.service("servers", latency=Latency("tail", None, big_table))
        guard = Guard("servers", Hedge(0.010, cap=0.1, burst=SERVERS)) if hedged else None
        call = server.acall if guard is None else guard(server.acall)

        async def read() -> None:
            await asyncio.gather(*(call() for _ in range(SERVERS)))

        world.clients("reads", read, rate=count / 100)
        result = world.run(seconds=100)
    load = result.load("servers") * 100 / (result.came() * SERVERS)
    took = sorted(one for step in result.clients["reads"].latencies for one in step)
    return Read(took[bisect_left(range(len(took)), 0.999 * (len(took) - 1))], load)


def main() -> None:
    """Print both tables beside the published numbers."""
    print(f"{'slow calls':>12}{'fan-out':>9}{'slow requests':>15}{'published':>11}")
    for (share, calls), published in FAN_OUT.items():
        found = slow_requests(share, calls, requests=1000)
        print(f"{share:12.2%}{calls:9}{found:15.0%}{published:11.0%}")
    print(f"\n{'':20}{'p99.9 of a read':>17}{'published':>11}{'calls':>8}{'published':>11}")
    for name, published_read in PUBLISHED.items():
        read = reads(hedged=name != "no hedging")
        print(
            f"{name:20}{read.p999 * 1000:14.0f} ms{published_read[0] * 1000:8.0f} ms"
            f"{read.load:8.3f}{published_read[1]:11.2f}"
        )


if __name__ == "__main__":
    main()
