from __future__ import annotations

import copy
import pickle

import pytest

from seawall.models.breaker.probes import (
    CallVerdict,
    NOfM,
    Probe,
    growing,
    n_of_m,
    ramp,
    single_probe,
    slow_start,
)
from seawall.models.breaker.state import (
    TRANSITIONS,
    BreakerCause,
    BreakerChange,
    BreakerModel,
    BreakerRefusal,
    BreakerSettings,
    BreakerState,
)
from seawall.models.windows import CallCount, Tracked

SUCCESS, FAILURE, NONE = CallVerdict.SUCCESS, CallVerdict.FAILURE, CallVerdict.NONE


def breaker(**settings):
    """Return a breaker that trips at the first failure and opens for 10, by default."""
    return BreakerModel(
        BreakerSettings(
            **({"consecutive": 1, "break_for": 10, "probes": single_probe()} | settings)
        )
    )


def call(model, verdict, now=0.0):
    """Make a call that ends at once."""
    ticket = model.admit(now)
    assert not isinstance(ticket, BreakerRefusal), ticket
    model.settle(ticket, verdict, now)


def calls(model, verdicts, now=0.0):
    """Make calls that end at once: s, f or n for each."""
    for letter in verdicts:
        call(model, {"s": SUCCESS, "f": FAILURE, "n": NONE}[letter], now)


# --- Tripping ---


def test_consecutive_failures_trip():
    """That many failures in a row open the breaker; a success starts a new row."""
    model = breaker(consecutive=3)
    calls(model, "ffsff")
    assert model.state is BreakerState.CLOSED
    calls(model, "f")
    assert model.state is BreakerState.OPEN


def test_a_withdrawn_failure_leaves_the_streak_and_ends_no_other():
    """A stream that is opened again has not succeeded: the failures before it still count."""
    model = breaker(consecutive=3)
    for before in range(3):
        count = CallCount()
        model.settle(model.admit(0), FAILURE, 0, count)
        if before < 2:
            model.retract_failure(count, 0)
            model.retract_failure(count, 0)
            assert model.snapshot(0)["consecutive_failures"] == before
            model.settle(model.admit(0), FAILURE, 0, count)
        assert model.snapshot(0)["consecutive_failures"] == before + 1
    assert model.state is BreakerState.OPEN


def test_a_withdrawn_failure_whose_call_succeeds_ends_the_streak():
    """The end of the call counts, and after it nothing is withdrawn."""
    model = breaker(consecutive=3)
    calls(model, "f")
    count = CallCount()
    model.settle(model.admit(0), FAILURE, 0, count)
    model.retract_failure(count, 0)
    model.settle(model.admit(0), SUCCESS, 0, count)
    assert model.snapshot(0)["consecutive_failures"] == 0
    model.settle(model.admit(0), FAILURE, 0, count)
    count.over = True
    model.retract_failure(count, 0)
    assert model.snapshot(0)["consecutive_failures"] == 1


@pytest.mark.parametrize("window", [{"window": 30}, {"window_calls": 100}])
def test_failure_ratio_trips_from_the_minimum_of_calls_on(window):
    """A ratio opens the breaker when it is reached, but not before there were enough calls."""
    model = breaker(consecutive=None, failure_ratio=0.5, min_calls=6, **window)
    calls(model, "fffss")
    assert model.state is BreakerState.CLOSED
    calls(model, "f")
    assert model.state is BreakerState.OPEN


def test_a_success_never_trips():
    """A success that completes the minimum of calls opens nothing; the next failure does."""
    model = breaker(consecutive=None, failure_ratio=0.5, min_calls=4)
    calls(model, "fffs")
    assert model.state is BreakerState.CLOSED
    calls(model, "f")
    assert model.state is BreakerState.OPEN


