"""The audit of a running process: numbers that prove what a setting does or never does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from seawall import (
    Breaker,
    Bulkhead,
    Guard,
    Hedge,
    Policy,
    RateLimit,
    Retry,
    RetryBudget,
    Timeout,
    registry,
)
from seawall.audit import Finding, audit_process
from seawall.clock import VirtualClock, current_clock
from seawall.models.budget import SuccessDeposit
from seawall.resources import Pool
from seawall.testing import run_virtual, virtual_time

STANDARD = {"on": (ConnectionError, TimeoutError), "timeout": 2.0}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start without guards and pools of other tests, on a virtual clock."""
    monkeypatch.setattr(registry, "_entries", WeakKeyDictionary())
    monkeypatch.setattr(registry, "counts", registry.GuardCounts())
    with registry.emptied(), virtual_time():
        yield


def run(main: Coroutine[Any, Any, None]) -> None:
    clock = current_clock()
    assert isinstance(clock, VirtualClock)
    run_virtual(main, clock=clock)


def found(rule: str, **options: int) -> list[Finding]:
    return [one for one in audit_process(**options) if one.rule.id == rule]


def drive(guard: Guard, calls: int, seconds: float = 0.01, fails: int = 0) -> None:
    """Make calls that take `seconds`; the first `fails` attempts of each fail."""

    async def main() -> None:
        for _ in range(calls):
            left = fails

            async def work() -> None:
                nonlocal left
                await asyncio.sleep(seconds)  # noqa: TID251 - virtual time
                if left:
                    left -= 1
                    raise ConnectionError

            try:
                await guard.acall(work)
            except ConnectionError:
                pass

    run(main())


def test_an_empty_process_is_clean():
    """Without guards there is nothing to say."""
    assert audit_process() == []


def test_a_good_guard_is_clean_before_it_was_called():
    """The recommended stack has no dangers, and no calls prove nothing."""
    Guard.standard("vendor", **STANDARD)
    assert audit_process() == []


def test_dangers_are_those_of_explain():
    """Every danger of `explain()` is a finding, and no rule is written twice."""
    guard = Guard("vendor", Bulkhead(3), Retry(on=ConnectionError))
    explained = guard.explain()
    findings = found("SW702")
    assert len(findings) == len(guard.dangers()) > 2
    assert all(one.message in explained and one.path == "guard 'vendor'" for one in findings)


@pytest.mark.parametrize(
    ("policies", "write"),
    [
        ([Breaker()], "Timeout(2.0) as the last policy, around each attempt"),
        (
            [Retry(on=ConnectionError, budget=RetryBudget()), Timeout(2.0)],
            "add TimeoutError to on=, if it may be",
        ),
        (
            [Timeout(9.0), Retry(on=TimeoutError, budget=RetryBudget())],
            "add a shorter Timeout inside Retry",
        ),
    ],
)
def test_each_danger_says_what_to_write(policies: list[Policy], write: str):
    """The remedy that the guard names, or the policy that is missing."""
    Guard("vendor", *policies)
    assert [one.write for one in found("SW702")] == [write]


def test_attempts_longer_than_the_total_are_found():
    """Three attempts of 2 s do not fit into a total of 3 s."""
    budget = RetryBudget()
    Guard("a", Timeout(3.0), Retry(on=(ConnectionError, TimeoutError), budget=budget), Timeout(2.0))
    (finding,) = found("SW702")
    assert "the total Timeout of 3 s is below 3 attempts of 2 s" in finding.message


def test_a_breaker_without_a_timeout_is_found():
    """It never learns of a call that hangs."""
    Guard("vendor", Breaker())
    (finding,) = found("SW702")
    assert "Breaker without Timeout" in finding.message


def test_a_timeout_far_above_the_latency_is_found():
    """2 s for calls of 10 ms is 200 times as long; after too few calls it is not known."""
    guard = Guard("vendor", Timeout(2.0))
    drive(guard, 900)
    assert found("SW701") == []
    drive(guard, 200)
    (finding,) = found("SW701")
    assert "Timeout(2) is" in finding.message
    assert "over 1100 calls" in finding.message
    assert finding.write.startswith("Timeout(0.02")


