"""Windows: which calls make one, and what is told of them."""

from __future__ import annotations

import pytest

from seawall.models.concurrency.samples import ENOUGH, FEWEST, MOST, SPAN, SampleWindow, Windows


def _warm() -> Windows:
    """Return windows that have seen the first few calls."""
    windows = Windows(0.1)
    windows.typical = 0.0
    return windows


def test_the_first_calls_to_end_are_only_looked_at() -> None:
    """Of those that began together they are the fastest: a baseline of them would be too low."""
    windows = Windows(0.1)
    windows.samples += [0.1] * (FEWEST - 1)
    assert windows.end(100.0) is None
    windows.samples.append(0.5)
    assert windows.end(100.0) is None
    assert (windows.due, windows.samples) == (100.0 + SPAN * 0.5, [])
    assert windows.typical == pytest.approx(0.14)


def test_a_window_needs_calls_and_time() -> None:
    """At least ten calls, and four times what they took in the window before."""
    windows = _warm()
    windows.samples += [0.5] * (FEWEST - 1)
    assert windows.end(100.0) is None
    windows.samples.append(0.7)
    assert windows.end(100.0) == SampleWindow(pytest.approx(0.52), dropped=False)
    assert windows.due == pytest.approx(100.0 + SPAN * 0.52)
    windows.samples += [0.01] * 20
    assert windows.end(102.0) is None
    assert windows.end(102.1) == SampleWindow(pytest.approx(0.01), dropped=False)
    assert windows.due == pytest.approx(102.2)
    assert windows.samples == []


def test_calls_that_vary_make_longer_windows() -> None:
    """Until their mean is known to 12 %; it is looked at when it should be, not at each call."""
    windows = _warm()
    windows.typical = 1.0
    windows.samples += [0.0, 2.0] * 10
    assert windows.end(1.0) is None
    assert windows.due == pytest.approx(1.0 + (69 - 20) / 20)
    windows.samples += [0.0, 2.0] * 25
    assert windows.end(4.0) == SampleWindow(1.0, dropped=False)


def test_there_are_calls_enough_however_they_vary() -> None:
    """And after a long idle time it is looked at soon again, not after as long a time."""
    windows = _warm()
    windows.typical = 1.0
    windows.samples += [0.0] * (ENOUGH - 2) + [1e6]
    assert windows.end(1e6) is None
    assert windows.due <= 1e6 + SPAN
    windows.samples.append(0.0)
    assert windows.end(1e6 + SPAN) == SampleWindow(1e4, dropped=False)


def test_one_dropped_call_among_many_is_no_sign() -> None:
    """A window counts as dropped when more than one call in twenty was."""
    windows = _warm()
    windows.samples += [1.0] * 19
    windows.drops.append(5.0)
    assert windows.end(0.0) == SampleWindow(1.0, dropped=False)
    assert windows.typical == 1.2
    windows.samples += [1.0] * 18
    windows.drops.append(5.0)
    assert windows.end(1e3) == SampleWindow(1.0, dropped=True)


def test_a_window_of_nothing_but_drops_ends_too() -> None:
    """An outage has no other calls; their time decides when the next window ends."""
    windows = _warm()
    windows.drops += [2.0] * FEWEST
    assert windows.end(10.0) == SampleWindow(0.0, dropped=True)
    assert (windows.due, windows.typical) == (18.0, 2.0)


def test_at_high_rates_a_sample_makes_the_mean() -> None:
    """The mean of 100 000 calls is that of at most two thousand of them."""
    windows = _warm()
    windows.samples += [1.0, 3.0] * 50_000
    stride = 100_000 // MOST + 1
    assert stride % 2
    assert windows.end(0.0) == SampleWindow(pytest.approx(2.0, abs=0.01), dropped=False)