def test_a_ratio_is_met_exactly_in_spite_of_floats():
    """Seven failures of a hundred calls are 7 %."""
    model = breaker(consecutive=None, failure_ratio=0.07, window_calls=100, min_calls=100)
    calls(model, "s" * 93 + "f" * 6)
    assert model.state is BreakerState.CLOSED
    calls(model, "f")
    assert model.state is BreakerState.OPEN


def test_failures_that_left_the_window_do_not_count():
    """Old failures trip nothing."""
    model = breaker(consecutive=None, failure_ratio=0.5, min_calls=4, window=30)
    calls(model, "fff", now=0)
    calls(model, "f", now=31)
    assert model.state is BreakerState.CLOSED


def test_slow_calls_trip():
    """Calls that take `slow_after` or longer open the breaker, although they succeed."""
    model = breaker(consecutive=None, slow_after=2, slow_ratio=0.5, min_calls=2)
    first, second = model.admit(0), model.admit(0)
    assert isinstance(first, Tracked)
    model.settle(first, SUCCESS, 1.9)
    model.settle(second, SUCCESS, 2)
    assert model.state is BreakerState.OPEN


def test_calls_in_flight_trip_once_they_are_slow():
    """A hung call counts as slow before it ends: the next call sees it."""
    model = breaker(consecutive=None, slow_after=2, slow_ratio=0.5, min_calls=3)
    for _ in range(3):
        model.admit(0)
    assert isinstance(model.admit(1.9), Tracked)
    assert model.admit(2) == BreakerRefusal("open", 10)


def test_a_slow_call_is_counted_once():
    """A call counted as slow in flight adds no call at its end, but its failure still counts."""
    model = breaker(consecutive=None, slow_after=2, slow_ratio=1.0, min_calls=20)
    hung = model.admit(0)
    model.admit(3)
    assert model.snapshot(3) | {"calls": 1, "slow": 1, "failures": 0} == model.snapshot(3)
    model.settle(hung, FAILURE, 4)
    assert model.snapshot(4) | {"calls": 1, "slow": 1, "failures": 1} == model.snapshot(4)


def test_a_cancelled_call_was_slow_all_the_same():
    """A cancelled call is no verdict, but that it ran for `slow_after` is a fact."""
    model = breaker(consecutive=None, slow_after=2, slow_ratio=1.0, min_calls=20)
    model.settle(model.admit(0), NONE, 1)
    model.settle(model.admit(0), NONE, 2)
    assert model.snapshot(2) | {"calls": 1, "slow": 1, "failures": 0} == model.snapshot(2)


def test_calls_without_a_verdict_count_as_nothing():
    """Neither a streak nor a window sees a cancelled call."""
    model = breaker(consecutive=2, failure_ratio=1.0, min_calls=20)
    calls(model, "fn" + "n" * 30)
    assert model.snapshot(0) | {"calls": 1, "consecutive_failures": 1} == model.snapshot(0)
    calls(model, "f")
    assert model.state is BreakerState.OPEN


# --- The break ---


def test_open_refuses_until_the_break_is_over():
    """An open breaker says how long it will stay so, and keeps its word."""
    model = breaker()
    calls(model, "f")
    assert model.admit(0) == BreakerRefusal("open", 10)
    assert model.admit(9.5) == BreakerRefusal("open", 0.5)
    assert isinstance(model.admit(10), Probe)


def test_breaks_grow_until_a_recovery():
    """Each break in a row is longer; after a recovery the first length holds again."""
    model = breaker(break_for=growing(10, cap=35))
    now, breaks = 0, []
    for verdict in (FAILURE, FAILURE, FAILURE, FAILURE, SUCCESS, FAILURE):
        call(model, verdict, now)
        left = model.retry_after(now)
        if left is not None:
            breaks.append(left)
            now += left
    assert breaks == [10, 20, 35, 35, 10]


def test_growing_never_overflows():
    """After a million opens the break is the cap."""
    assert growing(1.0)(10**6) == 300.0
    assert growing(1.0, factor=1)(10**6) == 1.0


