"""Controlled delay and adaptive LIFO: when a queue is a bad one, and who has to go."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seawall.models.shedding import codel as model
from seawall.models.shedding.codel import QueueShed, QueueState
from seawall.shedding import adaptive_lifo, codel
from tests.support import falsified


def unknown(_now: float) -> float | None:
    return None


def fixed(seconds: float) -> Callable[[float], float | None]:
    return lambda _now: seconds


# A queue, as slots keep it


class Traffic(NamedTuple):
    """Steps in hundredths of a second, each with the number of who comes and who is served."""

    steps: list[tuple[int, int, int]]


TRAFFIC = st.builds(
    Traffic, st.lists(st.tuples(st.integers(1, 8), st.integers(0, 4), st.integers(0, 2)))
)


class Day(NamedTuple):
    """What became of everybody: instants of coming, and of being served or shed."""

    served: list[tuple[float, float]]
    shed: list[tuple[float, float]]


def run(state: QueueState, traffic: Traffic, left: list[int] | None = None) -> Day:
    """Serve who waits by `state`: the last one is never shed. `left`: how many still waited."""
    queue: list[float] = []
    day = Day([], [])
    now = 0.0
    for step, coming, servings in traffic.steps:
        now += step / 100
        for _ in range(coming):
            if not queue:
                state.emptied(now)
            elif state.refuses(len(queue), now - queue[0], now):
                day.shed.append((now, now))
                continue
            queue.append(now)
        for _ in range(servings):
            while len(queue) > 1 and state.sheds(now - queue[0], now):
                day.shed.append((queue.pop(0), now))
            if queue:
                place = -1 if state.newest_first(now) else 0
                day.served.append((queue.pop(place), now))
                state.serves(now)
                if left is not None:
                    left.append(len(queue))
    return day


OVERLOADED = st.builds(
    Traffic,
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(0, 2)), min_size=50),
)


# Controlled delay


class Waits(NamedTuple):
    """Waits of those who were served and of those who were not, and the calls done in a second."""

    served: list[float]
    refused: list[float]
    done: float

    def quantile(self, p: float) -> float:
        return sorted(self.served)[int(p * len(self.served))]


class Overload(NamedTuple):
    """`slots` whose calls take `seconds`, asked for `times` of what they can do."""

    slots: int
    seconds: float
    times: float
    exact: bool
    seed: int
    asked: bool = True
    """Whether newcomers are asked about; otherwise they all come in, as into a shared queue."""


def _overload(case: Overload, shed: QueueShed, lasting: float = 20.0, calm: float = 2.0) -> Waits:
    """Run it, after a while at half of the capacity."""
    rng = Random(case.seed)
    typical = case.seconds if case.exact else 0.69 * case.seconds
    state = shed.start(fixed(typical))
    capacity = case.slots / case.seconds
    queue: deque[float] = deque()
    ends: list[float] = []
    waits, refused, done = [], [], 0
    free, coming = case.slots, 0.0

    def begin(came: float, now: float) -> None:
        if came > calm:
            waits.append(now - came)
        takes = case.seconds if case.exact else rng.expovariate(1 / case.seconds)
        heapq.heappush(ends, now + takes)

    while coming < calm + lasting:
        if ends and ends[0] <= coming:
            now = heapq.heappop(ends)
            done += now > calm
            free += 1
            while len(queue) > 1 and state.sheds(now - queue[0], now):
                refused.append(now - queue.popleft())
            if queue:
                state.serves(now)
                free -= 1
                begin(queue.popleft(), now)
            continue
        now = coming
        coming += rng.expovariate(capacity * (case.times if now > calm else 0.5))
        if free:
            free -= 1
            begin(now, now)
        elif not queue:
            state.emptied(now)
            queue.append(now)
        elif case.asked and state.refuses(len(queue), now - queue[0], now):
            refused.append(0.0)
        else:
            queue.append(now)
    return Waits(waits, refused, done / lasting / capacity)


TARGET = 0.1


def _check_overload(case: Overload) -> None:
    waits = _overload(case, codel(TARGET, interval=1.0, scale=0))
    assert waits.quantile(0.5) <= 2 * TARGET
    assert waits.done >= 0.9
    assert sorted(waits.refused)[int(0.99 * len(waits.refused))] <= TARGET * 1.001


@pytest.mark.parametrize("asked", [True, False], ids=["newcomers refused", "waiting ones dropped"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "random"])
@pytest.mark.parametrize("seconds", [0.01, 0.1])
@pytest.mark.parametrize("times", [2, 3, 10])
def test_controlled_delay_keeps_the_queue_at_its_target(
    times: float, seconds: float, *, exact: bool, asked: bool
) -> None:
    """Half of the served wait for twice the target at most; goodput is full; no refusal is late."""
    case = Overload(max(2, int(100 * seconds)), seconds, times, exact, 1, asked=True)
    if asked:
        _check_overload(case)
        return
    waits = _overload(case._replace(asked=False), codel(TARGET, interval=1.0, scale=0))
    assert waits.quantile(0.5) <= 2 * TARGET
    assert waits.done >= 0.9


OVERLOADS = st.builds(
    Overload,
    slots=st.integers(2, 6),
    seconds=st.sampled_from([0.02, 0.05]),
    times=st.floats(2.0, 6.0),
    exact=st.booleans(),
    seed=st.integers(0, 2**32),
    asked=st.just(value=True),
)


@given(OVERLOADS)
@settings(max_examples=10)
def test_whatever_the_overload_the_queue_is_kept_at_its_target(case: Overload) -> None:
    """The same for any number of times the capacity, and any seed."""
    _check_overload(case)


REFUSES = model.CodelState.refuses


def _never_bad(state: Any, waiting: int, sojourn: float, now: float) -> bool:
    state.shedding = False
    return REFUSES(state, waiting, sojourn, now)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("refuses", lambda _state, _waiting, _sojourn, _now: False),
        ("refuses", _never_bad),
        ("_judge", lambda state, _sojourn, now: state._spans.stretch(now)),
    ],
    ids=["all are let in", "never a bad queue", "no judgement"],
)
def test_without_a_part_of_its_law_a_queue_leaves_its_target(
    name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let everybody in, or never judge or count: waits grow, or slots are idle."""
    monkeypatch.setattr(model.CodelState, name, broken)
    with pytest.raises(AssertionError):
        _check_overload(Overload(2, 0.01, 3, exact=False, seed=1))


