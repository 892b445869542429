"""Metrics and span events for OpenTelemetry; needs opentelemetry-api.

Promises:
- Metrics are read when a reader collects, and wait for no store.
- An event during a call is added to the span of the call.

OpenTelemetry has no observable histogram: its values are recorded one by one. So that calls do not
pay for it, the increase of each bucket is recorded at the next collection, as values of that bucket
with the right sum, and at most `RECORDED_A_SECOND` of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from operator import mul
from threading import Lock
from typing import Any, Final
from weakref import WeakKeyDictionary

try:
    from opentelemetry import metrics, trace
    from opentelemetry.metrics import CallbackOptions, Histogram, MeterProvider, Observation
except ImportError as error:
    raise ImportError(
        "export_opentelemetry() needs opentelemetry-api: pip install 'seawall[otel]'"
    ) from error

from seawall import _checks as check
from seawall._forks import survives_fork
from seawall.clients.llm.operations import Operation, observers
from seawall.clock import current_clock
from seawall.events import Event, subscribe
from seawall.events.log import Value, fields_of, values_of
from seawall.registry import snapshot
from seawall.telemetry import TelemetrySwitch
from seawall.telemetry.metrics import METRICS, Metric
from seawall.telemetry.readings import readings_of
from seawall.telemetry.series import CAP, Labels, MetricReading, Series

__all__ = ["export_opentelemetry"]

RECORDED_A_SECOND: Final = 200.0
"""Maximum number of values recorded for one histogram, per second since the last collection.

