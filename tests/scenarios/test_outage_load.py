"""What a dependency that answers nothing is asked for, by each kind of retry budget.

The page about retries has the table; here it is measured again, on virtual time.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from seawall import Guard, Retry, RetryBudget
from seawall.models.budget import Budget
from seawall.policies.retry import InFlightRatio, RequestRatio, SuccessDeposit
from seawall.testing import run_virtual
from tests.support import let_pass

PAGE = Path(__file__).parents[2] / "docs" / "policies" / "retry.md"
RATES = (1, 5, 20, 100, 1000)
SECONDS = 20
MOST_CALLS = 2_000
TAKES = 0.1
"""How long an attempt takes until it fails."""

BUDGETS: dict[str, Callable[[], Budget | None]] = {
    "none": lambda: None,
    "`SuccessDeposit()`": SuccessDeposit,
    "`RequestRatio()`": RequestRatio,
    "`RequestRatio(0.1)`": lambda: RequestRatio(0.1),
    "`InFlightRatio()`": InFlightRatio,
}


async def _outage(rule: Budget | None, rate: int) -> float:
    """Return the attempts made for each call in a total outage."""
    budget = None if rule is None else RetryBudget(rule)
    guard = Guard("outage", Retry(on=ConnectionError, attempts=3, backoff=[0.1], budget=budget))
    attempts = 0

    async def fail() -> None:
        nonlocal attempts
        attempts += 1
        await let_pass(TAKES)
        raise ConnectionError

    calls = min(SECONDS * rate, MOST_CALLS)
    async with asyncio.TaskGroup() as group:
        for _ in range(calls):
            group.create_task(guard.aattempt(fail))
            await let_pass(1 / rate)
    guard.close()
    return attempts / calls


def _table() -> dict[str, list[float]]:
    rows = re.findall(r"^\| ([^|]*) \|((?: \d\.\d\d \|){5})$", PAGE.read_text(), re.MULTILINE)
    return {name: [float(cell) for cell in cells.split("|")[:-1]] for name, cells in rows}


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_page_tells_the_load_in_a_total_outage(budget: str) -> None:
    """Attempts for each call, by calls a second, with three attempts and each kind of budget."""
    measured = [run_virtual(_outage(BUDGETS[budget](), rate)) for rate in RATES]
    assert [f"{load:.2f}" for load in measured] == [f"{load:.2f}" for load in _table()[budget]]


@pytest.mark.parametrize("rate", RATES)
def test_a_ratio_of_a_tenth_adds_a_tenth_of_load_in_a_total_outage(rate: int) -> None:
    """At any rate of calls: a floor of retries must not make it a multiple of the load."""
    assert run_virtual(_outage(RequestRatio(0.1), rate)) <= 1.1001


def test_a_large_floor_is_a_multiple_of_the_load_of_quiet_callers() -> None:
    """The floor does what it says, so its default is small."""
    assert run_virtual(_outage(RequestRatio(0.1, floor=10.0), 5)) > 2.5
