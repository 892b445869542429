"""What it costs to be seen: the five-policy stack with all telemetry on, against off.

On, everything is exported at once: Prometheus, OpenTelemetry (metrics and spans) and logs. What is
read is read when somebody asks, so the calls themselves should cost the same; and of what asking
costs, each call bears its part, as if both were asked once a second. A service with twenty guards
is read.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from bench.cases import async_work, five
from bench.measure import CLOCKS, Contestant

if TYPE_CHECKING:
    from collections.abc import Callable

OFF = "off"
ON = "on"
TELEMETRY = "telemetry, async"
GUARDS = 20
ASKED_EVERY = 1.0
"""Seconds between two questions of each exporter; fifteen and more are usual."""


class Plan(NamedTuple):
    """How thoroughly to measure."""

    rounds: int = 15
    seconds: float = 0.05
    seed: int = 1
    clock: str = "cpu"


class Seen(Contestant):
    """The same calls, with everything switched on while they are made."""

    async def _time(self) -> float:
        # Only where it is measured: the benchmarks run without these libraries, too.
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from prometheus_client import CollectorRegistry, generate_latest

        from seawall.telemetry import export_opentelemetry, export_prometheus, log_events

        registry, reader = CollectorRegistry(), InMemoryMetricReader()
        provider = MeterProvider([reader], shutdown_on_exit=False)
        with ExitStack() as on:
            on.enter_context(export_prometheus(registry))
            on.enter_context(export_opentelemetry(provider))
            on.enter_context(log_events("bench.telemetry"))
            began = time.perf_counter()
            took = await super()._time()
            elapsed = time.perf_counter() - began
            clock = self._clock
            begin = clock()
            generate_latest(registry)
            reader.get_metrics_data()
            asking = clock() - begin
        provider.shutdown()
        return took + asking * elapsed / ASKED_EVERY


def measure(plan: Plan, progress: Callable[[str], None]) -> dict[str, list[float]]:
    """Return seconds a call, off and on, by round."""
    import asyncio

    return asyncio.run(_measure(plan, progress))


async def _measure(plan: Plan, progress: Callable[[str], None]) -> dict[str, list[float]]:
    assert plan.clock in CLOCKS
    others = [five(async_work) for _ in range(GUARDS - 1)]
    # The very same stack, off and on: two that are alike differ by some percent, by where they lie.
    guarded = five(async_work)
    contestants = [
        Contestant(OFF, "async", guarded, plan.clock),
        Seen(ON, "async", guarded, plan.clock),
    ]
    for contestant in contestants:
        await contestant.check()
        await contestant.calibrate(plan.seconds)
    chance = Random(plan.seed)
    for number in range(1, plan.rounds + 1):
        progress(f"telemetry, round {number} of {plan.rounds}")
        for contestant in chance.sample(contestants, 2):
            await contestant.measure()
    del others
    return {contestant.name: contestant.samples for contestant in contestants}
