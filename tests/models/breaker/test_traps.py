"""Mistakes that circuit breakers are known for, one test for each."""

from __future__ import annotations

import pytest

from seawall.models.breaker.probes import CallVerdict, Probe, n_of_m, ramp, single_probe, slow_start
from seawall.models.breaker.state import BreakerModel, BreakerRefusal, BreakerSettings, BreakerState

SUCCESS, FAILURE, NONE = CallVerdict.SUCCESS, CallVerdict.FAILURE, CallVerdict.NONE

EVERY_KIND = pytest.mark.parametrize(
    "probes",
    [single_probe(), n_of_m(2, 3), ramp(step=5), slow_start()],
    ids=["single", "n_of_m", "ramp", "slow_start"],
)


def closed(**settings):
    """Return a breaker that trips at the first failure and breaks for 10."""
    return BreakerModel(BreakerSettings(consecutive=1, break_for=10, **settings))


def half_open(**settings):
    """Return one whose break is over at 10, and its first probe."""
    model = closed(**settings)
    model.settle(model.admit(0), FAILURE, 0)
    probe = model.admit(10)
    assert isinstance(probe, Probe)
    return model, probe


@EVERY_KIND
def test_a_cancelled_probe_is_not_a_success(probes):
    """However many probes are cancelled, none of them closes the breaker."""
    model, probe = half_open(probes=probes)
    for moment in range(10, 40):
        model.settle(probe, NONE, moment)
        assert model.state is BreakerState.HALF_OPEN
        probe = model.admit(moment)
        assert isinstance(probe, Probe)


def test_a_cancelled_call_is_not_a_success():
    """A cancelled call between two failures does not end the row of failures."""
    model = BreakerModel(BreakerSettings(consecutive=2))
    for verdict in (FAILURE, NONE, FAILURE):
        model.settle(model.admit(0), verdict, 0)
    assert model.state is BreakerState.OPEN


def test_a_cancelled_call_is_not_a_failure():
    """Callers that give up, a thousand of them, do not open the breaker."""
    model = BreakerModel(BreakerSettings(consecutive=1, failure_ratio=0.01, min_calls=1))
    for _ in range(1000):
        model.settle(model.admit(0), NONE, 0)
    assert model.state is BreakerState.CLOSED


@EVERY_KIND
def test_fifty_callers_are_not_fifty_probes(probes):
    """When the break is over, a waiting crowd does not pass as probes."""
    model, first = half_open(probes=probes)
    crowd = [first, *(model.admit(10) for _ in range(49))]
    assert sum(isinstance(one, Probe) for one in crowd) == (3 if probes == n_of_m(2, 3) else 1)


@pytest.mark.parametrize("slow", [{}, {"slow_after": 500, "slow_ratio": 1.0}])
def test_a_late_success_from_before_the_trip_does_not_close(slow):
    """A call that began before the trip says nothing about the dependency after it."""
    model = closed(**slow)
    early, failing = model.admit(0), model.admit(0)
    model.settle(failing, FAILURE, 1)
    model.settle(early, SUCCESS, 2)
    assert model.state is BreakerState.OPEN
    another = closed(**slow)
    early, failing = another.admit(0), another.admit(0)
    another.settle(failing, FAILURE, 1)
    another.admit(11)
    another.settle(early, SUCCESS, 12)
    assert another.state is BreakerState.HALF_OPEN


def test_a_late_failure_from_before_the_trip_does_not_open():
    """A straggler of the outage opens neither the probing nor the recovered breaker."""
    model = closed()
    stragglers = [model.admit(0) for _ in range(3)]
    model.settle(stragglers.pop(), FAILURE, 0)
    probe = model.admit(10)
    model.settle(stragglers.pop(), FAILURE, 11)
    assert model.state is BreakerState.HALF_OPEN
    model.settle(probe, SUCCESS, 12)
    model.settle(stragglers.pop(), FAILURE, 13)
    assert model.state is BreakerState.CLOSED


def test_a_probe_of_an_earlier_trial_decides_nothing():
    """A hung probe that comes back during a later trial neither closes nor opens."""
    model, hung = half_open(probe_timeout=5)
    assert model.admit(15) == BreakerRefusal("open", 10)
    probe = model.admit(25)
    model.settle(hung, SUCCESS, 26)
    assert model.state is BreakerState.HALF_OPEN
    model.settle(probe, SUCCESS, 27)
    assert model.state is BreakerState.CLOSED


@EVERY_KIND
def test_a_probe_refused_further_in_returns_its_permit(probes):
    """A probe that a full bulkhead refused is no result, and blocks no other probe."""
    model, probe = half_open(probes=probes)
    model.settle(probe, NONE, 10)
    assert isinstance(model.admit(10), Probe)


@EVERY_KIND
def test_a_hung_probe_does_not_hold_the_breaker_half_open(probes):
    """If every probe hangs for ever, new ones get their turn after the timeout and a break."""
    model, _ = half_open(probes=probes, probe_timeout=30)
    for _ in range(9):
        model.admit(10)
    assert model.admit(40) == BreakerRefusal("open", 10)
    assert isinstance(model.admit(50), Probe)


def test_a_slow_dependency_is_seen_while_every_call_hangs():
    """If no call ever ends, the breaker opens all the same."""
    model = BreakerModel(BreakerSettings(slow_after=2, slow_ratio=0.5, min_calls=20))
    answers = [model.admit(0.1 * number) for number in range(60)]
    assert isinstance(answers[-1], BreakerRefusal)


def test_a_clock_set_back_neither_shortens_nor_freezes_the_break():
    """An hour back, the break begins again once; it neither ends at once nor in an hour."""
    model = closed()
    model.settle(model.admit(4000), FAILURE, 4000)
    assert model.admit(400) == BreakerRefusal("open", 10)
    assert model.admit(409) == BreakerRefusal("open", 1)
    assert isinstance(model.admit(410), Probe)


def test_a_clock_set_back_does_not_hold_a_hung_probe():
    """A probe from before the clock was set back is given up after one more timeout."""
    model, _ = half_open(probe_timeout=30)
    assert model.admit(-3600) == BreakerRefusal("probing", None)
    assert model.admit(-3570) == BreakerRefusal("open", 10)


def test_a_clock_set_back_does_not_hide_slow_calls():
    """A call dated by the old clock does not keep the next ones from being slow."""
    model = BreakerModel(BreakerSettings(slow_after=2, slow_ratio=1.0, min_calls=2))
    model.admit(4000)
    for moment in (400, 403):
        model.settle(model.admit(moment), SUCCESS, moment + 2)
    assert model.state is BreakerState.OPEN


def test_no_outcome_is_remembered_for_ever():
    """What the breaker holds on to does not grow with the number of calls."""
    model = BreakerModel(BreakerSettings(slow_after=2, slow_ratio=1.0, min_calls=10**6))
    for moment in range(5000):
        model.settle(model.admit(moment), FAILURE if moment % 2 else SUCCESS, moment + 1)
        model.admit(moment)
    assert len(model._running) <= 3
    assert len(model._window.buckets) <= 10
