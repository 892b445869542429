"""What must always hold of a breaker, on random histories; and what breaks without its safeguard.

Each property is a function that drives a model through a history and names the violations. The
model has none; the same model without the safeguard has some.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from seawall.models.breaker.probes import (
    CallVerdict,
    Countdown,
    NOfM,
    Probe,
    Ramp,
    SlowStart,
    Trial,
    _CountedTrial,
    _RampTrial,
    _SlowStartTrial,
    n_of_m,
    ramp,
    single_probe,
    slow_start,
)
from seawall.models.breaker.state import (
    BreakerCause,
    BreakerModel,
    BreakerRefusal,
    BreakerSettings,
    BreakerState,
)
from seawall.models.windows import TimeWindow

SUCCESS, FAILURE, NONE = CallVerdict.SUCCESS, CallVerdict.FAILURE, CallVerdict.NONE
SEARCH = settings(max_examples=5000, database=None, phases=[Phase.generate])


class Step(NamedTuple):
    """Wait, then do something; `which` chooses among the calls in flight."""

    wait: int
    action: str
    which: int
    verdict: CallVerdict


def histories(*actions, waits=12, size=80):
    """Return random histories of these actions."""
    step = st.builds(
        Step,
        st.integers(0, waits),
        st.sampled_from(actions),
        st.integers(0, 9),
        st.sampled_from(CallVerdict),
    )
    # Hypothesis likes its lists short; half of these are long.
    return st.lists(step, max_size=size) | st.lists(step, min_size=size // 2, max_size=size)


CALLS = histories("admit", "admit", "settle")
ANYTHING = histories(*["admit", "settle"] * 8, "isolate", "close", "close")


def some_settings(**strategies):
    """Return settings of which only these are drawn; the others keep their defaults."""
    return st.fixed_dictionaries(strategies).map(lambda drawn: BreakerSettings(**drawn))


PROBES = st.one_of(
    st.just(single_probe()),
    st.integers(1, 4).flatmap(lambda m: st.integers(1, m).map(lambda n: n_of_m(n, m))),
    st.sampled_from([ramp((0.1, 0.5), step=7), ramp((0.3,), step=3)]),
    st.sampled_from([slow_start(step=2), slow_start(step=6)]),
)
SETTINGS = some_settings(
    consecutive=st.integers(1, 3),
    break_for=st.integers(1, 20),
    probes=PROBES,
    probe_timeout=st.integers(5, 40),
)


class Run:
    """Drives a model: what is in flight, and what time it is."""

    def __init__(self, model):
        self.model = model
        self.now = 1000
        self.flying = []

    def step(self, step):
        """Do a step; return the ticket that it settled, if any."""
        self.now += step.wait
        if step.action == "admit":
            self.admit()
        elif step.action == "settle" and self.flying:
            ticket = self.flying.pop(step.which % len(self.flying))
            self.model.settle(ticket, step.verdict, self.now)
            return ticket
        elif step.action in ("isolate", "close"):
            getattr(self.model, step.action)(self.now)
        return None

    def admit(self):
        """Offer a call, and return the answer."""
        answer = self.model.admit(self.now)
        if not isinstance(answer, BreakerRefusal):
            self.flying.append(answer)
        return answer


def generation(ticket):
    """Return the generation that a ticket belongs to."""
    return ticket if isinstance(ticket, int) else ticket.generation


def is_found(violations, *strategies):
    """Assert that some history makes the property fail."""
    find(
        st.tuples(*strategies),
        lambda example: bool(violations(*example)),
        settings=SEARCH,
        random=Random(20261115),
    )


# --- Half-open in flight <= probes, in each generation ---


def too_many_probes(options, history):
    """Return the generations that had more probes in flight than they may."""
    run, bad = Run(BreakerModel(options)), []
    for step in history:
        run.step(step)
        probes = Counter(ticket.generation for ticket in run.flying if isinstance(ticket, Probe))
        bad += [one for one, count in probes.items() if count > options.probes.m]
    return bad


COUNTED = SETTINGS.filter(lambda options: isinstance(options.probes, NOfM))


@given(COUNTED, ANYTHING)
def test_half_open_in_flight_is_bounded(options, history):
    """A half-open generation never has more probes in flight than `probes` says."""
    assert not too_many_probes(options, history)


def test_without_counting_there_are_too_many_probes(monkeypatch):
    """Without the count of permits the bound breaks."""
    monkeypatch.setattr(_CountedTrial, "_has_room", lambda *_: True)
    is_found(too_many_probes, COUNTED, ANYTHING)


def over_share(options, history):
    """Return the stages of a ramp that let through more than their share and one call."""
    run, bad, stage, offered, admitted = Run(BreakerModel(options)), [], None, 0, 0
    for step in history:
        if step.action != "admit":
            returned = run.step(step)
            if isinstance(returned, Probe) and step.verdict is NONE:
                admitted -= (returned.generation, returned.stage) == stage
            continue
        run.now += step.wait
        answer = run.admit()
        if run.model.state is not BreakerState.HALF_OPEN:
            continue
        here = (run.model.generation, run.model._trial._stage)
        if here != stage:
            stage, offered, admitted = here, 0, 0
        admitted += isinstance(answer, Probe)
        if admitted > offered * options.probes.shares[stage[1]] + 1:
            bad.append(stage)
        offered += 1
    return bad


RAMPS = SETTINGS.filter(lambda options: isinstance(options.probes, Ramp))


@given(RAMPS, CALLS)
def test_a_ramp_lets_its_share_through(options, history):
    """Of the calls offered in a stage at most its share, and one, are let through."""
    assert not over_share(options, history)


def test_without_counting_a_ramp_lets_too_many_through(monkeypatch):
    """Without the counter the share breaks."""
    monkeypatch.setattr(_RampTrial, "_has_room", lambda *_: True)
    is_found(over_share, RAMPS, CALLS)


def above_its_stage(options, history):
    """Return the admissions of a slow start that were more than its stage allows at once.

    One more may be let through every `step`, since those out may hang.
    """
    run, bad, waited = Run(BreakerModel(options)), [], {}
    for step in history:
        if step.action != "admit":
            run.step(step)
            continue
        run.now += step.wait
        answer = run.admit()
        if isinstance(answer, Probe):
            began, waited[answer.generation] = waited.get(answer.generation), run.now
            out = len(run.model._trial._out)
            hung = began is not None and run.now - began >= options.probes.step
            if out > 2**answer.stage and not hung:
                bad.append(answer)
    return bad


SLOW_STARTS = SETTINGS.filter(lambda options: isinstance(options.probes, SlowStart))


@given(SLOW_STARTS, CALLS)
def test_a_slow_start_lets_run_what_its_stage_allows(options, history):
    """At most 2**k at once in stage k, and one more every `step` in which none began."""
    assert not above_its_stage(options, history)


def test_without_counting_a_slow_start_lets_too_many_run(monkeypatch):
    """Without the count of those who run the bound breaks."""
    monkeypatch.setattr(_SlowStartTrial, "_has_room", lambda *_: True)
    is_found(above_its_stage, SLOW_STARTS, CALLS)


# --- Results of an older generation are ignored ---


def moved_by_the_past(kind, options, history):
    """Return the tickets of an older generation that changed anything."""
    run, bad = Run(kind(options)), []
    for step in history:
        current, before = run.model.generation, run.model.snapshot(run.now + step.wait)
        ticket = run.step(step)
        late = ticket is not None and generation(ticket) != current
        if late and run.model.snapshot(run.now) != before:
            bad.append(ticket)
    return bad


class Forgetful(BreakerModel):
    """Takes each result as one of its present generation."""

    def settle(self, ticket, verdict, now):
        """Settle, but not by the ticket's own generation."""
        if isinstance(ticket, int) or self.state is BreakerState.CLOSED:
            ticket = self.generation
        super().settle(ticket, verdict, now)


