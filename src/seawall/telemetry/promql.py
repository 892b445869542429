"""PromQL queries, composed from the table of metrics.

Promises:
- A query uses only metrics and labels that are in the table.
- A counter is queried only for its rate or increase, and a gauge only for its values.
- A quantile is that of all processes together.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from seawall.telemetry.metrics import BY_NAME, Kind, Metric, full_name

TARGET: Final = ("job", "instance")
"""Labels that Prometheus itself adds to everything it scrapes."""


class PromqlQueries(NamedTuple):
    """Common settings of all queries of one file: their window and scope.

    `scope` has pairs of a label and its condition, applied to the metrics that have the label.
    """

    window: str
    scope: tuple[tuple[str, str], ...] = ()

    def rate(self, name: str, by: str = "", where: str = "") -> str:
        """Return the rate per second, summed `by` labels; without them, in total."""
        return self._counted("rate", name, by, where)

    def increase(self, name: str, by: str = "", where: str = "") -> str:
        """Return the increase within the window, summed `by` labels."""
        return self._counted("increase", name, by, where)

    def _counted(self, function: str, name: str, by: str, where: str) -> str:
        metric = _known(name, "counter")
        series = self._series(metric, where)
        return _folded("sum", metric, by, f"{function}({series}[{self.window}])")

    def quantile(self, share: float, name: str, by: str = "") -> str:
        """Return a quantile of all values of a histogram within the window, `by` labels."""
        metric = _known(name, "histogram")
        buckets = self._series(metric, "", "_bucket")
        summed = _folded("sum", metric, f"{by} le", f"rate({buckets}[{self.window}])")
        return f"histogram_quantile({share:g}, {summed})"

    def sum_rate(self, name: str, by: str = "") -> str:
        """Return the growth of the sum of a histogram's values per second, `by` labels."""
        metric = _known(name, "histogram")
        sums = self._series(metric, "", "_sum")
        return _folded("sum", metric, by, f"rate({sums}[{self.window}])")

    def gauge(self, fold: str, name: str, by: str = "", where: str = "") -> str:
        """Return a gauge's current values, folded `by` labels: "sum", "max", "min" or "avg"."""
        metric = _known(name, "gauge")
        return _folded(fold, metric, by, self._series(metric, where))

    def series(self, name: str, where: str = "") -> str:
        """Return a gauge's series without aggregation."""
        return self._series(_known(name, "gauge"), where)

    def _series(self, metric: Metric, where: str, suffix: str = "") -> str:
        known = {*TARGET, *metric.labels}
        conditions = [condition for label, condition in self.scope if label in known]
        if where:
            conditions.insert(0, where)
        return metric.name + suffix + (f"{{{','.join(conditions)}}}" if conditions else "")


def _known(name: str, kind: Kind) -> Metric:
    metric = BY_NAME.get(full_name(f"{name}_total" if kind == "counter" else name))
    if metric is None or metric.kind != kind:
        raise ValueError(f"there is no {kind} {name!r} in the table of metrics")
    return metric


def _folded(fold: str, metric: Metric, by: str, values: str) -> str:
    labels = by.split()
    known = (*TARGET, *metric.labels, *(["le"] if metric.kind == "histogram" else []))
    unknown = [label for label in labels if label not in known]
    if unknown:
        raise ValueError(f"{metric.name} has no label {unknown[0]!r}")
    return f"{fold} by ({', '.join(labels)}) ({values})" if labels else f"{fold}({values})"
