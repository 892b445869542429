from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.breaker.probes import CallVerdict, Countdown, Probe, n_of_m, ramp, slow_start
from seawall.models.breaker.state import BreakerModel, BreakerRefusal, BreakerSettings, BreakerState

SUCCESS, FAILURE, NONE = CallVerdict.SUCCESS, CallVerdict.FAILURE, CallVerdict.NONE
LETTERS = {"s": SUCCESS, "f": FAILURE, "n": NONE}


def half_open(**settings):
    """Return a breaker whose break is over at 10, so that the next call is a probe."""
    model = BreakerModel(BreakerSettings(**({"consecutive": 1, "break_for": 10} | settings)))
    model.settle(model.admit(0), FAILURE, 0)
    return model


def offer(model, count, now):
    """Offer that many calls; return the probes among them."""
    offered = [model.admit(now) for _ in range(count)]
    return [ticket for ticket in offered if isinstance(ticket, Probe)]


# --- N of M ---


@pytest.mark.parametrize(
    ("verdicts", "state"),
    [
        ("s", BreakerState.HALF_OPEN),
        ("ss", BreakerState.CLOSED),
        ("sfs", BreakerState.CLOSED),
        ("f", BreakerState.HALF_OPEN),
        ("ff", BreakerState.OPEN),
        ("fsf", BreakerState.OPEN),
        ("nnnnss", BreakerState.CLOSED),
        ("nfnnf", BreakerState.OPEN),
    ],
)
def test_two_of_three(verdicts, state):
    """Two successes close, two failures open, and what is no verdict does not count."""
    model = half_open(probes=n_of_m(2, 3))
    for letter in verdicts:
        (probe,) = offer(model, 1, now=10)
        model.settle(probe, LETTERS[letter], 10)
    assert model.state is state


def test_no_more_than_m_probes():
    """Of fifty callers at once three get through, and a verdict frees no place."""
    model = half_open(probes=n_of_m(2, 3))
    probes = offer(model, 50, now=10)
    assert len(probes) == 3
    model.settle(probes[0], SUCCESS, 10)
    assert model.admit(10) == BreakerRefusal("probing", None)


def test_each_hung_probe_has_failed():
    """Hung probes are given up as their times come, oldest first."""
    model = half_open(probes=n_of_m(2, 3), probe_timeout=5)
    offer(model, 1, now=10)
    offer(model, 2, now=12)
    assert model.admit(15) == BreakerRefusal("probing", None)
    assert model.admit(17) == BreakerRefusal("open", 10)


def test_a_probe_given_up_is_not_counted_again():
    """The late verdict of a hung probe changes nothing, although the generation is the same."""
    model = half_open(probes=n_of_m(1, 2), probe_timeout=5)
    hung, second = offer(model, 1, now=10) + offer(model, 1, now=14)
    assert model.admit(15) == BreakerRefusal("probing", None)
    model.settle(hung, SUCCESS, 16)
    assert model.state is BreakerState.HALF_OPEN
    model.settle(second, FAILURE, 16)
    assert model.state is BreakerState.OPEN


def test_a_verdict_before_anybody_asked_counts():
    """A late probe's result counts if no call came in between."""
    model = half_open(probe_timeout=5)
    (late,) = offer(model, 1, now=10)
    model.settle(late, SUCCESS, 30)
    assert model.state is BreakerState.CLOSED


# --- The ramp ---


def test_ramp_step_by_step():
    """One in a hundred, one in twenty, one in four, then all; each stage begins with a probe."""
    model = half_open(probes=ramp(step=5))
    for start, share in ((10, 2), (15, 10), (20, 50)):
        probes = offer(model, 200, start)
        assert len(probes) == share
        assert model.state is BreakerState.HALF_OPEN
        for probe in probes:
            model.settle(probe, SUCCESS, start + 1)
    assert model.admit(25) == model.generation
    assert model.state is BreakerState.CLOSED