WITH_WINDOW = SETTINGS.map(lambda options: options.replace(failure_ratio=0.9, window=50))


@given(WITH_WINDOW, ANYTHING)
def test_an_older_generation_changes_nothing(options, history):
    """Neither the state nor the window sees the result of a call from before the last change."""
    assert not moved_by_the_past(BreakerModel, options, history)


def test_without_generations_the_past_changes_the_present():
    """Without the comparison of generations late results count."""
    is_found(lambda *example: moved_by_the_past(Forgetful, *example), WITH_WINDOW, ANYTHING)


# --- A cancelled probe returns its permit ---


def lost_permits(options, history):
    """Return the probes after whose cancellation the next call was not let through as a probe."""
    run, bad = Run(BreakerModel(options)), []
    for step in history:
        run.step(step)
        answer = run.model.admit(run.now)
        if isinstance(answer, Probe):
            before = run.model.snapshot(run.now)
            run.model.settle(answer, NONE, run.now)
            changed = run.model.snapshot(run.now) != before
            again = run.model.admit(run.now)
            if changed or not isinstance(again, Probe):
                bad.append(answer)
            else:
                run.model.settle(again, NONE, run.now)
        elif not isinstance(answer, BreakerRefusal):
            run.flying.append(answer)
    return bad


@given(SETTINGS, ANYTHING)
def test_a_cancelled_probe_returns_its_permit(options, history):
    """After a cancelled probe the next call is one, and nothing else has changed."""
    assert not lost_permits(options, history)


