"""Nothing is proposed that makes the load on a failing dependency worse, whatever was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from seawall import registry
from seawall.config import guard_from_table
from seawall.models.rate.rates import Rate
from seawall.tune import Measurement, Proposal, propose
from seawall.tune.proposals import apply
from tests.support import examples
from tests.tune.support import measured, policy, tally_of

BUDGETS = st.sampled_from(
    [None, True, {"kind": "request_ratio", "ratio": 0.9}, {"kind": "success_deposit", "ratio": 0.3}]
)
POLICIES = {
    "retry": st.builds(
        lambda attempts, budget: policy(
            "retry",
            on=["ConnectionError"],
            attempts=attempts,
            **({"budget": budget} if budget else {}),
        ),
        st.integers(2, 10),
        BUDGETS,
    ),
    "hedge": st.builds(
        lambda delay, cap: policy("hedge", delay=delay, cap=cap),
        st.floats(0.001, 1.0),
        st.floats(0.01, 1.0),
    ),
    "breaker": st.one_of(
        st.builds(
            lambda window, least: policy("breaker", window=window, min_calls=least),
            st.floats(0.1, 60.0),
            st.integers(1, 100),
        ),
        st.builds(lambda count: policy("breaker", consecutive=count), st.integers(1, 20)),
    ),
    "rate_limit": st.builds(
        lambda rate: policy("rate_limit", limits=[f"{rate}/s"]), st.integers(1, 1000)
    ),
    "bulkhead": st.builds(lambda limit: policy("bulkhead", limit=limit), st.integers(1, 1000)),
    "timeout": st.builds(lambda seconds: policy("timeout", seconds=seconds), st.floats(0.005, 60)),
}
TALLIES = [tally_of(), tally_of(cut=0.05), tally_of(samples=3000)]


@st.composite
def services(draw: st.DrawFn) -> Measurement:
    """Return any stack of one policy of each kind, with any counts."""
    kinds = [kind for kind in POLICIES if draw(st.booleans())]
    stack = [draw(POLICIES[kind]) for kind in kinds]
    tally = draw(st.sampled_from(TALLIES))
    total = sum(tally.counts)
    failed = draw(st.floats(0, 3 * total))
    counted = [
        {
            "policy": kind,
            "rejected": draw(st.floats(0, total)),
            "transitions": {"open": draw(st.integers(0, 50))},
        }
        for kind in kinds
    ]
    return measured(
        *stack,
        counted=counted,
        tally=tally,
        failed=failed,
        timed_out=draw(st.floats(0, min(failed, total))),
        rejected=sum(one["rejected"] for one in counted),
        retries=draw(st.floats(0, failed)),
        error_rate=draw(st.floats(0, 1)),
        seconds=draw(st.floats(1, 10_000)),
    )


def budget_of(table: Mapping[str, Any]) -> float:
    """Return which share of the calls a budget allows as retries; infinite without one."""
    budget = table.get("budget")
    if not budget:
        return float("inf")
    return 0.1 if budget is True else float(budget["ratio"])


def more_load(one: Proposal, service: Measurement) -> list[str]:
    """Return what of a proposal could put more load on the dependency, one way or the other."""
    before, after = one.before, one.after
    if one.added:
        return [one.policy] if one.policy in ("retry", "hedge") else []
    numbers = {
        "attempts": 3,
        "seconds": 0.0,
        "limit": 0,
        "window": 30.0,
        "min_calls": 20,
        "cap": 0.05,
    }
    more = [
        name
        for name, usual in numbers.items()
        if name in after and not (name == "window" and "never" in one.reason)
        if after[name] > before.get(name, usual)
    ]
    if "consecutive" in after and after["consecutive"] > before["consecutive"]:
        more.append("consecutive")
    if "budget" in after and budget_of(after) > budget_of(before):
        more.append("budget")
    if "limits" in after:
        rates = [Rate.parse(rate["limits"][0]) for rate in (before, after)]
        more += ["limits"] if rates[1].limit > rates[0].limit else []
    if "delay" in after and service.quantile(0.95) < before["delay"]:
        more.append("delay")
    return more


@examples(300)
@given(services())
def test_a_failing_dependency_never_gets_more_load(service: Measurement):
    """Neither longer timeouts nor larger limits, slower breakers, attempts, budgets or hedges."""
    is_failing = service.failing > 0.1 or service.error_rate > 0.2 + service.timing_out
    for one in propose(service).proposals:
        more = more_load(one, service)
        assert not set(more) & {"attempts", "budget", "cap", "delay", "retry", "hedge"}, one
        assert not (is_failing and more), one


@examples(100)
@given(services())
def test_every_proposal_can_be_made(service: Measurement):
    """With all proposals in it, a stack is one that Seawall accepts; each says what it rests on."""
    advice = propose(service)
    assert service.table is not None
    for one in advice.proposals:
        assert one.reason
        assert one.samples == service.samples
        assert one.after != one.before
    with registry.emptied():
        guard_from_table("vendor", apply(service.table, advice.proposals))
