from __future__ import annotations

from math import inf, nan
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.budget import BUCKETS, Budget, InFlightRatio, RequestRatio, SuccessDeposit

RATIOS = st.floats(0.01, 1)


# --- The property of each budget, checked at every prefix of a history ---


def check_success_deposit(budget, history):
    """Between any two moments there are fewer than maximum / 2 + ratio * successes retries."""
    # Of all the spans that end now, the most by which retries exceed their deposits.
    excess = 0.0
    for succeeded in history:
        if succeeded:
            budget.succeeded(0.0)
            excess = max(0.0, excess - budget.ratio)
        else:
            budget.failed(0.0)
            if budget.try_retry(0.0):
                excess += 1
                assert excess < budget.maximum / 2 + 1e-6


def check_recovery(budget, failures):
    """However long the storm, the same number of successes allows retries again."""
    for _ in range(failures):
        budget.failed(0.0)
    for _ in range(int(budget.maximum / 2 / budget.ratio) + 2):
        budget.succeeded(0.0)
    assert budget.try_retry(0.0)


def check_request_ratio(budget, history):
    """Whenever a retry is made, the inequality holds over the ten buckets; and only then."""
    now, requests, retries = 0.0, [], []
    for step, retry in history:
        now += step
        bucket = now // (budget.window / BUCKETS)
        if not retry:
            budget.started(now)
            requests.append(bucket)
            continue
        allowed = budget.ratio * sum(bucket - at < BUCKETS for at in requests)
        allowed = max(allowed, budget.floor * budget.window)
        after = sum(bucket - at < BUCKETS for at in retries) + 1
        assert budget.try_retry(now) == (after <= allowed)
        if after <= allowed:
            retries.append(bucket)


def check_in_flight_ratio(budget, history):
    """Whenever a retry is made, the inequality holds over what is in flight; and only then."""
    active = retries = 0
    for operation in history:
        if operation == "start":
            active += 1
            budget.started(0.0)
        elif operation == "end" and active:
            active -= 1
            budget.ended(0.0)
        elif operation == "end retry" and retries:
            retries -= 1
            budget.retry_ended(0.0)
        elif operation == "retry":
            fits = retries + 1 <= max(budget.floor, budget.ratio * active)
            assert budget.try_retry(0.0) == fits
            retries += fits


# --- Success deposits ---


@given(st.floats(3, 100), RATIOS, st.lists(st.booleans(), max_size=400))
def test_successes_pay_for_retries(maximum, ratio, history):
    """No span of any history has more retries than half the tokens and its deposits allow."""
    check_success_deposit(SuccessDeposit(maximum, ratio), history)


@given(st.floats(3, 100), RATIOS, st.integers(0, 1000))
def test_recovery_does_not_depend_on_the_storm(maximum, ratio, failures):
    """No number of failures puts the recovery further away."""
    check_recovery(SuccessDeposit(maximum, ratio), failures)


def test_the_fresh_budget_allows_four_retries():
    """Ten tokens, more than half of which must be left, are four retries."""
    budget = SuccessDeposit()
    granted = []
    for _ in range(8):
        budget.failed(0.0)
        granted.append(budget.try_retry(0.0))
    assert granted == [True] * 4 + [False] * 4
    assert not budget.allows()
    assert budget.snapshot() == {"tokens": 2, "maximum": 10}


def test_a_full_budget_needs_no_deposit():
    """While the tokens are at their maximum a success changes nothing."""
    budget = SuccessDeposit()
    assert budget.tokens == budget.maximum
    budget.succeeded(0.0)
    assert budget.tokens == budget.maximum


class WithoutThreshold(SuccessDeposit):
    """Allows every retry."""

    def allows(self):
        """Ignore the tokens."""
        return True


class WithoutCeiling(SuccessDeposit):
    """Saves up successes without end."""

    def succeeded(self, _now, /):
        """Earn, however much there is."""
        self.tokens += self.ratio


class WithoutFloor(SuccessDeposit):
    """Goes into debt without end."""

    def failed(self, _now, /):
        """Spend, however little there is."""
        self.tokens -= 1


def test_without_the_threshold_the_property_fails():
    """The check sees that retries are no longer bounded."""
    storm = [False] * 10
    check_success_deposit(SuccessDeposit(), storm)
    with pytest.raises(AssertionError):
        check_success_deposit(WithoutThreshold(), storm)


