"""What is proposed, from what, and when nothing is."""

from __future__ import annotations

from typing import Any

import pytest

from seawall import Guard, registry
from seawall.config import guard_from_table
from seawall.models.histogram import Histogram
from seawall.tune import Proposal, propose
from seawall.tune.proposals import apply
from tests.tune.support import (
    BREAKER,
    BULKHEAD,
    GOOD,
    LOGNORMAL,
    RETRY,
    TIMEOUT,
    measured,
    policy,
    tally_of,
)


def only(*arguments: Any, **numbers: Any) -> Proposal:
    """Return the only proposal for a stack."""
    advice = propose(measured(*arguments, **numbers))
    assert len(advice.proposals) == 1, advice
    return advice.proposals[0]


def refused(*arguments: Any, **numbers: Any) -> str:
    """Return why nothing is proposed."""
    advice = propose(measured(*arguments, **numbers))
    assert not advice.proposals
    return advice.refusals[0].reason


def test_nothing_is_proposed_for_a_good_stack():
    """Settings near what is needed stay as they are."""
    assert propose(measured(*GOOD)) == ([], [])


def test_few_samples_are_refused():
    """It says how many there are, and how many are needed."""
    few = tally_of(samples=312)
    assert refused(policy("timeout", seconds=30.0), tally=few) == (
        "312 calls were measured, 1000 are needed"
    )


def test_a_long_timeout_follows_the_slowest_calls():
    """One and a half times the p99.9, with the number of calls that it rests on."""
    found = only(RETRY, BREAKER, BULKHEAD, policy("timeout", seconds=30.0))
    assert found.policy == "timeout"
    assert found.before == {"seconds": 30.0}
    assert 0.5 < found.after["seconds"] < 1.0
    assert found.reason.startswith("p99.9 of 20 000 calls is 0.4")
    assert found.words.startswith("seconds 30 -> 0.")
    assert found.samples == 20_000


def test_with_fewer_samples_the_p99_is_used():
    """Of 2000 calls, two are above the p99.9."""
    found = only(
        RETRY,
        BREAKER,
        BULKHEAD,
        policy("timeout", seconds=30.0),
        tally=tally_of(samples=2000),
        seconds=20.0,
    )
    assert found.reason.startswith("p99 of 2 000 calls is 0.18 s")
    assert found.after["seconds"] == pytest.approx(0.5, rel=0.2)


def test_a_short_timeout_is_made_longer_from_what_it_hides():
    """The tail is estimated from the calls that it did not cut off: here the p99.9 is 0.42 s."""
    cut = tally_of(LOGNORMAL, cut=0.06)
    share = 0.135
    found = only(
        *GOOD[:3],
        policy("timeout", seconds=0.06),
        tally=cut,
        succeeded=20_000 * (1 - share),
        failed=20_000 * share,
        timed_out=20_000 * share,
        error_rate=share,
    )
    assert found.after["seconds"] == pytest.approx(1.2 * 0.42, rel=0.25)
    assert "13.5% of 20 000 attempts time out" in found.reason


def test_a_timeout_that_hides_too_much_is_refused():
    """If half of the calls time out, nobody knows what they would have taken."""
    half = {"succeeded": 10_000.0, "failed": 10_000.0, "timed_out": 10_000.0, "error_rate": 0.5}
    why = refused(*GOOD[:3], policy("timeout", seconds=0.02), tally=tally_of(cut=0.02), **half)
    assert "too many to tell" in why


def test_attempts_are_lowered():
    """If one attempt in fifty fails, two leave one call in 2500."""
    retry = policy("retry", on=["ConnectionError"], attempts=8, budget=True)
    found = only(retry, BREAKER, BULKHEAD, TIMEOUT, failed=400.0)
    assert found.after == {"attempts": 2}


def test_a_missing_budget_is_added():
    """Successes pay for retries; the more attempts fail, the more each success pays."""
    retry = policy("retry", on=["ConnectionError"])
    found = only(retry, BREAKER, BULKHEAD, TIMEOUT, failed=100.0)
    assert found.after == {"budget": True}
    assert "0.5% of 20 100 attempts fail" in found.reason
    found = only(retry, BREAKER, BULKHEAD, TIMEOUT, failed=1800.0)
    assert found.after == {"budget": {"kind": "success_deposit", "ratio": 0.14}}
    found = only(retry, BREAKER, BULKHEAD, TIMEOUT, failed=1800.0, error_rate=0.6)
    assert found.after == {"budget": True}


def test_a_large_budget_is_lowered():
    """A budget of 80 % is no bound where one attempt in 200 fails."""
    budget = {"kind": "request_ratio", "ratio": 0.8}
    retry = policy("retry", on=["ConnectionError"], budget=budget)
    found = only(retry, BREAKER, BULKHEAD, TIMEOUT, failed=100.0)
    assert found.after == {"budget": {"kind": "request_ratio", "ratio": 0.1}}


