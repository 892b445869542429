"""What a guard and its layers are called for what is wrong."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.dashboard.counters import Counters
from seawall.dashboard.presenters.guards import guard_view
from seawall.dashboard.presenters.sections import describe_row
from tests.dashboard.views_support import Pair

SPENT: dict[str, Any] = {
    "policy": "retry",
    "retries": 9,
    "stopped": {"budget": 7},
    "budget": {"tokens": 0.0, "maximum": 10.0},
}


def _breaker(state: str, **more: Any) -> dict[str, Any]:
    return {"policy": "breaker", "state": state, "calls": 9, "failures": 9, **more}


def _shown(*policies: dict[str, Any], **more: Any) -> Any:
    """Return what is shown of a guard whose retries were refused between two looks."""
    before = [{**policy, "stopped": {}} for policy in policies]
    counters = Counters()
    for now, told in enumerate((before, list(policies))):
        counters.begin(float(now))
        seen = {"name": "vendor", "policies": told, **more}
        shown = guard_view(seen, (), counters, edge=False)
    return shown


@pytest.mark.parametrize("state", ["open", "isolated"])
def test_a_guard_with_a_broken_breaker_is_called_after_it(state: str):
    """Whatever else is wrong, and in whatever order: it is what lets no call through."""
    for stack in permutations([SPENT, _breaker(state), {"policy": "chaos", "enabled": True}]):
        shown = _shown(*stack)
        assert (shown["state"], shown["tone"]) == (state, "bad")
    assert _shown(SPENT, _breaker("closed"))["state"] == "budget spent"
    assert _shown(SPENT, _breaker(state), snapshot_error="it broke")["state"] == state


def test_the_worse_of_two_breakers_counts():
    """A breaker that an operator isolated does not close automatically."""
    assert _shown(_breaker("open"), _breaker("isolated"))["state"] == "isolated"


@pytest.mark.parametrize("mode", ["shadow", "off"])
def test_a_breaker_that_stops_nothing_is_not_it(mode: str):
    """In shadow or switched off it refuses no call: the guard is called for something else."""
    assert _shown(SPENT, _breaker("open", mode=mode))["state"] == "budget spent"


def test_a_timeout_has_a_state_only_while_it_strikes():
    """Its seconds are among its settings; its state says whether calls time out now."""
    pair = Pair()

    def state(timed_out: int, seconds: float = 1.0) -> str:
        timeout = {"policy": "timeout", "seconds": 2.0, "timed_out": timed_out}
        view = pair.look({"guard": [{"name": "vendor", "policies": [timeout]}]}, seconds)
        found: str = view["guards"][0]["stack"][0]["state"]
        return found

    assert [state(7), state(7), state(8), state(8)] == ["", "", "timing out", "timing out"]
    assert [state(8, 10.0), state(8, 10.0)][-1] == ""


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 9)), min_size=2, max_size=20))
def test_a_look_between_two_others_shows_no_peak(steps: list[tuple[int, int]]):
    """Rates are of half a turn at least: one call of a moment is not many a second."""
    counters, now, total = Counters(apart=0.5), 0.0, 0
    looks = [(now, total)]
    counters.begin(now)
    counters.rate("calls", total)
    for ticks, calls in steps:
        now, total = now + ticks / 16, total + calls
        counters.begin(now)
        rate = counters.rate("calls", total)
        at, before = next((one for one in reversed(looks) if now - one[0] >= 0.5), looks[0])
        assert rate == pytest.approx((total - before) / (now - at))
        looks.append((now, total))


def test_jobs_are_shown_by_their_states_alone():
    """How many jobs this process has ever claimed is not how many are claimed now."""
    counts = {"claimed": 1234, "cancelled": 3, "refused_late": 0}
    stored = {"queued": (3, 2.0), "running": (1, 1.0)}
    seen = {"name": "reports", **counts, "stored": stored}
    row = describe_row("jobs", "reports", seen, Counters())
    assert row.facts == [("oldest", "2 s"), ("running", "1")]
