"""The rule of the throttle: the formula, the window, and what is counted when."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.throttle import ThrottleModel, reject_share
from tests.support import falsified, quarters


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.floats(1, 10))
def test_the_share_is_the_formula(requests, accepts, k):
    """A probability, 0 while accepts keep up, and never a certainty."""
    accepts = min(accepts, requests)
    share = reject_share(requests, accepts, k)
    assert share == max(0.0, (requests - k * accepts) / (requests + 1))
    assert 0.0 <= share < 1.0
    assert (share == 0.0) == (requests <= k * accepts)


@given(st.integers(0, 1000), st.integers(0, 1000), st.floats(1, 5), st.floats(1, 5))
def test_a_higher_k_rejects_less(requests, accepts, one, other):
    """What matters more is never rejected at a draw at which what matters less is not."""
    accepts = min(accepts, requests)
    low, high = sorted((one, other))
    assert reject_share(requests, accepts, high) <= reject_share(requests, accepts, low)


class Request(NamedTuple):
    """One request: when it comes, after the one before, and how it ends."""

    after: float
    end: str


ENDS = ["accepted", "refused", "given back", "rejected here"]
REQUESTS = st.builds(Request, quarters(12), st.sampled_from(ENDS))
HISTORIES = st.lists(REQUESTS, min_size=1, max_size=40)
SPAN = 10.0


def check_window(history):
    """Compare the model with a plain list of all requests, bucket by bucket."""
    model = ThrottleModel(SPAN, 2.0, None)
    now, log = 0.0, []
    for request in history:
        now += request.after
        ticket = model.count(now, sent=request.end != "rejected here")
        if request.end in ("refused", "rejected here"):
            model.refused(ticket)
        elif request.end == "given back":
            model.give_back(ticket)
        log.append((now, request.end))
        # A tenth of the window is counted as one: the running tenth and the nine before it.
        kept = [end for at, end in log if at // 1.0 > now // 1.0 - 10 and end != "given back"]
        recent = model.recent(now)
        assert recent.requests == len(kept)
        assert recent.accepts == kept.count("accepted")


@given(HISTORIES)
def test_the_window_holds_the_latest_requests(history):
    """Requests and accepts are those of the last ten buckets."""
    check_window(history)


def test_without_giving_back_the_window_is_wrong(monkeypatch):
    """Ablation: a model that keeps what was cancelled fails the same check."""
    monkeypatch.setattr(ThrottleModel, "give_back", lambda _self, _ticket: None)
    assert falsified(check_window, HISTORIES)


def check_late(case):
    """Check that late refusals never outnumber the requests."""
    model = ThrottleModel(SPAN, 2.0, None)
    now, open_tickets = 0.0, []
    for after, ends in case:
        now += after
        open_tickets.append(model.count(now))
        for _ in range(min(ends, len(open_tickets))):
            model.refused(open_tickets.pop(0))
        requests, accepts = model.recent(now)
        assert 0 <= accepts <= requests


LATE = st.lists(st.tuples(quarters(60), st.integers(0, 3)), min_size=1, max_size=30)


@given(LATE)
def test_a_late_refusal_counts_where_its_request_does(case):
    """Both are in the window, or neither is."""
    check_late(case)


def test_counted_where_it_ends_a_refusal_outlives_its_request(monkeypatch):
    """Ablation: counted in the running bucket, refusals can outnumber requests."""

    def refused(self, _ticket):
        self.bucket.failures += 1
        self.calm = False

    monkeypatch.setattr(ThrottleModel, "refused", refused)
    assert falsified(check_late, LATE)


def test_a_request_counts_as_accepted_until_told_otherwise():
    """Requests under way reject nothing: a slow server is no refusing one."""
    model = ThrottleModel(120.0, 2.0, None)
    tickets = [model.count(0.0) for _ in range(50)]
    assert model.recent(1.0) == (50, 50)
    assert model.calm
    for ticket in tickets[:40]:
        model.refused(ticket)
    assert model.recent(1.0) == (50, 10)
    assert not model.calm


def test_it_is_calm_again_once_accepts_keep_up():
    """Because enough were accepted, or because the refusals have left the window."""
    model = ThrottleModel(10.0, 2.0, None)
    model.refused(model.count(0.0))
    assert model.recent(1.0) == (1, 0)
    assert not model.calm
    model.count(1.0)
    assert model.recent(1.0) == (2, 1)
    assert model.calm
    model.refused(model.count(2.0))
    assert not model.calm
    assert model.recent(20.0) == (0, 0)
    assert model.calm


class Step(NamedTuple):
    """Something that happens to a window after some time."""

    after: float
    what: str


def steps_of(*seconds):
    whats = st.sampled_from(["count", "refused", "given back", "look"])
    step = st.builds(Step, st.sampled_from(seconds), whats)
    return st.lists(step, min_size=1, max_size=40)


def check_calm(steps):
    """Check that a caller who counts itself in calm times skips no rejection."""
    model = ThrottleModel(SPAN, 2.0, None)
    now, waiting = 0.0, []
    for step in steps:
        now += step.after
        if model.calm and now < model.bucket.end:
            requests, refused, _ = model.totals(now)
            assert reject_share(requests, requests - refused, 2.0) == 0.0
        elif step.what in ("count", "look"):
            model.recent(now)
        if step.what == "count":
            waiting.append(model.count(now))
        elif step.what == "refused" and waiting:
            model.refused(waiting.pop(0))
        elif step.what == "given back" and waiting:
            model.give_back(waiting.pop(0))


@given(steps_of(0.0, 0.0, 0.0, 0.25, 3.0))
def test_in_calm_times_there_is_nothing_to_reject(steps):
    """What the short cut leaves out would have made no difference."""
    check_calm(steps)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("refused", lambda _self, ticket: setattr(ticket, "failures", ticket.failures + 1)),
        ("give_back", lambda _self, ticket: setattr(ticket, "calls", ticket.calls - 1)),
    ],
)
def test_calm_that_is_not_ended_skips_rejections(monkeypatch, name, change):
    """Ablation: if refusals, or calls given back, leave it calm, the same check fails."""
    monkeypatch.setattr(ThrottleModel, name, change)
    assert falsified(check_calm, steps_of(0.0))


def test_one_request_in_each_interval_may_not_be_rejected():
    """If none was sent for `probe_every`, the next one is; those rejected here were not sent."""
    model = ThrottleModel(120.0, 2.0, 10.0)
    assert not model.may_reject(0.0)
    model.count(0.0)
    assert model.may_reject(0.0)
    model.count(9.0, sent=False)
    assert model.may_reject(9.75)
    assert not model.may_reject(10.0)
    model.update(None, 2.0, None)
    assert model.may_reject(1000.0)


def test_a_request_that_was_given_back_was_not_the_one_sent():
    """The next one goes in its stead; with others sent lately, there is no need."""
    model = ThrottleModel(120.0, 2.0, 10.0)
    model.count(0.0)
    model.give_back(model.count(10.0))
    assert not model.may_reject(10.25)
    model.count(10.5)
    model.give_back(model.count(11.0))
    assert model.may_reject(11.0)
    assert not model.may_reject(20.5)


def test_another_window_begins_empty():
    """A window of another size counts anew."""
    model = ThrottleModel(10.0, 2.0, None)
    model.refused(model.count(0.0))
    model.update(20.0, 2.0, None)
    assert model.recent(0.0) == (0, 0)
    model.refused(model.count(1.0))
    assert model.recent(19.0) == (1, 0)
    assert model.recent(21.0) == pytest.approx((0, 0))