def test_a_timeout_near_the_latency_is_clean():
    """Five times the p99 is a timeout as it should be; 0.4 s is short for anybody."""
    drive(Guard("vendor", Timeout(1.0)), 1100, seconds=0.2)
    drive(Guard("cache", Timeout(0.4)), 1100, seconds=0.001)
    assert found("SW701") == []


def test_a_guard_that_nobody_calls_is_found():
    """Only if the process has work: before that, nobody was called."""
    Guard("idle", Timeout(1.0))
    busy = Guard("busy", Timeout(1.0))
    drive(busy, 50)
    assert found("SW703") == []
    drive(busy, 60)
    (finding,) = found("SW703")
    assert (finding.path, finding.message) == (
        "guard 'idle'",
        "no call, while other guards had 110",
    )


def test_a_budget_that_refuses_nothing_is_found():
    """A budget as large as the attempts lets every call be retried."""
    wide = RetryBudget(SuccessDeposit(10_000))
    retry = Retry(on=ConnectionError, backoff=0.01, budget=wide)
    guard = Guard("vendor", retry, Timeout(1.0))
    drive(guard, 200, fails=1)
    (finding,) = found("SW704")
    assert finding.message == "200 retries for 200 calls, and the budget refused none"


def test_a_budget_that_refuses_is_clean():
    """The default refuses most retries when every call fails."""
    retry = Retry(on=ConnectionError, backoff=0.01, budget=RetryBudget())
    guard = Guard("vendor", retry, Timeout(1.0))
    drive(guard, 400, fails=3)
    assert found("SW704") == []


def test_limits_that_are_never_reached_are_found():
    """Twenty slots for one call at a time, and a rate far above that of the calls."""
    guard = Guard("vendor", RateLimit("1000/s"), Bulkhead(20), Timeout(0.4))
    drive(guard, 1000)
    assert [one.message for one in found("SW705")] == [
        "the bulkhead of 20 never made any of 1000 calls wait, and refused none",
        "the rate_limit of 1000/s never made any of 1000 calls wait, and refused none",
    ]


def test_a_limit_that_refused_is_clean():
    """A rate that was exceeded once is a rate that protects."""
    guard = Guard("vendor", RateLimit("50/s"), Timeout(0.4))

    async def main() -> None:
        for _ in range(1100):
            try:
                await guard.acall(asyncio.sleep, 0.01)  # noqa: TID251 - virtual time
            except Exception:  # noqa: BLE001, S110 - refusals are what is wanted
                pass

    run(main())
    assert found("SW705") == []


def test_hedges_that_never_win_are_found():
    """Copies of a call that is slow each time are never faster than the first."""
    guard = Guard("vendor", Hedge(0.01, cap=1.0), Timeout(0.4))
    drive(guard, 300, seconds=0.05)
    (finding,) = found("SW706")
    assert finding.message.startswith("0 of ")


def test_pools_are_added_up():
    """Two pools of 30 in 4 pods are 240 connections."""
    pools = [Pool(object, name=name, max_size=30) for name in ("db", "reports")]
    assert found("SW707") == []
    assert found("SW707", connections=240, pods=4) == []
    (finding,) = found("SW707", connections=200, pods=4)
    assert finding.message == (
        "db 30, reports 30, in 4 pods: up to 240 connections, and the server has 200"
    )
    assert finding.write == "max_size so that all pools of a pod have at most 50 together"
    assert len(pools) == 2


@pytest.mark.parametrize("options", [{"connections": 0}, {"pods": 0}])
def test_numbers_are_checked(options: dict[str, int]):
    """No server accepts zero connections."""
    with pytest.raises(ValueError, match="write 1 or more"):
        audit_process(**options)


def test_findings_are_known_whatever_their_numbers():
    """In a baseline, a finding is the same after more calls."""
    guard = Guard("vendor", Timeout(2.0))
    drive(guard, 1100)
    (before,) = found("SW701")
    drive(guard, 100)
    (after,) = found("SW701")
    assert before.message != after.message
    assert before.fingerprint == after.fingerprint