@pytest.mark.parametrize("wrong", [{"base": 0}, {"base": 1, "factor": 0.5}, {"base": 1, "cap": 0}])
def test_growing_refuses_nonsense(wrong):
    """A break is longer than nothing and never shrinks."""
    with pytest.raises(ValueError, match="write"):
        growing(**wrong)


def test_a_break_function_that_raises_changes_nothing():
    """The user's own error comes out, and the breaker is still in one piece."""

    def lengths(opens):
        if opens == 2:
            raise LookupError
        return 10

    model = breaker(break_for=lengths)
    calls(model, "f")
    probe = model.admit(10)
    with pytest.raises(LookupError):
        model.settle(probe, FAILURE, 10)
    seen = {"state": "half_open", "generation": 3, "consecutive_opens": 1}
    assert model.snapshot(10) | seen == model.snapshot(10)


# --- Probing ---


def test_one_probe_at_a_time_and_its_success_closes():
    """With `single_probe()` one call decides."""
    model = breaker()
    calls(model, "f")
    probe = model.admit(10)
    assert model.admit(10) == BreakerRefusal("probing", None)
    model.settle(probe, SUCCESS, 11)
    assert model.state is BreakerState.CLOSED
    assert model.admit(11) == model.generation


def test_a_failed_probe_opens_again():
    """A failure begins another break, from that moment."""
    model = breaker()
    calls(model, "f")
    model.settle(model.admit(10), FAILURE, 12)
    assert model.admit(12) == BreakerRefusal("open", 10)


def test_a_hung_probe_has_failed():
    """A probe without a verdict for `probe_timeout` opens the breaker at the next call."""
    model = breaker(probe_timeout=60)
    calls(model, "f")
    hung = model.admit(10)
    assert model.admit(69) == BreakerRefusal("probing", None)
    assert model.admit(70) == BreakerRefusal("open", 10)
    model.settle(hung, SUCCESS, 71)
    assert model.state is BreakerState.OPEN


def test_a_slow_probe_does_not_close_what_slowness_opened():
    """With a slow rule a slow success is a failed probe, whether it has ended or not."""
    model = breaker(slow_after=2, slow_ratio=0.5)
    calls(model, "f")
    model.settle(model.admit(10), SUCCESS, 12)
    assert model.state is BreakerState.OPEN
    model.admit(22)
    assert model.admit(24) == BreakerRefusal("open", 10)


def test_a_cancelled_slow_probe_gives_its_permit_back():
    """A cancelled probe is no verdict, slow or not."""
    model = breaker(slow_after=2, slow_ratio=0.5)
    calls(model, "f")
    model.settle(model.admit(10), NONE, 15)
    assert isinstance(model.admit(15), Probe)


# --- By hand ---


@pytest.mark.parametrize("before", [BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN])
def test_isolated_until_closed(before):
    """Isolated from any state, the breaker refuses for ever, until it is closed by hand."""
    model = breaker()
    if before is not BreakerState.CLOSED:
        calls(model, "f")
    if before is BreakerState.HALF_OPEN:
        model.admit(10)
    assert model.state is before
    model.isolate(10)
    model.isolate(10)
    assert model.admit(10**9) == BreakerRefusal("isolated", None)
    model.close(10**9)
    model.close(10**9)
    calls(model, "s", now=10**9)
    assert [change.cause for change in model.changes[-2:]] == [
        BreakerCause.ISOLATE,
        BreakerCause.CLOSE,
    ]


def test_closing_by_hand_forgets():
    """Forced closed, it begins with an empty window, no streak and the first break."""
    model = breaker(consecutive=2, failure_ratio=0.9, break_for=growing(10))
    calls(model, "ff")
    model.close(1)
    seen = {"calls": 0, "consecutive_failures": 0, "consecutive_opens": 0, "retry_after": None}
    assert model.snapshot(1) | seen == model.snapshot(1)


# --- What can be seen ---


