"""Counters never fall, whoever goes: what is told of them is good for a rate."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider, ObservableCounter
from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader
from prometheus_client import CollectorRegistry

from seawall.resources import Channel
from seawall.telemetry import export_opentelemetry, export_prometheus
from seawall.telemetry.metrics import BY_NAME
from seawall.telemetry.prometheus import SeawallCollector
from seawall.telemetry.readings import readings_of
from seawall.telemetry.series import OTHER, Series, _Counter, _Remembered, combined
from tests.support import falsified

PUT = {"channel": "ws", "result": "put"}


class Told:
    """What an exporter tells of the retries of guards, one time after another."""

    def __init__(self, cap: int = 10) -> None:
        self.series = Series(cap)

    def after(self, *guards: tuple[str, float]) -> dict[str, float]:
        """Return what is told by name while these guards live, each with what it has counted."""
        shown = {"guard": [{"name": name, "retries": number} for name, number in guards]}
        return {
            one.labels[0]: one.value
            for one in self.series.bounded(readings_of(shown))
            if one.metric.name == "seawall_retries_total"
        }


# One of several goes


def test_a_counter_stays_when_one_of_several_goes():
    """What the one had counted was told, and stays so; what the others count comes on top."""
    told = Told()
    assert told.after(("ws", 100), ("ws", 50)) == {"ws": 150}
    assert told.after(("ws", 50)) == {"ws": 150}
    assert told.after(("ws", 57)) == {"ws": 157}
    assert told.after(("ws", 57), ("ws", 3)) == {"ws": 160}


def test_prometheus_sees_no_new_beginning_when_channels_close():
    """Ten channels of one name close one by one: of what it would count again there is nothing."""
    registry = CollectorRegistry()
    channels = [Channel(10, name="ws") for _ in range(10)]
    for channel in channels:
        channel.put(1)
    del channel
    seen = []
    with export_prometheus(registry):
        while channels:
            seen.append(registry.get_sample_value("seawall_channel_items_total", PUT))
            channels.pop()
    assert seen == [10.0] * 10


def test_opentelemetry_tells_no_negative_delta():
    """Nor when all have gone and others come, which have counted less."""
    delta = {ObservableCounter: AggregationTemporality.DELTA}
    reader = InMemoryMetricReader(preferred_temporality=delta)  # type: ignore[arg-type]
    provider = MeterProvider([reader], shutdown_on_exit=False)
    channels: list[Channel[int]] = []

    def told() -> list[float]:
        data = reader.get_metrics_data()
        assert data is not None
        return [
            point.value
            for metric in data.resource_metrics[0].scope_metrics[0].metrics
            if metric.name == "seawall.channel_items"
            for point in metric.data.data_points
            if point.attributes == PUT
        ]

    with export_opentelemetry(provider, spans=False):
        for items in (5, 5):
            channels.append(Channel(10, name="ws"))
            for _ in range(items):
                channels[-1].put(1)
        assert told() == [10]
        channels.pop()
        assert told() == [0]
        channels.clear()
        assert sum(told()) == 0
        channels.append(Channel(10, name="ws"))
        channels[0].put(1)
        assert told() == [1]
    provider.shutdown()


# All of a series go


def test_a_series_that_comes_back_goes_on():
    """A new thing of the name begins at 0, its series where it was."""
    told = Told()
    told.after(("ws", 100), ("x", 1))
    assert told.after(("x", 1)) == {"x": 1}
    assert told.after(("ws", 4), ("x", 1)) == {"ws": 104, "x": 1}
    assert told.after() == {}
    assert told.after(("ws", 5)) == {"ws": 105}


def test_who_cannot_be_read_once_is_not_counted_twice():
    """A snapshot that failed is a series that is missing once: it goes on from what was told."""
    told = Told()
    told.after(("v", 100))
    told.after()
    assert told.after(("v", 103)) == {"v": 103}


def test_what_has_gone_does_not_fill_memory():
    """Of series that are gone as many are remembered as may be told, the last ones."""
    told = Told(10)
    for number in range(1000):
        told.after((f"g{number}", 1))
    told.after()
    for remembered in told.series._counters["seawall_retries_total"]._state:
        assert list(remembered.gone) == [(f"g{number}",) for number in range(990, 1000)]
        assert not remembered.there


# The rest, told together


def test_other_stays_when_one_gets_a_name_of_its_own():
    """Who moves out of "other" begins anew, and nothing is told twice."""
    told = Told(10)
    guards = [(f"g{number:02}", 100.0) for number in range(15)]
    assert told.after(*guards)[OTHER] == 500
    after = told.after(*guards[1:])
    assert (after[OTHER], after["g10"]) == (500, 0)
    after = told.after(*guards[1:10], ("g10", 107), *guards[11:14], ("g14", 101))
    assert (after[OTHER], after["g10"]) == (501, 7)


def test_who_loses_its_name_is_not_told_twice():
    """One that has more series than there is room for joins "other" with what is new only."""
    series = Series(10)

    def told(**outcomes: int) -> dict[tuple[str, ...], float]:
        others = [{"name": f"g{number}", "succeeded": 1} for number in range(9)]
        shown = {"guard": [*others, {"name": "much", **outcomes}]}
        return {
            one.labels: one.value
            for one in series.bounded(readings_of(shown))
            if one.metric.name == "seawall_attempts_total"
        }

    assert told(failed=100)["much", "failed"] == 100
    after = told(failed=101, succeeded=2)
    assert {key: value for key, value in after.items() if key[0] in {"much", OTHER}} == {
        (OTHER, "failed"): 1,
        (OTHER, "succeeded"): 2,
    }


# Whoever comes and goes

LIVES = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=15), max_size=8
)


def _never_falls(lives: list[list[tuple[str, int]]]) -> None:
    told = Told(2)
    retries = "seawall_retries_total"  # with room to remember all: what is forgotten begins anew
    told.series._counters[retries] = _Counter(BY_NAME[retries], cap=100)
    highest: dict[str, float] = {}
    for guards in lives:
        for name, value in told.after(*guards).items():
            assert value >= highest.get(name, 0.0)
            highest[name] = value


@given(LIVES)
def test_no_series_ever_falls(lives: list[list[tuple[str, int]]]):
    """Whatever comes, goes, and moves between its own series and "other"."""
    _never_falls(lives)


def test_a_sum_of_what_lives_would_fall(monkeypatch: pytest.MonkeyPatch):
    """That what was told is remembered is what keeps it from falling."""
    monkeypatch.setattr(
        _Counter, "exported", lambda _self, readings: combined(form for _, form in readings)
    )
    assert falsified(_never_falls, LIVES)


def test_exporters_know_nothing_of_each_other():
    """One that is switched on later tells what lives then."""
    first, second = CollectorRegistry(), CollectorRegistry()
    channels = [Channel(10, name="ws") for _ in range(2)]
    for channel in channels:
        channel.put(1)
    del channel

    def told(registry: CollectorRegistry) -> float | None:
        return registry.get_sample_value("seawall_channel_items_total", PUT)

    with export_prometheus(first):
        assert told(first) == 2
        channels.pop()
        with export_prometheus(second):
            assert (told(first), told(second)) == (2, 1)


def test_of_two_scrapes_at_once_the_older_comes_first(monkeypatch: pytest.MonkeyPatch):
    """One that overtook another would make what was counted in between look new once more."""
    collector = SeawallCollector(10)
    alone: list[bool] = []

    def snapshot() -> dict[str, Any]:
        alone.append(collector._lock.locked())  # nobody else can read before this was told
        return {"guard": [{"name": "v", "retries": 5}]}

    monkeypatch.setattr("seawall.telemetry.prometheus.snapshot", snapshot)
    assert list(collector.collect())
    assert alone == [True]


def test_a_fork_in_the_middle_leaves_what_was_there_before(monkeypatch: pytest.MonkeyPatch):
    """What is remembered changes at once, or not at all: a child has no half of it."""
    told = Told()
    told.after(("v", 5))

    def forked(*_given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_Remembered, "followed_by", forked)
        with pytest.raises(KeyboardInterrupt):
            told.after(("v", 9))
    assert told.after(("v", 9)) == {"v": 9}
