"""The tools of the tests with processes: the log is read right, and no process is left."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.redis.pods.fleet import Fleet
from tests.redis.pods.logs import (
    Entry,
    arrived,
    enough,
    most_arrived_within,
    most_within,
    percentile,
)


def _entry(asked: int, arrived_at: int, *, ok: bool = True) -> Entry:
    return Entry(arrived_at, arrived_at, asked, "pod", ok)


ENTRIES = st.lists(
    st.builds(
        lambda asked, lag, ok: _entry(asked, asked + lag, ok=ok),
        st.integers(0, 30),
        st.integers(0, 10),
        st.booleans(),
    )
)


@given(ENTRIES, st.integers(1, 15))
def test_the_fullest_stretch_is_found(entries: list[Entry], seconds: int):
    """No stretch of that length holds more, and one holds as many."""
    counts = [
        sum(begin <= entry.asked and entry.arrived < begin + seconds for entry in entries)
        for begin in range(45)
    ]
    assert most_within(entries, seconds) == max(counts)


@given(ENTRIES, st.integers(1, 15))
def test_a_delay_never_makes_a_request_too_many(entries: list[Entry], seconds: int):
    """Whenever requests were decided between asking and arriving, no more are counted than were."""
    for share in (0, 1):
        decided = [entry.asked + share * (entry.arrived - entry.asked) for entry in entries]
        most = max(
            (sum(begin <= at < begin + seconds for at in decided) for begin in decided), default=0
        )
        assert most_within(entries, seconds) <= most
    assert most_within(entries, seconds) <= most_arrived_within(entries, seconds)


def test_arrivals_are_counted():
    """From the beginning on, and not at the end."""
    assert arrived([_entry(0, at) for at in (1, 2, 3)], 1, 3) == 2


def test_enough_bad_answers_are_found():
    """It is the moment at which their share was reached, and not before there were so many."""
    log = [_entry(0, at, ok=at % 2 == 0) for at in range(1, 9)]
    assert enough(log, 0.5, 1) == 1
    assert enough(log, 0.5, 4) == 4
    with pytest.raises(AssertionError):
        enough(log, 0.9, 4)


def test_percentiles_are_values():
    """The 95th percentile of twenty is the nineteenth."""
    assert percentile(range(1, 21), 0.95) == 19
    assert percentile([5.0], 0.95) == 5


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_no_process_outlives_its_fleet(redis_url: str):
    """Also one that is stopped, and also when the test has failed."""
    with pytest.raises(ZeroDivisionError), Fleet(redis_url, ["alone"], pause=0.01) as fleet:  # noqa: PT012
        fleet.start(2)
        fleet.wait_ready()
        fleet.pods[0].send(signal.SIGSTOP)
        processes = [process.id for process in (*fleet.pods, fleet.vendor)]
        assert all(map(_lives, processes))
        raise ZeroDivisionError
    assert not any(map(_lives, processes))


def test_a_pod_that_ends_by_itself_is_noticed(redis_url: str):
    """What it had to say is in the error."""
    with Fleet(redis_url, ["no such account"], pause=0.01) as fleet:
        fleet.start()
        with pytest.raises(AssertionError, match="KeyError: 'no such account'"):
            fleet.wait_ready()