def test_a_breaker_that_opens_by_chance_waits_for_more_calls():
    """Two calls are too few to judge by, where one in twenty fails."""
    counted = [{"policy": "retry"}, {"policy": "breaker", "transitions": {"open": 40}}]
    hasty = policy("breaker", window=1.0, min_calls=2)
    found = only(RETRY, hasty, BULKHEAD, TIMEOUT, counted=counted, failed=1000.0)
    assert found.after == {"min_calls": 20}
    assert "opened 40 times while 4.8%" in found.reason


def test_a_breaker_that_can_never_open_gets_a_longer_window():
    """Twenty calls have to come in the window."""
    found = only(RETRY, policy("breaker", window=0.1), BULKHEAD, TIMEOUT)
    assert found.after == {"window": 0.4}
    assert "can never open" in found.reason


def test_failures_in_a_row_that_happen_by_chance_need_more():
    """Where one call in twenty fails, two in a row are no outage."""
    counted = [{"policy": "retry"}, {"policy": "breaker", "transitions": {"open": 40}}]
    hasty = policy("breaker", consecutive=2)
    found = only(RETRY, hasty, BULKHEAD, TIMEOUT, counted=counted, failed=1000.0)
    assert found.after == {"consecutive": 5}


def test_a_bulkhead_that_bounds_nothing_is_made_smaller():
    """By Little's law: 100 calls a second of 0.03 s keep 3 in flight."""
    found = only(RETRY, BREAKER, policy("bulkhead", limit=500), TIMEOUT)
    assert found.after["limit"] == pytest.approx(16, abs=3)
    assert "500 bound nothing" in found.reason


def test_a_bulkhead_that_refuses_is_made_larger():
    """Of the calls, those that were refused count too."""
    counted = [{"policy": "retry"}, {"policy": "breaker"}, {"policy": "bulkhead", "rejected": 5000}]
    small = policy("bulkhead", limit=3)
    found = only(RETRY, BREAKER, small, TIMEOUT, counted=counted, rejected=5000.0)
    assert found.after["limit"] > 15
    assert found.reason.startswith("20.0% of 25 000 calls were refused")


def test_a_rate_limit_that_refuses_is_made_larger():
    """Half as much again as what comes; it says when to leave it."""
    counted = [{"policy": "rate_limit", "rejected": 10_000}]
    limit = policy("rate_limit", limits=["100/s"])
    found = only(limit, BREAKER, BULKHEAD, TIMEOUT, counted=counted, rejected=10_000.0)
    assert found.after == {"limits": ["230/s"]}
    assert "keep it if it is a quota" in found.reason


def test_a_hedge_that_starts_early_waits_for_the_slow_calls():
    """A copy of every second call is no hedge."""
    hedge = policy("hedge", delay=0.02, cap=0.9)
    found = only(hedge, BREAKER, BULKHEAD, TIMEOUT)
    assert found.after == {"delay": {"kind": "quantile", "p": 0.95}, "cap": 0.05}


@pytest.mark.parametrize(
    "limit",
    [
        policy("rate_limit", limits=["10/s"], shared="redis", name="vendor"),
        policy("rate_limit", limits=["10/s"], key="by_user"),
        policy("rate_limit", limits=["10/s", "100/min"]),
    ],
)
def test_limits_that_one_pod_cannot_judge_are_left_alone(limit: dict[str, Any]):
    """What pods share, and what each key has of its own, is not seen in one pod's counts."""
    counted = [{"policy": "rate_limit", "rejected": 10_000}]
    stack = (limit, BREAKER, BULKHEAD, TIMEOUT)
    assert propose(measured(*stack, counted=counted, rejected=10_000.0)).proposals == []


def test_settings_that_toml_cannot_hold_are_left_alone():
    """A backoff or budget of the user's own is not known, so nothing better is either."""
    numbers = measured(policy("retry"), BREAKER, BULKHEAD, TIMEOUT)
    assert numbers.table is not None
    assert [one.policy for one in propose(numbers).proposals] == ["retry"]
    own = numbers._replace(table={**numbers.table, "unwritten": ["retry: budget"]})
    advice = propose(own)
    assert not advice.proposals
    assert "of your own" in advice.refusals[0].reason


def test_missing_policies_are_added_in_the_recommended_order():
    """A bare stack gets a breaker, a bulkhead and a timeout, and Seawall accepts the order."""
    retry = policy("retry", on=["ConnectionError"], budget=True)
    found = measured(policy("timeout", seconds=5.0), retry)
    advice = propose(found)
    assert found.table is not None
    assert not [one for one in advice.proposals if one.policy == "timeout"]  # a total is there
    bare = measured()
    assert bare.table is not None
    table = apply(bare.table, propose(bare).proposals)
    assert [one["policy"] for one in table["policies"]] == ["breaker", "bulkhead", "timeout"]
    with registry.emptied():
        made = guard_from_table("vendor", table)
        assert isinstance(made, Guard)


def test_unknown_settings_get_a_whole_stack():
    """Without today's settings there is nothing to compare with, and no retry is added."""
    advice = propose(measured(known=False))
    assert [one.policy for one in advice.proposals] == ["breaker", "bulkhead", "timeout"]
    assert all(one.before == {} for one in advice.proposals)


