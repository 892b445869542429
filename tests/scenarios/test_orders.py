"""The order of a stack while some keys always fail, as `bench.orders` measures it."""

from __future__ import annotations

import pytest

from bench.orders import ORDERS, Measured, measure

OURS, OTHER = ORDERS
SECONDS = 40.0


def measured(order: str, share: float, *, budget: bool = False, counts: str = "calls") -> Measured:
    """Measure for a while, always the same calls."""
    return measure(order, share, 1, budget=budget, counts=counts, seconds=SECONDS)


@pytest.mark.parametrize("budget", [False, True], ids=["plain", "budget"])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.4])
def test_our_order_answers_at_least_as_many_at_no_more_load(share: float, budget: bool) -> None:  # noqa: FBT001
    """All callers with good keys are served: bad ones open no breaker, and hold no slot long."""
    ours, other = (measured(order, share, budget=budget) for order in ORDERS)
    assert ours.goodput >= other.goodput
    assert ours.goodput == pytest.approx(1 - share, abs=0.03)
    assert ours.load <= 1 + 2 * share + 0.05


def test_counting_attempts_the_breaker_opens_for_everybody() -> None:
    """30 % of bad keys are 56 % of the attempts: of good ones, a third is served."""
    assert measured(OURS, 0.3, counts="attempts").goodput < 0.3
