"""Detectors: levels by the formulas, safe for any instants, bounded, and fair to each peer."""

from math import exp, isfinite, log10
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.detection.detectors import (
    DetectorSettings,
    exponential,
    fixed_timeout,
    phi_accrual,
    quantile_timeout,
)

EVERY = [phi_accrual(), exponential(), quantile_timeout(), fixed_timeout(2.0)]
EACH = pytest.mark.parametrize("settings", EVERY, ids=repr)

intervals = st.lists(st.floats(0.001, 10.0), min_size=1, max_size=30)


def fed(settings: DetectorSettings, silences: list[float]):
    """Return a detector that heard a heartbeat after each silence, and when it heard the last."""
    detector, now = settings.start(), 100.0
    detector.heartbeat(now)
    for silence in silences:
        now += silence
        detector.heartbeat(now)
    return detector, now


def reference_phi(silence: float, mean: float, deviation: float) -> float:
    """Return the published approximation, for values where its exponential fits a float."""
    y = (silence - mean) / deviation
    e = exp(-y * (1.5976 + 0.070566 * y * y))
    return -log10(e / (1 + e)) if silence > mean else -log10(1 - 1 / (1 + e))


@given(st.lists(st.floats(0.9, 1.1), min_size=2, max_size=150), st.floats(0.5, 1.6))
def test_phi_is_that_of_the_published_formula(silences, silence):
    """Mean and deviation are those of the window; the bootstrap counts until it is pushed out."""
    detector, now = fed(phi_accrual(threshold=1000.0), silences)
    window = [0.75, 1.25, *(round(one * 1e6) / 1e6 for one in silences)][-100:]
    wanted = reference_phi(silence, fmean(window), max(pstdev(window), 0.1))
    assert detector.level(now + silence) == pytest.approx(wanted, rel=1e-4, abs=1e-9)


def test_the_exponential_level_8_is_a_silence_of_18_4_means():
    """0.434 t / mean, as the field uses it."""
    detector, now = fed(exponential(), [1.0] * 100)
    assert detector.level(now + 18.4) == pytest.approx(8.0, rel=1e-2)
    assert not detector.suspected(now + 18.3)
    assert detector.suspected(now + 18.5)


@EACH
def test_nobody_is_suspected_who_was_never_heard(settings):
    """A detector knows silence only after a sign of life."""
    detector = settings.start()
    assert detector.level(1e6) == 0.0
    assert not detector.suspected(1e6)


@EACH
@given(silences=intervals, steps=st.lists(st.floats(0.0, 1e4), min_size=1, max_size=10))
def test_the_level_never_falls_while_a_peer_is_silent(settings, silences, steps):
    """Nor is anything but a heartbeat a reason to trust a peer more."""
    detector, now = fed(settings, silences)
    levels = [detector.level(now)]
    for step in steps:
        now += step
        levels.append(detector.level(now))
    assert levels == sorted(levels)
    detector.heartbeat(now)
    assert not detector.suspected(now)


@EACH
@given(
    st.lists(
        st.tuples(st.sampled_from(["heartbeat", "sent", "level"]), st.floats(width=64)), max_size=40
    )
)
def test_any_sequence_of_instants_is_safe(settings, history):
    """Clocks that jump, infinite instants and NaN give a finite level, and no error."""
    detector = settings.start()
    for what, now in history:
        getattr(detector, what)(now)
        level = detector.level(now)
        assert isfinite(level)
        assert level >= 0.0
        detector.suspected(now)


@EACH
def test_every_silence_is_suspected_in_the_end(settings):
    """Completeness: whatever was learned, a peer that stays silent reaches the threshold."""
    detector, now = fed(settings, [1.0, 0.5, 1.5] * 20)
    assert detector.suspected(now + 1e6)


@pytest.mark.parametrize("settings", [phi_accrual(), exponential(), quantile_timeout()], ids=repr)
def test_the_silence_that_ended_a_suspicion_is_not_learned(settings):
    """Else the next crash would be found as late as the outage was long."""
    detector, now = fed(settings, [1.0] * 50)
    before = detector.level(now + 1.5)
    now += 1000.0
    assert detector.suspected(now)
    detector.heartbeat(now)
    assert detector.level(now + 1.5) == pytest.approx(before)


