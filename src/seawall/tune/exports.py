"""A Prometheus text export, read as a snapshot for tuning.

Only the metrics of Seawall are read (`docs/operate/telemetry.md`). An export has no settings, and
does not say how long its counts cover. It should be of one process: series that differ in labels of
others (pod, instance) are added up.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import inf, isfinite
from typing import Any, Final

from seawall.models.histogram import BOUNDS

_LINE: Final = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL: Final = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPES: Final = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}

Labels = Mapping[str, str]


def read_export(text: str, *, seconds: float = 0.0) -> dict[str, Any]:
    """Return the guards and pools of an export, whose counts cover so many `seconds`."""
    guards: defaultdict[str, ExportedSeries] = defaultdict(ExportedSeries)
    pools: defaultdict[str, ExportedSeries] = defaultdict(ExportedSeries)
    for name, labels, value in _series(text):
        if "guard" in labels:
            guards[labels["guard"]].add(name, labels, value)
        elif "pool" in labels:
            pools[labels["pool"]].add(name, labels, value)
    if not guards and not pools:
        raise ValueError("the export has no metrics of Seawall: their names begin with seawall_")
    return {
        "guards": [one.guard(name, seconds) for name, one in sorted(guards.items())],
        "pools": [one.pool(name, seconds) for name, one in sorted(pools.items())],
    }


class ExportedSeries:
    """The series of one guard or pool."""

    def __init__(self) -> None:
        self._values: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._buckets: defaultdict[str, defaultdict[float, float]] = defaultdict(
            lambda: defaultdict(float)
        )

    def add(self, name: str, labels: Labels, value: float) -> None:
        """Take one line of the export."""
        metric = name.removeprefix("seawall_")
        if metric.endswith("_bucket"):
            self._buckets[metric.removesuffix("_bucket")][float(labels.get("le", "nan"))] += value
            return
        which = next((labels[one] for one in _WHICH if one in labels), "")
        before = self._values[metric, which]
        value = max(value, before) if metric == "error_ratio" else before + value
        self._values[metric, which] = value

    def guard(self, name: str, seconds: float) -> dict[str, Any]:
        """Return what there is of a guard, as in its snapshot."""
        outcomes = ("succeeded", "failed", "rejected", "cancelled")
        return {
            "name": name,
            "seconds": seconds,
            **{one: self._values["attempts_total", one] for one in outcomes},
            "timed_out": self._values["timeouts_total", ""],
            "retries": self._values["retries_total", ""],
            "error_rate": self._values["error_ratio", ""],
            "histogram": self._histogram("attempt_duration_seconds"),
            "refused": {
                policy: value
                for (metric, policy), value in self._values.items()
                if metric == "rejected_total"
            },
            "opened": self._values["breaker_transitions_total", "open"],
            "breaker_state": next(
                (one for one in _BROKEN if self._values["breaker_state", one] > 0), None
            ),
        }

    def pool(self, name: str, seconds: float) -> dict[str, Any]:
        """Return what there is of a pool, as in its snapshot."""
        troubles = ("rejected", "timed_out", "connect_failed")
        return {
            "name": name,
            "seconds": seconds,
            "limit": self._values["pool_slots", ""],
            "borrowed": self._values["pool_borrowed_total", ""],
            **{one: self._values["pool_troubles_total", one] for one in troubles},
            "use": {"histogram": self._histogram("pool_use_seconds")},
            "checkout_timeout": CHECKOUT,
        }

    def _histogram(self, metric: str) -> dict[str, Any]:
        known = self._buckets[metric]
        missing = [bound for bound in (*BOUNDS, inf) if bound not in known]
        if known and missing:  # what is missing may be the slowest calls
            raise ValueError(f"the export is incomplete: {metric} has no bucket le={missing[0]:g}")
        below = [0.0, *(known.get(bound, 0.0) for bound in (*BOUNDS, inf))]
        counts = [max(0.0, after - before) for before, after in pairwise(below)]
        return {"counts": counts, "sum": self._values[f"{metric}_sum", ""]}


CHECKOUT: Final = 1.0  # how long borrowers of a pool wait, if that is not known: its default

_BROKEN: Final = ("isolated", "open", "half_open")
_WHICH: Final = ("outcome", "policy", "result", "to", "cause", "state")
"""Labels of ours by which the values of a metric are kept apart."""


def _series(text: str) -> Iterator[tuple[str, Labels, float]]:
    for line in text.split("\n"):  # labels may have other characters that end lines
        found = _LINE.match(line)
        if found is None or not found["name"].startswith("seawall_"):
            continue
        try:
            value = float(found["value"])
        except ValueError:
            raise ValueError(f"the export has a line that is none: {line[:80]!r}") from None
        labels = {
            name: re.sub(r"\\.", lambda one: _ESCAPES.get(one[0], one[0]), label)
            for name, label in _LABEL.findall(found["labels"] or "")
        }
        if isfinite(value):
            yield found["name"], labels, value
