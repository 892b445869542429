"""The numbers that `explain()` gives for a stack."""

from __future__ import annotations

import re

import pytest

from seawall import (
    Breaker,
    Bulkhead,
    Fallback,
    Guard,
    Retry,
    RetryBudget,
    Timeout,
    static,
    subscribe,
)
from seawall.backoff import constant
from seawall.models.budget import Budget, RequestRatio
from seawall.testing import VirtualClock

ROW = re.compile(r"^ +(\d+)% fail: load ([\d.]+) x, (\d+)% served$")


def rows(*policies):
    """Return (load, share served) by the share of attempts that fail, in percent."""
    guard = Guard("vendor", *policies)
    found = [ROW.match(line) for line in guard.explain().splitlines()]
    guard.close()
    return {int(row[1]): (float(row[2]), int(row[3])) for row in found if row}


def retry(budget=None, attempts=3):
    return Retry(on=ConnectionError, attempts=attempts, budget=budget)


def test_retries_alone_make_the_load_that_chance_predicts():
    """Three attempts of share p make 1 + p + p² calls and serve 1 - p³ of them."""
    for percent, (load, served) in rows(retry(), Timeout(2.0)).items():
        p = percent / 100
        assert load == pytest.approx(1 + p + p * p, abs=0.08)
        assert served == pytest.approx(100 * (1 - p**3), abs=3)


def test_a_budget_bounds_the_load_in_an_outage():
    """The same stack with a budget sends the dependency far less when everything fails."""
    assert rows(retry())[100][0] == 3.0
    assert rows(retry(RetryBudget()))[100][0] < 1.1


def test_a_breaker_spares_a_dependency_that_is_down():
    """In an outage hardly any call reaches the dependency; at 10 % failures nearly all do."""
    found = rows(retry(RetryBudget()), Breaker())
    assert found[100][0] < 0.2
    assert found[10][0] > 0.95


def test_each_share_of_failures_is_shown_once():
    """The table has the four shares, whatever else is in the stack."""
    assert list(rows(Fallback(static(1)), retry(), Bulkhead(5), Timeout(2.0))) == [10, 30, 60, 100]


def test_a_stack_without_retry_and_breaker_has_no_forecast():
    """Where nothing depends on failures there is nothing to say."""
    assert rows(Bulkhead(5), Timeout(2.0)) == {}


def test_a_forecast_touches_nothing_real():
    """State and statistics of the guard stay as they are, and nobody hears of an event."""
    breaker, budget = Breaker(consecutive=1), RetryBudget()
    guard = Guard("vendor", retry(budget), breaker, clock=VirtualClock())
    events = []
    end = subscribe(events.append)
    before = guard.snapshot(), budget.snapshot(), breaker.state
    guard.explain()
    end()
    after = guard.snapshot(), budget.snapshot(), breaker.state
    assert after[1:] == before[1:]
    for seen in (before[0], after[0]):
        seen.pop("policies")
    assert after[0] == before[0]
    assert events == []


def test_a_forecast_is_the_same_each_time():
    """Chance has a seed, also where the backoff is jittered."""
    assert rows(retry(RetryBudget()), Breaker()) == rows(retry(RetryBudget()), Breaker())


@pytest.mark.parametrize("rule", [RequestRatio(0.1, floor=0), RequestRatio(0.5, floor=0)])
def test_the_rule_of_the_budget_is_the_stacks_own(rule):
    """A share of the requests is the share of the load that retries add."""
    load, _ = rows(Retry(on=OSError, attempts=5, budget=RetryBudget(rule)))[100]
    assert load == pytest.approx(1 + rule.ratio, abs=0.02)


def test_a_budget_of_the_users_own_is_copied():
    """A rule that does not say how to make another is copied, and stays untouched."""

    class Two(Budget):
        left = 2

        def try_retry(self, _now):
            self.left -= 1
            return self.left >= 0

        def snapshot(self):
            return {"left": self.left}

    rule = Two()
    assert rows(Retry(on=OSError, backoff=constant(0.1), budget=RetryBudget(rule)))[100][0] < 1.01
    assert rule.left == 2
