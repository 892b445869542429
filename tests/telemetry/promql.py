"""As much of Prometheus as the rules and the dashboard ask of it: samples, questions, alerts.

The questions are parsed by promql-parser; what is not known here raises, and is never guessed.
"""

from __future__ import annotations

import math
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from seawall.telemetry import METRICS

LOOKBACK = 300.0
EVERY = 15.0

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Series = tuple[str, Labels]

GONE = object()
"""The mark of a series that a scrape has no more."""

ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
COMPARISONS = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
FOLDS: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "max": max,
    "min": min,
    "avg": lambda values: sum(values) / len(values),
    "count": len,
}


@lru_cache
def _parsed(expr: str) -> Any:
    return pytest.importorskip("promql_parser").parse(expr)


class Prometheus:
    """Samples of some processes, and questions to them."""

    def __init__(self) -> None:
        self.samples: dict[Series, list[tuple[float, Any]]] = defaultdict(list)

    def scrape(self, at: float, text: str, *, job: str = "api", instance: str = "pod-1") -> None:
        """Take what a process tells, as the official parser reads it."""
        told = {
            (one.name, frozenset({**one.labels, "job": job, "instance": instance}.items())): one
            for family in text_string_to_metric_families(text)
            for one in family.samples
        }
        for series, one in told.items():
            self.samples[series].append((at, one.value))
        target = {("job", job), ("instance", instance)}
        for series, samples in self.samples.items():
            if target <= series[1] and series not in told and samples[-1][1] is not GONE:
                samples.append((at, GONE))

    def tell(self, at: float, name: str, value: float, /, **labels: str) -> None:
        """Take one sample."""
        named = {"job": "api", "instance": "pod-1", **labels}
        self.samples[name, frozenset(named.items())].append((at, value))

    def ask(self, expr: str, at: float) -> Vector:
        """Return the answer to a question."""
        answer = self._value(_parsed(expr), at)
        assert isinstance(answer, dict), "a rule must ask for series"
        return answer

    def _value(self, node: Any, at: float) -> Vector | float:
        match type(node).__name__:
            case "NumberLiteral":
                return float(node.val)
            case "ParenExpr":
                return self._value(node.expr, at)
            case "VectorSelector":
                return self._instant(node, at)
            case "Call":
                return self._call(node, at)
            case "AggregateExpr":
                return self._aggregate(node, at)
            case "BinaryExpr":
                return _binary(node, self._value(node.lhs, at), self._value(node.rhs, at))
        raise NotImplementedError(type(node).__name__)

    def _matching(self, selector: Any) -> Iterable[tuple[Labels, list[tuple[float, Any]]]]:
        assert selector.offset is None
        assert selector.at is None
        for (name, labels), samples in list(self.samples.items()):
            known = dict(labels)
            if name == selector.name and all(
                _matches(one, known) for one in selector.matchers.matchers
            ):
                yield labels, samples

    def _instant(self, selector: Any, at: float) -> Vector:
        found = {}
        for labels, samples in self._matching(selector):
            recent = [value for time, value in samples if at - LOOKBACK < time <= at]
            if recent and recent[-1] is not GONE:
                found[labels] = recent[-1]
        return found

    def _call(self, node: Any, at: float) -> Vector:
        if node.func.name == "histogram_quantile":
            share, buckets = (self._value(one, at) for one in node.args)
            assert isinstance(share, float)
            assert isinstance(buckets, dict)
            return _quantiles(share, buckets)
        (ranged,) = node.args
        span = ranged.range.total_seconds()
        found = {}
        for labels, samples in self._matching(ranged.vector_selector):
            window = [one for one in samples if at - span < one[0] <= at and one[1] is not GONE]
            if len(window) > 1:
                grown = _grown(window, at - span, at)
                found[labels] = {"rate": grown / span, "increase": grown}[node.func.name]
        return found

    def _aggregate(self, node: Any, at: float) -> Vector:
        values = self._value(node.expr, at)
        assert isinstance(values, dict)
        assert node.param is None
        by = set(node.modifier.labels) if node.modifier else set()
        groups: dict[Labels, list[float]] = defaultdict(list)
        for labels, value in values.items():
            groups[frozenset(pair for pair in labels if pair[0] in by)].append(value)
        return {labels: FOLDS[str(node.op)](group) for labels, group in groups.items()}


def _quantiles(share: float, buckets: Vector) -> Vector:
    """Return the quantile of each histogram, interpolated within a bucket as Prometheus does."""
    histograms: dict[Labels, list[tuple[float, float]]] = defaultdict(list)
    for labels, count in buckets.items():
        own = frozenset(pair for pair in labels if pair[0] != "le")
        histograms[own].append((float(dict(labels)["le"]), count))
    return {labels: _quantile(share, sorted(found)) for labels, found in histograms.items()}


def _quantile(share: float, cumulative: list[tuple[float, float]]) -> float:
    assert cumulative[-1][0] == math.inf
    rank = share * cumulative[-1][1]
    if not cumulative[-1][1]:
        return math.nan
    lower, below = 0.0, 0.0
    for bound, count in cumulative:
        if count >= rank and count > below:
            if bound == math.inf:
                return lower
            return lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return lower


def _divided(left: float, right: float) -> float:
    if right:
        return left / right
    return math.inf if left else math.nan


ARITHMETIC["/"] = _divided


