"""What the tests of rules and panels rest on: answers as Prometheus gives them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.telemetry.promql import EVERY, Labels, Prometheus, Rule

POD: Labels = frozenset({("job", "api"), ("instance", "pod-1")})


def _counter(*values: float) -> Prometheus:
    prometheus = Prometheus()
    for step, value in enumerate(values):
        prometheus.tell(step * EVERY, "calls_total", value)
    return prometheus


@given(st.integers(1, 1000), st.integers(3, 40))
def test_a_steady_counter_has_its_rate(each: int, steps: int):
    """So many in each scrape, so many a second, once the window is full."""
    prometheus = _counter(*(1e6 + each * step for step in range(steps)))
    (rate,) = prometheus.ask("rate(calls_total[30s])", (steps - 1) * EVERY).values()
    assert rate == pytest.approx(each / EVERY)


def test_a_counter_that_begins_again_has_not_gone_down():
    """A restarted process counts from 0, and nothing is lost or counted twice."""
    prometheus = _counter(100, 110, 5, 15)
    (grown,) = prometheus.ask("increase(calls_total[46s])", 3 * EVERY).values()
    assert grown == pytest.approx((10 + 5 + 10) * (46 / 45), rel=0.02)


def test_one_sample_has_no_rate():
    """Two are needed: a series that has just come tells nothing yet."""
    assert _counter(7).ask("rate(calls_total[5m])", 0.0) == {}


def test_what_a_scrape_has_no_more_is_gone():
    """A series that a process does not tell any more is not answered with its last value."""
    prometheus = Prometheus()
    prometheus.scrape(0.0, "depth 3\nother 1\n")
    assert prometheus.ask("depth", 1.0) == {POD: 3.0}
    prometheus.scrape(15.0, "other 1\n")
    assert prometheus.ask("depth", 16.0) == {}
    assert prometheus.ask("other", 16.0) == {POD: 1.0}


def test_what_is_old_is_gone():
    """A process that is scraped no more is forgotten after five minutes."""
    prometheus = Prometheus()
    prometheus.scrape(0.0, "depth 3\n")
    assert prometheus.ask("depth", 299.0) == {POD: 3.0}
    assert prometheus.ask("depth", 300.0) == {}


def test_nothing_of_nothing_is_no_share():
    """0 / 0 is not a number, and is above nothing; 1 / 0 is above all."""
    prometheus = Prometheus()
    prometheus.tell(0.0, "part", 0.0)
    prometheus.tell(0.0, "whole", 0.0)
    assert math.isnan(prometheus.ask("part / whole", 0.0)[POD])
    assert prometheus.ask("part / whole > 0.05", 0.0) == {}
    prometheus.tell(1.0, "part", 1.0)
    assert prometheus.ask("part / whole > 0.05", 1.0) == {POD: math.inf}


def test_a_rule_fires_only_after_it_held_without_a_break():
    """A moment in which all is well begins the time anew."""
    prometheus, rule = Prometheus(), Rule({"expr": "depth > 1", "for": "30s"})
    fired = []
    for step, depth in enumerate([2, 2, 0, 2, 2, 2]):
        prometheus.tell(step * EVERY, "depth", depth)
        fired.append(bool(rule.look(prometheus, step * EVERY)))
    assert fired == [False, False, False, False, False, True]


@pytest.mark.parametrize("expr", ["topk(1, depth)", "depth offset 5m", "-depth", "absent(depth)"])
def test_what_is_not_known_is_not_guessed(expr: str):
    """A question that goes beyond what is done here fails the test that asks it."""
    prometheus = Prometheus()
    prometheus.tell(0.0, "depth", 1.0)
    with pytest.raises((NotImplementedError, AssertionError, AttributeError, KeyError)):
        prometheus.ask(expr, 0.0)