def test_without_giving_it_back_the_permit_is_lost(monkeypatch):
    """If a cancelled probe keeps its place, the next call is refused."""
    with_permit = Trial.settle

    def settle(self, probe, verdict, now):
        return CallVerdict.NONE if verdict is NONE else with_permit(self, probe, verdict, now)

    monkeypatch.setattr(Trial, "settle", settle)
    is_found(lost_permits, SETTINGS, ANYTHING)


# --- Never stuck ---


def is_stuck(options, history, settles):
    """Tell whether a breaker is kept from closing, although all is well from now on."""
    run = Run(BreakerModel(options))
    for step in history:
        run.step(step)
    if run.model.state is BreakerState.ISOLATED:
        run.model.close(run.now)
    while settles and run.flying:
        run.model.settle(run.flying.pop(), SUCCESS, run.now)
    for _ in range(100):
        answer = run.model.admit(run.now)
        if not isinstance(answer, BreakerRefusal):
            run.model.settle(answer, SUCCESS, run.now)
        if run.model.state is BreakerState.CLOSED:
            return False
        run.now += 5
    return True


@given(SETTINGS, ANYTHING, st.booleans())
def test_never_stuck(options, history, settles):
    """Whatever happened, and even if every call in flight hangs for ever, successes close it."""
    assert not is_stuck(options, history, settles)


def test_without_giving_up_hung_probes_it_is_stuck(monkeypatch):
    """Without the probe timeout a hung probe holds the breaker half-open for ever."""
    monkeypatch.setattr(Trial, "review", lambda self, now: self._shown(now))
    is_found(is_stuck, SETTINGS, CALLS, st.just(False))  # noqa: FBT003


# --- Clocks ---

SET_BACKS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3000)), max_size=40)


def admitted_during_the_break(break_for, set_backs):
    """Return the real moments, of too early admissions, under a clock that is set back."""
    model = BreakerModel(BreakerSettings(consecutive=1, break_for=break_for))
    model.settle(model.admit(10_000), FAILURE, 10_000)
    real, clock = 0, 10_000
    for elapsed, back in set_backs:
        real += elapsed
        clock += elapsed - (back if back % 3 == 0 else 0)
        if not isinstance(model.admit(clock), BreakerRefusal):
            return [real] if real < break_for else []
    return []


def open_too_long(break_for, back):
    """Tell whether a clock that was set back once keeps the breaker open for over two breaks."""
    model = BreakerModel(BreakerSettings(consecutive=1, break_for=break_for))
    model.settle(model.admit(10_000), FAILURE, 10_000)
    clock = 10_000 - back
    model.admit(clock)
    return isinstance(model.admit(clock + 2 * break_for), BreakerRefusal)


@given(st.integers(1, 40), SET_BACKS)
def test_a_clock_set_back_never_shortens_the_break(break_for, set_backs):
    """However often and far the clock is set back, the break takes its real time."""
    assert not admitted_during_the_break(break_for, set_backs)


@pytest.mark.parametrize(
    "left",
    [
        lambda self, now: self._length - abs(now - self._until + self._length),
        lambda self, now: self._until - now if now >= self._until - self._length else 0,
    ],
    ids=["distance", "not between start and end"],
)
def test_a_naive_countdown_shortens_the_break(monkeypatch, left):
    """If a clock before the start counts as elapsed time, the break is cut short."""
    monkeypatch.setattr(Countdown, "left", left)
    is_found(admitted_during_the_break, st.integers(1, 40), SET_BACKS)


@given(st.integers(1, 40), st.integers(0, 9_000))
def test_a_clock_set_back_does_not_hold_the_breaker_open(break_for, back):
    """A clock set back by an hour costs at most one more break, not an hour."""
    assert not open_too_long(break_for, back)