def test_a_burst_is_no_reason_to_refuse_or_to_shed() -> None:
    """However many come at once: of what drains within an interval nobody goes."""
    state = codel(0.05, interval=1.0, scale=0).start(unknown)
    state.emptied(0.0)
    assert not any(state.refuses(waiting, 0.0, 0.0) for waiting in range(1, 64))
    for number in range(1, 64):
        now = number / 80
        assert not state.sheds(now, now)
        state.serves(now)
        assert not state.refuses(64 - number, now, now)
    state.emptied(2.0)
    assert not state.refuses(64, 0.0, 2.0)


def test_who_would_wait_for_longer_than_an_interval_is_refused_before_it_is_a_bad_queue() -> None:
    """Or a flood would fill the queue for many seconds before an interval is over."""
    state = codel(0.1, interval=1.0, scale=0).start(unknown)
    state.emptied(0.0)
    for number in range(1, 11):
        state.serves(number / 100)
    assert not state.refuses(99, 0.1, 0.11)
    assert state.refuses(101, 0.1, 0.11)


def test_a_bad_queue_is_good_again_when_hardly_anybody_is_refused() -> None:
    """Within the last interval; an empty queue for a moment is not enough."""
    state = codel(0.1, interval=1.0, scale=0).start(unknown)
    state.emptied(0.0)

    def pass_second(second: int, sojourn: float, waiting: int) -> int:
        refused = 0
        for number in range(100):
            now = second + number / 100
            refused += state.refuses(waiting, sojourn, now)
            state.serves(now)
        return refused

    assert pass_second(0, 0.5, 50) == 0
    assert pass_second(1, 0.5, 50) > 50
    state.emptied(2.0)
    assert pass_second(2, 0.05, 12) > 90
    pass_second(3, 0.05, 5)
    pass_second(4, 0.05, 5)
    assert pass_second(5, 0.05, 50) == 0


def test_nothing_is_known_of_a_queue_that_was_empty_for_an_interval() -> None:
    """It begins anew, as a good one."""
    state = codel(0.1, interval=1.0, scale=0).start(unknown)
    state.emptied(0.0)
    for number in range(300):
        state.refuses(50, 0.5, number / 100)
        state.serves(number / 100)
    assert state.refuses(50, 0.5, 3.0)
    state.emptied(4.1)
    assert not state.refuses(50, 0.05, 4.15)


def test_in_a_bad_queue_nobody_waits_past_its_use() -> None:
    """Who has waited for three intervals goes, such as when all slots hang."""
    state = codel(scale=0).start(unknown)
    state.emptied(0.0)
    for at in range(30):
        state.refuses(5, 0.08, at / 100)
    assert not state.sheds(0.3, 0.3)
    assert state.sheds(0.301, 0.3)


# In proportion to what a call takes