def test_the_first_call_of_a_stage_is_a_probe():
    """Little traffic is no obstacle: one call in each stage is enough."""
    model = half_open(probes=ramp((0.01, 0.5), step=5))
    for now in (10, 15):
        (probe,) = offer(model, 1, now)
        model.settle(probe, SUCCESS, now)
    model.admit(20)
    assert model.state is BreakerState.CLOSED


def test_a_stage_waits_for_a_success():
    """A stage without a success lasts until it has one; that success ends it at once."""
    model = half_open(probes=ramp((0.5,), step=5))
    (probe,) = offer(model, 1, now=10)
    assert model.admit(40) == BreakerRefusal("probing", None)
    model.settle(probe, SUCCESS, 41)
    assert model.state is BreakerState.CLOSED


def test_each_stage_needs_a_success_of_its_own():
    """What an earlier stage has shown does not end the next one."""
    model = half_open(probes=ramp((0.5, 1.0), step=5))
    (probe,) = offer(model, 1, now=10)
    model.settle(probe, SUCCESS, 10)
    (probe,) = offer(model, 1, now=15)
    assert model.admit(40) != model.generation
    model.settle(probe, SUCCESS, 41)
    assert model.state is BreakerState.CLOSED


@pytest.mark.parametrize(
    ("ratio", "verdicts", "state"),
    [
        (None, "f", BreakerState.OPEN),
        (None, "sf", BreakerState.OPEN),
        (None, "ssf", BreakerState.HALF_OPEN),
        (None, "ssff", BreakerState.OPEN),
        (0.25, "ssssf", BreakerState.HALF_OPEN),
        (0.25, "sssf", BreakerState.OPEN),
    ],
)
def test_ramp_gives_up_at_the_ratio_that_trips(ratio, verdicts, state):
    """The share of failures that opens the ramp is `failure_ratio`, or one half."""
    model = half_open(failure_ratio=ratio, probes=ramp((1.0,), step=5))
    for probe, letter in zip(offer(model, len(verdicts), now=10), verdicts, strict=True):
        model.settle(probe, LETTERS[letter], 10)
    assert model.state is state


def test_a_cancelled_probe_of_an_earlier_stage_gives_nothing_back():
    """A permit goes back to the stage that gave it, or nowhere."""
    model = half_open(probes=ramp((0.1, 0.2), step=5))
    late, early = offer(model, 11, now=10)
    model.settle(early, SUCCESS, 15)
    assert len(offer(model, 1, now=15)) == 1
    model.settle(late, NONE, 15)
    assert offer(model, 1, now=15) == []


def test_a_hung_probe_of_the_ramp_has_failed():
    """On the ramp too a probe without a verdict cannot hold the breaker for ever."""
    model = half_open(probes=ramp(step=5), probe_timeout=60)
    offer(model, 50, now=10)
    assert model.admit(70) == BreakerRefusal("open", 10)


# --- Countdown ---


def test_waiting_for_what_is_left_is_enough_where_plain_floats_are_not():
    """The difference to the end, added again, can fall short of it by the last bit."""
    start, length, now = 3.415, 48.58, 9.2683
    end = start + length
    assert now + (end - now) < end
    countdown = Countdown(length, start)
    assert countdown.left(now + countdown.left(now)) == 0


@given(st.floats(0, 1e9), st.floats(1e-3, 1e6), st.floats(0, 1))
def test_who_waits_as_told_is_not_too_early(now, length, elapsed):
    """Waiting for `retry_after` is always enough, despite the rounding of floats."""
    countdown = Countdown(length, now)
    later = now + length * elapsed
    assert countdown.left(later + countdown.left(later)) == 0


def test_what_is_left_is_never_negative():
    """Long after the end nothing is left."""
    countdown = Countdown(10, 100)
    assert [countdown.left(now) for now in (100, 104, 110, 10**9)] == [10, 6, 0, 0]


def test_a_clock_set_back_far_starts_the_countdown_again():
    """A clock set back a little extends the wait; set back by more, it restarts it once."""
    countdown = Countdown(10, 1000)
    assert countdown.left(995) == 15
    assert countdown.left(990) == 20
    assert countdown.left(500) == 10
    assert countdown.left(504) == 6


