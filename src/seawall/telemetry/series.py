"""Series: values with their labels, bounded in number. Pure.

Promises:
- Values with the same labels are exported once.
- At most `cap` series of each metric have their own labels, whatever objects are called. The rest
  is exported together, as "other" (a histogram counts as one series).
- The exported value of a counter, or of a bucket of a histogram, never falls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from operator import add, lt
from typing import Final, NamedTuple

from seawall.telemetry.metrics import BY_NAME, METRICS, Fold, Metric

CAP: Final = 1000
"""Default for the maximum number of series of one metric."""
OTHER: Final = "other"
LONGEST_LABEL: Final = 120
_HASH_DIGITS: Final = 8

Labels = tuple[str, ...]
Numbers = tuple[float, ...]
"""The counts of one series: a counter's value, or the sum of a histogram and its buckets."""
_ORDER: Final = {metric.name: place for place, metric in enumerate(METRICS)}
_FOLDS: Final[dict[Fold, Callable[[tuple[float, float]], float]]] = {
    "sum": sum,
    "max": max,
    "min": min,
}


class MetricReading(NamedTuple):
    """One value of one metric; for a histogram, the sum of its values and the count of each bucket.

    The last bucket is that of values above all bounds.
    """

    metric: Metric
    labels: Labels
    value: float
    counts: tuple[float, ...] = ()


class Series:
    """Decides which series keep their labels: those that came first, for as long as they exist.

    It belongs to one exporter, which calls it sequentially, each time with newer readings.
    """

    def __init__(self, cap: int = CAP) -> None:
        """Export up to `cap` series of each metric with their own labels."""
        self.cap = cap  # may be changed between two calls of `bounded`
        self._admitted: dict[str, dict[Labels, None]] = {}
        self._counters: dict[str, _Counter] = {}

    def bounded(self, readings: Iterable[MetricReading]) -> list[MetricReading]:
        """Return the readings with the rest folded into "other", and the number of those."""
        by_metric: dict[str, dict[Labels, list[MetricReading]]] = {}
        for reading in readings:
            owners = by_metric.setdefault(reading.metric.name, {})
            owners.setdefault(_owner(reading), []).append(reading)
        kept: list[MetricReading] = []
        for name in self._counters:
            by_metric.setdefault(name, {})  # so that it notices that all of its series are gone
        for name, owners in by_metric.items():
            admitted = self._admit(name, owners)
            rest = [one for owner, of in owners.items() if owner not in admitted for one in of]
            own = [one for owner in admitted for one in owners[owner]]
            # Combined, because an object may really be called "other".
            if BY_NAME[name].kind != "gauge":
                counter = self._counters.setdefault(name, _Counter(BY_NAME[name], self.cap))
                kept += counter.exported(
                    [(one, one) for one in own] + [(one, _anonymous(one)) for one in rest]
                )
            else:
                kept += combined([*own, *(_anonymous(one) for one in rest)])
            if rest:
                folded = BY_NAME["seawall_series_folded"]
                kept.append(MetricReading(folded, (name,), float(len(rest))))
        return sorted(kept, key=lambda reading: _ORDER[reading.metric.name])

    def _admit(self, name: str, owners: Mapping[Labels, list[MetricReading]]) -> dict[Labels, None]:
        kept: dict[Labels, None] = {}
        room = self.cap
        before = self._admitted.get(name, {})
        for owner in (*(known for known in before if known in owners), *owners):
            if owner not in kept and len(owners[owner]) <= room:
                kept[owner] = None
                room -= len(owners[owner])
        self._admitted[name] = kept
        return kept


