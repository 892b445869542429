"""A pod: makes calls of known durations in virtual time, and prints what Prometheus scrapes.

    python -m tests.telemetry.pod_process NUMBER

It prints two scrapes, apart by a line, before and after the calls.
"""

from __future__ import annotations

import sys
from random import Random

from prometheus_client import CollectorRegistry, generate_latest

from seawall import Bulkhead, Guard
from seawall.clock import VirtualClock
from seawall.telemetry import export_prometheus

APART = "# ---\n"


def durations(number: int) -> list[float]:
    """Return the seconds that the calls of a pod take: the third has few calls, and slow ones."""
    chance = Random(number)
    calls, typical = [(6000, 0.004), (9000, 0.01), (60, 2.0)][number]
    return [chance.lognormvariate(0.0, 0.8) * typical for _ in range(calls)]


def main(number: int) -> None:
    """Make the calls."""
    clock = VirtualClock()
    guard = Guard("vendor", Bulkhead(5), clock=clock)
    registry = CollectorRegistry()
    with export_prometheus(registry):
        sys.stdout.write(generate_latest(registry).decode() + APART)
        for seconds in durations(number):
            guard.call(clock.advance, seconds)
        sys.stdout.write(generate_latest(registry).decode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
