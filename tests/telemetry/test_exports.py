from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

import seawall
from seawall import Breaker, Bulkhead, Guard, Retry
from seawall.clock import VirtualClock
from seawall.events import BreakerChanged, CallRejected
from seawall.events.bus import emit, listening
from seawall.telemetry import METRICS, export_opentelemetry, export_prometheus, log_events
from tests.support import new_guard


def _refused() -> None:
    raise ConnectionRefusedError


def _samples(registry: CollectorRegistry) -> dict[tuple[Any, ...], float]:
    families = parse_text(generate_latest(registry).decode())
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.fixture
def awkward() -> Iterator[Guard]:
    """Return a guard whose name has all that must be escaped."""
    guard = Guard('we said "no"\\\n{a="b"} é', Breaker(), Bulkhead(1))
    yield guard
    guard.close()


# Prometheus


@pytest.mark.usefixtures("world", "awkward")
def test_prometheus_output_parses_with_the_official_parsers():
    """As text and as OpenMetrics, with every kind of thing and awkward names in it."""
    registry = CollectorRegistry()
    with export_prometheus(registry):
        text = list(parse_text(generate_latest(registry).decode()))
        openmetrics = list(parse_openmetrics(exposition.generate_latest(registry).decode()))
        for families in (text, openmetrics):
            known = {family.name: family for family in families}
            assert len(known) > 50
            for metric in METRICS:
                family = known.get(metric.name.removesuffix("_total"))
                if family is not None:
                    assert family.type == metric.kind
                    for one in family.samples:
                        assert set(one.labels) - {"le"} == set(metric.labels)


def test_prometheus_reads_when_it_is_asked():
    """Two scrapes, two readings; in between nothing is done."""
    registry = CollectorRegistry()
    guard = new_guard(Bulkhead(1))
    with export_prometheus(registry):
        assert not listening()
        before = _samples(registry)
        guard.attempt(_refused)
        after = _samples(registry)
    key = ("seawall_attempts_total", guard.name, "failed")
    assert (before[key], after[key]) == (0, 1)


def test_prometheus_can_be_switched_off_and_on_again():
    """Closed, it exports nothing."""
    registry = CollectorRegistry()
    switch = export_prometheus(registry)
    assert repr(switch) == "<export_prometheus(): on>"
    switch.close()
    switch.close()
    assert repr(switch) == "<export_prometheus(): off>"
    assert generate_latest(registry) == b""
    with export_prometheus(registry):
        assert generate_latest(registry)


def test_second_prometheus_export_replaces_the_first():
    """The later settings apply, and the first switch no longer closes anything."""
    registry = CollectorRegistry()
    kept = [new_guard(Bulkhead(1)) for _ in range(30)]
    first = export_prometheus(registry)
    second = export_prometheus(registry, max_series=10)
    assert (repr(first), repr(second)) == (
        "<export_prometheus(): off>",
        "<export_prometheus(): on>",
    )
    first.close()
    samples = _samples(registry)
    assert samples["seawall_series_folded", "seawall_retries_total"] >= len(kept) - 10
    second.close()
    assert generate_latest(registry) == b""


def test_counters_do_not_fall_when_a_prometheus_export_is_replaced():
    """A notebook that runs its cells again has another guard of the same name, and goes on."""
    registry = CollectorRegistry()
    guard = new_guard(Retry(on=OSError, attempts=1))
    key = ("seawall_attempts_total", guard.name, "failed")
    with export_prometheus(registry):
        for _ in range(3):
            guard.attempt(_refused)
        assert _samples(registry)[key] == 3
        guard.close()
        assert key not in _samples(registry)
        again = Guard(guard.name, Retry(on=OSError, attempts=1))
        with export_prometheus(registry):
            again.attempt(_refused)
            assert _samples(registry)[key] == 4
        again.close()


def test_default_registry_can_be_exported_to_again():
    """As an app factory does that is called twice."""
    with export_prometheus(), export_prometheus():
        assert b"seawall_autoscale_load" in generate_latest()
    assert b"seawall_autoscale_load" not in generate_latest()


def test_prometheus_bounds_its_series():
    """Guards beyond the cap are told together."""
    registry = CollectorRegistry()
    kept = [new_guard(Bulkhead(1)) for _ in range(30)]
    with export_prometheus(registry, max_series=10):
        told = _samples(registry)
    assert len([key for key in told if key[0] == "seawall_retries_total"]) == 11
    assert told["seawall_series_folded", "seawall_retries_total"] >= len(kept) - 10


