"""How the users fared: the numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from seawall_demo._tally import OUTCOMES, RequestResult, Tally, outcome_of, quantile, summary

moments = st.floats(0, 100, allow_nan=False)
seens = st.builds(
    RequestResult,
    moments,
    st.sampled_from([None, "a", "b"]),
    st.sampled_from(["x", "y"]),
    st.booleans(),
    st.sampled_from(OUTCOMES),
    st.floats(0, 10),
)


@given(st.lists(seens))
def test_shares_add_up_and_quantiles_are_in_order(seen: list[RequestResult]):
    """All outcomes together are all requests, and p50 is not above p99."""
    told = summary(seen)
    assert told["requests"] == len(seen)
    assert abs(sum(told[outcome] for outcome in OUTCOMES) - bool(seen)) < 1e-9
    if told["p50"] is not None:
        assert told["p50"] <= told["p99"] <= max(one.seconds for one in seen)


@given(st.lists(st.floats(0, 10), min_size=1), st.floats(0, 1))
def test_a_quantile_has_that_share_at_or_below_it(values: list[float], share: float):
    """At least that share of the values is not above it, and no smaller value does that."""
    values.sort()
    found = quantile(values, share)
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert found == values[0] or sum(value < found for value in values) < share * len(values)


@given(st.lists(seens))
def test_only_the_last_seconds_count_and_each_phase_by_itself(seen: list[RequestResult]):
    """What is older than the window is left out; a phase has what began in it."""
    seen.sort(key=lambda one: one.at)
    tally = Tally(["x", "y"], window=5.0)
    for one in seen:
        tally.add(one)
    recent = tally.recent(100.0)
    for side in ("x", "y"):
        assert recent[side]["requests"] == sum(1 for o in seen if o.side == side and o.at > 95.0)
        both = tally.phases(["a", "b"])[side]["requests"]
        assert both == sum(1 for one in seen if one.side == side and one.phase is not None)


def test_answers_are_told_apart():
    """Good, degraded, over a limit, and everything else an error."""
    assert outcome_of(200, b'{"degraded":false}') == "good"
    assert outcome_of(200, b'{"item":1,"degraded":true}') == "degraded"
    assert outcome_of(429, b"") == "limited"
    assert [outcome_of(status, b"") for status in (500, 503, 504, 404, 301)] == ["error"] * 5


def test_who_is_over_his_limit_says_nothing_about_latency():
    """A quick refusal of one's own limit does not make the others look quick."""
    slow = RequestResult(0.0, None, "x", premium=True, outcome="good", seconds=2.0)
    refused = [slow._replace(premium=False, outcome="limited", seconds=0.001)] * 9
    assert summary([slow, *refused])["p50"] == 2.0