def test_changes_are_told():
    """Each change of state is there to be taken away, with its cause, time and generation."""
    model = breaker()
    calls(model, "f", now=1)
    calls(model, "s", now=11)
    assert model.changes == [
        BreakerChange(BreakerState.CLOSED, BreakerState.OPEN, BreakerCause.TRIPPED, 1, 2),
        BreakerChange(BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerCause.BREAK_OVER, 11, 3),
        BreakerChange(
            BreakerState.HALF_OPEN, BreakerState.CLOSED, BreakerCause.PROBES_PASSED, 11, 4
        ),
    ]


def test_snapshot_shows_what_tripped_it():
    """While it is open one can still see the window that opened it."""
    model = breaker(consecutive=None, failure_ratio=0.5, min_calls=2)
    calls(model, "sf")
    assert model.snapshot(4) == {
        "state": "open",
        "generation": 2,
        "calls": 2,
        "failures": 1,
        "slow": 0,
        "consecutive_failures": 0,
        "consecutive_opens": 1,
        "retry_after": 6,
        "open_for": 4,
        "failure": None,
    }


def test_reprs_say_what_matters():
    """What appears in a log can be read."""
    model = breaker(slow_after=1, slow_ratio=1.0)
    assert repr(model) == "<BreakerModel closed, generation 1>"
    assert repr(model.admit(2)) == "Tracked(generation=1, slow_at=3.0)"
    calls(model, "f", now=2)
    assert repr(model.admit(12)) == "Probe(generation=3, started=12)"


def test_every_state_can_be_reached_and_left():
    """The table has no dead end and nothing that cannot happen."""
    assert {before for before, _ in TRANSITIONS} == set(BreakerState)
    assert set(TRANSITIONS.values()) == set(BreakerState)
    assert {cause for _, cause in TRANSITIONS} == set(BreakerCause)


# --- The cheap path ---


@pytest.mark.parametrize(
    "rules",
    [
        {"consecutive": 3},
        {"failure_ratio": 0.5, "window": 30},
        {"failure_ratio": 0.5, "window_calls": 10},
        {"consecutive": 3, "failure_ratio": 0.5, "window": 30},
    ],
)
def test_success_is_the_same_as_settle(rules):
    """What `success` counts is what `settle` would have counted."""
    models = [BreakerModel(BreakerSettings(**rules)) for _ in range(2)]
    for letter in "fsssffssfsss":
        for model, cheap in zip(models, (True, False), strict=True):
            assert model.calm
            if letter == "s" and cheap:
                model.success(0)
            else:
                calls(model, letter)
    assert models[0].snapshot(0) == models[1].snapshot(0)


def test_calm_only_while_closed_and_nothing_is_timed():
    """`calm` invites to skip `admit` only where `admit` would give the bare generation."""
    model = breaker()
    assert model.calm
    calls(model, "f")
    assert not model.calm
    probe = model.admit(10)
    assert not model.calm
    model.settle(probe, SUCCESS, 10)
    assert model.calm
    model.isolate(10)
    assert not model.calm
    assert not breaker(slow_after=1, slow_ratio=0.5).calm


def test_a_stale_reading_of_calm_does_no_harm():
    """A caller that read `calm`, and then the number of the next generation, changes nothing."""
    model = breaker()
    calls(model, "f")
    model.settle(model.generation, FAILURE, 1)
    assert (model.state, model.generation) == (BreakerState.OPEN, 2)
    model.admit(10)
    model.settle(model.generation, SUCCESS, 10)
    assert (model.state, model.generation) == (BreakerState.HALF_OPEN, 3)


# --- Other settings while running ---


def test_update_keeps_the_window():
    """New thresholds judge the calls that were counted before."""
    model = breaker(consecutive=None, failure_ratio=0.9, min_calls=5)
    calls(model, "ssff")
    model.update(model.settings.replace(failure_ratio=0.5), 0)
    calls(model, "f")
    assert model.state is BreakerState.OPEN