def test_bad_arguments_say_what_to_write():
    """Where they are given."""
    with pytest.raises(TypeError, match="pass a CollectorRegistry, or leave it out"):
        export_prometheus("localhost")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pass a MeterProvider, or leave it out"):
        export_opentelemetry(7)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pass a logger of the standard logging, or its name"):
        log_events(7)  # type: ignore[arg-type]


def test_a_success_does_nothing_for_telemetry_that_is_on(monkeypatch):
    """All switched on, a call that goes well reads nothing and tells nothing."""
    done: list[object] = []
    for exporter in ("prometheus", "otel"):
        monkeypatch.setattr(f"seawall.telemetry.{exporter}.snapshot", lambda: done.append(1) or {})
    provider = MeterProvider(shutdown_on_exit=False)
    guarded = new_guard(Retry(on=OSError), Breaker(), Bulkhead(1))(lambda: "answer")
    stop = seawall.subscribe(done.append)
    with export_prometheus(CollectorRegistry()), export_opentelemetry(provider), log_events():
        for _ in range(1000):
            assert guarded() == "answer"
    stop()
    assert not done


# OpenTelemetry


def _points(reader: InMemoryMetricReader) -> dict[str, dict[tuple[Any, ...], float]]:
    data = reader.get_metrics_data()
    if data is None:
        return {}
    return {
        metric.name: {
            tuple(point.attributes.values()): getattr(point, "value", point)
            for point in metric.data.data_points
        }
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


@pytest.fixture
def reader() -> Iterator[tuple[InMemoryMetricReader, MeterProvider]]:
    """Return a reader and its provider."""
    made = InMemoryMetricReader()
    provider = MeterProvider([made], shutdown_on_exit=False)
    yield made, provider
    provider.shutdown()


@pytest.mark.usefixtures("world")
def test_opentelemetry_is_read_in_memory(reader: Any):
    """Each metric that has a value is there, as Prometheus tells it."""
    memory, provider = reader
    registry = CollectorRegistry()
    with export_opentelemetry(provider, spans=False), export_prometheus(registry):
        points = _points(memory)
        names = {key[0] for key in _samples(registry)}
    # Of a histogram without values there is nothing to record.
    assert set(points) == {
        metric.otel_name
        for metric in METRICS
        if metric.name in names
        or (f"{metric.name}_count" in names and metric.otel_name != "seawall.pool_wait")
    } - {"seawall.queue_wait"}
    assert points["seawall.attempts"]["w-vendor", "failed"] == 2
    assert points["seawall.outbox_age"]["w-outbox",] >= 0


def test_opentelemetry_reads_anew_for_each_collection(reader: Any, monkeypatch):
    """Everything is read once a collection, however many instruments there are."""
    memory, provider = reader
    guard = new_guard(Bulkhead(1))
    asked: list[object] = []
    monkeypatch.setattr(
        "seawall.telemetry.otel.snapshot", lambda: asked.append(1) or seawall.snapshot()
    )
    with export_opentelemetry(provider, spans=False):
        assert _points(memory)["seawall.attempts"][guard.name, "failed"] == 0
        guard.attempt(_refused)
        assert _points(memory)["seawall.attempts"][guard.name, "failed"] == 1
    assert len(asked) == 2


def test_second_opentelemetry_export_replaces_the_first(reader: Any):
    """The later settings apply, and the first switch no longer closes anything."""
    memory, provider = reader
    first = export_opentelemetry(provider)
    assert listening()
    with export_opentelemetry(provider, spans=False):
        first.close()
        assert repr(first) == "<export_opentelemetry(): off>"
        assert not listening()
        points = _points(memory)
        assert len(points["seawall.autoscale_load"]) == 1
    assert not _points(memory)


def test_opentelemetry_can_be_switched_off_and_on_again(reader: Any):
    """Closed, its instruments tell nothing; on again, they do."""
    memory, provider = reader
    switch = export_opentelemetry(provider)
    assert listening()
    switch.close()
    assert not listening()
    assert not _points(memory)
    with export_opentelemetry(provider):
        assert "seawall.autoscale_load" in _points(memory)


def test_what_happens_in_a_call_is_an_event_of_its_span():
    """A retry, an open breaker, a refusal: with their values, once however many exports."""
    memory = InMemorySpanExporter()
    tracing = TracerProvider(shutdown_on_exit=False)
    tracing.add_span_processor(SimpleSpanProcessor(memory))
    guard = new_guard(Retry(on=OSError, attempts=2, backoff=0), Breaker(consecutive=1))
    first, second = (export_opentelemetry(MeterProvider(shutdown_on_exit=False)) for _ in "ab")
    guard.attempt(_refused)  # in no span: nowhere to tell it
    guard.policies[1].close()  # type: ignore[attr-defined]
    first.close()
    with second, tracing.get_tracer("test").start_as_current_span("request"):
        guard.attempt(_refused)
    (span,) = memory.get_finished_spans()
    told = {event.name: dict(event.attributes or {}) for event in span.events}
    assert len(told) == len(span.events)
    assert told["seawall.call_retried"]["seawall.guard"] == guard.name
    assert told["seawall.call_retried"]["seawall.attempt"] == 1
    assert told["seawall.breaker_changed"]["seawall.after"] == "open"
    assert not listening()
    tracing.shutdown()


# Logs


def test_an_event_is_a_record_with_fields(caplog: pytest.LogCaptureFixture):
    """Fields have names of their own, which clash with nothing of a record's or of structlog's."""
    with log_events():
        emit(BreakerChanged, "vendor", before="closed", after="open", cause="x", key=None)
        emit(CallRejected, "vendor", policy="breaker", reason="circuit_open", enforced=True)
    first, second = caplog.records
    assert first.getMessage() == "breaker_changed in 'vendor': closed -> open (x)"
    assert (first.name, first.levelno) == ("seawall.events", logging.WARNING)
    plain = set(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
    fields = {name: value for name, value in vars(first).items() if name not in plain}
    assert fields == {
        "seawall_event": "breaker_changed",
        "seawall_guard": "vendor",
        "seawall_before": "closed",
        "seawall_after": "open",
        "seawall_cause": "x",
        "seawall_reason": "",
        "seawall_failure": "",
    }
    assert vars(second)["seawall_enforced"] is True


def test_a_flood_is_some_records_and_a_number(caplog: pytest.LogCaptureFixture):
    """After the burst one a second of each sort, which tells how many were left out."""
    clock = VirtualClock()
    fields = {"policy": "breaker", "reason": "circuit_open", "enforced": True}
    with log_events(burst=3, clock=clock, level=logging.ERROR):
        for _ in range(1000):
            emit(CallRejected, "vendor", **fields)
        emit(CallRejected, "other", **fields)
        clock.advance(1)
        emit(CallRejected, "vendor", **fields)
    told = [(vars(r)["seawall_guard"], vars(r).get("seawall_left_out")) for r in caplog.records]
    assert told == [("vendor", None)] * 3 + [("other", None), ("vendor", 997)]
    assert {record.levelno for record in caplog.records} == {logging.ERROR}


def test_ten_thousand_names_do_not_fill_memory(caplog: pytest.LogCaptureFixture):
    """Beyond a thousand sorts the rest is bounded together."""
    fields = {"policy": "breaker", "reason": "circuit_open", "enforced": True}
    with log_events(burst=1, clock=VirtualClock()):
        for number in range(10_000):
            emit(CallRejected, f"guard {number}", **fields)
    assert len(caplog.records) == 1001


def test_a_handler_that_is_itself_guarded_does_not_go_round():
    """What the writing of a record causes is not written."""
    logger = logging.getLogger("seawall.test.guarded")
    logger.propagate = False
    written = []

    class Guarded(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(record)
            emit(CallRejected, "log", policy="breaker", reason="circuit_open", enforced=True)

    handler = Guarded()
    logger.addHandler(handler)
    with log_events(logger):
        emit(CallRejected, "vendor", policy="breaker", reason="circuit_open", enforced=True)
    logger.removeHandler(handler)
    assert len(written) == 1


def test_second_log_for_a_logger_replaces_the_first(caplog: pytest.LogCaptureFixture):
    """Each event is written once, at the later level; another logger is not concerned."""
    logger = logging.getLogger("seawall.test.a")
    with log_events("seawall.test.b"), log_events("seawall.test.a") as first:
        with log_events(logger, level=logging.ERROR):
            first.close()
            emit(CallRejected, "vendor", policy="breaker", reason="circuit_open", enforced=True)
        assert listening()
    assert not listening()
    assert [(one.name, one.levelname) for one in caplog.records] == [
        ("seawall.test.b", "WARNING"),
        ("seawall.test.a", "ERROR"),
    ]
