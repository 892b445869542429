"""Metrics for Prometheus, read at each scrape; needs prometheus-client.

Promises:
- Nothing is done between two scrapes.
- A scrape waits for no store and no database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from threading import Lock
from typing import Final
from weakref import WeakKeyDictionary

try:
    from prometheus_client import REGISTRY, CollectorRegistry
except ImportError as error:
    raise ImportError(
        "export_prometheus() needs prometheus-client: pip install 'seawall[prometheus]'"
    ) from error

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from seawall import _checks as check
from seawall._forks import survives_fork
from seawall.registry import snapshot
from seawall.telemetry import TelemetrySwitch
from seawall.telemetry.metrics import METRICS, Metric
from seawall.telemetry.readings import readings_of
from seawall.telemetry.series import CAP, Series

__all__ = ["export_prometheus"]

_BOUNDS: Final = {
    metric.name: [*map(floatToGoString, metric.bounds), "+Inf"]
    for metric in METRICS
    if metric.kind == "histogram"
}

AnyFamily = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

_KINDS: Final[dict[str, Callable[..., AnyFamily]]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}

_exports: Final[WeakKeyDictionary[CollectorRegistry, tuple[TelemetrySwitch, SeawallCollector]]] = (
    WeakKeyDictionary()
)


def export_prometheus(
    registry: CollectorRegistry | None = None, *, max_series: int = CAP
) -> TelemetrySwitch:
    """Add all metrics to `registry` (by default the default one of prometheus-client).

    Up to `max_series` series of each metric have their own labels; the rest are summed as "other".
    Returns a switch: `close()`, or the end of a `with` block, removes the metrics. A second call
    for the same registry replaces the first: its settings apply, the first switch is off, and
    counters continue.
    """
    target = REGISTRY if registry is None else registry
    if not isinstance(target, CollectorRegistry):
        raise TypeError(f"registry={registry!r}: pass a CollectorRegistry, or leave it out")
    cap = check.count("max_series", max_series, minimum=10)
    if target in _exports:
        replaced, collector = _exports[target]
        replaced.close()
        collector.series.cap = cap
    else:
        collector = SeawallCollector(cap)

    def off() -> None:
        _exports.pop(target, None)
        target.unregister(collector)

    target.register(collector)
    switch = TelemetrySwitch("export_prometheus()", off)
    _exports[target] = switch, collector
    return switch


class SeawallCollector(Collector):
    """Reads all live objects at each scrape."""

    def __init__(self, max_series: int) -> None:
        self.series = Series(max_series)
        self._lock = Lock()
        survives_fork(self)

    def _after_fork(self) -> None:
        self._lock = Lock()  # another thread may have held it

    def describe(self) -> Iterator[Family]:
        """Return the metrics without values, which reserves their names."""
        return (_family(metric) for metric in METRICS)

    def collect(self) -> Iterator[Family]:
        """Return the metrics that have values now."""
        # Covers the snapshot too: of two concurrent scrapes, the older must come first.
        with self._lock:
            readings = self.series.bounded(readings_of(snapshot()))
        families: dict[str, AnyFamily] = {}
        for reading in readings:
            metric = reading.metric
            family = families.get(metric.name)
            if family is None:
                family = families[metric.name] = _family(metric)
            if isinstance(family, HistogramMetricFamily):
                # The number of values up to each bound.
                counts = zip(_BOUNDS[metric.name], accumulate(reading.counts), strict=True)
                family.add_metric(reading.labels, list(counts), reading.value)
            else:
                family.add_metric(reading.labels, reading.value)
        yield from families.values()


def _family(metric: Metric) -> AnyFamily:
    unit = "seconds" if metric.unit == "s" else ""
    return _KINDS[metric.kind](metric.name, metric.help, labels=metric.labels, unit=unit)
