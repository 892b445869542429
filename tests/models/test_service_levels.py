"""The levels's rules: one level at a time, late back, and dependencies at once."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.service_levels import (
    THRESHOLDS,
    LevelCause,
    LevelModel,
    LevelSettings,
    Move,
    ServiceLevel,
)
from tests.support import falsified, quarters

FULL, CACHED, PARTIAL, STATIC, MAINTENANCE = ServiceLevel


def model(**settings):
    return LevelModel(LevelSettings(**settings).checked())


def test_load_takes_one_level_at_a_time():
    """However high the load, each step is one level and `hold` after the last."""
    levels = model(hold=5.0)
    seen = {now: levels.update(9.0, FULL, now) for now in range(22)}
    moves = {now: move.after for now, move in seen.items() if move is not None}
    assert moves == {0: CACHED, 5: PARTIAL, 10: STATIC, 15: MAINTENANCE}


def test_load_stops_at_the_level_whose_threshold_it_reaches():
    """Each level is taken from its own threshold on."""
    for load, level in [(0.69, FULL), (0.7, CACHED), (0.85, PARTIAL), (0.9, STATIC)]:
        levels = model(hold=0.0)
        for now in range(10):
            levels.update(load, FULL, now)
        assert levels.level is level


def test_it_recovers_after_calm_and_one_level_at_a_time():
    """Each level better takes `recover_after` of load below the level's threshold less the gap."""
    levels = model(hold=0.0, recover_after=10.0)
    for now in range(3):
        levels.update(1.0, FULL, now)
    assert levels.level is STATIC
    seen = {now: levels.update(0.1, FULL, now) for now in range(3, 40)}
    moves = {now: move for now, move in seen.items() if move is not None}
    assert moves == {
        13: Move(STATIC, PARTIAL, LevelCause.RECOVERED),
        23: Move(PARTIAL, CACHED, LevelCause.RECOVERED),
        33: Move(CACHED, FULL, LevelCause.RECOVERED),
    }


def test_a_moment_of_load_begins_the_calm_anew():
    """Calm counts only without interruption."""
    levels = model(recover_after=10.0)
    levels.update(0.75, FULL, 0.0)
    for now in range(1, 40):
        load = 0.65 if now % 8 == 0 else 0.1
        assert levels.update(load, FULL, now) is None
    assert levels.level is CACHED


def test_after_a_recovery_load_is_met_at_once():
    """The hold is between two levels taken; what was given back too early is taken back."""
    levels = model(hold=5.0, recover_after=10.0)
    levels.update(0.75, FULL, 0.0)
    levels.update(0.0, FULL, 1.0)
    assert levels.update(0.0, FULL, 11.0) == Move(CACHED, FULL, LevelCause.RECOVERED)
    assert levels.update(0.75, FULL, 11.0) == Move(FULL, CACHED, LevelCause.LOAD)


def test_what_a_dependency_demands_is_met_at_once():
    """No step in between, no hold; and it is kept for as long as it is demanded."""
    levels = model(recover_after=10.0)
    assert levels.update(0.0, STATIC, 0.0) == Move(FULL, STATIC, LevelCause.DEPENDENCY)
    for now in range(1, 100):
        assert levels.update(0.0, STATIC, now) is None
    assert levels.update(0.0, FULL, 100.0) is None
    assert levels.update(0.0, FULL, 110.0) == Move(STATIC, PARTIAL, LevelCause.RECOVERED)


def test_it_never_recovers_beyond_what_is_demanded():
    """A lesser demand bounds the way back, also where it is at no rung of its own."""
    levels = model(thresholds={"cached": 0.5, "static": 0.9}, recover_after=1.0)
    levels.update(0.0, STATIC, 0.0)
    for now in range(1, 20):
        levels.update(0.0, PARTIAL, now)
        assert levels.level >= PARTIAL
    assert levels.level is PARTIAL


def test_levels_without_a_threshold_are_left_out():
    """Load goes from rung to rung, down and up."""
    levels = model(thresholds={"static": 0.9, "cached": 0.5}, hold=0.0, recover_after=0.0)
    moves = [levels.update(load, FULL, now) for now, load in enumerate([1, 1, 1, 0, 0, 0])]
    levels = [None if move is None else move.after for move in moves]
    assert levels == [CACHED, STATIC, None, CACHED, FULL, None]


# What always holds


class Moment(NamedTuple):
    """Some time later: the load then, and what dependencies demand."""

    after: float
    load: float
    demanded: ServiceLevel


LOADS = st.floats(0, 1.5, allow_nan=False)
MOMENTS = st.builds(Moment, quarters(16, 1), LOADS, st.sampled_from(ServiceLevel))
HISTORIES = st.lists(MOMENTS, min_size=1, max_size=40)
LOADED = st.lists(st.builds(Moment, quarters(16, 1), LOADS, st.just(FULL)), min_size=1, max_size=40)
HOLD, RECOVER = 3.0, 8.0