# --- The slow start ---


def test_a_slow_start_doubles_while_calls_are_refused():
    """One at once, then two, four, eight: each stage after the answers of the one before."""
    model = half_open(probes=slow_start(step=5))
    now, sizes = 10, []
    for _ in range(4):
        probes = offer(model, 20, now)
        sizes.append(len(probes))
        for probe in probes:
            model.settle(probe, SUCCESS, now + 1)
        now += 1
    assert sizes == [1, 2, 4, 8]
    assert model.state is BreakerState.HALF_OPEN


def test_a_slow_start_closes_when_a_stage_refused_nobody():
    """It is closed once all callers of `step` seconds were let through, and not before."""
    model = half_open(probes=slow_start(step=5))
    first, *_ = offer(model, 3, now=10)
    model.settle(first, SUCCESS, 11)
    for now in (12, 14, 15):
        for probe in offer(model, 2, now):
            model.settle(probe, SUCCESS, now)
        assert model.state is (BreakerState.CLOSED if now == 15 else BreakerState.HALF_OPEN)


def test_slow_answers_slow_the_start():
    """Without an answer there is no further stage, however much time passes."""
    model = half_open(probes=slow_start(step=5), probe_timeout=1000)
    (probe,) = offer(model, 4, now=10)
    model.settle(probe, SUCCESS, 11)
    assert len(offer(model, 9, now=11)) == 2
    assert model.admit(15) == BreakerRefusal("probing", None)


def test_a_hanging_probe_does_not_keep_a_slow_start_from_trying():
    """It may have begun before the recovery: one more is let through every `step`, and decides."""
    model = half_open(probes=slow_start(step=5), probe_timeout=1000)
    (hanging,) = offer(model, 4, now=10)
    assert model.admit(14) == BreakerRefusal("probing", None)
    (second,) = offer(model, 2, now=15)
    model.settle(second, SUCCESS, 16)
    model.settle(hanging, FAILURE, 17)  # of an earlier stage
    assert model.state is BreakerState.HALF_OPEN
    assert len(offer(model, 4, now=17)) == 2


def test_a_slow_start_opens_when_half_of_a_stage_fails():
    """The ratio is that of the breaker, over the calls of the stage; it need not wait for all."""
    model = half_open(probes=slow_start(step=5))
    for now, verdicts in ((10, "s"), (11, "ss"), (12, "fssf")):
        for probe, letter in zip(offer(model, 9, now), verdicts, strict=True):
            model.settle(probe, LETTERS[letter], now)
    assert model.state is BreakerState.OPEN


def test_a_slow_start_stays_where_a_quarter_fails():
    """More than it carries well would be too much: the stage is repeated."""
    model = half_open(probes=slow_start(step=5))
    for now, verdicts in ((10, "s"), (11, "ss"), (12, "fsss")):
        for probe, letter in zip(offer(model, 9, now), verdicts, strict=True):
            model.settle(probe, LETTERS[letter], now)
    assert len(offer(model, 9, now=13)) == 4


def test_a_slow_start_uses_the_permit_of_a_failed_call_only_once():
    """Who timed out here may still be served there: it is no room for another."""
    model = half_open(probes=slow_start(step=5))
    for now, verdicts in ((10, "s"), (11, "ss")):
        for probe, letter in zip(offer(model, 9, now), verdicts, strict=True):
            model.settle(probe, LETTERS[letter], now)
    failed, *_ = offer(model, 9, now=12)
    model.settle(failed, FAILURE, 13)
    assert offer(model, 9, now=13) == []


def test_a_slow_start_gives_the_permit_of_a_cancelled_call_back():
    """It says nothing, and runs no more."""
    model = half_open(probes=slow_start(step=5))
    (probe,) = offer(model, 3, now=10)
    model.settle(probe, NONE, 11)
    assert len(offer(model, 3, now=11)) == 1
