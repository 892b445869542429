"""Latency as histograms: those of several processes are added, and have quantiles."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from bisect import bisect_left
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from prometheus_client import CollectorRegistry

import seawall
from seawall import Bulkhead, Guard
from seawall.clock import VirtualClock
from seawall.models.histogram import BOUNDS, Tally
from seawall.telemetry import export_opentelemetry, export_prometheus
from seawall.telemetry import otel as module
from seawall.telemetry.grafana.dashboard import grafana_dashboard
from seawall.telemetry.metrics import BY_NAME
from seawall.telemetry.readings import readings_of
from seawall.telemetry.series import OTHER, MetricReading, Series
from seawall.testing import run_virtual
from tests.support import let_pass, new_guard
from tests.telemetry.pod_process import APART, durations
from tests.telemetry.promql import EVERY, Prometheus

DURATION = BY_NAME["seawall_attempt_duration_seconds"]
PODS = range(3)


# Over pods


def _bucket(seconds: float) -> int:
    return bisect_left(BOUNDS, seconds)


def _p99_of_dashboard() -> str:
    (panel,) = [one for one in grafana_dashboard()["panels"] if one["title"].startswith("Duration")]
    (expr,) = [target["expr"] for target in panel["targets"] if "p99" in target["legendFormat"]]
    text: str = expr.replace("$__rate_interval", "1m")
    for variable in ("job", "instance", "guard"):
        text = text.replace(f'"${variable}"', '".*"')
    return text


def test_p99_of_three_pods_is_within_a_bucket_of_the_true_one():
    """Three processes are scraped, and the dashboard asks for the p99 of them all."""
    root = Path(__file__).parents[2]
    pods = [
        subprocess.Popen(  # noqa: S603 - our own
            [sys.executable, "-m", "tests.telemetry.pod_process", str(number)],
            cwd=root,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in PODS
    ]
    prometheus, alone = Prometheus(), Prometheus()
    for number, pod in zip(PODS, pods, strict=True):
        text, _ = pod.communicate(timeout=300)
        assert pod.returncode == 0
        for step, scrape in enumerate(text.split(APART)):
            prometheus.scrape(step * EVERY, scrape, instance=f"pod-{number}")
            if number == 2:
                alone.scrape(step * EVERY, scrape)
    everything = sorted(seconds for number in PODS for seconds in durations(number))
    true = everything[ceil(0.99 * len(everything)) - 1]
    (found,) = prometheus.ask(_p99_of_dashboard(), EVERY).values()
    assert abs(_bucket(found) - _bucket(true)) <= 1
    # The largest p99 of a pod is that of the one with few and slow calls.
    (largest,) = alone.ask(_p99_of_dashboard(), EVERY).values()
    assert abs(_bucket(largest) - _bucket(true)) > 1


# Prometheus


def _told(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"seawall_{name}", labels)


def test_prometheus_tells_buckets_sum_and_count():
    """Cumulative by bound, from the first scrape on."""
    clock = VirtualClock()
    guard = new_guard(Bulkhead(1), clock=clock)
    registry = CollectorRegistry()
    with export_prometheus(registry):
        name = "attempt_duration_seconds"
        assert _told(registry, f"{name}_count", guard=guard.name) == 0
        for seconds in (0.3, 0.3, 3.5):
            guard.call(clock.advance, seconds)
        assert _told(registry, f"{name}_bucket", guard=guard.name, le="0.25") == 0
        assert _told(registry, f"{name}_bucket", guard=guard.name, le="0.375") == 2
        assert _told(registry, f"{name}_bucket", guard=guard.name, le="4.0") == 3
        assert _told(registry, f"{name}_bucket", guard=guard.name, le="+Inf") == 3
        assert _told(registry, f"{name}_count", guard=guard.name) == 3
        total = _told(registry, f"{name}_sum", guard=guard.name)
    assert total == pytest.approx(4.1, rel=0.04)


def test_waiting_to_be_admitted_is_a_histogram():
    """Who waits for a slot and gets it is in it; who need not wait, or is refused, is not."""
    registry = CollectorRegistry()

    async def main() -> None:
        guard = Guard("waited", Bulkhead(1, max_wait=60.0))
        await asyncio.gather(*(guard.aattempt(let_pass, 2.0) for _ in range(3)))

    run_virtual(main())
    with export_prometheus(registry):
        name = "queue_wait_seconds"
        assert _told(registry, f"{name}_count", guard="waited") == 1
        assert _told(registry, f"{name}_bucket", guard="waited", le="1.5") == 0
        assert _told(registry, f"{name}_bucket", guard="waited", le="2.0") == 1
        assert _told(registry, f"{name}_sum", guard="waited") == pytest.approx(2.0)
    seawall.get_guard("waited").close()


def test_a_family_tells_the_durations_of_all_keys_also_of_those_it_forgot():
    """Else its histogram would fall when a key is evicted."""
    clock = VirtualClock()
    family = Guard.family("known keys", lambda _key: [Bulkhead(1)], max_keys=2, clock=clock)
    for key in "abcdef":
        family[key].call(clock.advance, 0.3)
        clock.advance(3600.0)
    seen = family.snapshot()
    family.close()
    assert seen["family"]["evicted"] > 0
    assert sum(seen["histogram"]["counts"]) == 6


# Series


def _guards(*tallies: tuple[str, Tally]) -> dict[str, Any]:
    return {"guard": [{"name": name, "histogram": one.snapshot()} for name, one in tallies]}


def _tally(*values: float) -> Tally:
    tally = Tally()
    for value in values:
        tally.add(value)
    return tally


def test_a_histogram_counts_as_one_series():
    """The cap is for names, and a name has many buckets."""
    guards = _guards(*((f"g{number:02}", _tally(0.1, 1.0, 10.0)) for number in range(15)))
    told = Series(10).bounded(readings_of(guards))
    found = {one.labels[0]: one for one in told if one.metric is DURATION}
    assert len(found) == 11
    assert sum(found[OTHER].counts) == 15
    (folded,) = [
        one.value
        for one in told
        if one.metric.name == "seawall_series_folded" and one.labels == (DURATION.name,)
    ]
    assert folded == 5


@given(st.lists(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.floats(0, 90)))), min_size=1))
def test_no_bucket_ever_falls_whoever_goes(lives: list[list[tuple[str, list[float]]]]):
    """So a rate is right, and a larger bound never has fewer values."""
    series, before = Series(10), {}
    for guards in lives:
        shown = _guards(*((name, _tally(*values)) for name, values in guards))
        for one in series.bounded(readings_of(shown)):
            old = before.get((one.metric.name, one.labels))
            if old is not None and one.metric is DURATION:
                assert all(new >= was for new, was in zip(one.counts, old.counts, strict=True))
                assert one.value >= old.value
            before[one.metric.name, one.labels] = one


@pytest.mark.parametrize("counts", [[1, 2], "no", None, [1] * 99])
def test_buckets_of_another_shape_are_left_out(counts: Any):
    """A policy of the user's own may show anything."""
    shown = {"guard": [{"name": "v", "histogram": {"counts": counts, "sum": 1.0}, "failed": 2}]}
    told = readings_of(shown)
    assert not [one for one in told if one.metric is DURATION]
    assert any(one.value == 2 for one in told)


