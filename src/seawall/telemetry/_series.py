"""Series: values with their labels, and no more of them than a cap. Pure.

Promises: values with the same labels are told once; of each metric at most `cap` series have names
of their own, whatever things are called, and the rest is told together, as "other".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from seawall.telemetry._names import BY_NAME, METRICS, Metric

CAP: Final = 1000
"""Series of one metric, unless told otherwise."""

OTHER: Final = "other"
LONGEST_LABEL: Final = 120

Labels = tuple[str, ...]

_ORDER: Final = {metric.name: place for place, metric in enumerate(METRICS)}


class Reading(NamedTuple):
    """One value of one metric."""

    metric: Metric
    labels: Labels
    value: float


class Series:
    """Which series are told by name: those that came first, for as long as they are there.

    So a counter does not move between its own series and the one for all others.
    """

    def __init__(self, cap: int = CAP) -> None:
        """Tell up to `cap` series of each metric by name."""
        self.cap = cap
        self._admitted: dict[str, dict[Labels, None]] = {}

    def bounded(self, readings: Iterable[Reading]) -> list[Reading]:
        """Return the readings with the rest folded into "other", and how many those were."""
        by_metric: dict[str, dict[Labels, list[Reading]]] = {}
        for reading in readings:
            owners = by_metric.setdefault(reading.metric.name, {})
            owners.setdefault(_owner(reading), []).append(reading)
        told: list[Reading] = []
        for name, owners in by_metric.items():
            admitted = self._admit(name, owners)
            rest = [one for owner, of in owners.items() if owner not in admitted for one in of]
            own = [one for owner in admitted for one in owners[owner]]
            # Together: something may really be called "other".
            told += combined([*own, *(_anonymous(one) for one in rest)])
            if rest:
                folded = BY_NAME["seawall_series_folded"]
                told.append(Reading(folded, (name,), float(len(rest))))
        return sorted(told, key=lambda reading: _ORDER[reading.metric.name])

    def _admit(self, name: str, owners: Mapping[Labels, list[Reading]]) -> dict[Labels, None]:
        kept: dict[Labels, None] = {}
        room = self.cap
        before = self._admitted.get(name, {})
        for owner in (*(known for known in before if known in owners), *owners):
            if owner not in kept and len(owners[owner]) <= room:
                kept[owner] = None
                room -= len(owners[owner])
        self._admitted[name] = kept
        return kept


def combined(readings: Iterable[Reading]) -> list[Reading]:
    """Return one reading for each series: the sum, or the largest, as the metric says."""
    known: dict[tuple[str, Labels], Reading] = {}
    for reading in readings:
        key = reading.metric.name, reading.labels
        before = known.get(key)
        if before is not None:
            both = before.value, reading.value
            total = max(both) if reading.metric.fold == "max" else sum(both)
            reading = reading._replace(value=total)  # noqa: PLW2901
        known[key] = reading
    return list(known.values())


def label(value: str) -> str:
    """Return a value fit for a label: short, and legible."""
    text = value if value.isprintable() else value.encode("unicode_escape").decode("ascii")
    return text if len(text) <= LONGEST_LABEL else f"{text[: LONGEST_LABEL - 1]}…"


def _owner(reading: Reading) -> Labels:
    open_labels = reading.metric.open_labels
    pairs = zip(reading.metric.labels, reading.labels, strict=True)
    return tuple(value for name, value in pairs if name in open_labels)


def _anonymous(reading: Reading) -> Reading:
    open_labels = reading.metric.open_labels
    pairs = zip(reading.metric.labels, reading.labels, strict=True)
    return reading._replace(
        labels=tuple(OTHER if name in open_labels else value for name, value in pairs)
    )