def test_without_starting_again_the_break_lasts_as_far_as_the_clock_went_back(monkeypatch):
    """A countdown that only compares instants holds for as long as the clock was set back."""
    monkeypatch.setattr(Countdown, "left", lambda self, now: max(self._until - now, 0))
    is_found(open_too_long, st.integers(1, 40), st.integers(0, 9_000))


@given(st.floats(1e-3, 1e5), st.floats(0, 1e9), st.floats(0, 0.999))
def test_retry_after_is_honest(break_for, start, share):
    """Who comes back after `retry_after` is let through; who comes at half of it is not."""
    model = BreakerModel(BreakerSettings(consecutive=1, break_for=break_for))
    model.settle(model.admit(start), FAILURE, start)
    now = start + break_for * share
    refused = model.admit(now)
    if isinstance(refused, BreakerRefusal):
        early = now + refused.retry_after / 2
        if early < start + break_for:
            assert isinstance(model.admit(early), BreakerRefusal)
        assert isinstance(model.admit(now + refused.retry_after), Probe)


# --- It trips exactly when the rules say so ---

RULES = some_settings(
    consecutive=st.none() | st.integers(1, 6),
    failure_ratio=st.sampled_from([0.07, 0.3, 0.5, 1.0]),
    window=st.sampled_from([20, 50, 100]),
    min_calls=st.integers(1, 8),
)
COUNT_RULES = some_settings(
    consecutive=st.none() | st.integers(1, 6),
    failure_ratio=st.sampled_from([0.07, 0.3, 0.5, 1.0]),
    window_calls=st.integers(8, 15),
    min_calls=st.integers(1, 8),
)
SLOW = st.builds(
    dict, slow_after=st.integers(1, 20), slow_ratio=st.sampled_from([0.07, 0.3, 0.5, 1.0])
)
ALL_RULES = st.one_of(
    RULES,
    COUNT_RULES,
    st.builds(lambda rules, slow: rules.replace(**slow), RULES | COUNT_RULES, SLOW),
    st.builds(
        lambda rules, slow: rules.replace(failure_ratio=None, **slow), RULES | COUNT_RULES, SLOW
    ),
)
MANY_CALLS = histories("admit", "admit", "settle", "settle", waits=6, size=150)


