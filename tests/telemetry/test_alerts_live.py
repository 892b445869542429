"""Whether the alerts fire for what really goes on in a process, read as Prometheus reads it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from seawall import Breaker, Guard, Retry, RetryBudget
from seawall.clock import VirtualClock
from seawall.jobs import LocalQueue
from seawall.registry import answered
from seawall.telemetry import export_prometheus
from seawall.telemetry import thresholds as threshold
from seawall.telemetry.alerts import alert_rules
from seawall.telemetry.readings import spent_share
from seawall.testing import virtual_time
from seawall.web import Health
from tests.telemetry.promql import EVERY, Prometheus, Rule
from tests.telemetry.world import World

yaml = pytest.importorskip("yaml")
(GROUP,) = yaml.safe_load(alert_rules())["groups"]
RULES = {rule["alert"]: rule for rule in GROUP["rules"]}


class Watched:
    """A process that is scraped, and rules that are looked at, in virtual time."""

    def __init__(self, clock: Any, *names: str) -> None:
        self.clock = clock
        self.registry = CollectorRegistry()
        self.prometheus = Prometheus()
        self.rules = {name: Rule(RULES[name]) for name in names}

    def firing(self, seconds: float, work: Callable[[], object]) -> set[str]:
        """Work for so long, once each second, and return what fires at the end."""
        fired: set[str] = set()
        for second in range(int(seconds)):
            work()
            self.clock.sleep(1.0)
            if second % EVERY == 0:
                now = self.clock.now()
                self.prometheus.scrape(now, generate_latest(self.registry).decode())
                fired = {
                    name for name, rule in self.rules.items() if rule.look(self.prometheus, now)
                }
        return fired


def _down() -> None:
    raise ConnectionRefusedError


async def _lost() -> None:
    raise ConnectionRefusedError


def test_an_outage_is_told_and_then_over():
    """A real guard: nothing fires while all is well, then circuit and errors do, then nothing."""
    with virtual_time() as clock:
        guard = Guard("alerts-vendor", Breaker(consecutive=3, break_for=10.0))
        watched = Watched(clock, "SeawallCircuitOpenRate", "SeawallErrorRatio")
        with export_prometheus(watched.registry):
            assert watched.firing(360, lambda: guard.attempt(str)) == set()
            assert watched.firing(720, lambda: guard.attempt(_down)) == set(watched.rules)
            assert watched.firing(720, lambda: guard.attempt(str)) == set()
        guard.close()


def test_a_spent_budget_is_told_and_then_over():
    """A real budget: it ends with the outage, though the budget is far from refilled."""
    with virtual_time() as clock:
        retry = Retry(on=OSError, attempts=3, backoff=0, budget=RetryBudget())
        guard = Guard("alerts-budget", retry)
        watched = Watched(clock, "SeawallRetryBudgetSpent")
        with export_prometheus(watched.registry):
            assert watched.firing(360, lambda: guard.attempt(str)) == set()
            assert watched.firing(720, lambda: guard.attempt(_down)) == set(watched.rules)
            seconds = count()
            seldom = lambda: next(seconds) % 20 or guard.attempt(str)  # noqa: E731
            assert watched.firing(720, seldom) == set()
        assert spent_share(guard.snapshot()["policies"][0]["budget"]) == threshold.BUDGET_SPENT
        guard.close()


def test_a_queue_that_stands_is_told_and_then_over():
    """A real queue: what nobody takes grows old."""
    with virtual_time() as clock:
        queue = LocalQueue("alerts-queue")
        watched = Watched(clock, "SeawallQueueOld")
        with export_prometheus(watched.registry):
            assert watched.firing(120, list) == set()
            queue.push("job")
            assert watched.firing(420, list) == set(watched.rules)
            (claim,) = queue.claim()
            queue.ack(claim)
            assert watched.firing(60, list) == set()


def test_an_outbox_that_stands_is_told_and_then_over(world: World):
    """A real outbox: what a database said of it is what the rule sees."""
    watched = Watched(VirtualClock(), "SeawallOutboxOld")

    def told(age: float) -> Callable[[], None]:
        said = {"pending": 1, "oldest_age": age, "dead": 0, "blocked": 0}
        return lambda: answered(world.outbox, said)

    with export_prometheus(watched.registry):
        assert watched.firing(300, told(59.0)) == set()
        assert watched.firing(300, told(61.0)) == set(watched.rules)
        assert watched.firing(60, told(0.0)) == set()


def test_one_store_of_two_that_is_down_is_told(monkeypatch: pytest.MonkeyPatch):
    """Two stores of one name, two policies of one guard: those that are well do not hide it."""
    up = [True, True]

    def snapshot() -> dict[str, Any]:
        modes = ["shared" if one else "local" for one in up]
        policies = [{"policy": "rate_limit", "shared": {"mode": mode}} for mode in modes]
        return {
            "guard": [{"name": "vendor", "policies": policies}],
            "store": [{"name": "redis", "up": one} for one in up],
        }

    monkeypatch.setattr("seawall.telemetry.prometheus.snapshot", snapshot)
    watched = Watched(VirtualClock(), "SeawallStoreLost", "SeawallPolicyAlone")
    with export_prometheus(watched.registry):
        assert watched.firing(720, list) == set()
        up[1] = False
        assert watched.firing(720, list) == set(watched.rules)
        up[1] = True
        assert watched.firing(60, list) == set()


def test_two_that_are_wrong_are_told_as_one_is():
    """Both breakers of a guard isolated by hand, and two services of one name unhealthy."""
    with virtual_time() as clock:
        breakers = Breaker(consecutive=1), Breaker(failure_ratio=0.5)
        guard = Guard("alerts-two", *breakers)
        services = [Health(name="alerts-service") for _ in "ab"]
        for service in services:
            service.add("database", _lost, failures=1)
        watched = Watched(clock, "SeawallBreakerIsolated", "SeawallUnhealthy")
        with export_prometheus(watched.registry):
            assert watched.firing(60, list) == set()
            for breaker in breakers:
                breaker.isolate()
            for service in services:
                assert asyncio.run(service.state_of("ready")) == "unhealthy"
            lasts = threshold.ISOLATED_SECONDS + 60
            assert watched.firing(lasts, list) == set(watched.rules)
        guard.close()


@pytest.mark.usefixtures("world")
def test_every_rule_can_be_answered_of_a_real_process():
    """Each metric and each value of a label that a rule asks for is told by a real process."""
    registry, prometheus = CollectorRegistry(), Prometheus()
    with export_prometheus(registry):
        for step in range(4):
            prometheus.scrape(step * EVERY, generate_latest(registry).decode())
    unanswered = set()
    for name, rule in RULES.items():
        (about, *_) = re.split(r"\s(?:>|>=|==)\s", rule["expr"])
        if not prometheus.ask(about, 3 * EVERY):
            unanswered.add(name)
    # No retry was refused, all can be read, names are few.
    expected = {"RetryBudgetSpent", "Unreadable", "SeriesFolded"}
    assert unanswered == {f"Seawall{name}" for name in expected}
