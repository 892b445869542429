"""Measurements for the tests of tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from seawall.models.histogram import Histogram, Tally
from seawall.sim import Latency
from seawall.tune import Measurement

LOGNORMAL = Latency.lognormal(median=0.02, p99=0.2)


def tally_of(
    latency: Latency = LOGNORMAL, samples: int = 20_000, cut: float | None = None
) -> Tally:
    """Return a histogram of so many calls; those above `cut` were cut off there."""
    rng = Random(1)
    drawn = [latency.draw(rng, 1) for _ in range(samples)]
    histogram = Histogram()
    histogram.add_all([one if cut is None else min(one, cut) for one in drawn])
    return histogram.tally()


def measured(
    *policies: Mapping[str, Any],
    counted: Sequence[Mapping[str, Any]] | None = None,
    tally: Tally | None = None,
    known: bool = True,
    **numbers: Any,
) -> Measurement:
    """Return a guard with these policies: 20 000 calls in 200 s, all well unless said otherwise."""
    tally = tally_of() if tally is None else tally
    given: dict[str, Any] = {
        "name": "vendor",
        "kind": "guard",
        "seconds": 200.0,
        "succeeded": sum(tally.counts),
        "failed": 0.0,
        "timed_out": 0.0,
        "rejected": 0.0,
        "retries": 0.0,
        "error_rate": 0.0,
        "recent_rate": 0.0,
        "tally": tally,
        "policies": counted or [{"policy": one["policy"]} for one in policies],
        "table": {"policies": list(policies)} if known else None,
    }
    return Measurement(**(given | numbers))


def policy(kind: str, **settings: Any) -> dict[str, Any]:
    """Return the table of a policy."""
    return {"policy": kind, **settings}


TIMEOUT = policy("timeout", seconds=0.5)
BREAKER = policy("breaker")
BULKHEAD = policy("bulkhead", limit=20)
RETRY = policy("retry", on=["ConnectionError"], budget=True)
GOOD = (RETRY, BREAKER, BULKHEAD, TIMEOUT)
"""A stack to which nothing has to be changed."""