def test_without_the_ceiling_the_property_fails():
    """The check sees that a long calm pays for a storm."""
    calm_then_storm = [True] * 100 + [False] * 10
    check_success_deposit(SuccessDeposit(), calm_then_storm)
    with pytest.raises(AssertionError):
        check_success_deposit(WithoutCeiling(), calm_then_storm)


def test_without_the_floor_the_property_fails():
    """The check sees that a long storm delays the recovery."""
    check_recovery(SuccessDeposit(), 1000)
    with pytest.raises(AssertionError):
        check_recovery(WithoutFloor(), 1000)


# --- A share of requests ---

TRAFFIC = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.9, 5.0, 30.0]), st.booleans()))


@given(RATIOS, st.sampled_from([1.0, 10.0, 7.3]), st.floats(0, 1), TRAFFIC)
def test_retries_are_a_share_of_requests(ratio, window, floor, history):
    """The inequality holds at every retry, and nothing is refused that it allows."""
    check_request_ratio(RequestRatio(ratio, window, floor), history)


def test_the_floor_is_allowed_without_requests():
    """One in ten seconds by default, whatever the traffic; more if it is asked for."""
    budget = RequestRatio()
    assert sum(budget.try_retry(1.0) for _ in range(500)) == 1
    assert budget.snapshot() == {"requests": 0, "retries": 1, "allowed": 1}
    larger = RequestRatio(floor=10.0)
    assert sum(larger.try_retry(1.0) for _ in range(500)) == 100


@pytest.mark.parametrize("requests", [10, 50, 200, 1_000, 10_000])
def test_a_ratio_of_a_tenth_is_a_tenth(requests):
    """The floor adds nothing to it, however few requests there are."""
    budget = RequestRatio(0.1)
    for _ in range(requests):
        budget.started(3.0)
    assert sum(budget.try_retry(3.0) for _ in range(requests)) == requests // 10


def test_integer_microseconds_serve_as_well():
    """The arithmetic does not care about the unit of time."""
    budget = RequestRatio(ratio=1, window=10_000_000, floor=0)
    budget.started(1_500_000)
    assert not RequestRatio(ratio=1, window=10_000_000, floor=0).try_retry(1_500_000)
    assert budget.try_retry(10_999_999)
    budget.started(19_999_999)
    assert not budget.try_retry(19_999_999)
    assert budget.try_retry(20_000_000)
    assert budget.snapshot()["requests"] == 1


def test_memory_is_bounded():
    """A day of traffic leaves ten buckets."""
    budget = RequestRatio()
    for second in range(0, 86_400, 7):
        budget.started(second)
        budget.try_retry(second)
    assert len(budget._requests) == len(budget._retries) == BUCKETS


def test_a_clock_read_late_counts_now():
    """A moment that is a little old neither raises nor clears the window."""
    budget = RequestRatio(ratio=1, floor=0)
    for _ in range(20):
        budget.started(50.0)
        budget.started(48.0)
    assert budget.snapshot()["requests"] == 40
    assert [budget.try_retry(49.0) for _ in range(41)] == [True] * 40 + [False]


class WithoutRatio(RequestRatio):
    """Allows every retry."""

    def _allowed(self):
        return inf


class WithoutExpiry(RequestRatio):
    """Lets requests of long ago pay for retries."""

    def _advance(self, now):
        """Never turn the buckets."""


@pytest.mark.parametrize(
    ("ablated", "history"),
    [
        (WithoutRatio, [(0.0, False)] + [(0.0, True)] * 5),
        (WithoutExpiry, [(0.0, False)] * 10 + [(30.0, True)]),
    ],
)
def test_without_ratio_or_expiry_the_property_fails(ablated, history):
    """The check sees each safeguard that is taken away."""
    settings = {"ratio": 0.5, "window": 10.0, "floor": 0.0}
    check_request_ratio(RequestRatio(**settings), history)
    with pytest.raises(AssertionError):
        check_request_ratio(ablated(**settings), history)


# --- A share of what is in flight ---

FLIGHTS = st.lists(st.sampled_from(["start", "start", "start", "retry", "end retry", "end"]))


@given(st.floats(0, 1), st.integers(0, 5), FLIGHTS)
def test_retries_are_a_share_of_calls_in_flight(ratio, floor, history):
    """The inequality holds at every retry, and nothing is refused that it allows."""
    check_in_flight_ratio(InFlightRatio(ratio, floor), history)