def test_unknown_time_is_refused():
    """Counts say nothing about a rate if nobody knows how long they took."""
    assert "pass --span" in refused(*GOOD, seconds=0.0)


def test_a_small_pool_is_made_larger():
    """As many as twice the borrowers need; those that got none count too."""
    pool = {"kind": "pool", "policies": (), "table": {"max_size": 2, "checkout_timeout": 1.0}}
    found = only(rejected=5000.0, **pool)
    assert found.policy == "pool"
    assert found.after["max_size"] > 15
    assert found.reason.startswith("20.0% of 25 000 borrowers got none")
    large = pool | {"table": {"max_size": 500, "checkout_timeout": 1.0}}
    assert only(**large).after["max_size"] < 20


FAILS = {"error_rate": 0.6}
OPENED = [{"policy": "retry"}, {"policy": "breaker", "transitions": {"open": 40}}]
TIMES_OUT = {"succeeded": 17_300.0, "failed": 2700.0, "timed_out": 2700.0}


@pytest.mark.parametrize(
    ("stack", "numbers"),
    [
        ((*GOOD[:3], policy("timeout", seconds=0.06)), {"tally": tally_of(cut=0.06), **TIMES_OUT}),
        ((RETRY, policy("breaker", window=1.0, min_calls=2), *GOOD[2:]), {"counted": OPENED}),
        ((RETRY, policy("breaker", consecutive=2), *GOOD[2:]), {"counted": OPENED}),
        (
            (policy("bulkhead", limit=3), BREAKER, TIMEOUT),
            {"counted": [{"policy": "bulkhead", "rejected": 5000}], "rejected": 5000.0},
        ),
        (
            (policy("rate_limit", limits=["100/s"]), BREAKER, BULKHEAD, TIMEOUT),
            {"counted": [{"policy": "rate_limit", "rejected": 10_000}], "rejected": 10_000.0},
        ),
        ((), {"kind": "pool", "rejected": 5000.0, "table": {"max_size": 2}}),
    ],
    ids=["timeout", "breaker", "consecutive", "bulkhead", "rate_limit", "pool"],
)
def test_a_failing_dependency_gets_no_more_load(stack: Any, numbers: dict[str, Any]):
    """What is proposed while it is well is not proposed while it fails."""
    failed = {"failed": 1000.0} | numbers
    assert len(propose(measured(*stack, **failed)).proposals) == 1
    assert propose(measured(*stack, **failed | FAILS)).proposals == []


def refused_by_limit(**numbers: Any) -> dict[str, Any]:
    """Return the numbers of a guard whose bulkhead refuses a third of the calls."""
    counted = [{"policy": one["policy"]} for one in GOOD]
    counted[1]["state"] = numbers.pop("state", "closed")
    counted[2]["rejected"] = 8000.0
    return {"counted": counted, "rejected": 8000.0, **numbers}


SMALL = (RETRY, BREAKER, policy("bulkhead", limit=4), TIMEOUT)


def test_a_dependency_that_hangs_gets_no_larger_limit():
    """Where most attempts time out, a larger limit would only hold more of them."""
    assert only(*SMALL, **refused_by_limit()).policy == "bulkhead"
    hung = {"succeeded": 0.0, "failed": 20_000.0, "timed_out": 20_000.0, "error_rate": 1.0}
    histogram = Histogram()
    histogram.add_all([0.5] * 20_000)
    advice = propose(measured(*SMALL, tally=histogram.tally(), **refused_by_limit(**hung)))
    assert not advice.proposals
    assert "a larger limit would add load" in advice.refusals[-1].reason


@pytest.mark.parametrize("state", ["open", "half_open", "isolated"])
def test_no_larger_limit_while_the_breaker_is_not_closed(state: str):
    """An open breaker lets no attempts through that would show that they fail."""
    assert "would add load" in refused(*SMALL, **refused_by_limit(state=state))


@pytest.mark.parametrize("known", [True, False])
def test_no_timeout_from_calls_that_are_longer_than_what_is_measured(*, known: bool):
    """The last bucket has no upper bound, so the p99.9 in it is not known."""
    histogram = Histogram()
    histogram.add_all([0.02] * 19_000 + [300.0] * 1000)
    stack = (RETRY, BREAKER, BULKHEAD, policy("timeout", seconds=600.0))
    advice = propose(measured(*stack, tally=histogram.tally(), known=known))
    assert "timeout" not in [one.policy for one in advice.proposals]


def test_a_quiet_pool_is_not_made_smaller():
    """The last seconds alone say nothing about the size that the busiest ones need."""
    pool = {"kind": "pool", "policies": (), "table": {"max_size": 50, "checkout_timeout": 1.0}}
    assert "how long" in refused(seconds=0.0, **pool)
    assert propose(measured(seconds=0.0, recent_rate=0.1, **pool)) == ([], [])
    assert only(seconds=20_000.0, **pool).after == {"max_size": 2}