def test_update_of_the_window_starts_it_anew():
    """A window of another size begins empty."""
    model = breaker(consecutive=None, failure_ratio=0.5, min_calls=5)
    calls(model, "ssff")
    model.update(model.settings.replace(window_calls=10), 0)
    calls(model, "f")
    assert model.snapshot(0) | {"state": "closed", "calls": 1} == model.snapshot(0)


def test_update_keeps_a_running_break():
    """An open breaker stays open as long as it said."""
    model = breaker()
    calls(model, "f")
    model.update(model.settings.replace(break_for=1), 1)
    assert model.admit(2) == BreakerRefusal("open", 8)
    assert not model.calm


def test_update_forgets_a_streak_nobody_counts():
    """A rule of consecutive failures that comes back begins at zero."""
    model = breaker(consecutive=2, failure_ratio=1.0)
    calls(model, "f")
    with_rule, without = model.settings, model.settings.replace(consecutive=None)
    model.update(without, 0)
    model.success(0)
    model.update(with_rule, 0)
    calls(model, "f")
    assert model.state is BreakerState.CLOSED


def test_update_of_the_slow_rule_reaches_calls_in_flight():
    """A lower limit holds for running calls too; without a limit none of them is slow."""
    model = breaker(failure_ratio=1.0, slow_after=60, slow_ratio=1.0)
    first, second = model.admit(0), model.admit(0)
    model.update(model.settings.replace(slow_after=1), 0)
    assert model.admit(0.5)
    assert model.snapshot(0.5)["slow"] == 0
    model.settle(first, SUCCESS, 1)
    assert model.snapshot(1)["slow"] == 2
    third = model.admit(1)
    model.update(model.settings.replace(slow_after=None, slow_ratio=None), 1)
    assert model.calm
    model.admit(9)
    model.settle(second, SUCCESS, 9)
    model.settle(third, SUCCESS, 9)
    assert model.snapshot(9) | {"calls": 3, "slow": 2} == model.snapshot(9)


def test_update_judges_by_the_old_settings_what_happened_under_them():
    """A call that was slow when the limit is raised has been slow."""
    model = breaker(slow_after=2, slow_ratio=1.0)
    model.admit(0)
    model.update(model.settings.replace(slow_after=60), 5)
    assert model.snapshot(5)["slow"] == 1


def test_a_call_counted_in_a_replaced_window_is_counted_in_the_new_one():
    """The new window has never seen the call, so its end counts in full."""
    model = breaker(consecutive=9, slow_after=2, slow_ratio=1.0)
    hung = model.admit(0)
    model.admit(5)
    model.update(model.settings.replace(window_calls=20), 5)
    model.settle(hung, FAILURE, 6)
    seen = {"calls": 1, "failures": 1, "slow": 0}
    assert model.snapshot(6) | seen == model.snapshot(6)


def test_update_to_a_slow_rule_accepts_bare_tickets():
    """A call admitted before there was a slow rule is never slow, but its verdict counts."""
    model = breaker(consecutive=2)
    ticket = model.admit(0)
    model.update(model.settings.replace(slow_after=1, slow_ratio=0.5), 0)
    model.settle(ticket, FAILURE, 9)
    seen = {"calls": 1, "slow": 0, "failures": 1}
    assert model.snapshot(9) | seen == model.snapshot(9)


# --- Settings ---