def play(history):
    """Return what happened: the instant, the moment, and the move, for each."""
    levels = model(hold=HOLD, recover_after=RECOVER)
    now, happened = 0.0, []
    for moment in history:
        now += moment.after
        before = levels.level
        move = levels.update(moment.load, moment.demanded, now)
        assert levels.level >= moment.demanded
        assert (move is None) == (levels.level is before)
        happened.append((now, moment, move))
    return happened


def check_steps(history):
    """Load and calm move it by one level."""
    for _, moment, move in play(history):
        if move is not None and move.cause is LevelCause.LOAD:
            assert move.after - move.before == 1
            assert moment.load >= THRESHOLDS[move.after]
        if move is not None and move.cause is LevelCause.RECOVERED:
            assert move.before - move.after == 1


def check_pace(history):
    """No step by load follows another step down within the hold."""
    moves = [(now, move) for now, _, move in play(history) if move and move.after > move.before]
    for (first, _), (second, move) in pairwise(moves):
        assert move.cause is not LevelCause.LOAD or second - first >= HOLD


def check_calm(history):
    """Before each step back there was calm for as long as is asked for."""
    happened = play(history)
    for now, _, move in happened:
        if move is None or move.cause is not LevelCause.RECOVERED:
            continue
        easy = THRESHOLDS[move.before] - 0.1
        seen = [(at, moment) for at, moment, _ in happened if now - RECOVER < at <= now]
        assert all(moment.load < easy for _, moment in seen)
        assert all(moment.demanded < move.before for _, moment in seen)


@given(HISTORIES)
def test_each_step_is_one_level(history):
    """Whatever happens, load moves it by one, and never without reason."""
    check_steps(history)


@given(HISTORIES)
def test_steps_by_load_keep_their_distance(history):
    """Whatever happens, the effect of a step is waited for before the next."""
    check_pace(history)


@given(HISTORIES)
def test_there_is_calm_before_it_recovers(history):
    """Whatever happens, no level is given back in the middle of trouble."""
    check_calm(history)


@given(LOADED)
def test_the_band_moves_nothing(history):
    """Load between a level's lower and the next one's upper bound changes nothing."""
    before = FULL
    for _, moment, move in play(history):
        low = THRESHOLDS[before] - 0.1 if before else 0.0
        high = THRESHOLDS.get(ServiceLevel(min(before + 1, MAINTENANCE)), 2.0)
        if before is MAINTENANCE:
            high = 2.0
        if low <= moment.load < high:
            assert move is None
        before = before if move is None else move.after


def test_without_the_hold_it_rushes_down(monkeypatch):
    """Ablation: with the hold taken away two steps come too close."""
    init = LevelModel.__init__
    monkeypatch.setattr(
        LevelModel, "__init__", lambda self, settings: init(self, settings._replace(hold=0.0))
    )
    assert falsified(check_pace, LOADED)


def test_without_calm_it_recovers_in_trouble(monkeypatch):
    """Ablation: with `recover_after` taken away a level comes back too early."""
    init = LevelModel.__init__
    monkeypatch.setattr(
        LevelModel,
        "__init__",
        lambda self, settings: init(self, settings._replace(recover_after=0.0)),
    )
    assert falsified(check_calm, LOADED)


def test_without_the_gap_it_recovers_too_near(monkeypatch):
    """Ablation: with the gap taken away a level comes back right below its threshold."""
    init = LevelModel.__init__
    monkeypatch.setattr(
        LevelModel, "__init__", lambda self, settings: init(self, settings._replace(gap=0.0))
    )
    near = st.builds(Moment, quarters(16, 1), st.floats(0.6, 0.75), st.just(FULL))
    assert falsified(check_calm, st.lists(near, min_size=1, max_size=40))


# Names and settings


def test_levels_are_known_by_name():
    """A level's name is as good as the level."""
    assert ServiceLevel.of("partial") is PARTIAL
    assert ServiceLevel.of(PARTIAL) is PARTIAL
    assert [level.label for level in ServiceLevel] == [
        "full",
        "cached",
        "partial",
        "static",
        "maintenance",
    ]


@pytest.mark.parametrize("level", ["Full", "", 1, None, "offline"])
def test_unknown_levels_are_told(level):
    """The message lists the names."""
    with pytest.raises(ValueError, match="'full', 'cached', 'partial', 'static', 'maintenance'"):
        ServiceLevel.of(level)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"thresholds": {"full": 0.1}}, "'full' needs no load"),
        ({"thresholds": {"cached": 0.8, "static": 0.8}}, "a higher load for less service"),
        ({"thresholds": {"cached": 0.8, "static": 0.7}}, "a higher load for less service"),
        ({"thresholds": {"cached": -0.1}}, "thresholds"),
        ({"gap": 0.7}, "less than the lowest threshold"),
        ({"gap": -0.1}, "gap"),
        ({"hold": -1.0}, "hold"),
        ({"recover_after": float("inf")}, "recover_after"),
    ],
)
def test_bad_settings_are_told(settings, message):
    """Each message says what to write."""
    with pytest.raises(ValueError, match=message):
        LevelSettings(**settings).checked()


def test_thresholds_are_a_mapping():
    """A list of loads does not say which level is meant."""
    with pytest.raises(TypeError, match="the load for each level"):
        LevelSettings(thresholds=[0.7, 0.8]).checked()