def test_a_retry_counts_while_it_backs_off():
    """From its permission to its end a retry keeps its place."""
    budget = InFlightRatio(floor=1)
    budget.started(0.0)
    assert budget.try_retry(0.0)
    assert not budget.try_retry(100.0)
    budget.retry_ended(100.0)
    assert budget.try_retry(100.0)
    assert budget.snapshot() == {"active": 1, "retries": 1, "allowed": 1}


def test_more_calls_in_flight_allow_more():
    """A fifth of the calls in flight, once that is above the floor."""
    budget = InFlightRatio()
    for _ in range(50):
        budget.started(0.0)
    assert [budget.try_retry(0.0) for _ in range(11)] == [True] * 10 + [False]


def test_ends_of_older_calls_make_no_debt():
    """Calls and retries that began under another budget end without making room in this one."""
    budget = InFlightRatio(floor=1)
    for _ in range(5):
        budget.retry_ended(0.0)
        budget.ended(0.0)
    budget.started(0.0)
    assert budget.active == 1
    assert [budget.try_retry(0.0) for _ in range(2)] == [True, False]


class WithoutShare(InFlightRatio):
    """Allows every retry."""

    def _allowed(self):
        return inf


class WithoutBackingOff(InFlightRatio):
    """Forgets a retry as soon as it is allowed."""

    def try_retry(self, now, /):
        """Count no retry that only waits."""
        granted = super().try_retry(now)
        if granted:
            self.retries -= 1
        return granted


@pytest.mark.parametrize("ablated", [WithoutShare, WithoutBackingOff])
def test_without_share_or_backing_off_the_property_fails(ablated):
    """The check sees each safeguard that is taken away."""
    history = ["start"] * 5 + ["retry"] * 10
    check_in_flight_ratio(InFlightRatio(), history)
    with pytest.raises(AssertionError):
        check_in_flight_ratio(ablated(), history)


# --- All of them ---

BUDGETS = [SuccessDeposit, RequestRatio, InFlightRatio]


@pytest.mark.parametrize("make", BUDGETS)
def test_one_policy_can_drive_any_budget(make):
    """Every budget takes the whole life of a call."""
    budget = make()
    budget.started(1.0)
    budget.failed(1.1)
    assert budget.try_retry(1.1)
    budget.succeeded(1.5)
    budget.retry_ended(1.5)
    budget.ended(1.5)
    assert isinstance(budget, Budget)
    assert all(isinstance(value, (int, float)) for value in budget.snapshot().values())


def test_a_policy_may_skip_what_does_not_count():
    """Only budgets that count calls need to hear of each one."""
    assert [make.counts_calls for make in BUDGETS] == [False, True, True]


class Bare(Budget):
    """Overrides nothing."""

    __slots__ = ()
    counts_calls: ClassVar[bool] = False


def test_a_budget_of_ones_own_must_decide():
    """What has no sensible default raises; what has one does nothing."""
    budget = Bare()
    budget.started(0.0)
    budget.succeeded(0.0)
    budget.failed(0.0)
    budget.retry_ended(0.0)
    budget.ended(0.0)
    with pytest.raises(NotImplementedError):
        budget.try_retry(0.0)
    with pytest.raises(NotImplementedError):
        budget.snapshot()


def test_reprs_show_the_settings():
    """A budget reads as the call that makes it."""
    assert [repr(make()) for make in BUDGETS] == [
        "SuccessDeposit(maximum=10, ratio=0.1)",
        "RequestRatio(ratio=0.2, window=10, floor=0.1)",
        "InFlightRatio(ratio=0.2, floor=3)",
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SuccessDeposit(maximum=2), "^maximum=2: write a finite number of at least 3"),
        (lambda: SuccessDeposit(ratio=0), "^ratio=0"),
        (lambda: RequestRatio(ratio=1.5), r"^ratio=1\.5"),
        (lambda: RequestRatio(window=0), "^window=0"),
        (lambda: RequestRatio(floor=nan), "^floor=nan"),
        (lambda: InFlightRatio(ratio=-1), "^ratio=-1"),
        (lambda: InFlightRatio(floor=-1), "^floor=-1"),
    ],
)
def test_wrong_settings_say_what_to_write(make, message):
    """Settings are checked at construction."""
    with pytest.raises(ValueError, match=message):
        make()