class Reference:
    """The closed breaker with its full history: a call is `[counted at, failed, slow]`."""

    def __init__(self, options):
        self.options = options
        self.started = {}
        self.counted = []
        self.verdicts = []
        self.tripped = False

    def notice(self, now):
        """Count the running calls that are slow by now, oldest first."""
        slow_after = self.options.slow_after
        for call in [] if slow_after is None else self.started.values():
            if not self.tripped and not call["record"] and now - call["at"] >= slow_after:
                self.count(call, now, failed=False, slow=True)

    def count(self, call, now, *, failed, slow):
        """Count a call, or the failure of one that was counted and is still in the window."""
        if any(record is call["record"] for record in self.in_window(now)):
            call["record"][1] |= failed
        else:
            call["record"] = [now, failed, slow]
            self.counted.append(call["record"])
        if failed or slow:
            self.judge(now)

    def in_window(self, now):
        """Return the counted calls that are in the window."""
        options = self.options
        if options.window is None:
            return self.counted[-options.window_calls :]
        width = options.window / 10
        return [call for call in self.counted if call[0] // width > now // width - 10]

    def judge(self, now):
        """Apply each rule as it is written."""
        options, sample = self.options, self.in_window(now)
        row = 0
        for verdict in reversed(self.verdicts):
            if verdict is SUCCESS:
                break
            row += 1
        self.tripped |= options.consecutive is not None and row >= options.consecutive
        for ratio, column in ((options.failure_ratio, 1), (options.slow_ratio, 2)):
            if ratio is not None and len(sample) >= options.min_calls:
                share = Fraction(sum(call[column] for call in sample), len(sample))
                self.tripped |= share >= Fraction(str(ratio))

    def admit(self, ticket, now):
        """Remember when a call began."""
        self.started[ticket] = {"at": now, "record": []}

    def settle(self, ticket, verdict, now):
        """Take in the end of a call."""
        self.notice(now)
        call = self.started.pop(ticket)
        if self.tripped or verdict is NONE:
            return
        self.verdicts.append(verdict)
        if verdict is FAILURE or not call["record"]:
            self.count(call, now, failed=verdict is FAILURE, slow=False)


def disagreements(kind, options, history):
    """Return the step at which the model and the full history disagree, up to the first trip."""
    model, reference, flying, now = kind(options), Reference(options), [], 1000
    for number, step in enumerate(history):
        now += step.wait
        if step.action == "admit":
            reference.notice(now)
            ticket = model.admit(now)
            if not reference.tripped:
                flying.append((number, ticket))
                reference.admit(number, now)
        elif flying:
            name, ticket = flying.pop(step.which % len(flying))
            reference.settle(name, step.verdict, now)
            if step.verdict is SUCCESS and model.calm and step.wait % 2:
                model.success(now)
            else:
                model.settle(ticket, step.verdict, now)
        if reference.tripped != (model.state is BreakerState.OPEN):
            return [number]
        if reference.tripped:
            return []
    seen = model.snapshot(now)
    sample = reference.in_window(now)
    expected = (len(sample), sum(call[1] for call in sample), sum(call[2] for call in sample))
    return [] if (seen["calls"], seen["failures"], seen["slow"]) == expected else [len(history)]


@given(ALL_RULES, MANY_CALLS)
def test_trips_exactly_when_the_rules_say(options, history):
    """With any rules the breaker opens at the very step at which the full history says so."""
    assert not disagreements(BreakerModel, options, history)


def test_without_old_buckets_left_out_it_trips_wrongly(monkeypatch):
    """If the time window keeps what is too old, the full history disagrees."""
    monkeypatch.setattr(TimeWindow, "live", lambda self, now: self._turn(now) or list(self.buckets))
    is_found(lambda *example: disagreements(BreakerModel, *example), RULES, MANY_CALLS)


def test_slow_calls_counted_twice_are_caught():
    """If the end of a call counted as slow counts it again, the full history disagrees."""

    class CountsTwice(BreakerModel):
        def _take(self, verdict, now, _ticket):
            super()._take(verdict, now, None)

    is_found(lambda *example: disagreements(CountsTwice, *example), ALL_RULES, MANY_CALLS)


def test_slow_calls_noticed_only_at_their_end_are_caught():
    """If calls in flight are not looked at, the full history disagrees."""

    class Patient(BreakerModel):
        def _notice_slow(self, now):
            pass

    is_found(lambda *example: disagreements(Patient, *example), ALL_RULES, MANY_CALLS)


# --- Any unit of time ---


def told(options, history, unit):
    """Return every answer and change of state, in seconds, of a model driven in other units."""
    run, answers = Run(BreakerModel(options)), []
    run.now = 0
    for step in history:
        run.step(step._replace(wait=step.wait * unit // 64))
        state = run.model.snapshot(run.now)
        times = [state.pop("retry_after"), state.pop("open_for")]
        answers.append(
            (state, *(time if time is None else Fraction(time) / unit for time in times))
        )
    return answers


@given(
    st.builds(
        dict,
        break_for=st.integers(1, 9),
        window=st.integers(1, 9).map(lambda tens: tens * 10),
        slow_after=st.integers(1, 3),
        probe_timeout=st.integers(2, 9),
    ),
    PROBES,
    histories("admit", "settle", waits=300),
)
def test_microseconds_and_seconds_agree(times, probes, history):
    """Driven in whole microseconds the model says what it says in seconds."""
    rules = {"min_calls": 3, "failure_ratio": 0.5, "slow_ratio": 0.5}

    def options(unit):
        if isinstance(probes, Ramp):
            stages = ramp(probes.shares, step=5 * unit)
        else:
            stages = slow_start(step=5 * unit) if isinstance(probes, SlowStart) else probes
        scaled = {name: time * unit for name, time in times.items()}
        return BreakerSettings(**rules, **scaled, probes=stages)

    assert told(options(64), history, 64) == told(options(10**6), history, 10**6)


# --- Generations ---


@given(SETTINGS, ANYTHING)
def test_every_change_is_told_and_begins_a_generation(options, history):
    """The changes follow one another without a gap, each with a later generation.

    Only `close()` of a closed breaker begins a generation that is no change of state.
    """
    run = Run(BreakerModel(options))
    for step in history:
        run.step(step)
    state, generation = BreakerState.CLOSED, 1
    for change in run.model.changes:
        assert change.before is state
        assert change.generation > generation
        state, generation = change.after, change.generation
    assert run.model.state is state
    closes = sum(step.action == "close" for step in history)
    assert generation <= run.model.generation <= 1 + len(run.model.changes) + closes
    assert all(isinstance(change.cause, BreakerCause) for change in run.model.changes)