@given(st.floats(1e-4, 10.0), st.floats(0.5, 5.0))
def test_target_and_interval_grow_with_service_time(seconds: float, scale: float) -> None:
    """A wait below the target is never too long; one above it is, after an interval."""
    target = max(0.005, scale * seconds)
    interval = max(0.1, 2 * target)

    def first_shed(wait: float) -> bool:
        state = codel(scale=scale).start(fixed(seconds))
        return state.sheds(wait, 0.0) or state.sheds(wait, interval * 1.001)

    assert not first_shed(target * 0.999)
    assert first_shed(target * 1.001)
    state = codel(scale=scale).start(fixed(seconds))
    assert not state.sheds(target * 2, 0.0)
    assert not state.sheds(target * 2, interval * 0.999)


def test_until_calls_are_known_nobody_is_shed() -> None:
    """A wait is long or short in proportion only; the question is asked again now and then."""
    known: list[float | None] = [None]
    asked: list[float] = []

    def service_time(now: float) -> float | None:
        asked.append(now)
        return known[0]

    for shed in (codel(), adaptive_lifo()):
        known[0] = None
        asked.clear()
        state = shed.start(service_time)
        assert not any(state.sheds(60.0, at / 100) for at in range(200))
        assert len(asked) <= 21
        known[0] = 0.001
        assert any(state.sheds(60.0, 2 + at / 100) for at in range(200))


@pytest.mark.parametrize("shed", [codel(), adaptive_lifo()])
def test_settings_hold_no_state(shed: QueueShed) -> None:
    """Two queues with the same settings do not know of each other."""
    first, second = shed.start(fixed(0.001)), shed.start(fixed(0.001))
    assert any(first.sheds(0.09 + at / 100, at / 100) for at in range(50))
    assert not second.sheds(0.09, 0.5)


# Adaptive LIFO


def _check_adaptive_lifo(traffic: Traffic) -> None:
    state = adaptive_lifo(0.02, patience=0.1, scale=0).start(unknown)
    left: list[int] = []
    day = run(state, traffic, left)
    for (came, gone), others in zip(day.served, left, strict=True):
        assert gone - came <= 0.1 + 1e-9 or not others
    for came, gone in day.shed:
        assert gone - came > 0.02


@given(TRAFFIC | OVERLOADED)
def test_nobody_who_waited_for_too_long_is_served_before_others(traffic: Traffic) -> None:
    """Beyond patience who is not alone is shed; within the timeout nobody is."""
    _check_adaptive_lifo(traffic)


@pytest.mark.parametrize(
    "broken", [lambda *_: False, lambda *_: True], ids=["sheds nobody", "sheds everybody"]
)
def test_without_its_timeouts_the_property_is_falsified(
    broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shed nobody, or everybody, and somebody is served too late or shed too early."""
    monkeypatch.setattr(model.AdaptiveLifoState, "sheds", broken)
    assert falsified(_check_adaptive_lifo, OVERLOADED)


def test_in_a_standing_queue_the_newest_is_first() -> None:
    """First come first served, until the queue has not been empty for as long as patience."""
    state = adaptive_lifo(0.02, patience=0.1, scale=0).start(unknown)
    assert not state.sheds(0.05, 1.0)
    assert not state.newest_first(1.0)
    assert state.sheds(0.05, 1.06)
    assert state.newest_first(1.06)
    assert not state.sheds(0.01, 1.07)
    state.emptied(1.1)
    assert not state.newest_first(1.1)
    assert not state.sheds(0.05, 1.2)


# Settings


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: codel(0), "target=0: write finite seconds, more than 0"),
        (lambda: codel(0.2), "interval=0.1: write more than target=0.2"),
        (lambda: codel(scale=-1), "scale=-1: write a finite number of at least 0"),
        (lambda: adaptive_lifo(-1), "timeout=-1: write finite seconds"),
        (lambda: adaptive_lifo(0.2), "patience=0.1: write at least timeout=0.2"),
        (lambda: adaptive_lifo(scale=float("nan")), "scale=nan: write a finite number"),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], object], message: str) -> None:
    """At once, and the message says what to write."""
    with pytest.raises(ValueError, match=message):
        make()


def test_settings_can_be_read() -> None:
    """The repr is the call that makes them."""
    assert repr(codel()) == "codel(0.005, interval=0.1, scale=2)"
    assert repr(adaptive_lifo()) == "adaptive_lifo(0.005, patience=0.1, scale=2)"


def test_time_in_which_the_queue_was_empty_is_left_out_once():
    """However often an empty queue is looked at, its idle time does not push the window away."""
    state = model.CodelState(codel(0.1, interval=1.0, scale=0), lambda: None)
    state.shedding, state._last = True, 0.0
    for _ in range(5):
        state.emptied(0.5)
    assert state._since <= 0.5