class _Counter:
    """One counter whose exported series never fall.

    Objects of one name are counted together, and when one of them is gone, so are its counts;
    others move out of "other" when there is room. If the sum of the living objects were exported,
    each of these would look like a counter reset, and Prometheus would add the rest once more. So
    the exported value is the last one plus the rise of the sums since.

    A series that is gone is remembered, in case it comes back, until `cap` others went after it.
    """

    def __init__(self, metric: Metric, cap: int) -> None:
        self._metric = metric
        self._cap = cap
        # One assignment: a fork may come at any moment, while another thread is here.
        self._state = _Remembered({}, {}), _Remembered({}, {})

    def exported(
        self, readings: Iterable[tuple[MetricReading, MetricReading]]
    ) -> list[MetricReading]:
        """Return the readings to export, given pairs of a reading and its exported form."""
        sums, totals = self._state
        found: dict[Labels, Numbers] = {}
        rises: dict[Labels, Numbers] = {}
        for own, form in readings:
            found[own.labels] = numbers = (own.value, *own.counts)
            rise = sums.rise(own.labels, numbers)
            rises[form.labels] = _added(rises.get(form.labels), rise)
        shown_as = {labels: _added(totals.last(labels), rise) for labels, rise in rises.items()}
        self._state = sums.followed_by(found, self._cap), totals.followed_by(shown_as, self._cap)
        return [
            MetricReading(self._metric, labels, value, tuple(counts))
            for labels, (value, *counts) in shown_as.items()
        ]


class _Remembered(NamedTuple):
    """Numbers by labels: those of the last time, and those that were gone before."""

    there: Mapping[Labels, Numbers]
    gone: Mapping[Labels, Numbers]

    def last(self, labels: Labels) -> Numbers | None:
        return self.there.get(labels, self.gone.get(labels))

    def rise(self, labels: Labels, numbers: Numbers) -> Numbers:
        """Return the increase since the last time, as far as sums show it."""
        last = self.last(labels)
        if last is None:
            return numbers
        if labels not in self.there and any(map(lt, numbers, last)):
            return tuple(max(0.0, new) for new in numbers)  # a new object, which started at 0
        # If a sum is lower, part of the counted objects is gone.
        return tuple(max(0.0, new - old) for new, old in zip(numbers, last, strict=True))

    def followed_by(self, there: Mapping[Labels, Numbers], cap: int) -> _Remembered:
        """Return the state after the next time; keep `cap` of those that are gone."""
        known = (*self.gone.items(), *self.there.items())
        gone = [(labels, numbers) for labels, numbers in known if labels not in there]
        return _Remembered(there, dict(gone[-cap:]))


def _added(one: Numbers | None, other: Numbers) -> Numbers:
    return other if one is None else tuple(map(add, one, other))


def combined(readings: Iterable[MetricReading]) -> list[MetricReading]:
    """Return one reading for each series: sum, largest or smallest, as the metric says."""
    known: dict[tuple[str, Labels], MetricReading] = {}
    for reading in readings:
        key = reading.metric.name, reading.labels
        before = known.get(key)
        if before is not None:
            total = _FOLDS[reading.metric.fold]((before.value, reading.value))
            counts = _added(before.counts, reading.counts)
            reading = reading._replace(value=total, counts=counts)  # noqa: PLW2901
        known[key] = reading
    return list(known.values())


def label(value: str) -> str:
    """Return a value suitable for a label: short, readable, and unique for each value.

    Long values are truncated, and end with a hash of the whole: names may differ only at their end.
    """
    text = value if value.isprintable() else value.encode("unicode_escape").decode("ascii")
    if len(text) <= LONGEST_LABEL:
        return text
    end = "…" + sha256(text.encode()).hexdigest()[:_HASH_DIGITS]
    return text[: LONGEST_LABEL - len(end)] + end


def _owner(reading: MetricReading) -> Labels:
    open_labels = reading.metric.open_labels
    pairs = zip(reading.metric.labels, reading.labels, strict=True)
    return tuple(value for name, value in pairs if name in open_labels)


def _anonymous(reading: MetricReading) -> MetricReading:
    open_labels = reading.metric.open_labels
    pairs = zip(reading.metric.labels, reading.labels, strict=True)
    return reading._replace(
        labels=tuple(OTHER if name in open_labels else value for name, value in pairs)
    )
