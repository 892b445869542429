"""Controlled delay and adaptive LIFO: when a queue is a bad one, and who has to leave it."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import adaptive_lifo, codel
from seawall.models import codel as model
from seawall.models.codel import QueueShed, QueueState
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
            queue.append(now)
        for _ in range(servings):
            while len(queue) > 1 and state.sheds(now - queue[0], now):
                day.shed.append((queue.pop(0), now))
            if queue:
                place = -1 if state.newest_first(now) else 0
                day.served.append((queue.pop(place), now))
                if left is not None:
                    left.append(len(queue))
    return day


# Controlled delay


class Reference:
    """The pseudocode of RFC 8289, section 5, told in one piece and with calls for packets.

    Two lines are not the RFC's: once it drops, whatever has waited for two intervals goes at once.
    """

    def __init__(self, target: float, interval: float) -> None:
        self.target = target
        self.interval = interval
        self.queue: list[float] = []
        self.first_above: float | None = None
        self.dropping = False
        self.drop_next = float("-inf")
        self.count = self.last_count = 0
        self.day = Day([], [])

    def _dodequeue(self, now: float) -> tuple[float | None, bool]:
        if not self.queue:
            self.first_above = None
            return None, False
        came = self.queue.pop(0)
        if now - came < self.target or not self.queue:
            self.first_above = None
            return came, False
        if self.first_above is None:
            self.first_above = now + self.interval
        return came, now >= self.first_above

    def _too_old(self, came: float, now: float) -> bool:
        return now - came > 2 * self.interval

    def dequeue(self, now: float) -> None:
        came, may_drop = self._dodequeue(now)
        if self.dropping and not may_drop:
            self.dropping = False
        elif self.dropping:
            while self.dropping and (now >= self.drop_next or self._too_old(came, now)):
                self.day.shed.append((came, now))
                if now >= self.drop_next:
                    self.count += 1
                    self.drop_next += self.interval / sqrt(self.count)
                came, may_drop = self._dodequeue(now)
                self.dropping = may_drop
        elif may_drop:
            self.day.shed.append((came, now))
            came, may_drop = self._dodequeue(now)
            while may_drop and self._too_old(came, now):
                self.day.shed.append((came, now))
                came, may_drop = self._dodequeue(now)
            self.dropping = True
            delta = self.count - self.last_count
            recent = now - self.drop_next < 16 * self.interval
            self.count = delta if delta > 1 and recent else 1
            self.drop_next = now + self.interval / sqrt(self.count)
            self.last_count = self.count
        if came is not None:
            self.day.served.append((came, now))


def _check_codel(traffic: Traffic) -> None:
    reference = Reference(0.05, 0.2)
    now = 0.0
    for step, coming, servings in traffic.steps:
        now += step / 100
        reference.queue += [now] * coming
        for _ in range(servings):
            reference.dequeue(now)
    assert run(codel(0.05, interval=0.2, scale=0).start(unknown), traffic) == reference.day


SHEDS = model.CodelState.sheds

OVERLOADED = st.builds(
    Traffic,
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(0, 2)), min_size=50),
)


@given(TRAFFIC | OVERLOADED)
def test_it_sheds_when_the_rfc_says(traffic: Traffic) -> None:
    """The same calls go at the same instants as by the RFC's pseudocode with our bound."""
    _check_codel(traffic)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("emptied", lambda *_: None),
        ("_begin", lambda state, now, interval: setattr(state, "_drop_next", now + interval)),
        ("sheds", lambda _state, sojourn, _now: sojourn >= 0.05),
        ("sheds", lambda state, sojourn, now: SHEDS(state, min(sojourn, 0.4), now)),
    ],
)
def test_without_a_part_of_its_law_it_sheds_otherwise(
    name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never forgive, never begin, shed at once, or know no bound: the property is falsified."""
    monkeypatch.setattr(model.CodelState, name, broken)
    assert falsified(_check_codel, OVERLOADED)


def test_a_burst_is_no_reason_to_shed() -> None:
    """A wait far above the target is nothing if it is over within an interval."""
    state = codel(scale=0).start(unknown)
    assert not any(state.sheds(1.0, at / 100) for at in range(10))
    assert not state.sheds(0.004, 0.1)
    assert not any(state.sheds(1.0, at / 100) for at in range(11, 21))


def test_it_sheds_ever_more_often() -> None:
    """One at first, then after an interval through the square root of how many have gone."""
    state = codel(scale=0).start(unknown)
    shed = [at for at in range(1000) if state.sheds(0.08, at / 1000)]
    assert shed[:5] == [100, 200, 271, 329, 379]
    assert shed == sorted(set(shed))


def test_in_a_queue_that_stands_nobody_waits_for_longer_than_two_intervals() -> None:
    """A flood is not left to a law that adds a drop at a time: who is so late goes at once."""
    state = codel(scale=0).start(unknown)
    assert not any(state.sheds(1.0, at / 1000) for at in range(100))
    assert all(state.sheds(1.0, 0.1) for _ in range(50))
    assert not state.sheds(0.2, 0.1)
    assert [at for at in range(101, 300) if state.sheds(0.08, at / 1000)][:2] == [200, 271]


def test_bad_again_so_soon_it_resumes_where_it_was() -> None:
    """Within sixteen intervals it goes on at the rate that helped; after them it begins anew."""

    def pause(state: QueueState, seconds: float) -> list[int]:
        for at in range(1000):
            state.sheds(0.08, at / 1000)
        state.sheds(0.0, 1.0)
        return [at for at in range(400) if state.sheds(0.08, 1.0 + seconds + at / 1000)]

    soon = pause(codel(scale=0).start(unknown), 0.5)
    late = pause(codel(scale=0).start(unknown), 2.0)
    assert late == [100, 200, 271, 329, 379]
    assert len(soon) > 2 * len(late)


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
