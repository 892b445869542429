from __future__ import annotations

from datetime import UTC, datetime
from email.utils import format_datetime
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.wire import retries
from seawall.wire.retries import read_milliseconds, read_retry_after, write_retry_after
from tests.support import falsified

WALL = 784_111_770.0
A_YEAR = 31_536_000.0
EARLY, LATE = int(datetime(1980, 1, 1, tzinfo=UTC).timestamp()), 4_000_000_000


@pytest.mark.parametrize(
    "value",
    [
        "Sun, 06 Nov 1994 08:49:37 GMT",
        b"Sunday, 06-Nov-94 08:49:37 GMT",
        "Sun Nov  6 08:49:37 1994",
        "7",
        b" 7 ",
        "7.0",
    ],
)
def test_every_form(value: str | bytes):
    """Seconds and the three forms of a date all say the same."""
    assert read_retry_after(value, WALL) == 7.0


@given(st.integers(EARLY, LATE), st.integers(-(10**6), 10**6))
def test_dates_agree_with_the_standard_library(instant: int, ahead: int):
    """What the standard library writes is read as the seconds from now; the past is now."""
    then = datetime.fromtimestamp(instant + ahead, UTC)
    for text in (
        format_datetime(then, usegmt=True),
        f"{then:%A}, {then:%d-%b-%y %H:%M:%S} GMT",
        f"{then:%a %b} {then.day:2d} {then:%H:%M:%S %Y}",
    ):
        assert read_retry_after(text, float(instant)) == max(0.0, float(ahead))


@pytest.mark.parametrize(
    ("now", "text", "seconds"),
    [
        ("1999-12-31T23:59:50", "Saturday, 01-Jan-00 00:00:10 GMT", 20.0),
        ("2099-12-31T23:59:50", "Friday, 01-Jan-00 00:00:10 GMT", 20.0),
        ("2026-03-01T12:00:00", "Sunday, 01-Mar-26 12:00:30 GMT", 30.0),
        ("2026-03-01T12:00:00", "Sunday, 01-Mar-26 11:00:00 GMT", 0.0),
        ("2026-03-01T12:00:00", "Saturday, 06-Nov-94 08:49:37 GMT", 0.0),
        ("2026-03-01T12:00:00", "Sunday, 01-Mar-76 12:00:00 GMT", A_YEAR),
        ("2026-03-01T12:00:00", "Sunday, 01-Mar-76 12:00:01 GMT", 0.0),
        ("2024-02-29T12:00:00", "Thursday, 29-Feb-24 12:00:07 GMT", 7.0),
    ],
)
def test_a_year_of_two_digits_is_at_most_half_a_century_ahead(now: str, text: str, seconds: float):
    """The nearest such year that is not more than 50 years ahead, also across a century."""
    wall = datetime.fromisoformat(f"{now}+00:00").timestamp()
    assert read_retry_after(text, wall) == seconds


@pytest.mark.parametrize(
    "value",
    [
        "",
        "soon",
        "-1",
        "1e9",
        "inf",
        "nan",
        "9" * 16 + ".",
        ".5",
        "9" * 9000,
        "31 Feb",
        "1, 2",
        "Sun, 31 Feb 1994 08:49:37 GMT",
        "Sun, 06 Nov 1994 25:49:37 GMT",
        "Sun, 06 Nov 1994",
        "٣",
        "Sun, 06 Nov 0000 08:49:37 GMT",
        b"\xff",
        "Sun Nov    08:49:37 1994",
    ],
)
def test_what_says_nothing(value: str | bytes):
    """What is neither seconds nor a date says nothing."""
    assert read_retry_after(value, WALL) is None
    assert read_milliseconds(value) is None


def test_a_leap_second_is_a_second():
    """The 61st second of a minute is taken as its 60th."""
    assert read_retry_after("Sun, 06 Nov 1994 08:49:60 GMT", WALL) == 29.0


@pytest.mark.parametrize("wall", [inf, -inf, nan, 1e300, -1e18])
def test_a_wrong_clock_does_no_harm(wall: float):
    """A wall clock that stands nowhere makes no wait of more than a year."""
    for value in ("Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:37 GMT"):
        seconds = read_retry_after(value, wall)
        assert seconds is None or 0.0 <= seconds <= A_YEAR


@pytest.mark.parametrize("value", ["9" * 11, "9" * 15, "9" * 16, "9" * 400, "9" * 20 + ".5"])
def test_more_than_a_year_is_a_year(value: str):
    """Who says "never", in however many digits, is not asked sooner for it; no wait is endless."""
    assert read_retry_after(value, WALL) == A_YEAR
    assert read_retry_after("Sun, 06 Nov 9999 08:49:37 GMT", WALL) == A_YEAR
    assert read_milliseconds(value) == min(float(value) / 1000, A_YEAR)


def test_zeros_before_a_number_say_nothing():
    """Not even many of them; nor do digits after the point that no float can hold."""
    assert read_retry_after("0" * 20 + "5", WALL) == 5.0
    assert read_milliseconds("0" * 20 + "1500.5") == 1.5005
    assert read_retry_after("0" * 50, WALL) == 0.0
    assert read_retry_after("1." + "5" * 50, WALL) == pytest.approx(1.5555, abs=1e-3)


def test_milliseconds():
    """The header in milliseconds is read as seconds."""
    assert read_milliseconds(b"1500") == 1.5
    assert read_milliseconds("0.5") == 0.0005


def never_too_early(seconds: float) -> None:
    read = read_retry_after(write_retry_after(seconds), WALL)
    assert read is not None
    assert seconds <= read <= seconds + 1 or seconds > A_YEAR


@given(st.floats(0, 1e9))
def test_nobody_comes_back_too_early(seconds: float):
    """What is written is never less than what was meant, and at most a second more."""
    never_too_early(seconds)
    assert (write_retry_after(seconds) == "0") == (seconds == 0)


def test_rounding_up_is_needed(monkeypatch: pytest.MonkeyPatch):
    """Rounded to the nearest, clients would come back too early."""
    monkeypatch.setattr(retries, "ceil", round)
    assert falsified(never_too_early, st.floats(0, 1000))


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0"), (inf, "31536000"), (nan, "0")])
def test_odd_numbers_are_written_as_sane_ones(seconds: float, text: str):
    """Whatever is computed, the header is a whole number of seconds within a year."""
    assert write_retry_after(seconds) == text