def test_defaults():
    """Half of at least twenty calls in thirty seconds; fifteen seconds of break; one probe."""
    assert BreakerSettings() == BreakerSettings(
        failure_ratio=0.5,
        window=30,
        min_calls=20,
        break_for=15,
        probes=single_probe(),
        probe_timeout=60,
    )
    assert BreakerSettings(consecutive=5).failure_ratio is None


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"consecutive": 0}, ValueError, "consecutive=0"),
        ({"consecutive": 2.5}, TypeError, "whole number"),
        ({"failure_ratio": 50}, ValueError, "0.5 for 50 %"),
        ({"failure_ratio": 0.0}, ValueError, "above 0"),
        ({"slow_after": 1.0}, ValueError, "together"),
        ({"slow_ratio": 0.5}, ValueError, "together"),
        ({"slow_after": 0, "slow_ratio": 0.5}, ValueError, "more than 0"),
        ({"consecutive": 5, "window": 30}, ValueError, "need failure_ratio"),
        ({"consecutive": 5, "min_calls": 3}, ValueError, "need failure_ratio"),
        ({"window": 30, "window_calls": 100}, ValueError, "not both"),
        ({"break_for": 0}, ValueError, "break_for=0"),
        ({"break_for": "15s"}, TypeError, "break_for='15s'"),
        ({"break_for": lambda _opens: -1}, ValueError, "break_for=-1"),
        ({"probes": 3}, TypeError, r"n_of_m\(2, 3\)"),
        ({"probes": single_probe}, TypeError, r"single_probe\(\)"),
        ({"probe_timeout": 0}, ValueError, "probe_timeout"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, error, says):
    """The message says what to write instead."""
    with pytest.raises(error, match=says):
        BreakerSettings(**wrong)


def test_settings_never_change():
    """A policy can share its settings without fear."""
    with pytest.raises(AttributeError):
        BreakerSettings().window = 3


def test_settings_can_be_copied():
    """A copy, and one that went through a pickle, is equal."""
    settings = BreakerSettings(consecutive=3, break_for=growing(1.0), probes=n_of_m(2, 3))
    assert copy.copy(settings) == copy.deepcopy(settings) == settings
    assert pickle.loads(pickle.dumps(settings)) == settings  # noqa: S301


def test_replace_changes_only_what_it_names():
    """What is not named stays, and what cannot stay beside it goes."""
    settings = BreakerSettings(min_calls=5)
    assert settings.replace(consecutive=3) == BreakerSettings(
        consecutive=3, failure_ratio=0.5, min_calls=5
    )
    by_count = settings.replace(window_calls=50)
    assert (by_count.window, by_count.window_calls) == (None, 50)
    by_time = by_count.replace(window=10)
    assert (by_time.window, by_time.window_calls) == (10, None)
    assert settings.replace(consecutive=3, failure_ratio=None) == BreakerSettings(consecutive=3)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"failure_ratio": None}, ValueError),
        ({"consecutive": 3, "failure_ratio": None, "window": 30}, ValueError),
        ({"window": 30, "window_calls": 9}, ValueError),
        ({"colour": "red"}, TypeError),
    ],
)
def test_replace_checks_anew(wrong, error):
    """Settings that could not be written cannot be reached by replacing."""
    with pytest.raises(error):
        BreakerSettings().replace(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: n_of_m(3, 2),
        lambda: n_of_m(0, 2),
        lambda: ramp((), step=1),
        lambda: ramp((0.5, 0.5), step=1),
        lambda: ramp((0.5, 1.5), step=1),
        lambda: ramp(step=0),
        lambda: slow_start(step=0),
    ],
)
def test_probes_that_make_no_sense_are_refused(wrong):
    """The message says what to write instead."""
    with pytest.raises(ValueError, match="write"):
        wrong()


def test_single_is_one_of_one():
    """It is the smallest case of N of M."""
    assert single_probe() == NOfM(1, 1)


@pytest.mark.parametrize(
    "written",
    [
        "single_probe()",
        "n_of_m(2, 3)",
        "ramp((0.01, 0.05, 0.25), step=10)",
        "slow_start(step=0.5)",
        "growing(5, factor=2, cap=300)",
    ],
)
def test_settings_are_shown_as_they_are_written(written):
    """A repr is the code that makes the same again."""
    makers = (single_probe, n_of_m, ramp, slow_start, growing)
    names = {maker.__name__: maker for maker in makers}
    assert repr(eval(written, names)) == written  # noqa: S307
