"""The table and the verdict of a run without a page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall_demo._table import COLUMNS, PHASES, duration, groups, rows, table, verdict

shares = st.floats(0, 1)
times = st.none() | st.floats(0, 20)


def side(error: float, p99: float | None, requests: int = 100) -> dict:
    shown = {"good": 1 - error, "degraded": 0.0, "limited": 0.0, "error": error}
    return {"requests": requests, **shown, "p50": p99, "p99": p99}


def told(ours: dict, theirs: dict) -> dict:
    return {name: {"protected": ours, "unprotected": theirs} for name in groups()}


@given(shares, times, shares, times)
def test_contained_means_both_fewer_errors_and_quicker(ours, our_p99, theirs, their_p99):
    """A quarter of the errors and half of p99, or it was not contained."""
    contained, words = verdict(told(side(ours, our_p99), side(theirs, their_p99)))
    wanted = (
        ours < theirs / 4
        and our_p99 is not None
        and their_p99 is not None
        and our_p99 < their_p99 / 2
    )
    assert contained == wanted
    assert words.startswith("The outage was contained" if wanted else "The outage was not")


def test_an_outage_that_nobody_saw_shows_nothing():
    """Where the unprotected side had no error, nothing was contained."""
    contained, words = verdict(told(side(0.0, 0.1), side(0.0, 4.0)))
    assert not contained
    assert words.startswith("The outage was not seen")
    assert not verdict(told(side(0.0, None, 0), side(1.0, 4.0)))[0]


def test_the_verdict_reads_well():
    """It says what was seen on both sides."""
    _, words = verdict(told(side(0.003, 0.21), side(1.0, 4.0)))
    expected = "errors 0.3% against 100.0%, p99 210 ms against 4.00 s."
    assert words == f"The outage was contained: {expected}"
    assert duration(None) == "-"


def test_the_table_has_all_of_it():
    """Every column and every row is there, whole."""
    results = told(side(0.5, 0.25), side(1.0, 4.0))
    drawn = table(results)
    for line in (COLUMNS, *rows(results)):
        assert any(all(text in shown for text in line) for shown in drawn.splitlines()), line


def test_the_phases_take_all_of_the_time():
    """Their shares are one, and the outage is made of those in which something is broken."""
    assert sum(phase.share for phase in PHASES) == pytest.approx(1.0)
    assert groups()["outage"] == ["vendor broken", "vendor slow"]