# OpenTelemetry


def _points(reader: InMemoryMetricReader) -> dict[str, HistogramDataPoint]:
    data = reader.get_metrics_data()
    assert data is not None
    return {
        point.attributes["guard"]: point
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
        if metric.name == "seawall.attempt_duration"
        for point in metric.data.data_points
    }


def test_opentelemetry_has_the_same_buckets_and_sum():
    """What was counted between two collections is recorded once, when the second begins."""
    clock = VirtualClock()
    guard = new_guard(Bulkhead(1), clock=clock)
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    with export_opentelemetry(provider, spans=False):
        for seconds in (0.3, 0.3, 3.5):
            guard.call(clock.advance, seconds)
        point = _points(reader)[guard.name]
        assert tuple(point.explicit_bounds) == BOUNDS
        assert point.bucket_counts[bisect_left(BOUNDS, 0.3)] == 2
        assert point.bucket_counts[bisect_left(BOUNDS, 3.5)] == 1
        assert point.sum == pytest.approx(4.1, rel=0.04)
        assert _points(reader)[guard.name].count == 3
        guard.call(clock.advance, 0.3)
        assert _points(reader)[guard.name].count == 4
    guard.call(clock.advance, 0.3)
    with export_opentelemetry(provider, spans=False):
        assert _points(reader)[guard.name].count == 5
    provider.shutdown()


def test_opentelemetry_records_nothing_twice_when_a_guard_comes_back(monkeypatch):
    """Its counters go on from where they were, and so does what is recorded of them."""
    shown: dict[str, Any] = _guards(("v", _tally(1.0, 2.0)))
    monkeypatch.setattr(module, "snapshot", lambda: shown)
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    with export_opentelemetry(provider, spans=False):
        assert _points(reader)["v"].count == 2
        shown = {"guard": []}
        reader.get_metrics_data()
        shown = _guards(("v", _tally(1.0)))
        assert _points(reader)["v"].count == 3
    provider.shutdown()


VALUES = st.lists(st.floats(0.0001, 100.0).filter(lambda value: value not in BOUNDS))


def _reading(values: list[float]) -> MetricReading:
    tally = _tally(*values)
    return MetricReading(DURATION, ("v",), tally.sum, tuple(tally.counts))


@given(before=VALUES, since=VALUES)
def test_recorded_values_have_the_right_buckets_and_sum(before: list[float], since: list[float]):
    """As if each had been recorded when it came."""
    first, second = _reading(before), _reading(before + since)
    recorded = Tally()
    for value, times in module.values_since(first, second, 10_000):
        for _ in range(times):
            recorded.add(value)
    assert recorded.counts == _tally(*since).counts
    if all(0.001 < value < 60.0 for value in since):
        assert recorded.sum == pytest.approx(sum(since), rel=0.02)


@given(st.lists(st.floats(0.001, 60.0), min_size=1, max_size=300), st.integers(50, 100))
def test_of_too_many_values_a_fair_share_is_recorded(values: list[float], most: int):
    """Their number is bounded, and each share of them lies below the same bounds, as before."""
    found = _reading(values)
    recorded = module.values_since(None, found, most)
    number = sum(times for _, times in recorded)
    assert number == min(most, len(values))
    for bound in range(len(found.counts)):
        true = sum(found.counts[: bound + 1]) / len(values)
        below = sum(times for value, times in recorded if _bucket(value) <= bound) / number
        assert below == pytest.approx(true, abs=1 / number)


def test_bounds_grow():
    """Each bucket is half as wide again as the one before, at most."""
    assert all(1.3 < upper / lower <= 1.5 for lower, upper in pairwise(BOUNDS))