def _matches(matcher: Any, labels: Mapping[str, str]) -> bool:
    value = labels.get(matcher.name, "")
    match str(matcher.op).rsplit(".", 1)[-1]:
        case "Equal":
            return value == matcher.value
        case "NotEqual":
            return value != matcher.value
        case "Re":
            return re.fullmatch(matcher.value, value) is not None
    raise NotImplementedError(matcher.op)


def _grown(window: list[tuple[float, Any]], start: float, end: float) -> float:
    """Return how much a counter grew, extended to the edges of the window as Prometheus does."""
    values = [value for _, value in window]
    grown = values[-1] - values[0]
    grown += sum(before for before, after in pairwise(values) if after < before)
    first, last = window[0][0], window[-1][0]
    sampled = last - first
    step = sampled / (len(window) - 1)
    before, after = first - start, end - last
    if grown > 0 and values[0] >= 0:
        before = min(before, sampled * values[0] / grown)  # it cannot have been below 0
    reach = sampled
    reach += before if before < step * 1.1 else step / 2
    reach += after if after < step * 1.1 else step / 2
    return grown * reach / sampled


def _binary(node: Any, left: Vector | float, right: Vector | float) -> Vector | float:
    sign = str(node.op)
    modifier = node.modifier
    assert modifier is None or modifier.matching is None, "only plain matching is known here"
    if sign == "and":
        return {labels: value for labels, value in left.items() if labels in right}
    if sign == "or":
        return {**right, **left}
    if isinstance(left, float) and isinstance(right, float):
        return ARITHMETIC[sign](left, right)
    if isinstance(left, float):
        pairs = {labels: (left, value) for labels, value in right.items()}
    elif isinstance(right, float):
        pairs = {labels: (value, right) for labels, value in left.items()}
    else:
        pairs = {labels: (left[labels], right[labels]) for labels in left if labels in right}
    if sign in ARITHMETIC:
        return {labels: ARITHMETIC[sign](*pair) for labels, pair in pairs.items()}
    holds = COMPARISONS[sign]
    if modifier is not None and modifier.return_bool:
        return {labels: float(holds(*pair)) for labels, pair in pairs.items()}
    return {labels: pair[0] for labels, pair in pairs.items() if holds(*pair)}


class Rule:
    """An alert over time: it fires for who has been wrong long enough."""

    def __init__(self, rule: Mapping[str, Any]) -> None:
        self.expr = rule["expr"]
        self.lasts = float(str(rule.get("for", "0s")).removesuffix("s"))
        self._since: dict[Labels, float] = {}

    def look(self, prometheus: Prometheus, at: float) -> list[dict[str, str]]:
        """Return the labels of what fires now."""
        wrong = prometheus.ask(self.expr, at)
        self._since = {labels: self._since.get(labels, at) for labels in wrong}
        return [dict(who) for who, since in self._since.items() if at - since >= self.lasts]


# What can be told of a question without any samples

BY_NAME = {metric.name: metric for metric in METRICS}
TARGET = {"job", "instance"}


class Fault(AssertionError):
    """A question that asks for what is not there, or in a way that means nothing."""


def labels_of(expr: str) -> set[str]:
    """Return the labels of the answers; raises Fault if the question makes no sense."""
    labels = _labels(_parsed(expr))
    if labels is None:
        raise Fault("it asks for no series")
    return labels


def _labels(node: Any) -> set[str] | None:
    match type(node).__name__:
        case "NumberLiteral":
            return None
        case "ParenExpr":
            return _labels(node.expr)
        case "VectorSelector":
            return _selected(node, "gauge")
        case "Call":
            return _called(node)
        case "AggregateExpr":
            inner = _labels(node.expr) or set()
            by = set(node.modifier.labels) if node.modifier else set()
            if not by <= inner:
                raise Fault(f"grouped by {by - inner}, which is not there")
            return by
        case "BinaryExpr":
            left, right = _labels(node.lhs), _labels(node.rhs)
            if left is not None and right is not None and left != right:
                raise Fault(f"{left} and {right} never match")
            return right if left is None else left
    raise Fault(f"{type(node).__name__} is not known here")


def _called(node: Any) -> set[str]:
    if node.func.name == "histogram_quantile":
        inner = _labels(node.args[1]) or set()
        if "le" not in inner:
            raise Fault("a quantile needs the bounds of the buckets: sum by (le, ...)")
        return inner - {"le"}
    if node.func.name not in {"rate", "increase"}:
        raise Fault(f"{node.func.name}() is not known here")
    return _selected(node.args[0].vector_selector, "counter")


def _selected(selector: Any, kind: str) -> set[str]:
    bare, _, suffix = selector.name.rpartition("_")
    metric = BY_NAME.get(selector.name) or BY_NAME.get(bare)
    if metric is None:
        raise Fault(f"there is no metric {selector.name}")
    is_part = metric.name == bare and suffix in {"bucket", "sum", "count"}
    if metric.kind == "histogram" and is_part and kind == "counter":
        return {*metric.labels, *TARGET, *(["le"] if suffix == "bucket" else [])}
    if metric.name != selector.name or metric.kind != kind:
        raise Fault(f"{metric.name} is a {metric.kind}, asked for as a {kind}")
    labels = {*metric.labels, *TARGET}
    unknown = {one.name for one in selector.matchers.matchers} - labels
    if unknown:
        raise Fault(f"{metric.name} has no labels {unknown}")
    return labels