def test_the_first_interval_is_an_estimate():
    """One second, plus or minus a quarter, until intervals are known."""
    detector = phi_accrual(first_interval=1.0).start()
    detector.heartbeat(0.0)
    assert not detector.suspected(1.5)
    assert detector.suspected(3.5)
    patient = phi_accrual(first_interval=10.0).start()
    patient.heartbeat(0.0)
    assert not patient.suspected(15.0)


def test_an_acceptable_pause_delays_the_suspicion_by_as_much():
    """It is added to the mean."""
    strict, now = fed(phi_accrual(), [1.0] * 100)
    lenient, _ = fed(phi_accrual(acceptable_pause=3.0), [1.0] * 100)
    for silence in (1.0, 1.2, 1.5):
        assert lenient.level(now + silence + 3.0) == pytest.approx(strict.level(now + silence))


@given(st.lists(st.floats(0.001, 5.0), min_size=1, max_size=300), st.integers(1, 50))
def test_the_limit_is_the_quantile_of_the_last_round_trips(times, window):
    """Of as many as the window holds, times the factor, and never below the floor."""
    settings = quantile_timeout(0.5, factor=2.0, floor=0.01, first=1e6, window=window)
    detector, now, kept = settings.start(), 0.0, []
    for time in times:
        detector.sent(now)
        suspicious = detector.suspected(now + time)
        now += time
        detector.heartbeat(now)
        if not suspicious:
            kept = [*kept, detector_time(now, time)][-window:]
        now += 1.0
    ordered = sorted(kept)
    wanted = ordered[(len(ordered) + 1) // 2 - 1]
    assert detector.limit == pytest.approx(max(0.01, wanted * 2.0), rel=1e-6)


def detector_time(now: float, time: float) -> float:
    """Return a round trip as the detector computes it, from two instants."""
    return now - (now - time)


def test_a_near_and_a_far_peer_each_have_a_limit_that_fits():
    """10 ms and 300 ms with jitter: neither is suspected; killed, each is found in its own time."""
    near, far = quantile_timeout().start(), quantile_timeout().start()
    now = 0.0
    for round_ in range(200):
        for detector, usual in ((near, 0.01), (far, 0.3)):
            detector.sent(now)
            answer = now + usual * (1.0 + 0.5 * (round_ % 7) / 7)
            assert not detector.suspected(answer)
            detector.heartbeat(answer)
        now += 1.0
        assert not near.suspected(now)
        assert not far.suspected(now)
    near.sent(now)
    far.sent(now)
    assert near.suspected(now + 0.101)
    assert not far.suspected(now + 1.0)
    assert far.suspected(now + 1.8)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: phi_accrual(0), "threshold"),
        (lambda: phi_accrual(window=1), "window"),
        (lambda: phi_accrual(min_deviation=0), "min_deviation"),
        (lambda: exponential(acceptable_pause=-1), "acceptable_pause"),
        (lambda: quantile_timeout(1.5), "quantile"),
        (lambda: quantile_timeout(factor=0.5), "factor"),
        (lambda: fixed_timeout(0), "seconds"),
    ],
)
def test_wrong_settings_are_refused_by_name(make, words):
    """At once, and the message names the argument."""
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("settings", [phi_accrual(), exponential(), quantile_timeout()], ids=repr)
def test_a_backlog_of_heartbeats_is_not_learned(settings):
    """After a pause of this process they arrive at one instant, which is not how the peer sends."""
    detector, now = fed(settings, [1.0] * 50)
    before = detector.level(now + 1.5)
    for _ in range(40):
        detector.heartbeat(now)
    assert detector.level(now + 1.5) == before


def test_a_question_at_no_instant_is_none():
    """Else the real ones after it would not count, and a silent peer would not be suspected."""
    detector = quantile_timeout(first=3.0).start()
    detector.sent(float("nan"))
    assert detector.level(1e6) == 0.0
    detector.sent(10.0)
    assert detector.suspected(13.5)


@given(st.floats(1e-300, 1e-6), st.floats(0.0, 1e300))
def test_the_level_is_finite_however_small_the_least_deviation_is(deviation, silence):
    """The cube of a distance in deviations must not overflow."""
    detector, now = fed(phi_accrual(min_deviation=deviation, window=2), [1.0] * 5)
    assert isfinite(detector.level(now + silence))
