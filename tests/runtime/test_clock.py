"""Clocks: the machine's own, and one that moves when told."""

from __future__ import annotations

import math
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.clock import SYSTEM, Clock, SystemClock, VirtualClock


def test_the_system_clock_is_the_builtin() -> None:
    """Who stores `now` or `sleep` holds the interpreter's own function, without a Python frame."""
    assert SYSTEM.now is time.monotonic
    assert SYSTEM.sleep is time.sleep
    assert SystemClock.now is time.monotonic
    assert repr(SYSTEM) == "SystemClock()"


def test_both_clocks_are_clocks() -> None:
    """Either clock serves where a Clock is asked for; the type checker reads this test."""
    clocks: list[Clock] = [SYSTEM, VirtualClock()]
    assert all(isinstance(clock.now(), float) for clock in clocks)


def test_a_virtual_clock_moves_only_when_told() -> None:
    """It starts where it is told to and stands until it is moved."""
    clock = VirtualClock(10)
    assert (clock.now(), clock.now()) == (10.0, 10.0)
    clock.advance(2.5)
    assert clock.now() == 12.5
    clock.advance(0)
    clock.advance_to(12.5)
    clock.advance_to(20)
    assert clock.now() == 20.0
    assert repr(clock) == "VirtualClock(20.0)"
    assert VirtualClock().now() == 0.0


def test_virtual_sleep_passes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleeping moves the clock and blocks nobody."""
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("slept"))
    clock = VirtualClock()
    clock.sleep(3600.0)
    assert clock.now() == 3600.0


@pytest.mark.parametrize("bad", [-1.0, -1e-9, math.nan, math.inf])
def test_a_step_is_finite_and_not_negative(bad: float) -> None:
    """Neither a sleep nor a step takes a negative, endless or undefined time."""
    clock = VirtualClock(5.0)
    for move in (clock.sleep, clock.advance):
        with pytest.raises(ValueError, match=r"seconds=.*: write finite seconds, 0 or more"):
            move(bad)
    assert clock.now() == 5.0


@pytest.mark.parametrize("bad", ["1", None, True])
def test_a_step_is_a_number(bad: object) -> None:
    """What is no number is refused with words on what to write."""
    clock = VirtualClock()
    for move in (clock.sleep, clock.advance, clock.advance_to):
        with pytest.raises(TypeError, match="write"):
            move(bad)  # type: ignore[arg-type]


def test_a_virtual_clock_never_goes_back() -> None:
    """An instant that has passed is refused, and the message says where the clock stands."""
    clock = VirtualClock(5.0)
    with pytest.raises(ValueError, match=r"instant=4\.75: the clock stands at 5\.0"):
        clock.advance_to(4.75)
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="instant="):
            clock.advance_to(bad)
    assert clock.now() == 5.0


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_the_start_is_checked(bad: float) -> None:
    """A clock starts at a finite instant, 0 or later."""
    with pytest.raises(ValueError, match="start="):
        VirtualClock(bad)


def test_threads_may_share_a_virtual_clock() -> None:
    """No step is lost when many threads move one clock."""
    clock = VirtualClock()
    together = threading.Barrier(4)

    def move() -> None:
        together.wait()
        for _ in range(1000):
            clock.advance(1.0)

    threads = [threading.Thread(target=move) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.now() == 4000.0


@given(st.lists(st.tuples(st.booleans(), st.floats(allow_nan=True))))
def test_any_history_is_monotonic(moves: list[tuple[bool, float]]) -> None:
    """Whatever is asked of the clock, refused or not, time never falls."""
    clock = VirtualClock()
    for absolute, amount in moves:
        before = clock.now()
        try:
            (clock.advance_to if absolute else clock.advance)(amount)
        except ValueError:
            assert clock.now() == before
        assert clock.now() >= before