Of more values, a share of each bucket is recorded: the quantiles stay the same, the count is lower.
"""

RECORDED_ANYWAY: Final = 1000
"""Number of values that may be recorded in one collection, however soon it follows the last one."""

_sources: Final[WeakKeyDictionary[MeterProvider, _Source]] = WeakKeyDictionary()
_spans: Final[set[_Source]] = set()
"""The exports that want events in spans: each event is written once, however many there are."""
_stop_spans: Final[list[Callable[[], None]]] = []


def export_opentelemetry(
    meter_provider: MeterProvider | None = None, *, spans: bool = True, max_series: int = CAP
) -> TelemetrySwitch:
    """Add all metrics to `meter_provider` (by default the global one).

    With `spans`, events are added to the current span, if it is recorded. Up to `max_series` series
    of each metric have their own attributes; the rest are summed as "other". Returns a switch:
    `close()`, or the end of a `with` block, ends the export. A second call for the same provider
    replaces the first: its settings apply, the first switch is off, and counters continue.
    """
    provider = metrics.get_meter_provider() if meter_provider is None else meter_provider
    if not hasattr(provider, "get_meter"):
        raise TypeError(f"meter_provider={meter_provider!r}: pass a MeterProvider, or leave it out")
    cap = check.count("max_series", max_series, minimum=10)
    check.flag("spans", spans)
    source = _sources.get(provider)
    if source is not None and source.switch is not None:
        source.switch.close()
    if source is None:
        _sources[provider] = source = _Source()
        _instruments(provider, source)
    switch = TelemetrySwitch("export_opentelemetry()", source.stop)
    source.start(switch, cap)
    if spans:
        _spans.add(source)
        _switch_spans()
    return switch


class _Source:
    """The source that a provider's instruments read; it returns nothing while it is off.

    Instruments cannot be removed, so they stay, without values.
    """

    def __init__(self) -> None:
        self.switch: TelemetrySwitch | None = None
        self._series = Series()
        self._observations: dict[str, list[Observation]] = {}
        self._asked: set[str] = set()
        self.histograms: dict[str, Histogram] = {}
        self._recorded: dict[tuple[str, Labels], MetricReading] = {}
        self._clock = current_clock()
        self._recorded_at = self._clock.now()
        self._lock = Lock()
        survives_fork(self)

    def _after_fork(self) -> None:
        self._lock = Lock()  # another thread may have held it

    def start(self, switch: TelemetrySwitch, cap: int) -> None:
        with self._lock:
            self._series.cap, self._observations, self._asked = cap, {}, set()
            self.switch = switch

    def stop(self) -> None:
        self.switch = None
        _spans.discard(self)
        _switch_spans()

    def read(self, metric: Metric) -> list[Observation]:
        """Return the observations of `metric`; everything is read once for each collection.

        A collection calls each instrument once, so a second call starts another collection.
        """
        with self._lock:
            if self.switch is None:
                return []
            if not self._asked or metric.name in self._asked:
                self._observations, self._asked = self._read(), set()
            self._asked.add(metric.name)
            return self._observations.get(metric.name, [])

    def _read(self) -> dict[str, list[Observation]]:
        observations: dict[str, list[Observation]] = {}
        readings = self._series.bounded(readings_of(snapshot()))
        for metric, labels, value, _ in readings:
            if metric.kind != "histogram":
                attributes = dict(zip(metric.otel_labels, labels, strict=True))
                observations.setdefault(metric.name, []).append(Observation(value, attributes))
        self._record([one for one in readings if one.metric.kind == "histogram"])
        return observations

    def _record(self, found: list[MetricReading]) -> None:
        """Record the increase of the histograms since the last collection."""
        now = self._clock.now()
        most = max(RECORDED_ANYWAY, int((now - self._recorded_at) * RECORDED_A_SECOND))
        self._recorded_at = now
        recorded = self._recorded
        for one in found:
            key = one.metric.name, one.labels
            before = recorded.pop(key, None)
            recorded[key] = one  # moved to the end, as the most recent one
            pairs = zip(one.metric.otel_labels, one.labels, strict=True)
            attributes = {name: value for name, value in pairs if value}
            record = self.histograms[one.metric.name].record
            for value, times in values_since(before, one, most):
                for _ in range(times):
                    record(value, attributes)
        # Those that are gone are remembered as long as their counters: see `Series`.
        for _ in range(len(recorded) - len(found) - self._series.cap * len(self.histograms)):
            del recorded[next(iter(recorded))]


def values_since(
    before: MetricReading | None, now: MetricReading, most: int
) -> list[tuple[float, int]]:
    """Return values to record, and how often, for the increase of a histogram since `before`.

    Each value lies in its bucket, all at the same share of its width, so that they have the right
    sum. Of more than `most` values, the same share of each bucket is returned.
    """
    if before is None or before.value > now.value:  # it was reset
        before = now._replace(value=0.0, counts=(0.0,) * len(now.counts))
    counts = [max(0.0, new - old) for new, old in zip(now.counts, before.counts, strict=True)]
    total = sum(counts)
    if not total:
        return []
    bounds = now.metric.bounds
    edges = (0.0, *bounds, 2 * bounds[-1])
    widths = [upper - lower for lower, upper in pairwise(edges)]
    lowest = sum(map(mul, counts, edges))
    place = (now.value - before.value - lowest) / sum(map(mul, counts, widths))
    place = min(1.0, max(0.01, place))  # a lower bound belongs to the bucket below
    share = min(1.0, most / total)
    # Rounded by the running total, so that no bucket is favoured.
    ranks = [0, *(round(share * running) for running in accumulate(counts))]
    return [
        (lower + place * width, upto - since)
        for lower, width, (since, upto) in zip(edges, widths, pairwise(ranks), strict=False)
        if upto > since
    ]


def _instruments(provider: MeterProvider, source: _Source) -> None:
    meter = provider.get_meter("seawall")
    for metric in METRICS:
        if metric.kind == "histogram":
            source.histograms[metric.name] = meter.create_histogram(
                metric.otel_name,
                unit=metric.unit,
                description=metric.help,
                explicit_bucket_boundaries_advisory=metric.bounds,
            )
            continue
        make: Callable[..., Any] = meter.create_observable_gauge
        if metric.kind == "counter":
            make = meter.create_observable_counter
        make(metric.otel_name, [_reader(source, metric)], unit=metric.unit, description=metric.help)


def _reader(source: _Source, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
    return lambda _options: source.read(metric)


def _switch_spans() -> None:
    """Add events to spans while an export wants them."""
    if _spans and not _stop_spans:
        _stop_spans.append(subscribe(add_to_span))
        observers.append(describe_span)
    elif _stop_spans and not _spans:
        _stop_spans.pop()()
        observers.remove(describe_span)


def describe_span(operation: Operation) -> None:
    """Describe a request to a language model in the current span, if it is recorded."""
    span = trace.get_current_span()
    if not span.is_recording():
        return
    usage = operation.usage
    values: dict[str, Value | None] = {
        "gen_ai.operation.name": operation.name,
        "gen_ai.provider.name": operation.provider,
        "gen_ai.request.model": operation.request_model or None,
        "gen_ai.response.model": operation.response_model or None,
        "gen_ai.usage.input_tokens": operation.input_tokens,
        "gen_ai.usage.output_tokens": usage.output,
        "gen_ai.usage.cache_read.input_tokens": (usage.cached + usage.cached_input) or None,
        "gen_ai.response.time_to_first_chunk": operation.first_chunk,
        "error.type": operation.error or None,
        "seawall.llm.cost": operation.cost,
    }
    span.set_attributes({name: value for name, value in values.items() if value is not None})


def add_to_span(event: Event) -> None:
    """Add `event` to the current span, if there is one that is recorded."""
    span = trace.get_current_span()
    if span.is_recording():
        span.add_event(f"seawall.{event.name}", fields_of(values_of(event), "seawall."))
